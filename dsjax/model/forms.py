"""The five ways to compute MLA, by name, and which layout of the cache each one reads.

``CD`` caches keys and values decompressed, per head. ``CC`` caches the latent and expands it to keys and values for
all context tokens, anew each step. ``A_CC`` absorbs ``W^UK`` into the query and ``W^UV`` into the output, and so
attends in latent space, on one array ``[latent ‖ rotary key]``. ``A_CC_ME`` does the same with the two parts kept and
multiplied apart, so that nothing is concatenated or moved. ``AM_CC_ME`` has the products ``W^UQ·W^UK`` and ``W^UV·W^O``
computed ahead. All five give the same result.
"""

from __future__ import annotations

from typing import Literal, get_args

import ml_dtypes
import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from sharding import fp8

Form = Literal["CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"]
Layout = Literal["decompressed", "joined", "split"]
FORMS: tuple[Form, ...] = get_args(Form)

_READS: dict[Form, tuple[Layout, ...]] = {
    "CD": ("decompressed",),
    "CC": ("split", "joined"),
    "A_CC": ("joined",),
    "A_CC_ME": ("split",),
    "AM_CC_ME": ("split",),
}


def common_layout(prefill: Form, decode: Form) -> Layout:
    """The cache layout that both phases' forms can read.

    Raises:
        UserError: an unknown form, or two that have no layout in common.
    """
    for form in (prefill, decode):
        if form not in _READS:
            raise UserError(f"MLA form {form!r}: expected one of {', '.join(FORMS)}")
    for layout in _READS[prefill]:
        if layout in _READS[decode]:
            return layout
    partners = [form for form in FORMS if set(_READS[form]) & set(_READS[decode])]
    raise UserError(
        f"--mla-prefill {prefill} reads a cache that is {' or '.join(_READS[prefill])}, --mla-decode {decode} one that is "
        f"{' or '.join(_READS[decode])}; with --mla-decode {decode} choose --mla-prefill from {', '.join(partners)}"
    )


def reads(form: Form, dtype: np.dtype, config: ModelConfig | None = None) -> bool:
    """Whether a form can read a cache of ``dtype``: FP8 is kept in one layout only. config: sparse attention keeps latents only."""
    if config is not None and config.index_topk is not None and form == "CD":
        return False
    return np.dtype(dtype) != fp8.E4M3 or "split" in _READS[form]


def cache_arrays(
    layout: Layout, config: ModelConfig, dtype: np.dtype, lanes: int = 1, fp8_index: bool = False
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Arrays of a cache layout → trailing shape of one token's entry in one layer, and its dtype.

    dtype: float32 or bfloat16, which all numbers are kept in, or ``fp8.E4M3``: then only the latent is FP8, with a float32 scale for each
    128 of its values, and the rotary key stays bfloat16. So for V3 an entry takes 656 bytes of 1,152, as in FlashMLA's cache.

    lanes: widths of a token's entry are rounded up to a multiple of it, with zeros: 128 for the TPU's kernels, so that V3's entry of
    512 + 64 takes 512 + 128 numbers.

    A model with sparse attention keeps an index key of each token beside it; fp8_index: in FP8 with a scale, as with an FP8 ``dtype``.

    Raises:
        UserError: FP8 in a layout that does not keep the latent apart, or sparse attention in one that keeps no latent.
    """
    H, M = config.num_attention_heads, config.kv_lora_rank
    N, O, U = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    dtype = np.dtype(dtype)
    index = _index_arrays(layout, config, dtype, fp8_index)
    if dtype == fp8.E4M3:
        if layout != "split":
            raise UserError(
                "--kv-cache-dtype fp8 keeps the latent apart from the rotary key, and of --mla-prefill and --mla-decode one reads the "
                f"cache {layout}; choose --mla-prefill CC or A_CC_ME, and --mla-decode A_CC_ME or AM_CC_ME"
            )
        scales = ((fp8.num_scales(M),), np.dtype(np.float32))
        return {"latent": ((M,), dtype), "scale": scales, "rope": ((O,), np.dtype(ml_dtypes.bfloat16))} | index
    widths = {
        "decompressed": {"key": (H, N + O), "value": (H, U)},
        "joined": {"joined": (M + O,)},
        "split": {"latent": (M,), "rope": (O,)},
    }[layout]
    return {name: ((*width[:-1], -(-width[-1] // lanes) * lanes), dtype) for name, width in widths.items()} | index


INDEX_ARRAYS = ("index", "index_scale")
"""The arrays of a cache that hold index keys; attention reads the others."""


def _index_arrays(layout: Layout, config: ModelConfig, dtype: np.dtype, fp8_index: bool):
    """Arrays of the index keys of a model with sparse attention; none of other models."""
    if config.index_topk is None:
        return {}
    if layout == "decompressed":
        raise UserError(
            "MLA form CD keeps keys and values of each head, of which sparse attention would gather many times the bytes of "
            "latents; with --mla-prefill and --mla-decode choose from CC, A_CC, A_CC_ME, AM_CC_ME"
        )
    A = config.index_head_dim
    if dtype == fp8.E4M3 or fp8_index:
        return {"index": ((A,), fp8.E4M3), "index_scale": ((fp8.num_scales(A),), np.dtype(np.float32))}
    return {"index": ((A,), dtype)}

"""The five ways to compute MLA, by name, and which layout of the cache each one reads.

``CD`` caches keys and values decompressed, per head. ``CC`` caches the latent and expands it to keys and values for
all context tokens, anew each step. ``A_CC`` absorbs ``W^UK`` into the query and ``W^UV`` into the output, and so
attends in latent space, on one array ``[latent ‖ rotary key]``. ``A_CC_ME`` does the same with the two parts kept and
multiplied apart, so that nothing is concatenated or moved. ``AM_CC_ME`` has the products ``W^UQ·W^UK`` and ``W^UV·W^O``
computed ahead. All five give the same result.
"""

from __future__ import annotations

from typing import Literal, get_args

from dsjax.config import ModelConfig
from dsjax.errors import UserError

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
        f"MLA form {prefill} for prefill reads the cache as {'/'.join(_READS[prefill])}, {decode} for decode as "
        f"{'/'.join(_READS[decode])}; with {decode} choose prefill from {', '.join(partners)}"
    )


def cache_widths(layout: Layout, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Arrays of a cache layout → trailing shape of one token's entry in one layer."""
    H, M = config.num_attention_heads, config.kv_lora_rank
    N, O, U = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        "decompressed": {"key": (H, N + O), "value": (H, U)},
        "joined": {"joined": (M + O,)},
        "split": {"latent": (M,), "rope": (O,)},
    }[layout]

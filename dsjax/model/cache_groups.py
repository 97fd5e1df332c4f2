"""KV cache groups: the arrays a model caches per token, the layers that cache them, and the bytes of a page. Needs no JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import ml_dtypes
import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from sharding import fp8

Layout = Literal["decompressed", "joined", "split"]
Table = Literal["context", "window"]
TABLES: tuple[Table, ...] = get_args(Table)
Arrays = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Name of a cache array → shape of a token's entry in one layer, and its dtype."""
BF16 = np.dtype(ml_dtypes.bfloat16)
HELD_WINDOWS = 3
"""Maximum number of window pages that a request holds between two steps."""
KEPT_WINDOWS = 1 / 5
"""Share of the cache's bytes for window pages that no request holds. A repeated prompt can resume at the positions they cover."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same arrays on the same pages."""

    name: str
    layers: tuple[int, ...]  # numbers of the layers in the model; MTP layers follow the model's own
    entries: int  # capacity of a page
    arrays: Arrays
    # the kind of page table that names the pages. A "context" table names all pages of a request in the order of its positions. A "window"
    # table is a ring of the pages that hold the last ``page_size`` tokens; pages behind them are freed while the request runs
    table: Table = "context"
    by_head: bool = False  # the first axis of an entry is heads, sharded over ``tp``

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in one layer."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers and heads."""
        return self.entry_bytes * self.entries * len(self.layers)

    def device_page_bytes(self, tp: int) -> int:
        """Return the bytes of a page on one of a replica's ``tp`` devices."""
        return self.page_bytes // (tp if self.by_head else 1)


def cache_groups(
    config: ModelConfig,
    layers: Iterable[int],
    dtype: np.dtype,
    *,
    layout: Layout = "split",
    entries: int = 1,
    lanes: int = 1,
    fp8_index: bool = False,
) -> tuple[CacheGroup, ...]:
    """Return an MLA model's cache groups: latents in the ``layout`` that its forms read, and index keys with sparse attention.

    dtype: of all values. With ``fp8.E4M3`` only the latent is FP8, with a float32 scale per 128 values; the rotary key
        stays bfloat16. V3's entry then takes 656 bytes instead of 1,152, as in FlashMLA's cache.
    fp8_index: store index keys as FP8 with a scale, as with an FP8 ``dtype``.
    lanes: round widths of latents up to a multiple of this, zero-padded. The TPU kernels need 128, so V3's entry of 512 + 64
        values takes 512 + 128.

    Raises:
        UserError: FP8 in a layout that does not store the latent separately, or sparse attention in a layout without latents.
    """
    dtype, layers = np.dtype(dtype), tuple(layers)
    latents = _latent_arrays(config, dtype, layout, lanes)
    groups = (CacheGroup("latents", layers, entries, latents, by_head=layout == "decompressed"),)
    if config.mla.indexer is None:
        return groups
    return *groups, CacheGroup("index keys", layers, entries, _index_arrays(config, dtype, layout, fp8_index))


def _latent_arrays(config: ModelConfig, dtype: np.dtype, layout: Layout, lanes: int) -> Arrays:
    H, M, O = config.num_attention_heads, config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
    if dtype == fp8.E4M3:
        if layout == "split":
            scales = (fp8.num_scales(M),), np.dtype(np.float32)
            return {"latent": ((M,), dtype), "scale": scales, "rope": ((O,), BF16)}
        raise UserError(
            "--kv-cache-dtype fp8 keeps the latent apart from the rotary key, but one of --mla-prefill and --mla-decode reads the "
            f"cache {layout}; choose them from CC and A_CC_ME"
        )
    widths = {
        "decompressed": {"key": (H, config.mla.qk_head_dim), "value": (H, config.mla.v_head_dim)},
        "joined": {"joined": (M + O,)},
        "split": {"latent": (M,), "rope": (O,)},
    }[layout]
    return {name: ((*width[:-1], -(-width[-1] // lanes) * lanes), dtype) for name, width in widths.items()}


def _index_arrays(config: ModelConfig, dtype: np.dtype, layout: Layout, fp8_index: bool) -> Arrays:
    if layout == "decompressed":
        raise UserError(
            "MLA form CD keeps keys and values of each head, of which sparse attention would gather many times the bytes of "
            "latents; choose --mla-prefill and --mla-decode from CC and A_CC_ME"
        )
    A = config.mla.indexer.head_dim
    if dtype == fp8.E4M3 or fp8_index:
        return {"index": ((A,), fp8.E4M3), "index_scale": ((fp8.num_scales(A),), np.dtype(np.float32))}
    return {"index": ((A,), dtype)}

"""Cache groups: what a model caches of each token, which layers keep it, and how many bytes its pages take. Needs no JAX."""

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
"""Arrays of a cache → trailing shape of an entry in one layer, and its dtype."""
BF16 = np.dtype(ml_dtypes.bfloat16)
HELD_WINDOWS = 3
"""The most window pages that a request holds between two steps."""
KEPT_WINDOWS = 1 / 5
"""Share of the cache's bytes for window pages that no request holds: the borders at which prompts that are sent again may go on."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache the same arrays on the same pages.

    layers: their numbers in the model; the MTP module's follow the model's own. entries: that a page has room for. by_head: the first axis
    of an entry is heads, which ``tp`` divides.
    table: the kind of page table that names the pages. A "context" table names all pages of a request in the order of its positions. A
    "window" table is a ring of the pages that hold the last ``page_size`` tokens; pages behind them are freed while the request runs.
    """

    name: str
    layers: tuple[int, ...]
    entries: int
    arrays: Arrays
    table: Table = "context"
    by_head: bool = False

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry in one layer."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers and heads."""
        return self.entry_bytes * self.entries * len(self.layers)

    def device_page_bytes(self, tp: int) -> int:
        """Bytes of a page on one of the ``tp`` devices of a replica."""
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
    """The groups of a model: what MLA caches of a token in the ``layout`` that its forms read, and its index key with sparse attention.

    dtype: of all numbers; or ``fp8.E4M3``: then the latent is FP8, with a float32 scale for each 128 of its values, and the rotary key
        stays bfloat16. V3's entry then takes 656 bytes instead of 1,152, as in FlashMLA's cache.
    fp8_index: index keys are FP8 with a scale, as with an FP8 ``dtype``.
    lanes: widths of latents are rounded up to a multiple of it, with zeros: 128 for the TPU's kernels, so that V3's entry of 512 + 64
        takes 512 + 128 numbers.

    Raises:
        UserError: FP8 in a layout that does not keep the latent apart, or sparse attention in one that keeps no latent.
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

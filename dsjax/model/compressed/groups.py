"""DeepSeek-V4's cache groups: entries of both rates, tokens' own entries, and states of unfinished windows. Needs no JAX."""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.model.cache_groups import BF16, Arrays, CacheGroup
from sharding import fp8

FLOAT32 = np.dtype(np.float32)
FP8_BLOCK = 64
"""Number of unrotated values of an entry that share a one-byte scale in an FP8 cache."""


def compressed_groups(
    config: ModelConfig, layers: Iterable[int], dtype: np.dtype, tokens: int, *, drafts: int = 0
) -> tuple[CacheGroup, ...]:
    """Return the cache groups of these layers, with ``tokens`` tokens on a page. Groups without layers are left out.

    ``c4`` and ``c128`` hold entries of the first and the second rate, ``c4_index`` index keys, ``window`` tokens' own entries. ``state4``
    and ``state128`` hold a compressor's state after a position, at place ``position mod (drafts + 1)`` of its page: the gates' maximum,
    the sum of weights and the weighted sum of each value; two accumulators in ``state4``, one in ``state128`` (``fold``).

    Raises:
        UserError: A page does not hold whole windows.
    """
    if tokens % config.page_tokens:
        raise UserError(
            f"--page-size is {tokens}; pages of a deepseek_v4 model hold a multiple of {config.page_tokens} tokens"
        )
    layers, kinds = tuple(layers), dict(enumerate(config.v4.attention))
    of = {name: tuple(layer for layer in layers if kinds.get(layer) == name) for name in ("csa", "hca")}
    first, second = (tokens // rate for rate in config.v4.rates)
    width, index = config.v4.head_dim, config.v4.indexer.head_dim
    groups = (
        CacheGroup("c4", of["csa"], first, _entry("c4", config, dtype)),
        CacheGroup("c4_index", of["csa"], first, _index(index, dtype)),
        CacheGroup("c128", of["hca"], second, _entry("c128", config, dtype)),
        CacheGroup("window", layers, tokens, _entry("window", config, dtype), "window"),
        CacheGroup("state4", of["csa"], drafts + 1, {"state4": ((6, width + index), FLOAT32)}, "window"),
        CacheGroup("state128", of["hca"], drafts + 1, {"state128": ((3, width), FLOAT32)}, "window"),
    )
    return tuple(group for group in groups if group.layers)


def _entry(name: str, config: ModelConfig, dtype: np.dtype) -> Arrays:
    """Return an entry's arrays. FP8: unrotated values, one-byte scales padded to a multiple of 8, bfloat16 rotated values (584 bytes)."""
    if dtype != fp8.E4M3:
        return {name: ((config.v4.head_dim,), dtype)}
    scales = -(-config.v4.qk_nope_head_dim // FP8_BLOCK // 8) * 8
    return {
        name: ((config.v4.qk_nope_head_dim,), dtype),
        f"{name}_scale": ((scales,), np.dtype(ml_dtypes.float8_e8m0fnu)),
        f"{name}_rope": ((config.v4.qk_rope_head_dim,), BF16),
    }


def _index(width: int, dtype: np.dtype) -> Arrays:
    """Return an index key's arrays. With FP8 entries the key is FP4: two values per byte, one scale per 32 values (68 bytes)."""
    if dtype != fp8.E4M3:
        return {"c4_index": ((width,), dtype)}
    byte = np.dtype(np.uint8)
    return {"c4_index": ((width // 2,), byte), "c4_index_scale": ((width // 32,), byte)}

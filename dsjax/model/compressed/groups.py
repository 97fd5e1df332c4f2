"""DeepSeek-V4's cache groups: entries of both rates, tokens' own entries, and states of unfinished windows. Needs no JAX."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.fp4.formats import MXFP4
from dsjax.model.cache_groups import CacheGroup
from sharding import fp8

FLOAT32, BYTE = np.dtype(np.float32), np.dtype(np.uint8)
FP8_BLOCK = 64
"""Number of unrotated values of an entry that share a one-byte scale in an FP8 cache."""


def compressed_groups(
    config: ModelConfig, layers: Iterable[int], dtype: np.dtype, tokens: int, *, drafts: int = 0, fp4_keys: bool = False
) -> tuple[CacheGroup, ...]:
    """Return the cache groups of these layers, with ``tokens`` tokens on a page. Groups without layers are left out.

    ``c4`` ("csa" layers) and ``c128`` ("hca") hold compressed entries, ``c4_index`` index keys, ``window`` tokens' own entries. ``state4``
    and ``state128`` hold a compressor's state after a position, at place ``position mod (drafts + 1)`` of its page: the gates' maximum,
    the sum of weights and the weighted sum of each value; two accumulators in ``state4``, one in ``state128`` (``fold.py``).

    dtype: of entries and index keys. With ``fp8.E4M3`` entries are bytes (``precision.pack_entries``), and index keys are FP4. fp4_keys:
    keep index keys in FP4 (``precision.pack_keys``) in any case.

    Raises:
        UserError: ``tokens`` is not a multiple of ``config.page_tokens``, or an FP8 cache has index keys whose width is not a power of two.
    """
    if tokens % config.page_tokens:
        raise UserError(
            f"--page-size is {tokens}; pages of a deepseek_v4 model hold a multiple of {config.page_tokens} tokens"
        )
    layers, attention = tuple(layers), dict(enumerate(config.v4.attention))
    csa, hca = (tuple(layer for layer in layers if attention.get(layer) == name) for name in ("csa", "hca"))
    c4_entries, c128_entries = (tokens // rate for rate in config.v4.rates)
    width, key_width = config.v4.head_dim, config.v4.indexer.head_dim
    in_fp8 = dtype == fp8.E4M3
    if in_fp8 and key_width & (key_width - 1):
        raise UserError(
            f"--kv-cache-dtype fp8 rotates index keys by a Hadamard matrix, which wants a power of two, and this model's index_head_dim is "
            f"{key_width}; leave it out"
        )
    entry = ((_entry_bytes(config),), BYTE) if in_fp8 else ((width,), dtype)
    fp4_bytes = key_width // 2 + -(-key_width // MXFP4.block)
    key = ((fp4_bytes,), BYTE) if in_fp8 or fp4_keys else ((key_width,), dtype)
    groups = (
        CacheGroup("c4", csa, c4_entries, {"c4": entry}),
        CacheGroup("c4_index", csa, c4_entries, {"c4_index": key}),
        CacheGroup("c128", hca, c128_entries, {"c128": entry}),
        CacheGroup("window", layers, tokens, {"window": entry}, "window"),
        CacheGroup("state4", csa, drafts + 1, {"state4": ((6, width + key_width), FLOAT32)}, "window"),
        CacheGroup("state128", hca, drafts + 1, {"state128": ((3, width), FLOAT32)}, "window"),
    )
    return tuple(group for group in groups if group.layers)


def num_scales(width: int) -> int:
    """Return the scale bytes of an FP8 entry with ``width`` unrotated values: one per block, padded to a multiple of 8."""
    blocks = -(-width // FP8_BLOCK)
    return -(-blocks // 8) * 8


def _entry_bytes(config: ModelConfig) -> int:
    """Return the bytes of an FP8 entry: unrotated values, scales, and two for each rotated value (584 in the published models)."""
    plain = config.v4.qk_nope_head_dim
    return plain + num_scales(plain) + 2 * config.v4.qk_rope_head_dim

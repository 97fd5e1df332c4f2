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

    ``c4`` and ``c128`` hold entries of the first and the second rate, ``c4_index`` index keys, ``window`` tokens' own entries. ``state4``
    and ``state128`` hold a compressor's state after a position, at place ``position mod (drafts + 1)`` of its page: the gates' maximum,
    the sum of weights and the weighted sum of each value; two accumulators in ``state4``, one in ``state128`` (``fold``).

    dtype: of entries and index keys. With ``fp8.E4M3`` entries are bytes (``precision.pack_entries``), and index keys are FP4. fp4_keys:
    keep index keys in FP4 (``precision.pack_keys``) in any case.

    Raises:
        UserError: a page does not hold whole windows, or FP4 for index keys that no Hadamard matrix rotates.
    """
    if tokens % config.page_tokens:
        raise UserError(
            f"--page-size is {tokens}; pages of a deepseek_v4 model hold a multiple of {config.page_tokens} tokens"
        )
    layers, kinds = tuple(layers), dict(enumerate(config.v4.attention))
    of = {name: tuple(layer for layer in layers if kinds.get(layer) == name) for name in ("csa", "hca")}
    first, second = (tokens // rate for rate in config.v4.rates)
    width, index = config.v4.head_dim, config.v4.indexer.head_dim
    in_fp8 = dtype == fp8.E4M3
    if in_fp8 and index & (index - 1):
        raise UserError(
            f"--kv-cache-dtype fp8 rotates index keys by a Hadamard matrix, which wants a power of two, and this model's index_head_dim is "
            f"{index}; leave it out"
        )
    entry = ((_entry_bytes(config),), BYTE) if in_fp8 else ((width,), dtype)
    key = ((index // 2 + -(-index // MXFP4.block),), BYTE) if in_fp8 or fp4_keys else ((index,), dtype)
    groups = (
        CacheGroup("c4", of["csa"], first, {"c4": entry}),
        CacheGroup("c4_index", of["csa"], first, {"c4_index": key}),
        CacheGroup("c128", of["hca"], second, {"c128": entry}),
        CacheGroup("window", layers, tokens, {"window": entry}, "window"),
        CacheGroup("state4", of["csa"], drafts + 1, {"state4": ((6, width + index), FLOAT32)}, "window"),
        CacheGroup("state128", of["hca"], drafts + 1, {"state128": ((3, width), FLOAT32)}, "window"),
    )
    return tuple(group for group in groups if group.layers)


def num_scales(width: int) -> int:
    """Return the scale bytes of an FP8 entry with ``width`` unrotated values: one per block, padded to a multiple of 8."""
    return -(-width // FP8_BLOCK // 8) * 8


def _entry_bytes(config: ModelConfig) -> int:
    """Return the bytes of an FP8 entry: unrotated values, scales, and two for each rotated value (584 in the published models)."""
    plain = config.v4.qk_nope_head_dim
    return plain + num_scales(plain) + 2 * config.v4.qk_rope_head_dim

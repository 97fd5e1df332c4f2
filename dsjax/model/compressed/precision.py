"""Quantised KV cache entries and index keys, rounded as in DeepSeek's ``inference/kernel.py`` (``act_quant``, ``fp4_act_quant``).

Each block has a scale: the largest magnitude in the block ÷ the largest number of the format, rounded up to a power of two and stored as an
e8m0 byte. Values are rounded to nearest, ties to even, when they are written, so reads do not depend on the mesh or on prefill chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from dsjax.config import ModelConfig
from dsjax.fp4.decode import scales_to_values, unpack
from dsjax.fp4.formats import LARGEST as FP4_LARGEST
from dsjax.fp4.formats import MXFP4
from dsjax.fp4.rows import nearest_e2m1
from dsjax.model.compressed.groups import FP8_BLOCK, num_scales
from dsjax.model.compressed.rotations import interleave
from dsjax.model.parameters import reinterpret, store
from dsjax.model.sparse.precision import hadamard
from sharding import fp8

KEYS = "c4_index"
"""Cache array of index keys; all other arrays that a ``Format`` packs hold entries."""
LEAST_FP8 = 1e-4
"""Lower limit of a block's largest magnitude when the scale of an entry's block is computed."""
LEAST_FP4 = 6 * 2.0**-126
"""Lower limit of a block's largest magnitude when the scale of an index key's or a query's block is computed."""


@dataclass(frozen=True)
class Format:
    """How a cache stores entries and index keys. fp4_scores: also round index queries to FP4 (``--index-scores fp4``)."""

    config: ModelConfig
    cache_dtype: np.dtype
    fp4_scores: bool = False

    @property
    def fp8(self) -> bool:
        """Whether entries are FP8."""
        return self.cache_dtype == fp8.E4M3

    @property
    def fp4_keys(self) -> bool:
        """Whether index keys are FP4. If so, keys and queries are first multiplied by a Hadamard matrix."""
        return self.fp8 or self.fp4_scores

    def pack(self, name: str, values: Float[Array, "*n W"], stored: np.dtype) -> Shaped[Array, "*n _"]:
        """Return entries or index keys as the cache array ``name`` of dtype ``stored`` keeps them."""
        if name == KEYS and self.fp4_keys:
            return pack_keys(self._apply_hadamard(values))
        if self.fp8:
            return pack_entries(values, self.config.v4.qk_rope_head_dim)
        return store(values, self.cache_dtype, stored)

    def unpack(self, name: str, found: Shaped[Array, "*n _"]) -> Float[Array, "*n W"]:
        """Return the numbers that the array's elements represent."""
        if name == KEYS and self.fp4_keys:
            return unpack_keys(found, self.config.v4.indexer.head_dim)
        if self.fp8:
            return unpack_entries(found, self.config.v4.head_dim, self.config.v4.qk_rope_head_dim)
        return reinterpret(found, self.cache_dtype)

    def index_query(self, query: Float[Array, "*n A"]) -> Float[Array, "*n A"]:
        """Return index queries transformed and rounded so that they can be multiplied with the cached index keys."""
        query = self._apply_hadamard(query) if self.fp4_keys else query
        return round_queries(query) if self.fp4_scores else query

    def _apply_hadamard(self, x: Float[Array, "*n A"]) -> Float[Array, "*n A"]:
        # RoPE separated the pairs. Interleave them as the published code does, because the order decides which values share a block.
        return hadamard(interleave(x, self.config.v4.qk_rope_head_dim))


def pack_entries(x: Float[Array, "*n M"], rotated: int) -> UInt8[Array, "*n bytes"]:
    """Return entries as bytes: unrotated values in e4m3, scales (padded with zeros), the last ``rotated`` values in bfloat16."""
    nope_dim = x.shape[-1] - rotated
    blocks, scale = _scaled(x[..., :nope_dim], FP8_BLOCK, LEAST_FP8, fp8.LARGEST)
    values = blocks.astype(fp8.E4M3).reshape(*x.shape[:-1], -1)[..., :nope_dim]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_scales(nope_dim) - scale.shape[-1])]
    tail = lax.bitcast_convert_type(x[..., nope_dim:].astype(jnp.bfloat16), jnp.uint8)
    parts = lax.bitcast_convert_type(values, jnp.uint8), jnp.pad(scale, padding), tail.reshape(*x.shape[:-1], -1)
    return jnp.concatenate(parts, axis=-1)


def unpack_entries(packed: UInt8[Array, "*n bytes"], width: int, rotated: int) -> Float[Array, "*n M"]:
    """Return the float32 numbers of entries of ``width`` values."""
    nope_dim = width - rotated
    scales_end = nope_dim + num_scales(nope_dim)
    values = lax.bitcast_convert_type(packed[..., :nope_dim], fp8.E4M3).astype(jnp.float32)
    values *= _each(packed[..., nope_dim:scales_end], FP8_BLOCK, nope_dim)
    tail = packed[..., scales_end:].reshape(*packed.shape[:-1], rotated, 2)
    return jnp.concatenate([values, lax.bitcast_convert_type(tail, jnp.bfloat16).astype(jnp.float32)], axis=-1)


def pack_keys(x: Float[Array, "*n A"]) -> UInt8[Array, "*n bytes"]:
    """Return index keys as bytes: two e2m1 values per byte, lower bits first, then a scale per 32 values."""
    blocks, scale = _scaled(x, MXFP4.block, LEAST_FP4, FP4_LARGEST)
    values = nearest_e2m1(blocks).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    # The e2m1 codes 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6: steps of 0.5 up to 2, of 1 up to 4, then of 2.
    size = jnp.abs(values)
    code = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4)).astype(jnp.uint8)
    code |= jnp.signbit(values).astype(jnp.uint8) << 3
    return jnp.concatenate([code[..., 0::2] | code[..., 1::2] << 4, scale], axis=-1)


def unpack_keys(packed: UInt8[Array, "*n bytes"], width: int) -> Float[Array, "*n A"]:
    """Return the float32 numbers of index keys of ``width`` values."""
    values = unpack(packed[..., : width // 2], packed.ndim - 1)
    return values * _each(packed[..., width // 2 :], MXFP4.block, width)


def round_queries(x: Float[Array, "*n A"]) -> Float[Array, "*n A"]:
    """Round index queries to FP4 as keys are, and return them in their own dtype."""
    return unpack_keys(pack_keys(x), x.shape[-1]).astype(x.dtype)


def _scaled(
    x: Float[Array, "*n W"], block: int, least: float, largest: float
) -> tuple[Float[Array, "*n S block"], UInt8[Array, "*n S"]]:
    """Return blocks divided by their scales and clipped to ±``largest``, and the scales' bytes. The last block is padded if short.

    An infinity or NaN makes its block's scale infinite, so that the block has NaNs when it is read.
    """
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    quotient = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), least) * np.float32(1 / largest)
    # Round up to the next exponent if any fraction bit is set.
    exponent = jnp.minimum((lax.bitcast_convert_type(quotient, jnp.uint32) + 0x7FFFFF) >> 23, 255)
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.clip(blocks / scale[..., None], -largest, largest), exponent.astype(jnp.uint8)


def _each(scales: UInt8[Array, "*n S"], block: int, width: int) -> Float[Array, "*n W"]:
    """Repeat each block's scale for its ``block`` values."""
    return jnp.repeat(scales_to_values(scales), block, axis=-1)[..., :width]

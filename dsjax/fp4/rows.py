"""W4A4: NVFP4 rows times NVFP4 matrices, with Blackwell's FP4 matmul where XLA has it, otherwise with the same arithmetic in float32.

Each row is quantised like an NVFP4 tensor (docs/fp4.md): one float32 scale, amax ÷ (6 × 448), an e4m3 scale per 16 values, and e2m1
values. On CUDA, ``jax.nn.scaled_matmul`` becomes a cuDNN call on Blackwell (compute capability 10); on other GPUs XLA widens its operands.
It needs the contracting dimension innermost in both operands, so the bytes of a matrix are transposed first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from dsjax.fp4.decode import decode
from dsjax.fp4.formats import E4M3_LARGEST, LARGEST, NVFP4

_E4M3 = np.dtype(NVFP4.scale_dtype)
_LEAST_E4M3 = 2.0**-9


class NVFP4Rows(NamedTuple):
    """Rows as e2m1 values (dtype float4_e2m1fn), an e4m3 scale per 16 values and a float32 scale per row."""

    values: Float[Array, "*n K"]
    scales: Float[Array, "*n B"]
    row_scale: Float[Array, "*n 1"]

    def in_float32(self) -> Float[Array, "*n K"]:
        """Return ``e2m1 × e4m3``, exact, without the row scale."""
        return self.values.astype(jnp.float32) * jnp.repeat(self.scales.astype(jnp.float32), NVFP4.block, axis=-1)


def quantise(x: Float[Array, "*n K"]) -> NVFP4Rows:
    """Quantise rows to NVFP4, each with its own float32 scale, so rows are independent. K is a multiple of 16.

    A non-finite number makes a scale of its row NaN.
    """
    x = x.astype(jnp.float32)
    blocks = x.reshape(*x.shape[:-1], -1, NVFP4.block)
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    # Multiply by the reciprocal, as XLA does for division by a constant.
    row_scale = jnp.max(amax, axis=-1, keepdims=True) * np.float32(1 / (LARGEST * E4M3_LARGEST))
    row_scale = jnp.where(row_scale == 0, 1.0, row_scale)
    scales = jnp.clip(amax * np.float32(1 / LARGEST) / row_scale, _LEAST_E4M3, E4M3_LARGEST).astype(_E4M3)
    quotient = blocks / (scales.astype(jnp.float32) * row_scale)[..., None]
    values = nearest_e2m1(jnp.clip(quotient, -LARGEST, LARGEST)).astype(jnp.float4_e2m1fn)
    return NVFP4Rows(values.reshape(x.shape), scales, row_scale)


def nearest_e2m1(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Round numbers within ±6 to the nearest e2m1 number, ties to even, in the dtype of `x`.

    XLA's own conversion on CPUs goes through float16 in some code generators, which double-rounds a few numbers in a thousand.
    """
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.round(x / step) * step


def round_trip(x: Float[Array, "*n K"]) -> Float[Array, "*n K"]:
    """Quantise rows to NVFP4 and back to float32: ``(e2m1 × e4m3) × row scale``, rounded once."""
    rows = quantise(x)
    return rows.in_float32() * rows.row_scale


def product(
    x: Float[Array, "X C K"], packed: UInt8[Array, "X K/2 *m"], scales: Array, tensor_scale: Float[Array, "X ..."]
) -> Float[Array, "X C *m"]:
    """Return ``x · matrix`` for each of X in float32, with rows quantised to NVFP4. The matrix arrays have the layout of ``decode``.

    scales: e4m3 ``[X, K/16, *m]``. tensor_scale: one value per matrix, ``[X, 2, 1]`` if gate and up are side by side, else ``[X, 1]``.
    """
    rows, (X, K), columns = quantise(x), (len(packed), x.shape[-1]), packed.shape[2:]
    N = math.prod(columns)

    def on_cuda(values, block_scales, packed, scales):
        turned = jnp.moveaxis(packed.reshape(X, K // 2, N), 1, 2)
        weight = lax.bitcast_convert_type(turned, jnp.float4_e2m1fn).reshape(X, N, K)
        of_weight = jnp.moveaxis(scales.reshape(X, -1, N), 1, 2)
        return jax.nn.scaled_matmul(values, weight, block_scales, of_weight, preferred_element_type=jnp.float32)

    def widened(values, block_scales, packed, scales):
        weight = decode(packed, scales, None, 1, jnp.float32).reshape(X, K, N)
        exact = NVFP4Rows(values, block_scales, rows.row_scale).in_float32()
        return jnp.matmul(exact, weight, precision=lax.Precision.HIGHEST)

    out = lax.platform_dependent(rows.values, rows.scales, packed, scales, cuda=on_cuda, default=widened)
    return out.reshape(*out.shape[:2], *columns) * (
        rows.row_scale.reshape(*rows.row_scale.shape[:2], *[1] * len(columns)) * tensor_scale[:, None]
    )

"""Rows in NVFP4 times matrices in NVFP4 (W4A4): Blackwell's FP4 product where XLA has it, and elsewhere the same arithmetic in float32.

A row is quantised as NVFP4 quantises a tensor (docs/fp4.md): a float32 scale of its own, largest magnitude ÷ (6 × 448), an e4m3 scale for
each 16 values, and e2m1 values. On CUDA devices ``jax.nn.scaled_matmul`` becomes a call of cuDNN on Blackwell (compute capability 10), and
on others XLA widens for it. It wants the depth innermost in both operands, so that the bytes of a matrix are turned around first.
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
    """Rows as e2m1 values (dtype float4_e2m1fn), e4m3 scales of 16 values each, and a float32 scale of each row."""

    values: Float[Array, "*n K"]
    scales: Float[Array, "*n B"]
    whole: Float[Array, "*n 1"]

    def in_float32(self) -> Float[Array, "*n K"]:
        """``e2m1 × e4m3``, exact, without the scale of the row."""
        return self.values.astype(jnp.float32) * jnp.repeat(self.scales.astype(jnp.float32), NVFP4.block, axis=-1)


def quantise(x: Float[Array, "*n K"]) -> NVFP4Rows:
    """Rows in NVFP4, each with a scale of its own, so that no row depends on another. K is whole blocks of 16.

    A number that is not finite leaves a scale of its row that is none.
    """
    x = x.astype(jnp.float32)
    blocks = x.reshape(*x.shape[:-1], -1, NVFP4.block)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    # XLA divides by a constant so.
    whole = jnp.max(largest, axis=-1, keepdims=True) * np.float32(1 / (LARGEST * E4M3_LARGEST))
    whole = jnp.where(whole == 0, 1.0, whole)
    scales = jnp.clip(largest * np.float32(1 / LARGEST) / whole, _LEAST_E4M3, E4M3_LARGEST).astype(_E4M3)
    quotient = blocks / (scales.astype(jnp.float32) * whole)[..., None]
    values = nearest_e2m1(jnp.clip(quotient, -LARGEST, LARGEST)).astype(jnp.float4_e2m1fn)
    return NVFP4Rows(values.reshape(x.shape), scales, whole)


def nearest_e2m1(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The e2m1 numbers nearest to numbers within ±6, in their dtype; of two equally near the one whose fraction is even.

    XLA's own conversion on CPUs goes by float16 with some of its code generators, which rounds a few numbers in a thousand twice.
    """
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.round(x / step) * step


def round_trip(x: Float[Array, "*n K"]) -> Float[Array, "*n K"]:
    """What NVFP4 keeps of rows, as float32 numbers: ``(e2m1 × e4m3) × scale of the row``, rounded once."""
    rows = quantise(x)
    return rows.in_float32() * rows.whole


def product(
    x: Float[Array, "X C K"], packed: UInt8[Array, "X K/2 *m"], scales: Array, whole: Float[Array, "X ..."]
) -> Float[Array, "X C *m"]:
    """``x · matrix`` for each of X in float32, with rows quantised to NVFP4; the arrays of the matrices as ``decode`` has them.

    scales: e4m3 ``[X, K/16, *m]``; whole: one value for each matrix, ``[X, 2, 1]`` where gate and up stand side by side, else ``[X, 1]``.
    """
    rows, (X, K), columns = quantise(x), (len(packed), x.shape[-1]), packed.shape[2:]
    N = math.prod(columns)

    def on_cuda(values, row_scales, packed, scales):
        turned = jnp.moveaxis(packed.reshape(X, K // 2, N), 1, 2)
        weight = lax.bitcast_convert_type(turned, jnp.float4_e2m1fn).reshape(X, N, K)
        of_weight = jnp.moveaxis(scales.reshape(X, -1, N), 1, 2)
        return jax.nn.scaled_matmul(values, weight, row_scales, of_weight, preferred_element_type=jnp.float32)

    def widened(values, row_scales, packed, scales):
        weight = decode(packed, scales, None, 1, jnp.float32).reshape(X, K, N)
        exact = NVFP4Rows(values, row_scales, rows.whole).in_float32()
        return jnp.matmul(exact, weight, precision=lax.Precision.HIGHEST)

    out = lax.platform_dependent(rows.values, rows.scales, packed, scales, cuda=on_cuda, default=widened)
    return out.reshape(*out.shape[:2], *columns) * (
        rows.whole.reshape(*rows.whole.shape[:2], *[1] * len(columns)) * whole[:, None]
    )

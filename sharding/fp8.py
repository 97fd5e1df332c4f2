"""Rows of numbers in FP8 (e4m3), with one float32 scale for each 128 values of a row: what travels between ranks, the latent cache, and
the activations of FP8 products.

``value = e4m3 × scale``, and the scale is the 128 values' largest magnitude ÷ 448, e4m3's largest number (DeepSeek-V3 technical report,
section 3.3.2: activations are quantised 1 × 128). A magnitude below `LEAST` is taken for `LEAST`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float

BLOCK = 128
"""Values that share a scale; the last block of a row may be shorter."""
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
LEAST = 1e-10
"""The least magnitude that decides a scale. Below about 5e-36 a scale would be a denormal number, which XLA takes for 0, and 0 ÷ 0 is NaN.

It is the bound of vLLM's and SGLang's `per_token_group_quant_fp8` (`eps`). DeepGEMM, DeepEP (`kFP8Margin`) and the inference code of
DeepSeek-V3.2 have 1e-4 in its place, DeepSeek-V3's and transformers have none. No block above the bound is changed by it, and a block whose
largest magnitude is 1e-6 keeps e4m3's three bits down to a 28,672nd of that; with 1e-4 it would down to a 287th.
"""
LEAST_NORMAL = float(np.finfo(np.float32).tiny)
"""Blocks of smaller magnitudes count as zeros, which have the scale 1: XLA takes them for zeros, and NumPy does not."""


def num_scales(width: int) -> int:
    """Scales of a row of ``width`` values."""
    return -(-width // BLOCK)


def row_bytes(width: int) -> int:
    """Bytes of a row of ``width`` values with its scales."""
    return width + 4 * num_scales(width)


class Quantised(NamedTuple):
    """Rows as e4m3 values and float32 scales."""

    values: Float[Array, "*n D"]
    scales: Float[Array, "*n S"]


def quantise(x: Float[Array, "*n D"], *, powers: bool = False) -> Quantised:
    """The e4m3 values and float32 scales of rows. A number that is not finite leaves a NaN in what ``dequantise`` makes of its row.

    powers: scales are powers of two, rounded up (``scale_fmt`` "ue8m0" of DeepSeek-V3.1).
    """
    import jax.numpy as jnp  # only here: the planner goes by this file's sizes, and must not load JAX

    width = x.shape[-1]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -width % BLOCK)]
    blocks = jnp.pad(x.astype(jnp.float32), pad).reshape(*x.shape[:-1], -1, BLOCK)
    scale = scale_of(jnp.max(jnp.abs(blocks), axis=-1), powers)
    # Above 464 e4m3 has no number but NaN, and a rounded quotient can exceed 448: clip.
    values = jnp.clip(blocks / scale[..., None], -LARGEST, LARGEST).astype(E4M3)
    return Quantised(values.reshape(*x.shape[:-1], -1)[..., :width], scale)


def scale_of(largest: Float[Array, "*n"], powers: bool) -> Float[Array, "*n"]:
    """The scale of values of which the largest magnitude is ``largest``; of zeros 1."""
    import jax.numpy as jnp
    from jax import lax

    # XLA divides by a constant so; a kernel that divided otherwise would give other bits.
    scale = jnp.maximum(largest, LEAST) * np.float32(1 / LARGEST)
    scale = jnp.where(largest >= LEAST_NORMAL, scale, 1.0)
    if not powers:
        return scale
    # A float32 with any bit in its fraction goes up to the next exponent.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)


def dequantise(values: Float[Array, "*n D"], scale: Float[Array, "*n S"]) -> Float[Array, "*n D"]:
    """The float32 numbers that ``quantise``'s results stand for."""
    return values.astype(np.float32) * scale.repeat(BLOCK, axis=-1)[..., : values.shape[-1]]

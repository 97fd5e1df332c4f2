"""FP8 (e4m3) rows with one float32 scale per 128 values of a row, for the rows sent between ranks, the latent cache and the activations
of FP8 GEMMs.

``value = e4m3 × scale``, and the scale is the 128 values' largest magnitude ÷ 448, e4m3's largest number (DeepSeek-V3 technical report,
section 3.3.2: activations are quantised 1 × 128). Magnitudes below `LEAST` count as `LEAST`.
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
"""Smallest magnitude that determines a scale. Below about 5e-36 a scale would be a denormal, which XLA takes for 0, and 0 ÷ 0 is NaN.

vLLM and SGLang use the same bound in `per_token_group_quant_fp8` (`eps`). DeepGEMM, DeepEP (`kFP8Margin`) and DeepSeek-V3.2's code use
1e-4, which costs precision in blocks of small magnitudes; the code of DeepSeek-V3 and transformers have no bound.
"""
LEAST_NORMAL = float(np.finfo(np.float32).tiny)
"""Blocks of smaller magnitudes count as zeros and get the scale 1, because XLA takes denormals for zeros and NumPy does not."""


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
    """Return the e4m3 values and float32 scales of rows. A number that is not finite leaves a NaN in its dequantised row.

    powers: scales are powers of two, rounded up (``scale_fmt`` "ue8m0" of DeepSeek-V3.1).
    """
    import jax.numpy as jnp  # only here: the planner uses this file's sizes and must not load JAX

    width = x.shape[-1]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -width % BLOCK)]
    blocks = jnp.pad(x.astype(jnp.float32), pad).reshape(*x.shape[:-1], -1, BLOCK)
    scale = scale_of(jnp.max(jnp.abs(blocks), axis=-1), powers)
    # Clip: a rounded quotient can exceed 448, and above 464 e4m3 only has NaN.
    values = jnp.clip(blocks / scale[..., None], -LARGEST, LARGEST).astype(E4M3)
    return Quantised(values.reshape(*x.shape[:-1], -1)[..., :width], scale)


def scale_of(largest: Float[Array, "*n"], powers: bool) -> Float[Array, "*n"]:
    """Return the scale of values with the largest magnitude ``largest``; 1 for zeros."""
    import jax.numpy as jnp
    from jax import lax

    # XLA divides by a constant this way; a kernel that divides differently would give other bits.
    scale = jnp.maximum(largest, LEAST) * np.float32(1 / LARGEST)
    scale = jnp.where(largest >= LEAST_NORMAL, scale, 1.0)
    if not powers:
        return scale
    # Round up to the next exponent if any fraction bit is set.
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)


def dequantise(values: Float[Array, "*n D"], scale: Float[Array, "*n S"]) -> Float[Array, "*n D"]:
    """Return the float32 numbers that ``quantise``'s results represent."""
    return values.astype(np.float32) * scale.repeat(BLOCK, axis=-1)[..., : values.shape[-1]]

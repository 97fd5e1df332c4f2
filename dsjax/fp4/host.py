"""Packed formats on the host: matrices ``[out, in]`` as checkpoints have them, encoded and decoded with NumPy, blocks along ``in``."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, UInt8

from dsjax.fp4.formats import CODES, E4M3_LARGEST, E8M0_BIAS, INT4_HALF_RANGE, INT4_OFFSET, LARGEST, PackedFormat

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_LEAST_E4M3 = 2.0**-9
_LEAST_NORMAL = 2.0**-126


def _pairs(values: np.ndarray) -> np.ndarray:
    """A byte's two values, ``[256, 2]``, from those of the sixteen codes: the lower four bits first."""
    return np.stack([values[np.arange(256) & 15], values[np.arange(256) >> 4]], axis=-1)


_PAIRS = {
    False: _pairs(np.array([*CODES, *(-code for code in CODES)], np.float32)),
    True: _pairs(np.arange(16, dtype=np.float32) - INT4_OFFSET),
}
"""By whether the values are integers."""


def global_scale(matrix: Float[np.ndarray, "I J"]) -> np.float32:
    """NVFP4's scale of a tensor: largest magnitude ÷ (6 × 448), so that the largest block scale is e4m3's largest number; of zeros 1."""
    largest = np.float32(np.abs(matrix).max(initial=0))
    scale = largest / np.float32(LARGEST * E4M3_LARGEST)
    return scale if scale > 0 else np.float32(1)


def block_scales(matrix: Float[np.ndarray, "I J"], form: PackedFormat, whole: np.float32) -> np.ndarray:
    """The scale of each block, ``[I, J / block]``, in the format's dtype.

    whole: the tensor's scale; 1 in a format that has none. NVFP4: a scale that would round to 0 is e4m3's least number. MXFP4: the power
    of two of the block's largest magnitude, less that of 6 (OCP Microscaling Formats 1.0, section 6.3); of zeros the least. INT4: largest
    magnitude ÷ 7.5, at least the least normal number, as devices flush smaller ones to zero (``calculate_qparams`` of compressed-tensors).
    """
    largest = np.abs(matrix.astype(np.float32)).reshape(len(matrix), -1, form.block).max(axis=-1)
    if form.integers:
        return np.maximum(largest / np.float32(INT4_HALF_RANGE), np.float32(_LEAST_NORMAL)).astype(_BF16)
    if form.has_global:
        with np.errstate(
            invalid="ignore"
        ):  # numbers that are none give a scale that is none, which whoever reads it reports
            scale = largest / np.float32(LARGEST) / whole
        return np.clip(scale, _LEAST_E4M3, E4M3_LARGEST).astype(_E4M3)
    _, exponent = np.frexp(largest)  # largest = m × 2^exponent, 0.5 <= m < 1
    biased = exponent - 1 - 2 + E8M0_BIAS
    power = np.where(largest > 0, np.clip(biased, 0, 2 * E8M0_BIAS), 0)
    return np.where(np.isfinite(largest), power, 0xFF).astype(np.uint8)  # 0xFF: no number


def scale_values(scales: np.ndarray) -> Float32[np.ndarray, "..."]:
    """Block scales as float32 numbers."""
    if scales.dtype == np.uint8:
        power = np.ldexp(1.0, scales.astype(np.int32) - E8M0_BIAS)
        return np.where(scales == 0xFF, np.nan, power).astype(np.float32)
    return scales.astype(np.float32)


def encode(
    matrix: Float[np.ndarray, "I J"], form: PackedFormat, scales: np.ndarray, whole: np.float32
) -> UInt8[np.ndarray, "I J/2"]:
    """The values, two a byte: divided by their scales, held within ±6 (INT4: −8 to 7), rounded to the nearest, ties to even."""
    divisor = scale_values(scales) * whole
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = matrix.astype(np.float32).reshape(len(matrix), -1, form.block) / divisor[:, :, None]
        quotient = quotient.reshape(matrix.shape)
        if form.integers:
            codes = (np.clip(np.rint(quotient), -INT4_OFFSET, INT4_OFFSET - 1) + INT4_OFFSET).astype(np.uint8)
        else:  # rounds to the nearest, ties to even, and gives 6 for all that is larger
            codes = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def decode(
    packed: UInt8[np.ndarray, "I J/2"], form: PackedFormat, scales: np.ndarray, whole: np.float32
) -> Float32[np.ndarray, "I J"]:
    """``(value × scale) × whole`` in float32; only the last product is rounded."""
    values = _PAIRS[form.integers][packed].reshape(len(packed), -1, form.block)
    scaled = values * scale_values(scales)[:, :, None]
    return (scaled * np.float32(whole)).reshape(len(packed), -1)

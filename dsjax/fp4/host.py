"""Packed formats on the host: encode and decode matrices ``[out, in]`` (the checkpoint layout) with NumPy, blocks along ``in``."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, UInt8

from dsjax.fp4.formats import CODES, E4M3_LARGEST, E8M0_BIAS, INT4_HALF_RANGE, INT4_OFFSET, LARGEST, PackedFormat

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_LEAST_E4M3 = 2.0**-9
_LEAST_NORMAL = 2.0**-126
_LARGEST_EXPONENT = 2  # of 6 = 1.5 × 2^2
_E8M0_NAN = 0xFF


def _pairs(values: Float32[np.ndarray, "16"]) -> Float32[np.ndarray, "256 2"]:
    """Return both values of each byte, lower four bits first. values: the value of each code."""
    return np.stack([values[np.arange(256) & 15], values[np.arange(256) >> 4]], axis=-1)


_E2M1_PAIRS = _pairs(np.array([*CODES, *(-code for code in CODES)], np.float32))
_INT4_PAIRS = _pairs(np.arange(16, dtype=np.float32) - INT4_OFFSET)


def global_scale(matrix: Float[np.ndarray, "I J"]) -> np.float32:
    """Return NVFP4's tensor scale: amax ÷ (6 × 448), so that the largest block scale is the e4m3 maximum; 1 if all values are zero."""
    amax = np.float32(np.abs(matrix).max(initial=0))
    scale = amax / np.float32(LARGEST * E4M3_LARGEST)
    return scale if scale > 0 else np.float32(1)


def block_scales(matrix: Float[np.ndarray, "I J"], form: PackedFormat, tensor_scale: np.float32) -> np.ndarray:
    """Return the scale of each block, ``[I, J / block]``, in the format's dtype.

    tensor_scale: 1 in a format without one. NVFP4: a scale that would round to 0 becomes e4m3's smallest positive number.
    MXFP4: exponent of the block's amax minus that of 6 (OCP Microscaling Formats 1.0, section 6.3); the smallest one for zeros. INT4:
    amax ÷ 7.5, at least the smallest normal number, because devices flush subnormals to zero (``calculate_qparams`` of compressed-tensors).
    """
    amax = np.abs(matrix.astype(np.float32)).reshape(len(matrix), -1, form.block).max(axis=-1)
    if form.integers:
        return np.maximum(amax / np.float32(INT4_HALF_RANGE), np.float32(_LEAST_NORMAL)).astype(_BF16)
    if form.has_global:
        with np.errstate(invalid="ignore"):  # NaN or infinity gives a NaN scale, which the reader reports
            scale = amax / np.float32(LARGEST) / tensor_scale
        return np.clip(scale, _LEAST_E4M3, E4M3_LARGEST).astype(_E4M3)
    exponent = np.frexp(amax)[1] - 1  # amax = m × 2^exponent, 1 <= m < 2
    biased = np.clip(exponent - _LARGEST_EXPONENT + E8M0_BIAS, 0, 2 * E8M0_BIAS)
    biased = np.where(amax > 0, biased, 0)
    return np.where(np.isfinite(amax), biased, _E8M0_NAN).astype(np.uint8)


def scale_values(scales: np.ndarray) -> Float32[np.ndarray, "..."]:
    """Return block scales as float32."""
    if scales.dtype == np.uint8:
        power = np.ldexp(1.0, scales.astype(np.int32) - E8M0_BIAS)
        return np.where(scales == _E8M0_NAN, np.nan, power).astype(np.float32)
    return scales.astype(np.float32)


def encode(
    matrix: Float[np.ndarray, "I J"], form: PackedFormat, scales: np.ndarray, tensor_scale: np.float32
) -> UInt8[np.ndarray, "I J/2"]:
    """Return the packed values, two per byte: divided by their scales, clipped to ±6 (INT4: −8 to 7), rounded to nearest, ties to even."""
    divisor = scale_values(scales) * tensor_scale
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = matrix.astype(np.float32).reshape(len(matrix), -1, form.block) / divisor[:, :, None]
        quotient = quotient.reshape(matrix.shape)
        if form.integers:
            codes = (np.clip(np.rint(quotient), -INT4_OFFSET, INT4_OFFSET - 1) + INT4_OFFSET).astype(np.uint8)
        else:  # rounds to nearest, ties to even, and saturates at 6
            codes = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def decode(
    packed: UInt8[np.ndarray, "I J/2"], form: PackedFormat, scales: np.ndarray, tensor_scale: np.float32
) -> Float32[np.ndarray, "I J"]:
    """Return ``(value × scale) × tensor_scale`` in float32; only the last product is rounded."""
    pairs = _INT4_PAIRS if form.integers else _E2M1_PAIRS
    values = pairs[packed].reshape(len(packed), -1, form.block)
    scaled = values * scale_values(scales)[:, :, None]
    return (scaled * np.float32(tensor_scale)).reshape(len(packed), -1)

"""DeepSeek's FP8 weights on the host: e4m3 values with one float32 scale per 128 × 128 block.

``weight = fp8 × scale``; the scale is the block's largest magnitude divided by 448, e4m3's largest finite value
(DeepSeek-V3 technical report §3.3.2; ``weight_quant`` of its inference code). Matrices have two dimensions; if 128 does
not divide one, its last blocks are shorter.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from dsjax.checkpoint.safetensors import Tensor
from dsjax.model.parameters import BLOCK
from sharding import fp8

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0
# ml_dtypes converts one value at a time; a table of all 256 values is several times faster.
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)


def block_scales(matrix: Float[np.ndarray, "I J"]) -> Float32[np.ndarray, "I/128 J/128"]:
    """Return each block's scale; 1 for a block of zeros, to avoid division by zero. Other blocks count as at least `fp8.LEAST`."""
    magnitude = np.abs(matrix.astype(np.float32))
    rows = np.maximum.reduceat(magnitude, np.arange(0, matrix.shape[0], BLOCK), axis=0)
    largest = np.maximum.reduceat(rows, np.arange(0, matrix.shape[1], BLOCK), axis=1)
    scale = np.maximum(largest, np.float32(fp8.LEAST)) / np.float32(FP8_MAX)
    return np.where(largest >= np.float32(fp8.LEAST_NORMAL), scale, np.float32(1))


def quantise(matrix: Float[np.ndarray, "I J"]) -> tuple[np.ndarray, Float32[np.ndarray, "I/128 J/128"]]:
    """Return the matrix as e4m3, and its block scales. Values are clipped to ±448, because e4m3 turns values above 464 into NaN."""
    scale = block_scales(matrix)
    quotient = matrix.astype(np.float32) / expand(scale, 0, 0, matrix.shape)
    return np.clip(quotient, -FP8_MAX, FP8_MAX).astype(FP8), scale


def dequantise(
    weight: np.ndarray, scale: Float32[np.ndarray, "I/128 J/128"], row: int = 0, column: int = 0
) -> Float32[np.ndarray, "i j"]:
    """Return ``float32(weight) × scale`` for a part of a matrix that starts at ``[row, column]``; ``scale`` is the whole matrix's."""
    values = np.take(_FP8_VALUES, weight.view(np.uint8))
    with np.errstate(invalid="ignore", over="ignore"):  # `read_scale` reports damaged scales
        values *= expand(scale, row, column, weight.shape)
    return values


def read_scale(weight: Tensor, scale: Tensor) -> tuple[Float32[np.ndarray, "I/128 J/128"], str | None]:
    """Return a matrix's block scales as float32, from any stored dtype, and the problem with them, if any."""
    values = np.asarray(scale[:, :]).astype(np.float32)
    if not np.isfinite(values).all():
        return values, "has values that are not finite (NaN or infinity)"
    if (values < 0).any():
        return values, "has negative block scales"
    for block in np.argwhere(values == 0).tolist():
        ends = [(index + 1) * BLOCK for index in block]
        rows, columns = (slice(end - BLOCK, min(end, size)) for end, size in zip(ends, weight.shape, strict=True))
        if (np.asarray(weight[rows, columns]).view(np.uint8) & 0x7F).any():  # ignores the sign: −0 is zero
            return values, "has a block scale of zero, and the weights of the block are not zero"
    return values, None


def expand(scale: np.ndarray, row: int, column: int, shape: tuple[int, int]) -> np.ndarray:
    """Return the scale of each value in the part of a matrix that has this shape and starts at ``[row, column]``.

    If the part lies in one row of blocks, return a single row, which NumPy broadcasts.
    """
    columns = np.arange(column, column + shape[1]) // BLOCK
    if row // BLOCK == (row + shape[0] - 1) // BLOCK:
        return scale[row // BLOCK, columns][None]
    return scale[(np.arange(row, row + shape[0]) // BLOCK)[:, None], columns]

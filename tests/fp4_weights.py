"""Experts' matrices in FP4 as they lie in memory, and the numbers that they stand for, for tests of products."""

import numpy as np

from dsjax.fp4 import host
from dsjax.fp4.formats import PackedFormat


def in_fp4(params: dict[str, np.ndarray], form: PackedFormat) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """``gate_up.weight [X, D, 2, F]`` and ``down.weight [X, F, D]`` as FP4's arrays in storage dtypes, and decoded to float32."""
    packed, decoded = {}, {}
    for name, matrices in params.items():
        stem = name.removesuffix("weight")
        lead = matrices.shape[:1] + matrices.shape[2:-1]  # (X, 2) of gate and up, (X,) of down
        flat = np.moveaxis(matrices, 1, -1).reshape(-1, matrices.shape[-1], matrices.shape[1])  # [of each, out, in]
        parts = [encoded(matrix, form) for matrix in flat]

        def back(arrays, lead=lead):
            stacked = np.stack(arrays)
            return np.moveaxis(stacked.reshape(*lead, *stacked.shape[1:]), -1, 1)

        bits = f"u{form.scale_bytes}"
        packed[f"{stem}weight"] = np.ascontiguousarray(back([values for values, _, _ in parts]))
        packed[f"{stem}scale"] = np.ascontiguousarray(back([scales.view(bits) for _, scales, _ in parts]))
        if form.has_global:
            packed[f"{stem}global_scale"] = np.array([whole for *_, whole in parts], np.float32).reshape(*lead, 1)
        decoded[name] = np.ascontiguousarray(back([host.decode(values, form, *scales) for values, *scales in parts]))
    return packed, decoded


def encoded(matrix: np.ndarray, form: PackedFormat) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """A matrix's values, the scales of its blocks, and that of the whole."""
    matrix = matrix.astype(np.float32)
    whole = host.global_scale(matrix) if form.has_global else np.float32(1)
    scales = host.block_scales(matrix, form, whole)
    return host.encode(matrix, form, scales, whole), scales, whole

"""FP8 quantisation of activations with one scale per 1 × 128 block, in one pass (Pallas Triton). Reference: ``sharding.fp8.quantise``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import whole_spec
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype
from dsjax.kernels.pallas.order import KernelOrder
from sharding import fp8

ROWS = 16
"""Rows of a program, which quantises one 128-value block of each row: 2,048 values in registers."""


def quantise(x_TK: Float[Array, "T K"], *, powers: bool = False, interpret: bool = False) -> fp8.Quantised:
    """Return e4m3 values ``[T, K]`` and float32 scales ``[T, ceil(K / 128)]``. ``powers``: as in ``sharding.fp8.quantise``."""
    T, K = x_TK.shape
    blocks = fp8.num_scales(K)
    cost = KernelCost(0.0, T * (K * x_TK.dtype.itemsize + fp8.row_bytes(K)), hlo_dtype(x_TK.dtype))

    def kernel(x_ref, out_ref, scale_ref):
        row = pl.program_id(1) * ROWS + jnp.arange(ROWS)
        k = pl.program_id(0) * fp8.BLOCK + jnp.arange(fp8.BLOCK)
        inside = (row < T)[:, None] & (k < K)[None, :]
        x = plgpu.load(x_ref.at[row[:, None], k[None, :]], mask=inside, other=0)
        values, scale = quantised_tile(x.astype(jnp.float32), powers)
        plgpu.store(out_ref.at[row[:, None], k[None, :]], values, mask=inside)
        plgpu.store(scale_ref.at[row, jnp.full_like(row, pl.program_id(0))], scale, mask=row < T)

    shapes = [jax.ShapeDtypeStruct((T, K), fp8.E4M3), jax.ShapeDtypeStruct((T, blocks), jnp.float32)]
    values, scales = pl.pallas_call(
        kernel,
        grid=(blocks, pl.cdiv(T, ROWS)),
        in_specs=[whole_spec(x_TK)],
        out_specs=[*map(whole_spec, shapes)],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | KernelOrder(exact=True).metadata,
        interpret=interpret,
        name="quantise",
    )(x_TK)
    return fp8.Quantised(values, scales)


def quantised_tile(x: Float[Array, "R 128"], powers: bool) -> fp8.Quantised:
    """Quantise one block of each row, inside a kernel: return e4m3 values ``[R, 128]`` and float32 scales ``[R]``."""
    scale = fp8.scale_of(jnp.max(jnp.abs(x), axis=1), powers)
    values = jnp.clip(x / scale[:, None], -fp8.LARGEST, fp8.LARGEST).astype(fp8.E4M3)
    return fp8.Quantised(values, scale)

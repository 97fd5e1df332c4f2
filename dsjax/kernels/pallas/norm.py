"""RMSNorm that adds a row's squares in the same order for every number of rows (Triton and Mosaic, by Pallas).

A compiler that fuses a norm with its neighbours divides a row among threads as suits that fusion. Here a program takes whole rows, padded
to a power of two, so that the order depends on the width alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dsjax.kernels.pallas import PallasKernels, pl, plgpu
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import KernelOrder

ROWS_OF_TPU = 16
"""Rows of a program on TPUs: the fewest that fill a register with 16-bit numbers."""


def rms_norm(
    x_TD: Float[Array, "T D"], scale_D: Float[Array, "D"], eps: float, kernels: PallasKernels
) -> Float[Array, "T D"]:
    """``x / sqrt(mean(x²) + eps) × scale`` of each row, as ``model.norm.RMSNorm`` defines it, in the dtype of ``x_TD``."""
    T, D = x_TD.shape
    on_tpu = kernels.platform == "tpu"
    width, rows = (D, ROWS_OF_TPU) if on_tpu else (power(D), 1)
    cost = KernelCost(0.0, (2 * T + 1) * D * x_TD.dtype.itemsize, hlo_dtype(x_TD.dtype))
    order = KernelOrder({"width": width, "rows": rows})

    def normalised(x, scale):
        x_f32 = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.sum(x_f32 * x_f32, axis=-1, keepdims=True) / D + eps)
        return scale * (x_f32 * inverse).astype(x.dtype)

    def on_gpu(x_ref, scale_ref, out_ref):
        at = jnp.arange(width)
        inside = at < D
        row = pl.program_id(0) + jnp.arange(rows)
        x = plgpu.load(x_ref.at[row[:, None], at[None, :]], mask=inside[None, :], other=0)
        scale = plgpu.load(scale_ref.at[at], mask=inside, other=0)
        plgpu.store(out_ref.at[row[:, None], at[None, :]], normalised(x, scale[None, :]), mask=inside[None, :])

    def on_mosaic(x_ref, scale_ref, out_ref):
        out_ref[...] = normalised(x_ref[...], scale_ref[...])

    if on_tpu:
        programs = -(-T // rows)
        x_TD, scale = jnp.pad(x_TD, ((0, programs * rows - T), (0, 0))), scale_D[None]
        in_specs = [pl.BlockSpec((rows, D), lambda t: (t, 0)), pl.BlockSpec((1, D), lambda t: (0, 0))]
        out_specs, kernel, params = pl.BlockSpec((rows, D), lambda t: (t, 0)), on_mosaic, {}
    else:
        programs, scale = T, scale_D
        in_specs = [pl.BlockSpec((T, D), lambda t: (0, 0)), pl.BlockSpec((D,), lambda t: (0,))]
        out_specs, kernel = pl.BlockSpec((T, D), lambda t: (0, 0)), on_gpu
        params = {"compiler_params": plgpu.CompilerParams(num_warps=8, num_stages=1)}
    out = pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=kernels.interpret,
        name="rms_norm",
        **params,
    )(x_TD, scale)
    return out[:T]

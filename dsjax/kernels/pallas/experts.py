"""Helpers around the routed experts' matmuls (``products.py``): rounds of sorted pairs, and the weighted sum over each row's experts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import MESH, KernelOrder

ROUND_PAIRS = 32_768
"""Maximum number of pairs per round; in DeepSeek-V3 a pair takes 33 kB of buffers."""


def combine(
    y_PD: Float[Array, "P D"],
    place_NK: Int[Array, "N K"],
    weight_NK: Float[Array, "N K"],
    mean_pairs: float,
    *,
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """Return ``out[n] = Σ_k weight[n, k] × y[place[n, k]]``, summed in float32, in the dtype of ``y_PD``. Skip places outside ``y_PD``.

    mean_pairs: number of places inside ``y_PD`` under even routing. Only those rows of ``y_PD`` are read.
    """
    (P, D), (N, K) = y_PD.shape, place_NK.shape
    rows, columns = 4, min(1024, power(D))
    moved = ((mean_pairs + N) * D) * y_PD.dtype.itemsize + place_NK.size * 8
    cost = KernelCost(0.0, moved, hlo_dtype(y_PD.dtype), assumed=True)

    # Terms are added in the order of the chosen experts, but other devices add theirs separately. A single term needs no sum.
    order = KernelOrder(exact=True) if K == 1 else KernelOrder({"terms": K}, (MESH,))

    def kernel(y_ref, place_ref, weight_ref, out_ref):
        row = pl.program_id(1) * rows + jnp.arange(rows)
        at = pl.program_id(0) * columns + jnp.arange(columns)
        inside = row < N

        def add(k, total):
            place = plgpu.load(place_ref.at[row, k], mask=inside, other=-1)
            weight = plgpu.load(weight_ref.at[row, k], mask=inside, other=0.0)
            used = (place >= 0) & (place < P)
            mask = used[:, None] & (at < D)[None, :]
            y = plgpu.load(y_ref.at[jnp.where(used, place, 0)[:, None], at[None, :]], mask=mask, other=0)
            return total + jnp.where(used, weight, 0.0)[:, None] * y.astype(jnp.float32)

        total = lax.fori_loop(0, K, add, jnp.zeros((rows, columns), jnp.float32))
        mask = inside[:, None] & (at < D)[None, :]
        plgpu.store(out_ref.at[row[:, None], at[None, :]], total.astype(out_ref.dtype), mask=mask)

    arrays = (y_PD, place_NK.astype(jnp.int32), weight_NK.astype(jnp.float32))
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(D, columns), pl.cdiv(N, rows)),
        in_specs=[pl.BlockSpec(array.shape, lambda c, r: (0, 0)) for array in arrays],
        out_specs=pl.BlockSpec((N, D), lambda c, r: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((N, D), y_PD.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name="experts_combine",
    )(*arrays)


def round_pairs(mean_load: float, experts: int, most: int) -> int:
    """Return the pairs per round: the mean over all experts of a device plus four standard deviations, in whole tiles of 128.

    This makes a second round rare under even routing. most: upper bound of the number of pairs.
    """
    mean = mean_load * experts
    enough = 128 * math.ceil((mean + 4 * mean**0.5) / 128)
    return max(1, min(enough, ROUND_PAIRS, most))

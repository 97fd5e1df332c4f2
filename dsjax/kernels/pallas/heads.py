"""Products of queries with ``W^UK`` and of results with ``W^UV`` per head, read in place from the stack of layers (Pallas on Triton).

Both are parts of one matrix ``[M, H × (N + U)]``: each head has N columns for keys, followed by U columns for values.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import addressable
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import ROWS, KernelOrder
from dsjax.kernels.pallas.products import BLOCK, ProductTiles, widened
from dsjax.kernels.pallas.shared_memory import Cores, ProductBytes


def absorb(
    weight: Array,
    scale: Array | None,
    weight_dtype: np.dtype,
    layer: Int[Array, ""],
    q_THN: Float[Array, "T H N"],
    values: int,
    *,
    interpret: bool = False,
    cores: Cores = Cores(),
) -> Float[Array, "T H M"]:
    """Return queries in latent space: ``Σ_n q[t, h, n] W^UK[m, h, n]``.

    weight: ``[L, M, H × (N + U)]``, as bits of ``weight_dtype``; scale: ``[L, M / 128, H × (N + U) / 128]`` for FP8; values: U.
    """
    options = {"interpret": interpret, "cores": cores}
    return _by_head(weight, scale, weight_dtype, layer, q_THN, q_THN.shape[2], values, keys=True, **options)


def expand(
    weight: Array,
    scale: Array | None,
    weight_dtype: np.dtype,
    layer: Int[Array, ""],
    out_THM: Float[Array, "T H M"],
    values: int,
    *,
    interpret: bool = False,
    cores: Cores = Cores(),
) -> Float[Array, "T H U"]:
    """Return each head's values from results in latent space: ``Σ_m out[t, h, m] W^UV[m, h, u]``; arguments as in ``absorb``."""
    keys = weight.shape[2] // out_THM.shape[1] - values
    options = {"interpret": interpret, "cores": cores}
    return _by_head(weight, scale, weight_dtype, layer, out_THM, keys, values, keys=False, **options)


def takes(weight: Array, scale: Array | None, keys: int, values: int) -> bool:
    """Whether ``absorb`` and ``expand`` support this weight: its offsets fit, and no FP8 block crosses heads or keys and values."""
    return addressable(weight) and (scale is None or (keys % BLOCK == 0 and values % BLOCK == 0))


def _by_head(weight, scale, weight_dtype, layer, x, nope, values, *, keys: bool, interpret: bool, cores: Cores):
    T, H, K = x.shape
    M, N = weight.shape[1], (weight.shape[1] if keys else values)
    rows = min(64, max(16, power(T)))
    # For queries, a head's products are short and the latents many; for values it is the other way round.
    tiles = ProductTiles(rows, min(128, power(N)), min(BLOCK, power(K)), spread=1, warps=4, stages=3)
    tiles = tiles.fitting(ProductBytes(1, x.dtype, x.dtype, np.dtype(weight_dtype).itemsize), cores)
    columns, depth = tiles.columns, tiles.depth
    kernel = partial(
        _kernel, keys=keys, nope=nope, values=values, rows=rows, columns=columns, depth=depth, width=N,
        weight_dtype=weight_dtype, scaled=scale is not None,
    )  # fmt: skip
    arrays = [jnp.reshape(layer, 1).astype(jnp.int32), x, weight, *([] if scale is None else [scale])]
    across = -(-T // rows)
    moved = weight.dtype.itemsize * M * H * (nope if keys else values) + x.dtype.itemsize * T * H * (K + N)
    cost = KernelCost(2.0 * across * rows * H * K * N, moved, hlo_dtype(x.dtype))
    order = KernelOrder({"depth": depth, "rows": rows}, (ROWS,))
    return pl.pallas_call(
        kernel,
        grid=(across, pl.cdiv(N, columns), H),
        in_specs=[pl.BlockSpec(array.shape, lambda t, n, h, rank=array.ndim: (0,) * rank) for array in arrays],
        out_specs=pl.BlockSpec((T, H, N), lambda t, n, h: (0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((T, H, N), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=tiles.stages),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name="absorb_keys" if keys else "expand_values",
    )(*arrays)


def _kernel(
    layer_ref, x_ref, weight_ref, *refs, keys, nope, values, rows, columns, depth, width, weight_dtype, scaled
):  # fmt: skip
    scale_ref, out_ref = refs if scaled else (None, *refs)
    tile, column, head = (pl.program_id(axis) for axis in range(3))
    (T, _, K), dtype, layer = x_ref.shape, x_ref.dtype, layer_ref[0]
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    row, n = tile * rows + jnp.arange(rows), column * columns + jnp.arange(columns)
    first = head * (nope + values) + (0 if keys else nope)

    def step(block, total):
        k = block * depth + jnp.arange(depth)
        x = plgpu.load(x_ref.at[row[:, None], head, k[None, :]], mask=(row < T)[:, None] & (k < K)[None, :], other=0)
        # For keys, the latents are the columns of the result, so the weight is transposed.
        latent, head_columns = (n, k) if keys else (k, n)
        mask = None
        if K % depth or width % columns:
            mask = (latent < (width if keys else K))[:, None] & (head_columns < (K if keys else width))[None, :]
        weight = widened(
            weight_ref, (layer, latent[:, None], (first + head_columns)[None, :]), mask, weight_dtype, dtype
        )
        product = plgpu.dot(x, weight, trans_b=keys, precision=precision)
        if scaled:
            across = (column * columns, block * depth) if keys else (block * depth, column * columns)
            product = product * scale_ref[layer, across[0] // BLOCK, (first + across[1]) // BLOCK]
        return total + product

    total = lax.fori_loop(0, pl.cdiv(K, depth), step, jnp.zeros((rows, columns), jnp.float32))
    mask = (row < T)[:, None] & (n < width)[None, :]
    plgpu.store(out_ref.at[row[:, None], head, n[None, :]], total.astype(out_ref.dtype), mask=mask)

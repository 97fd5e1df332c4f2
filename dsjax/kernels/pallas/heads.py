"""Products of absorbed MLA per head: queries with ``W^UK`` and attention's results with ``W^UV`` (Pallas on Triton).

Both are parts of one matrix ``[M, H × (N + U)]``, read in place from the stack of layers: each head has N columns of ``W^UK``, then U of
``W^UV``. M: width of a latent; N, U: width of a head's key (without RoPE) and value."""

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
    """Return queries in latent space, ``[T, H, M]``: ``Σ_n q[t, h, n] W^UK[m, h, n]``.

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
    """Return each head's values from results in latent space: ``Σ_m out[t, h, m] W^UV[m, h, u]``; other arguments as in ``absorb``."""
    keys = weight.shape[2] // out_THM.shape[1] - values
    options = {"interpret": interpret, "cores": cores}
    return _by_head(weight, scale, weight_dtype, layer, out_THM, keys, values, keys=False, **options)


def takes(weight: Array, scale: Array | None, keys: int, values: int) -> bool:
    """Whether ``absorb`` and ``expand`` support this weight: its offsets fit, and no FP8 block spans two heads, or a key and a value."""
    return addressable(weight) and (scale is None or (keys % BLOCK == 0 and values % BLOCK == 0))


def _by_head(weight, scale, weight_dtype, layer, x, nope, values, *, keys: bool, interpret: bool, cores: Cores):
    T, H, K = x.shape
    M, width = weight.shape[1], (weight.shape[1] if keys else values)
    rows = min(64, max(16, power(T)))
    # Each head multiplies [T, K] by [K, width]: K = N and width = M in `absorb`, K = M and width = U in `expand`.
    tiles = ProductTiles(rows, min(128, power(width)), min(BLOCK, power(K)), spread=1, warps=4, stages=3)
    tiles = tiles.fitting(ProductBytes(1, x.dtype, x.dtype, np.dtype(weight_dtype).itemsize), cores)
    columns, depth = tiles.columns, tiles.depth
    kernel = partial(
        _kernel, keys=keys, nope=nope, values=values, rows=rows, columns=columns, depth=depth, width=width,
        weight_dtype=weight_dtype, scaled=scale is not None,
    )  # fmt: skip
    arrays = [jnp.reshape(layer, 1).astype(jnp.int32), x, weight, *([] if scale is None else [scale])]
    row_tiles = -(-T // rows)
    moved_bytes = weight.dtype.itemsize * M * H * (nope if keys else values) + x.dtype.itemsize * T * H * (K + width)
    cost = KernelCost(2.0 * row_tiles * rows * H * K * width, moved_bytes, hlo_dtype(x.dtype))
    order = KernelOrder({"depth": depth, "rows": rows}, (ROWS,))
    return pl.pallas_call(
        kernel,
        grid=(row_tiles, pl.cdiv(width, columns), H),
        in_specs=[pl.BlockSpec(array.shape, lambda t, n, h, rank=array.ndim: (0,) * rank) for array in arrays],
        out_specs=pl.BlockSpec((T, H, width), lambda t, n, h: (0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((T, H, width), x.dtype),
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
    row_tile, column_tile, head = (pl.program_id(axis) for axis in range(3))
    (T, _, K), dtype, layer = x_ref.shape, x_ref.dtype, layer_ref[0]
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    row, n = row_tile * rows + jnp.arange(rows), column_tile * columns + jnp.arange(columns)
    first_column = head * (nope + values) + (0 if keys else nope)  # of the weight, for this head's keys or values

    def step(block, total):
        k = block * depth + jnp.arange(depth)
        x = plgpu.load(x_ref.at[row[:, None], head, k[None, :]], mask=(row < T)[:, None] & (k < K)[None, :], other=0)
        # A weight's rows are latents. `absorb` has latents as the result's columns, so it multiplies by the transpose.
        latent, head_columns = (n, k) if keys else (k, n)
        mask = None
        if K % depth or width % columns:
            mask = (latent < (width if keys else K))[:, None] & (head_columns < (K if keys else width))[None, :]
        weight = widened(
            weight_ref, (layer, latent[:, None], (first_column + head_columns)[None, :]), mask, weight_dtype, dtype
        )
        product = plgpu.dot(x, weight, trans_b=keys, precision=precision)
        if scaled:
            corner = (column_tile * columns, block * depth) if keys else (block * depth, column_tile * columns)
            product = product * scale_ref[layer, corner[0] // BLOCK, (first_column + corner[1]) // BLOCK]
        return total + product

    total = lax.fori_loop(0, pl.cdiv(K, depth), step, jnp.zeros((rows, columns), jnp.float32))
    mask = (row < T)[:, None] & (n < width)[None, :]
    plgpu.store(out_ref.at[row[:, None], head, n[None, :]], total.astype(out_ref.dtype), mask=mask)

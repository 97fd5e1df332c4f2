"""Products with weights that are read in place from the stack of layers (Pallas on Triton).

``gate_up`` and ``down`` are the routed experts' products, over (row, expert) pairs sorted by expert: ``gate_up`` computes
``silu(x · gate) × (x · up)`` of every pair, and ``down`` multiplies the result by the second matrix. A tile of pairs has one expert.
``dense`` is for any other matrix of a layer. Tiles of rows that read the same weights are adjacent in the grid, so that a column
of weights comes from memory once and from the device's cache for every further tile. If a dense matrix has too few columns to
keep a device busy, its depth is split, and the partial sums are added afterwards.

FP8 weights are widened, exactly, in registers; each product over at most 128 of the depth is multiplied by its block's scale before it
is added to the float32 sum. If the rows are FP8 too (``fp8.Quantised``), tensor cores multiply e4m3 by e4m3, and each such product
is also multiplied by its row's scale (``dsjax/model/fp8_product.py`` is the definition). Hopper's ``wgmma`` needs at least 64 rows in
its first operand. For fewer rows the operands are swapped, ``(Wᵀ · xᵀ)ᵀ``: the columns of the weights are the instruction's rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dsjax.kernels.gate import gated
from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.activations import quantised_tile
from dsjax.kernels.pallas.addressing import addressable, whole_spec
from dsjax.kernels.pallas.cost import KernelCost, expected_tiles, hlo_dtype, power
from dsjax.kernels.pallas.order import MESH, ROWS, KernelOrder
from dsjax.kernels.pallas.shared_memory import Cores, ProductBytes, first_that_fits, shallower
from dsjax.kernels.pallas.tile_table import Product, TileTable
from sharding import fp8
from sharding.jax_internals import multiply_e4m3_on_tensor_cores

BLOCK = 128
"""Side of the blocks that share an FP8 scale."""
SLACK = 128
"""Padding rows required after the last sorted pair, so that the last tile has all its rows; their values are ignored."""


@dataclass(frozen=True)
class ProductTiles:
    """Sizes that shape a product, not its results beyond rounding: rows, columns and depth of a tile; columns and depth divide 128."""

    rows: int
    columns: int
    depth: int
    spread: int  # programs that share an expert's tiles of rows
    warps: int  # per program
    stages: int  # blocks in flight from memory
    splits: int = 1  # programs that share a tile's depth

    @classmethod
    def for_load(cls, mean_load: float) -> ProductTiles:
        """Return tiles for experts of so many pairs: with few, reading weights is the bottleneck; with many, multiplying."""
        rows = min(128, (power(mean_load + 2 * mean_load**0.5)))
        spread = max(1, math.ceil((mean_load + 2 * mean_load**0.5) / rows))
        if rows < 128:
            return cls(rows, 64, 128, spread, 4, 4)
        return cls(rows, 128, 64, spread, 8, 3)

    @classmethod
    def dense(cls, rows: int, depth: int, columns: int, cores: int) -> ProductTiles:
        """Return tiles for a matrix ``[depth, columns]`` and so many rows, on a device of so many cores."""
        tile = min(128, (power(rows)))
        tiles = cls(tile, 64, 128, 1, 4, 4) if tile < 128 else cls(tile, 128, 64, 1, 8, 3)
        spread = -(-rows // tile)
        programs = spread * -(-columns // tiles.columns)
        splits = max(1, min(cores // programs, depth // (4 * tiles.depth)))
        return replace(tiles, spread=spread, splits=splits)

    def tuned(self, table: TileTable | None, product: Product) -> ProductTiles:
        """Return the table's sizes for a product, or these sizes if the table has none."""
        settings = table and table.find(product)
        if not settings:
            return self
        tiles = replace(self, **settings)
        return replace(tiles, spread=max(1, math.ceil(self.rows * self.spread / tiles.rows)))

    def chosen(self, table: TileTable | None, product: Product, taken: ProductBytes, cores: Cores) -> ProductTiles:
        """Return the table's sizes, which ran on its device, if they differ from these; else these, reduced to fit the cores."""
        tiles = self.tuned(table, product)
        return self.fitting(taken, cores) if tiles == self else tiles

    def fitting(self, taken: ProductBytes, cores: Cores) -> ProductTiles:
        """Return these tiles, with fewer loads in flight or less depth if they do not fit the cores."""
        return first_that_fits(shallower(self), taken, cores)


@dataclass(frozen=True)
class Groups:
    """Sorted pairs of a round: each expert's first pair, its number of pairs, and the mean number under even routing."""

    start_X: Int[Array, "X"]
    count_X: Int[Array, "X"]
    mean_load: float


def gate_up(
    weight: Array,
    scale: Array | None,
    weight_dtype: np.dtype,
    layer: Int[Array, ""],
    x_PD: Float[Array, "P D"] | fp8.Quantised,
    groups: Groups,
    *,
    dtype: np.dtype | None = None,
    powers: bool = False,
    limit: float | None = None,
    depth_last: bool = False,
    interpret: bool = False,
    tiles: ProductTiles | TileTable | None = None,
    cores: Cores = Cores(),
) -> Float[Array, "P F"] | fp8.Quantised:
    """Return ``silu(x · gate) × (x · up)`` of each sorted pair, in the dtype of ``x_PD``, whose last ``SLACK`` rows are padding.

    Rows that belong to no expert are not written and are undefined. For quantised rows, the result is rounded to ``dtype`` and
    quantised as well, for ``down``; ``powers``: with scales that are powers of two.

    weight: ``[L, X, D, 2, F]``, or ``[L, X, 2, F, D]`` if ``depth_last``, as bits of ``weight_dtype``; scale:
    ``[L, X, D / 128, 2, F / 128]`` float32 for FP8.
    """
    return _product(
        weight, scale, weight_dtype, layer, x_PD, groups, fused=True, dtype=dtype, powers=powers, limit=limit, interpret=interpret,
        tiles=tiles, cores=cores, depth_last=depth_last,
    )  # fmt: skip


def down(
    weight: Array,
    scale: Array | None,
    weight_dtype: np.dtype,
    layer: Int[Array, ""],
    hidden_PF: Float[Array, "P F"] | fp8.Quantised,
    groups: Groups,
    *,
    dtype: np.dtype | None = None,
    depth_last: bool = False,
    interpret: bool = False,
    tiles: ProductTiles | TileTable | None = None,
    cores: Cores = Cores(),
) -> Float[Array, "P D"]:
    """Return ``hidden · down`` of each sorted pair, as in ``gate_up``. ``dtype``: of the result, if rows are quantised.

    weight: ``[L, X, F, D]``, or ``[L, X, D, F]`` if ``depth_last``; scale: ``[L, X, F / 128, D / 128]``.
    """
    return _product(
        weight,
        scale,
        weight_dtype,
        layer,
        hidden_PF,
        groups,
        fused=False,
        dtype=dtype,
        interpret=interpret,
        tiles=tiles,
        cores=cores,
        depth_last=depth_last,
    )


def dense(
    weight: Array,
    scale: Array | None,
    weight_dtype: np.dtype,
    layer: Int[Array, ""],
    x_TK: Float[Array, "T K"] | fp8.Quantised,
    *,
    dtype: np.dtype | None = None,
    depth_last: bool = False,
    interpret: bool = False,
    tiles: ProductTiles | TileTable | None = None,
    cores: Cores = Cores(),
) -> Float[Array, "T *n"]:
    """Return ``x · weight[layer]`` in the dtype of ``x_TK``, or for quantised rows in ``dtype``.

    weight: ``[L, K, N]``, or ``[L, K, 2, F]`` with products ``[T, 2, F]``; ``[L, N, K]`` or ``[L, 2, F, K]`` if ``depth_last``.
    scale: as for the experts; for a fused matrix only if 128 divides F (``takes``).
    """
    quantised = isinstance(x_TK, fp8.Quantised)
    T, L = (x_TK.values if quantised else x_TK).shape[0], weight.shape[0]
    K, columns = (weight.shape[-1], weight.shape[1:-1]) if depth_last else (weight.shape[1], weight.shape[2:])
    N = math.prod(columns)
    flat = weight.reshape(L, 1, *((N, K) if depth_last else (K, N)))
    scales = None if scale is None else scale.reshape(scale.shape[0], 1, scale.shape[1], -1)
    if not isinstance(tiles, ProductTiles):
        kind = Product("dense" + "_fp8" * quantised, K, N, np.dtype(weight_dtype).name, T)
        default = ProductTiles.dense(T, K, N, cores.count)
        tiles = default.chosen(tiles, kind, _taken(False, x_TK, weight_dtype), cores)
    x = jax.tree.map(lambda array: jnp.pad(array, ((0, -T % tiles.rows), (0, 0))), x_TK)
    dtype = dtype if quantised else x.dtype
    one = Groups(jnp.zeros((1,), jnp.int32), jnp.full((1,), T, jnp.int32), T)
    out = _product(
        flat, scales, weight_dtype, layer, x, one, fused=False, dtype=dtype, interpret=interpret, tiles=tiles, name="dense",
        cores=cores, depth_last=depth_last,
    )  # fmt: skip
    if tiles.splits > 1:
        with jax.named_scope("dense_splits"):
            out = out[:, :T].sum(axis=0).astype(dtype)
    else:
        out = out[:T]
    return out.reshape(T, *columns)


def widened(ref, at: tuple, mask: Array | None, stored: np.dtype, dtype) -> Array:
    """Inside a kernel: return a tile of weights, read as bits of ``stored``, in ``dtype``; zero where the mask is false. None: no mask."""
    values = ref[at] if mask is None else plgpu.load(ref.at[at], mask=mask)
    if values.dtype != stored:
        values = lax.bitcast_convert_type(values, stored)
    # Triton has no FP8 constant to load in place of masked elements.
    return values.astype(dtype) if mask is None else jnp.where(mask, values.astype(dtype), 0)


def takes(weight: Array, scale: Array | None) -> bool:
    """Whether ``dense`` supports this weight: its offsets fit, and a fused matrix's FP8 blocks do not cross from gate to up."""
    whole = scale is None or weight.ndim < 4 or weight.shape[-1] % BLOCK == 0
    return whole and addressable(weight)


def _product(
    weight, scale, weight_dtype, layer, x, groups: Groups, *, fused: bool, dtype, interpret: bool, tiles, name="", powers=False,
    limit=None, cores=Cores(), depth_last=False,
):  # fmt: skip
    quantised = isinstance(x, fp8.Quantised)
    name = (name or ("experts_gate_up" if fused else "experts_down")) + "_fp8" * quantised
    X, rest = weight.shape[1], weight.shape[2:]
    depth, N = (rest[-1], rest[-2]) if depth_last else (rest[0], rest[-1])
    if not isinstance(tiles, ProductTiles):
        kind = Product(name, depth, N, np.dtype(weight_dtype).name, groups.mean_load)
        default = ProductTiles.for_load(groups.mean_load)
        default = replace(default, columns=BLOCK) if quantised and fused else default
        tiles = default.chosen(tiles, kind, _taken(fused, x, weight_dtype), cores)
    if quantised:
        multiply_e4m3_on_tensor_cores()
        # Pad the depth to whole blocks, so that nothing is masked: the weights' last row, times 0, stands for the missing rows.
        x = fp8.Quantised(jnp.pad(x.values, ((0, 0), (0, -x.values.shape[1] % BLOCK))), x.scales)
        tiles = replace(tiles, columns=BLOCK) if fused else tiles
    rows_in = [*x] if quantised else [x]
    dtype = dtype if quantised else x.dtype
    rows = rows_in[0].shape[0]
    kernel = partial(
        _kernel, fused=fused, weight_dtype=weight_dtype, tiles=tiles, scaled=scale is not None, quantised=quantised,
        dtype=dtype if quantised else x.dtype,
        powers=powers, limit=limit, shape=(depth, N), depth_last=depth_last,
        swapped=depth_last and cores.swaps(tiles.rows, rows_in[0].dtype),
    )  # fmt: skip
    scalars = [array.astype(jnp.int32) for array in (jnp.reshape(layer, 1), groups.start_X, groups.count_X)]
    arrays = [*scalars, *rows_in, weight, *([] if scale is None else [scale])]
    cost = _cost(rows_in[0], weight, (depth, N), groups.mean_load, tiles, dtype)
    shapes = [jax.ShapeDtypeStruct((rows, N), dtype)]
    if quantised and fused:
        blocks = fp8.num_scales(N)
        shapes = [jax.ShapeDtypeStruct((rows, blocks * BLOCK), fp8.E4M3), jax.ShapeDtypeStruct((rows, blocks), jnp.float32)]  # fmt: skip
    elif tiles.splits > 1:
        shapes = [jax.ShapeDtypeStruct((tiles.splits, rows, N), jnp.float32)]
    sizes = {"depth": tiles.depth, "splits": tiles.splits, "rows": tiles.rows}
    order = KernelOrder(sizes, (ROWS, MESH))
    out = pl.pallas_call(
        kernel,
        grid=(tiles.spread, pl.cdiv(N, tiles.columns), X * tiles.splits),
        in_specs=[*map(whole_spec, arrays)],
        out_specs=[*map(whole_spec, shapes)],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name=name,
    )(*arrays)
    return fp8.Quantised(*out) if len(out) == 2 else out[0]


def _kernel(
    layer_ref, start_ref, count_ref, *refs, fused, weight_dtype, tiles, scaled, quantised, dtype, powers, limit, shape,
    depth_last, swapped,
):  # fmt: skip
    x_ref, *refs = refs
    x_scale_ref, *refs = refs if quantised else (None, *refs)
    weight_ref, *refs = refs
    scale_ref, *refs = refs if scaled else (None, *refs)
    out_ref, *out_scale_ref = refs
    spread, column, place = (pl.program_id(axis) for axis in range(3))
    expert, part = place // tiles.splits, place % tiles.splits
    layer, start, count = layer_ref[0], start_ref[expert], count_ref[expert]
    K, (depth, N) = x_ref.shape[1], shape
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 and not quantised else lax.Precision.DEFAULT
    n = column * tiles.columns + jnp.arange(tiles.columns)
    halves = (0, 1) if fused else (None,)

    def weights(k, half):
        middle = () if half is None else (half,)

        def index(k, n):
            k, n = k[:, None], n[None, :]
            return (layer, expert, *middle, n, k) if depth_last else (layer, expert, k, *middle, n)

        if quantised:
            rows = k if depth == K else jnp.minimum(k, depth - 1)
            columns = n if N % tiles.columns == 0 else jnp.minimum(n, N - 1)
            values = weight_ref[index(rows, columns)]
            return values if values.dtype == weight_dtype else lax.bitcast_convert_type(values, weight_dtype)
        at = index(k, n)
        whole = K % tiles.depth == 0 and N % tiles.columns == 0
        return widened(weight_ref, at, None if whole else (k[:, None] < K) & (n[None, :] < N), weight_dtype, dtype)

    def one_tile(tile, _):
        row = tile * tiles.rows + jnp.arange(tiles.rows)
        used, row = row < count, start + row

        def deeper(block, sums):
            at = block * tiles.depth
            k = at + jnp.arange(tiles.depth)
            if K % tiles.depth:
                x = plgpu.load(x_ref.at[row[:, None], k[None, :]], mask=(k < K)[None, :] & used[:, None], other=0)
            else:
                x = x_ref[row[:, None], k[None, :]]
            across = at // BLOCK
            added = []
            for half, total in zip(halves, sums, strict=True):
                if swapped:
                    product = plgpu.dot(weights(k, half), x, trans_a=True, trans_b=True).T
                else:
                    product = plgpu.dot(x, weights(k, half), precision=precision)
                if quantised:
                    product = product * plgpu.load(x_scale_ref.at[row, jnp.full_like(row, across)])[:, None]
                if scaled:
                    middle = () if half is None else (half,)
                    product = product * scale_ref[(layer, expert, across, *middle, column * tiles.columns // BLOCK)]
                added.append(total + product)
            return tuple(added)

        zeros = tuple(jnp.zeros((tiles.rows, tiles.columns), jnp.float32) for _ in halves)
        blocks = pl.cdiv(K, tiles.depth)
        steps = pl.cdiv(blocks, tiles.splits)
        last = blocks if tiles.splits == 1 else jnp.minimum((part + 1) * steps, blocks)
        sums = lax.fori_loop(0 if tiles.splits == 1 else part * steps, last, deeper, zeros)
        out = gated(*sums, limit) if fused else sums[0]
        if out_scale_ref:
            out = jnp.where((n < N)[None, :], out.astype(dtype).astype(jnp.float32), 0.0)
            values, factor = quantised_tile(out, powers)
            plgpu.store(
                out_ref.at[row[:, None], n[None, :]], values, mask=jnp.broadcast_to(used[:, None], values.shape)
            )
            plgpu.store(out_scale_ref[0].at[row, jnp.full_like(row, column)], factor, mask=used)
            return tile
        inside = used[:, None] & (n < N)[None, :]
        at = (row[:, None], n[None, :]) if tiles.splits == 1 else (part, row[:, None], n[None, :])
        plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=inside)
        return tile

    # Loop over this program's share of the tiles of the expert's pairs.
    turns = (pl.cdiv(count, tiles.rows) - spread + tiles.spread - 1) // tiles.spread
    lax.fori_loop(0, turns, lambda turn, _: one_tile(spread + turn * tiles.spread, _), 0)


def _taken(fused: bool, x: Array | fp8.Quantised, weight_dtype: np.dtype) -> ProductBytes:
    rows = x.values.dtype if isinstance(x, fp8.Quantised) else x.dtype
    return ProductBytes(1 + fused, rows, rows, np.dtype(weight_dtype).itemsize)


def _cost(
    x: Array, weight: Array, shape: tuple[int, int], mean_load: float, tiles: ProductTiles, dtype: np.dtype
) -> KernelCost:
    """Return the cost under even routing: rows of all started tiles, weights of every expert with a pair once. A dense matrix has one
    "expert", whose rows are known. For e4m3 rows, results of gate and up are e4m3 as well, and others have ``dtype``."""
    X, (K, width), fused = weight.shape[1], shape, weight.ndim == 5
    N = width * (1 + fused)
    known = X == 1 and isinstance(mean_load, int)
    rows = X * tiles.rows * (-(-mean_load // tiles.rows) if known else expected_tiles(mean_load, tiles.rows))
    flops = 2.0 * rows * K * N
    scales = 4 / BLOCK**2 if weight.dtype.itemsize == 1 else 0
    read = (1 if known else X * (1 - math.exp(-mean_load))) * K * N * (weight.dtype.itemsize + scales)
    quantised = x.dtype == fp8.E4M3
    row = fp8.row_bytes(K) if quantised else K * x.dtype.itemsize
    result = fp8.row_bytes(width) if quantised and fused else width * np.dtype(dtype).itemsize
    if tiles.splits > 1:
        result = width * 4 * tiles.splits
    moved = read + X * mean_load * (row + result)
    return KernelCost(flops, moved, hlo_dtype(x.dtype), assumed=not known)

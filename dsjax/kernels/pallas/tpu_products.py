"""Products on TPUs with weights read from the stack of layers: for the routed experts, over (row, expert) pairs, and for dense
matrices in FP8 (Pallas on Mosaic).

Pairs are placed in tiles of rows with one expert each: an expert's first pair starts a tile. The number of each tile's expert is in
scalar memory and selects the next block of the stack ``[layers, experts, depth, columns]`` to copy, so that XLA slices no
layer out of it, and the weights of an expert without pairs are not read. A block has the whole depth and as many columns as fit in VMEM.

Gate and up are adjacent in ``[depth, 2, columns]``: XLA keeps the two bfloat16 numbers of a position in one 32-bit word. The
kernel copies such blocks as they are and splits the words in registers; reshaping the stack would copy all layers. In FP8, XLA
stores gate and up one after the other, so that ``[2, depth, columns]`` has the same bytes. FP8 weights are widened in registers and
multiplied by the scale of their block of 128 × 128: no TPU that dsjax knows multiplies FP8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.gate import gated
from dsjax.kernels.pallas import pl, pltpu
from dsjax.kernels.pallas.cost import KernelCost, expected_tiles, hlo_dtype, power
from dsjax.kernels.pallas.order import MESH, ROWS, KernelOrder
from dsjax.kernels.pallas.tpu_attention import multiply, widened

BLOCK = 128
"""Columns of a vector register."""
LARGEST_BLOCK = 16 * 2**20
"""Most bytes of a block of 16-bit weights. VMEM (128 MiB) holds two blocks at once, a tile of rows, and the widened weights.
A block of FP8 weights has as many columns."""
MEMORY = 96 * 2**20
"""VMEM that the compiler may use, in bytes."""


@dataclass(frozen=True)
class TpuProductTiles:
    """Rows per tile, and the grid order: all columns of a tile before the next tile (``rows_first``), or all tiles of a column of weights.

    An expert with one tile reads its weights once in either order, and with ``rows_first`` also each row once. With many tiles,
    ``rows_first`` would read the expert's weights for each tile.
    """

    rows: int
    rows_first: bool

    @classmethod
    def for_load(cls, mean_load: float) -> TpuProductTiles:
        """Return tiles for experts with a mean of so many pairs."""
        likely = mean_load + 4 * mean_load**0.5
        rows = min(256, power(mean_load + 2 * mean_load**0.5))
        return cls(rows, likely <= rows)


class TiledPairs(NamedTuple):
    """Placement of pairs in tiles: the ``expert`` of each tile (unused tiles repeat the last one's), the number of tiles in ``use``, and
    for each row of the tiles its sorted ``pair`` and whether it is used."""

    expert_T: Int[Array, "T"]
    use: Int[Array, "1"]
    pair_S: Int[Array, "S"]
    used_S: Bool[Array, "S"]


def tile_pairs(start_X: Int[Array, "X"], count_X: Int[Array, "X"], most: int, rows: int) -> TiledPairs:
    """Place sorted pairs, of which there are at most ``most``, in tiles of ``rows``. Each expert starts a new tile."""
    X = len(start_X)
    tiles = -(-most // rows) + X
    last_X = jnp.cumsum(-(-count_X // rows))
    use = last_X[-1:]
    tile_T = jnp.minimum(jnp.arange(tiles), jnp.maximum(use - 1, 0))
    expert_T = jnp.minimum(jnp.sum(last_X[None, :] <= tile_T[:, None], axis=1), X - 1)
    first_T = jnp.where(expert_T > 0, last_X[expert_T - 1], 0)
    place_TR = ((jnp.arange(tiles) - first_T) * rows)[:, None] + jnp.arange(rows)
    used_TR = (place_TR < count_X[expert_T][:, None]) & (jnp.arange(tiles) < use)[:, None]
    pair_TR = jnp.where(used_TR, start_X[expert_T][:, None] + place_TR, 0)
    return TiledPairs(expert_T.astype(jnp.int32), use.astype(jnp.int32), pair_TR.reshape(-1), used_TR.reshape(-1))


def block_columns(depth: int, columns: int, matrices: int) -> int | None:
    """Return the columns of a block of weights: all, or the most whole registers that divide them and fit; None if none fit."""
    sizes = [columns, *(size for size in range(columns // BLOCK * BLOCK, 0, -BLOCK) if columns % size == 0)]
    return next((size for size in sizes if 2 * depth * size * matrices <= LARGEST_BLOCK), None)


def takes(depth: int, width: int) -> bool:
    """Whether blocks of both matrices of an expert of ``width``, in 16 bits or FP8, are whole registers and fit."""
    whole = depth % BLOCK == 0 and width % BLOCK == 0
    return whole and all(block_columns(*shape) for shape in ((depth, width, 2), (width, depth, 1)))


class Stack(NamedTuple):
    """The matrices of all layers and experts, as bits of ``dtype``: ``[L, X, depth, columns]``, or for gate and up ``[L, X, D, 2, F]``."""

    weight: Array
    scale: Array | None  # float32, only for FP8 weights; the same shape with depth and columns divided by 128
    dtype: np.dtype


def gate_up(
    stack: Stack, layer: Int[Array, ""], x_SD: Float[Array, "S D"],
    pairs: TiledPairs, mean_load: float, tiles: TpuProductTiles, *, limit: float | None = None, interpret: bool = False,
) -> Float[Array, "S F"]:  # fmt: skip
    """Return ``silu(x · gate) × (x · up)`` of each row in the tiles, in the dtype of ``x_SD``. Rows of unused tiles are undefined.

    limit: as in ``gated``.
    """
    return _product(stack, layer, x_SD, pairs, mean_load, tiles, interpret, limit=limit)


def down(
    stack: Stack, layer: Int[Array, ""], hidden_SF: Float[Array, "S F"],
    pairs: TiledPairs, mean_load: float, tiles: TpuProductTiles, *, interpret: bool = False,
) -> Float[Array, "S D"]:  # fmt: skip
    """Return ``hidden · down`` of each row in the tiles, in float32; arguments as in ``gate_up``."""
    return _product(stack, layer, hidden_SF, pairs, mean_load, tiles, interpret)


def takes_dense(weight: jax.ShapeDtypeStruct, scale: jax.ShapeDtypeStruct | None) -> bool:
    """Whether ``dense`` supports a stack ``[L, depth, columns]`` or ``[L, D, 2, F]``: FP8 weights in whole blocks."""
    depth, columns = weight.shape[1], weight.shape[-1]
    whole = depth % BLOCK == 0 and columns % BLOCK == 0
    return scale is not None and whole and block_columns(depth, columns, 1) is not None


def dense(
    stack: Stack, layer: Int[Array, ""], x: Float[Array, "T depth"], *, interpret: bool = False
) -> Float[Array, "T *n"]:
    """Return ``x · weight[layer]`` in the dtype of ``x``.

    stack: FP8 weights without an expert dimension: ``[L, depth, columns]``, or ``[L, D, 2, F]`` with products ``[T, 2, F]``.
    """
    T, fused = x.shape[0], stack.weight.ndim == 4
    weight, scale = (
        array if array is None else _matrices_first(array[:, None])[:, 0] if fused else array[:, None]
        for array in (stack.weight, stack.scale)
    )
    tiles = TpuProductTiles(min(256, power(T)), rows_first=False)
    count = -(-T // tiles.rows)
    x = jnp.pad(x, ((0, -T % tiles.rows), (0, 0)))
    nothing = jnp.zeros((0,), jnp.int32)

    def one(matrix: int) -> Array:
        pairs = TiledPairs(jnp.full((count,), matrix, jnp.int32), jnp.full((1,), count, jnp.int32), nothing, nothing)
        own = Stack(weight, scale, stack.dtype)
        return _product(own, layer, x, pairs, T, tiles, interpret, own_dtype=True)[:T]

    return jnp.stack([one(0), one(1)], axis=1) if fused else one(0)


def _product(
    stack: Stack, layer, x, pairs: TiledPairs, mean_load, tiles: TpuProductTiles, interpret: bool, own_dtype=False, limit=None
):  # fmt: skip
    """own_dtype: for a dense matrix: results have the dtype of ``x``, and all rows are in use."""
    weight = stack.weight
    depth, columns, fused = weight.shape[2], weight.shape[-1], weight.ndim == 5
    block_width = block_columns(depth, columns, 1 + fused)
    across, row_tiles = -(-columns // block_width), len(pairs.expert_T)
    at = (lambda t, n: (t, n)) if tiles.rows_first else (lambda n, t: (t, n))
    grid = (row_tiles, across) if tiles.rows_first else (across, row_tiles)

    def place(i, j, use):
        """Return the tile and column of a step. Steps of unused tiles stay at the last used block: they copy nothing, and never return to
        a finished block of the result, which would make its contents undefined."""
        tile, column = at(i, j)
        if tiles.rows_first:
            column = jnp.where(tile < use[0], column, across - 1)
        return jnp.minimum(tile, jnp.maximum(use[0] - 1, 0)), column

    def weights_block(i, j, layer, expert, use):
        tile, column = place(i, j, use)
        return (layer[0], expert[tile], 0, *[0] * fused, column)

    def scales_block(i, j, layer, expert, use):
        return weights_block(i, j, layer, expert, use)[1:]

    both = [2] * fused
    if stack.scale is None:
        kernel, operands = partial(_gate_up, limit=limit) if fused else _down, [weight]
        weights = [pl.BlockSpec((1, 1, depth, *both, block_width), weights_block)]
    else:
        kernel = partial(_fp8, limit=limit, fused=fused)
        operands = [_matrices_first(weight), _column_scales(stack, layer)]
        weights = [
            pl.BlockSpec((1, 1, *both, depth, block_width), weights_block),
            pl.BlockSpec((1, *both, depth // BLOCK, block_width), scales_block),
        ]

    out_dtype = x.dtype if fused or own_dtype else jnp.float32
    # A dense matrix is read once for all rows. Of routed experts, under even routing, those with a pair are, or each once per tile of it.
    rows, matrices, X = x.shape[0], 1, weight.shape[1]
    if not own_dtype:
        begun = X * expected_tiles(mean_load, tiles.rows)
        rows, matrices = begun * tiles.rows, begun if tiles.rows_first else X * (1 - np.exp(-mean_load))
    copies = 1 if tiles.rows_first else across  # of each row
    cost = _cost(x, weight, rows, matrices, copies, np.dtype(out_dtype).itemsize, assumed=not own_dtype)
    order = KernelOrder({"depth": depth, "rows": tiles.rows}, (ROWS, MESH))
    return pl.pallas_call(
        partial(kernel, tiles=tiles, weight_dtype=np.dtype(stack.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[pl.BlockSpec((tiles.rows, depth), lambda i, j, _, __, use: (place(i, j, use)[0], 0)), *weights],
            out_specs=pl.BlockSpec((tiles.rows, block_width), lambda i, j, _, __, use: place(i, j, use)),
        ),
        out_shape=jax.ShapeDtypeStruct((row_tiles * tiles.rows, columns), out_dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=MEMORY),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        # The TPU interpreter cannot bitcast a ref to words, which is how 16-bit gate and up are read.
        interpret=pltpu.InterpretParams() if interpret and stack.scale is not None else interpret,
        name="dense" if own_dtype else "experts_gate_up" if fused else "experts_down",
    )(jnp.reshape(layer, 1).astype(jnp.int32), pairs.expert_T, pairs.use, x, *operands)


def _matrices_first(array: Array) -> Array:
    """Move gate and up before the depth of ``[…, D, 2, F]``. For FP8 weights on TPUs, the bytes stay the same."""
    return jnp.moveaxis(array, -2, -3) if array.ndim == 5 else array


def _column_scales(stack: Stack, layer: Int[Array, ""]) -> Array:
    """Return a layer's scales ``[X, depth ÷ 128, columns]``, or ``[X, 2, D ÷ 128, F]``, each repeated for the columns of its block."""
    scale = _matrices_first(stack.scale)
    scale = lax.dynamic_index_in_dim(scale, layer, keepdims=False)
    return jnp.repeat(scale, BLOCK, axis=-1)


def _gate_up(layer_ref, expert_ref, use_ref, x_ref, weight_ref, out_ref, *, tiles, weight_dtype, limit):
    depth, width = weight_ref.shape[2], weight_ref.shape[-1]
    registers = width // BLOCK
    # Each index of the depth has ``registers`` consecutive rows of words.
    words_ref = weight_ref.bitcast(jnp.uint32).reshape(depth * registers, BLOCK)

    @pl.when(pl.program_id(0 if tiles.rows_first else 1) < use_ref[0])
    def _():
        @pl.loop(0, registers)
        def _(register):
            words = words_ref[pl.ds(register, depth, stride=registers), :]
            halves = (words << 16, words & jnp.uint32(0xFFFF0000))
            # The upper 16 bits of a float32 number are the bfloat16 number of the same value.
            gate, up = (
                multiply(x_ref[...], lax.bitcast_convert_type(half, jnp.float32).astype(x_ref.dtype)) for half in halves
            )
            at = pl.ds(pl.multiple_of(register * BLOCK, BLOCK), BLOCK)
            out_ref[:, at] = gated(gate, up, limit).astype(out_ref.dtype)


def _fp8(layer_ref, expert_ref, use_ref, x_ref, weight_ref, scale_ref, out_ref, *, tiles, weight_dtype, limit, fused):
    @pl.when(pl.program_id(0 if tiles.rows_first else 1) < use_ref[0])
    def _():
        @pl.loop(0, weight_ref.shape[-1] // BLOCK)
        def _(register):
            at = pl.ds(pl.multiple_of(register * BLOCK, BLOCK), BLOCK)
            products = []
            for which in ((0,), (1,)) if fused else ((),):
                weight, scale = weight_ref[(0, 0, *which, slice(None), at)], scale_ref[(0, *which, slice(None), at)]
                products.append(multiply(x_ref[...], _widened(weight, scale, weight_dtype, x_ref.dtype)))
            out = gated(*products, limit) if fused else products[0]
            out_ref[:, at] = out.astype(out_ref.dtype)


def _widened(weight: Array, scale: Array, stored: np.dtype, dtype) -> Array:
    """Return FP8 weights ``[depth, 128]`` times their scales ``[depth ÷ 128, 128]``, as ``dequantise`` does."""
    scales = jnp.broadcast_to(scale[:, None, :], (scale.shape[0], BLOCK, BLOCK)).reshape(weight.shape)
    return (widened(weight, stored, jnp.float32) * scales).astype(dtype)


def _down(layer_ref, expert_ref, use_ref, x_ref, weight_ref, out_ref, *, tiles, weight_dtype):
    @pl.when(pl.program_id(0 if tiles.rows_first else 1) < use_ref[0])
    def _():
        out_ref[...] = multiply(x_ref[...], widened(weight_ref[0, 0], weight_dtype, x_ref.dtype)).astype(out_ref.dtype)


def _cost(
    x: Array, weight: Array, rows: float, matrices: float, copies: int, out_bytes: int, assumed: bool
) -> KernelCost:
    """Return the cost of so many rows, each copied ``copies`` times, and of reading so many matrices with their FP8 scales."""
    size, stored = math.prod(weight.shape[2:]), weight.dtype.itemsize
    moved = matrices * size * (stored + (4 / BLOCK if stored == 1 else 0))
    moved += rows * x.shape[1] * x.dtype.itemsize * copies
    moved += rows * weight.shape[-1] * out_bytes
    return KernelCost(2.0 * rows * size, moved, hlo_dtype(x.dtype), assumed=assumed)

"""The routed experts' product over sorted pairs, weights read where they lie in the stack of layers (Triton, by Pallas).

Pairs of (row, expert) stand sorted by expert. ``gate_up`` makes ``silu(x · gate) × (x · up)`` of every pair, ``down`` multiplies that
by the second matrix, and ``combine`` adds up each row's experts with their weights, in the order of its choices, so that a result does
not depend on which program is first. A tile of pairs never crosses an expert. All tiles of an expert's pairs stand side by side in the
grid, so that a column of weights comes from memory once and from the device's cache for every further tile.

FP8 weights are widened, exactly, in registers; each product over 128 of the depth is multiplied by its block's scale before it is added
to the float32 sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from dsjax.kernels.pallas.cost import KernelCost, expected_tiles, hlo_dtype

BLOCK = 128
"""Side of the blocks that share an FP8 scale."""
SLACK = 128
"""Rows behind the last pair that ``x_PD`` must have, so that the last tile has all its rows; what is in them means nothing."""
ROUND_PAIRS = 32_768
"""Most pairs of a round; in DeepSeek-V3 a pair takes 33 kB of buffers."""


@dataclass(frozen=True)
class ProductTiles:
    """Sizes that shape a product and not its results beyond rounding: rows, columns and depth of a tile; columns and depth divide 128.

    spread: programs that share an expert's tiles of rows. warps, stages: of a program; how many blocks are under way from memory.
    """

    rows: int
    columns: int
    depth: int
    spread: int
    warps: int
    stages: int

    @classmethod
    def for_load(cls, mean_load: float) -> ProductTiles:
        """For experts of so many pairs: few are bound by reading weights, many by multiplying."""
        rows = min(128, max(16, _power(mean_load + 2 * mean_load**0.5)))
        spread = max(1, math.ceil((mean_load + 2 * mean_load**0.5) / rows))
        if rows < 128:
            return cls(rows, 64, 128, spread, 4, 4)
        return cls(rows, 128, 64, spread, 8, 3)


@dataclass(frozen=True)
class Groups:
    """Sorted pairs of a round: where each expert's begin, how many there are, and how many each has under even routing."""

    start_X: Int[Array, "X"]
    count_X: Int[Array, "X"]
    mean_load: float


def gate_up(
    weight: Array,
    scale: Array | None,
    weight_dtype: np.dtype,
    layer: Int[Array, ""],
    x_PD: Float[Array, "P D"],
    groups: Groups,
    *,
    interpret: bool = False,
    tiles: ProductTiles | None = None,
) -> Float[Array, "P F"]:
    """``silu(x · gate) × (x · up)`` of each sorted pair, in the dtype of ``x_PD``, whose last ``SLACK`` rows are no pairs.

    Rows that are no expert's pairs are not written: anything may be in them.

    weight: ``[L, X, D, 2, F]``, whose bits mean ``weight_dtype``; scale: ``[L, X, D / 128, 2, F / 128]`` float32 with FP8.
    """
    return _product(weight, scale, weight_dtype, layer, x_PD, groups, fused=True, interpret=interpret, tiles=tiles)


def down(
    weight: Array,
    scale: Array | None,
    weight_dtype: np.dtype,
    layer: Int[Array, ""],
    hidden_PF: Float[Array, "P F"],
    groups: Groups,
    *,
    interpret: bool = False,
    tiles: ProductTiles | None = None,
) -> Float[Array, "P D"]:
    """``hidden · down`` of each sorted pair, as ``gate_up``. weight: ``[L, X, F, D]``; scale: ``[L, X, F / 128, D / 128]``."""
    return _product(
        weight, scale, weight_dtype, layer, hidden_PF, groups, fused=False, interpret=interpret, tiles=tiles
    )


def _product(weight, scale, weight_dtype, layer, x, groups: Groups, *, fused: bool, interpret: bool, tiles):
    tiles = tiles or ProductTiles.for_load(groups.mean_load)
    X, (rows, N) = weight.shape[1], (x.shape[0], weight.shape[-1])
    kernel = partial(_kernel, fused=fused, weight_dtype=weight_dtype, tiles=tiles, scaled=scale is not None)
    scalars = [array.astype(jnp.int32) for array in (jnp.reshape(layer, 1), groups.start_X, groups.count_X)]
    arrays = [*scalars, x, weight, *([] if scale is None else [scale])]
    cost = _cost(x, weight, groups.mean_load, tiles)
    return pl.pallas_call(
        kernel,
        grid=(tiles.spread, pl.cdiv(N, tiles.columns), X),
        in_specs=[pl.BlockSpec(array.shape, lambda s, n, e, rank=array.ndim: (0,) * rank) for array in arrays],
        out_specs=pl.BlockSpec((rows, N), lambda s, n, e: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, N), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=cost.estimate,
        metadata=cost.metadata,
        interpret=interpret,
        name="experts_gate_up" if fused else "experts_down",
    )(*arrays)


def _kernel(layer_ref, start_ref, count_ref, x_ref, weight_ref, *refs, fused, weight_dtype, tiles, scaled):
    scale_ref, out_ref = refs if scaled else (None, *refs)
    spread, column, expert = (pl.program_id(axis) for axis in range(3))
    layer, start, count = layer_ref[0], start_ref[expert], count_ref[expert]
    (K, N), dtype = (x_ref.shape[1], weight_ref.shape[-1]), x_ref.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    n = column * tiles.columns + jnp.arange(tiles.columns)
    halves = (0, 1) if fused else (None,)

    def weights(k, half):
        middle = () if half is None else (half,)
        at = (layer, expert, k[:, None], *middle, n[None, :])
        if K % tiles.depth or N % tiles.columns:
            found = plgpu.load(weight_ref.at[at], mask=(k[:, None] < K) & (n[None, :] < N), other=0)
        else:
            found = weight_ref[at]
        if found.dtype != weight_dtype:
            found = lax.bitcast_convert_type(found, weight_dtype)
        return found.astype(dtype)

    def one_tile(tile, _):
        row = tile * tiles.rows + jnp.arange(tiles.rows)
        used, row = row < count, start + row

        def deeper(block, sums):
            k = block * tiles.depth + jnp.arange(tiles.depth)
            if K % tiles.depth:
                x = plgpu.load(x_ref.at[row[:, None], k[None, :]], mask=(k < K)[None, :] & used[:, None], other=0)
            else:
                x = x_ref[row[:, None], k[None, :]]
            found = []
            for half, total in zip(halves, sums, strict=True):
                product = plgpu.dot(x, weights(k, half), precision=precision)
                if scaled:
                    place = (
                        block * tiles.depth // BLOCK,
                        *(() if half is None else (half,)),
                        column * tiles.columns // BLOCK,
                    )
                    product = product * scale_ref[(layer, expert, *place)]
                found.append(total + product)
            return tuple(found)

        zeros = tuple(jnp.zeros((tiles.rows, tiles.columns), jnp.float32) for _ in halves)
        sums = lax.fori_loop(0, pl.cdiv(K, tiles.depth), deeper, zeros)
        out = sums[0] / (1 + jnp.exp(-sums[0])) * sums[1] if fused else sums[0]
        inside = used[:, None] & (n < N)[None, :]
        plgpu.store(out_ref.at[row[:, None], n[None, :]], out.astype(out_ref.dtype), mask=inside)
        return tile

    # Tile by tile: those of this program's share of the expert's pairs.
    own = (pl.cdiv(count, tiles.rows) - spread + tiles.spread - 1) // tiles.spread
    lax.fori_loop(0, own, lambda turn, _: one_tile(spread + turn * tiles.spread, _), 0)


def combine(
    y_PD: Float[Array, "P D"],
    place_NK: Int[Array, "N K"],
    weight_NK: Float[Array, "N K"],
    mean_pairs: float,
    *,
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """``out[n] = Σ_k weight[n, k] × y[place[n, k]]`` in float32, in the dtype of ``y_PD``; a place that is none of ``y_PD`` adds nothing.

    mean_pairs: how many places are some of ``y_PD`` under even routing. Nothing else of ``y_PD`` is read.
    """
    (P, D), (N, K) = y_PD.shape, place_NK.shape
    rows, columns = 4, min(1024, _power(D))
    moved = ((mean_pairs + N) * D) * y_PD.dtype.itemsize + place_NK.size * 8
    cost = KernelCost(0.0, moved, hlo_dtype(y_PD.dtype), assumed=True)

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
        metadata=cost.metadata,
        interpret=interpret,
        name="experts_combine",
    )(*arrays)


def addressable(array: Array) -> bool:
    """Whether Pallas addresses the array rightly: up to 2³² bytes it counts elements in 32 bits, of which one is the sign."""
    return array.size < 2**31 or array.size * array.dtype.itemsize > 2**32


def round_pairs(mean_load: float, experts: int, most: int) -> int:
    """Pairs of a round: what all experts of a device have on the mean and four standard deviations, in whole tiles of 128.

    Under even routing a second round is then rare. most: pairs that can be at all.
    """
    mean = mean_load * experts
    enough = 128 * math.ceil((mean + 4 * mean**0.5) / 128)
    return max(1, min(enough, ROUND_PAIRS, most))


def _cost(x: Array, weight: Array, mean_load: float, tiles: ProductTiles) -> KernelCost:
    """Under even routing: rows of all tiles that are begun, weights of every expert that has a pair, once."""
    X, K, N = weight.shape[1], x.shape[1], math.prod(weight.shape[3:])
    rows = X * tiles.rows * expected_tiles(mean_load, tiles.rows)
    flops = 2.0 * rows * K * N
    scales = 4 / BLOCK**2 if weight.dtype.itemsize == 1 else 0
    read = X * (1 - math.exp(-mean_load)) * K * N * (weight.dtype.itemsize + scales)
    pairs = X * mean_load * x.dtype.itemsize
    return KernelCost(flops, read + pairs * (K + weight.shape[-1]), hlo_dtype(x.dtype), assumed=True)


def _power(size: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(size, 1))))

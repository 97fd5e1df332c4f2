"""Routed experts' matmuls with packed weights, read in place from the stack of layers (Pallas, Triton backend).

Like ``products``, these run over (row, expert) pairs sorted by expert. A byte holds two values along the depth (K). The rows are therefore
split into even and odd depths, and each byte's two values are multiplied with both, without interleaving in registers. Value × block scale
is exact in bfloat16, except for INT4, which is rounded to it. Tensor cores multiply it with bfloat16 rows, and the tensor's scale
multiplies the float32 sum. FP8 rows (W4A8) are widened to bfloat16, exactly, and each block of 128 along the depth is multiplied by its row
scale. Hopper has no FP4 matmul; Blackwell's is not used, because Pallas' Triton lowering does not support it.

Pallas does not address a stack of 2³¹ to 2³² bytes correctly, so it is read as 16-bit words of two columns. If the stack of scales is that
large, one layer of it is copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dsjax.fp4.decode import codes_to_values, scales_to_values
from dsjax.fp4.formats import PackedFormat
from dsjax.kernels.gate import gated
from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import addressable, addressable_layer, whole_spec
from dsjax.kernels.pallas.cost import KernelCost, expected_tiles, hlo_dtype
from dsjax.kernels.pallas.order import MESH, ROWS, KernelOrder
from dsjax.kernels.pallas.products import BLOCK, Groups, ProductTiles
from dsjax.kernels.pallas.shared_memory import Cores, ProductBytes
from sharding import fp8


def product(
    arrays: Mapping[str, Array],
    form: PackedFormat,
    layer: Int[Array, ""],
    x: Float[Array, "P K"] | fp8.Quantised,
    groups: Groups,
    *,
    dtype: np.dtype,
    powers: bool = False,
    limit: float | None = None,
    interpret: bool = False,
    cores: Cores = Cores(),
) -> Float[Array, "P N"] | fp8.Quantised:
    """Return a product of each sorted pair in ``dtype``. Rows and options: see ``products.gate_up``.

    arrays: of gate and up ``weight [L, X, D/2, 2, F]``, ``scale [L, X, D/block, 2, F]`` and, if the format has it, ``global_scale
        [L, X, 2, 1]``; returns ``silu(x · gate) × (x · up)``, quantised if the rows are. Or of down, ``weight [L, X, F/2, D]`` and so on.
    """
    weight, quantised = arrays["weight"], isinstance(x, fp8.Quantised)
    fused = weight.ndim == 5
    tiles = ProductTiles.for_load(groups.mean_load)
    if quantised and fused:
        tiles = replace(tiles, columns=BLOCK)  # results are quantised in whole blocks
    values = x.values if quantised else x
    # Per byte: two values and a scale for each of them.
    tiles = tiles.fitting(ProductBytes(1 + fused, values.dtype, dtype, stored=1), cores)
    X, rows, K, N = weight.shape[1], values.shape[0], 2 * weight.shape[2], weight.shape[-1]
    cost = _cost(values, weight, form, groups.mean_load, tiles, dtype)
    lanes = 1 if addressable(weight) else 2
    if lanes == 2:
        weight = lax.bitcast_convert_type(weight.reshape(*weight.shape[:-1], N // 2, 2), jnp.uint16)
    # Pad the depth to whole tiles, then split it into even and odd depths.
    values = jnp.pad(values[:, :K], ((0, 0), (0, -K % max(tiles.depth, BLOCK))))
    values = values.reshape(rows, -1, 2).swapaxes(1, 2)
    # Load scales as unsigned integers, because Triton has no FP8 constant for masked elements.
    scale, bits = arrays["scale"], {1: jnp.uint8, 2: jnp.uint16}[form.scale_bytes]
    scale = scale if scale.dtype == bits else lax.bitcast_convert_type(scale, bits)
    scales, scale_layer = addressable_layer({"scale": scale}, layer)
    layers = jnp.stack([layer, scale_layer])  # layer index in the stack of weights, and in the stack of scales
    inputs = [array.astype(jnp.int32) for array in (layers, groups.start_X, groups.count_X)]
    inputs += [values, *([x.scales] if quantised else []), weight, scales["scale"]]
    inputs += [arrays["global_scale"]] if form.has_global else []
    shapes = [jax.ShapeDtypeStruct((rows, N), dtype)]
    if quantised and fused:
        blocks = fp8.num_scales(N)
        shapes = [jax.ShapeDtypeStruct((rows, blocks * BLOCK), fp8.E4M3), jax.ShapeDtypeStruct((rows, blocks), jnp.float32)]  # fmt: skip
    order = KernelOrder({"depth": tiles.depth, "rows": tiles.rows}, (ROWS, MESH))
    kernel = partial(
        _kernel, form=form, fused=fused, quantised=quantised, tiles=tiles, dtype=dtype, powers=powers, limit=limit, lanes=lanes
    )  # fmt: skip
    out = pl.pallas_call(
        kernel,
        grid=(tiles.spread, pl.cdiv(N, tiles.columns), X),
        in_specs=[*map(whole_spec, inputs)],
        out_specs=[*map(whole_spec, shapes)],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name=("experts_gate_up" if fused else "experts_down") + "_fp4",
    )(*inputs)
    return fp8.Quantised(*out) if len(out) == 2 else out[0]


gate_up = down = product
"""``product`` by the names of the two products in ``products``, whose weights differ in rank."""


def _kernel(layer_ref, start_ref, count_ref, x_ref, *refs, form, fused, quantised, tiles, dtype, powers, limit, lanes):
    x_scale_ref, *refs = refs if quantised else (None, *refs)
    weight_ref, scale_ref, *refs = refs
    whole_ref, *refs = refs if form.has_global else (None, *refs)
    out_ref, *out_scale_ref = refs
    spread, column, expert = (pl.program_id(axis) for axis in range(3))
    layer, scale_layer, start, count = layer_ref[0], layer_ref[1], start_ref[expert], count_ref[expert]
    deep, depth, N = tiles.depth // 2, weight_ref.shape[2], scale_ref.shape[-1]  # depths in bytes
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    word = column * tiles.columns // lanes + jnp.arange(tiles.columns // lanes)
    columns = [lanes * word + lane for lane in range(lanes)]
    halves = (0, 1) if fused else (None,)

    def weights(byte, half):
        """Return the weights of a tile for each column lane: those at even depths and those at odd depths."""
        middle = () if half is None else (half,)
        inside = (byte[:, None] < depth) & (columns[-1] < N)[None, :]
        at = (layer, expert, byte[:, None], *middle, word[None, :])
        packed = plgpu.load(weight_ref.at[at], mask=inside, other=0).astype(jnp.uint32)
        block, pairs = byte // (form.block // 2), []
        for lane, n in enumerate(columns):
            at = (scale_layer, expert, block[:, None], *middle, n[None, :])
            scale = plgpu.load(scale_ref.at[at], mask=inside, other=0)
            if form.scale_dtype != "uint8":
                scale = lax.bitcast_convert_type(scale, jnp.dtype(form.scale_dtype))
            scale = scales_to_values(scale)
            codes = (packed >> (8 * lane + shift) for shift in (0, 4))
            pairs.append([(codes_to_values(code, form.integers) * scale).astype(dtype) for code in codes])
        return pairs

    def one_tile(tile, _):
        row = tile * tiles.rows + jnp.arange(tiles.rows)
        used, row = row < count, start + row

        def deeper(step, sums):
            byte = step * deep + jnp.arange(deep)
            x = [x_ref[row[:, None], parity, byte[None, :]].astype(dtype) for parity in (0, 1)]
            x_scale = None
            if quantised:
                across = jnp.full_like(row, step * tiles.depth // BLOCK)
                x_scale = plgpu.load(x_scale_ref.at[row, across])[:, None]
            added = []
            for half, totals in zip(halves, sums, strict=True):
                pairs = weights(byte, half)
                products = [
                    sum(plgpu.dot(a, b, precision=precision) for a, b in zip(x, pair, strict=True)) for pair in pairs
                ]
                products = products if x_scale is None else [product * x_scale for product in products]
                added.append(tuple(total + product for total, product in zip(totals, products, strict=True)))
            return tuple(added)

        zeros = jnp.zeros((tiles.rows, tiles.columns // lanes), jnp.float32)
        sums = lax.fori_loop(0, pl.cdiv(depth, deep), deeper, tuple((zeros,) * lanes for _ in halves))
        if whole_ref is not None:
            at = [(layer, expert, half, 0) if fused else (layer, expert, 0) for half in halves]
            sums = [[total * whole_ref[place] for total in totals] for totals, place in zip(sums, at, strict=True)]
        outs = [gated(gate, up, limit) for gate, up in zip(*sums, strict=True)] if fused else sums[0]
        if out_scale_ref:
            outs = [
                jnp.where((n < N)[None, :], out.astype(dtype).astype(jnp.float32), 0.0)
                for n, out in zip(columns, outs, strict=True)
            ]
            factor = fp8.scale_of(reduce(jnp.maximum, [jnp.max(jnp.abs(out), axis=1) for out in outs]), powers)
            outs = [jnp.clip(out / factor[:, None], -fp8.LARGEST, fp8.LARGEST) for out in outs]
            plgpu.store(out_scale_ref[0].at[row, jnp.full_like(row, column)], factor, mask=used)
        for n, out in zip(columns, outs, strict=True):
            inside = used[:, None] & (n < out_ref.shape[-1])[None, :]
            plgpu.store(out_ref.at[row[:, None], n[None, :]], out.astype(out_ref.dtype), mask=inside)
        return tile

    # Loop over the tiles in this program's share of the expert's pairs.
    turns = (pl.cdiv(count, tiles.rows) - spread + tiles.spread - 1) // tiles.spread
    lax.fori_loop(0, turns, lambda turn, _: one_tile(spread + turn * tiles.spread, _), 0)


def _cost(x: Array, weight: Array, form: PackedFormat, mean_load: float, tiles: ProductTiles, dtype) -> KernelCost:
    """Return the cost under even routing: rows of all started tiles, and one read of each active expert's weights and scales."""
    X, K, columns = weight.shape[1], 2 * weight.shape[2], math.prod(weight.shape[3:])
    rows = X * tiles.rows * expected_tiles(mean_load, tiles.rows)
    read = X * (1 - math.exp(-mean_load)) * K * columns * form.bytes_per_value
    quantised, fused, width = x.dtype == fp8.E4M3, weight.ndim == 5, weight.shape[-1]
    row = fp8.row_bytes(K) if quantised else K * x.dtype.itemsize
    result = fp8.row_bytes(width) if quantised and fused else width * np.dtype(dtype).itemsize
    return KernelCost(2.0 * rows * K * columns, read + X * mean_load * (row + result), hlo_dtype(dtype), assumed=True)

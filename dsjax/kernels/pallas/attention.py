"""Absorbed MLA over the paged latent cache, for decodes, draft verification and prompt chunks (Pallas on Triton).

A program takes a tile of up to 64 (token, head) pairs of one row, which all read the same latents. It reads its part of
the row's context once, a block of positions at a time, directly from the pages. V3's 512 latent values and 64 rotary values
are two loads, because Triton takes only powers of two. With few rows, their context is split over several programs, whose
partial results are merged (flash decoding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import addressable_layer, load_entries, whole_spec
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import MESH, ROWS, KernelOrder
from dsjax.kernels.pallas.shared_memory import AttentionBytes, Cores, first_that_fits
from dsjax.kernels.pallas.tile_table import ATTENTION, Product, TileTable
from sharding import fp8

NOTHING = -1e30
"""Score of an invisible position; finite, so that the difference of two such scores is not NaN."""
MIN_BLOCKS = 4
"""Fewest blocks of positions in a split of the context: merging shorter splits moves more bytes than they read."""


@dataclass(frozen=True)
class AttentionTiles:
    """Sizes that shape the kernel, not its results beyond rounding."""

    rows: int = 64  # (token, head) pairs per program, a power of two of at least 16
    positions: int = 64  # context positions read at once, a power of two of at least 16
    warps: int = 8  # per program
    stages: int = 2  # blocks in flight from memory

    def tuned(self, table: TileTable | None, product: Product) -> AttentionTiles:
        """Return the table's sizes for this shape, or these sizes if the table has none."""
        return replace(self, **((table and table.find(product)) or {}))


def attention_product(rows: int, pairs: int, width: int, cache_dtype: np.dtype) -> Product:
    """Return the table's key for attention: rows of so many (token, head) pairs over cache entries of ``width`` values."""
    return Product(ATTENTION, width, pairs, np.dtype(cache_dtype).name, rows)


def latent_attention(
    q_latent: Float[Array, "R C H M"],
    q_rope: Float[Array, "R C H O"],
    cache: Mapping[str, Array],
    cache_dtype: np.dtype,
    layer: Int[Array, ""],
    start: Int[Array, "R"],
    length: Int[Array, "R"],
    tables: Int[Array, "R Pr"],
    filled: Bool[Array, "P G"] | None = None,
    *,
    scale: float,
    interpret: bool = False,
    tiles: AttentionTiles | TileTable | None = None,
    cores: Cores = Cores(),
) -> Float[Array, "R C H M"]:
    """Return causal attention, in latent space, of each row's queries from ``start`` on over the cache; zero for tokens from ``length`` on.

    cache: ``latent [L, P, G, M]`` and ``rope [L, P, G, O]``, as bits of ``cache_dtype``; in FP8 also ``scale [L, P, G, M / 128]`` of the
        latents, and ``rope`` in bfloat16.
    filled: which slots of the cache hold an entry; a token sees these and its own. None: all slots. scale: of the scores.
    tiles: sizes, or a table of sizes; for shapes that are not in the table, default sizes that fit ``cores``.
    Scores, weights and sums are float32; weights are rounded to the queries' dtype before they multiply the latents, as in the plain form.
    """
    R, C, H, M = q_latent.shape
    O = q_rope.shape[-1]
    latent_width, rope_width = power(M), power(O)
    if not isinstance(tiles, AttentionTiles):
        default = default_tiles(C * H)
        tiles = default.tuned(tiles, attention_product(R, C * H, M + O, cache_dtype))
        if tiles == default:
            memory = AttentionBytes(latent_width, rope_width, q_latent.dtype, cache_dtype)
            tiles = first_that_fits(smaller_tiles(C * H), memory, cores)
    pairs = -(-C * H // tiles.rows) * tiles.rows
    cache, layer = addressable_layer(cache, layer)
    L, P, G = cache["latent"].shape[:3]
    pages = tables.shape[1]
    blocks = -(-pages * G // tiles.positions)
    splits = split_context(R * (pairs // tiles.rows), blocks, cores.count)

    def by_pair(q, width):
        q = q.reshape(R, C * H, q.shape[-1])
        return jnp.pad(q, ((0, 0), (0, pairs - C * H), (0, width - q.shape[-1])))

    def tile_spec(width):
        return pl.BlockSpec((None, tiles.rows, width), lambda tile, split, row: (row, tile, 0))

    has_scales = "scale" in cache
    names = ("latent", "rope", "scale") if has_scales else ("latent", "rope")
    arrays = [cache[name].reshape(L * P * G, cache[name].shape[-1]) for name in names]
    if filled is not None:
        arrays.append(filled.reshape(-1).astype(jnp.int8))
    kernel = partial(
        _kernel, heads=H, widths=(M, O), page_slots=G, pages_of_layer=P, pages=pages, positions=tiles.positions, splits=splits,
        dtypes=(cache_dtype, jnp.bfloat16 if has_scales else cache_dtype), scale=scale * math.log2(math.e),
    )  # fmt: skip
    scalars = [array.astype(jnp.int32) for array in (jnp.reshape(layer, 1), start, length, tables)]
    stored_bytes = cache["latent"].dtype.itemsize
    cost = attention_cost(R, C, H, M, O, pages * G, q_latent.dtype, stored_bytes, tiles, splits)
    specs = [*map(whole_spec, scalars), tile_spec(latent_width), tile_spec(rope_width), *map(whole_spec, arrays)]
    result = jax.ShapeDtypeStruct((R, pairs, latent_width), q_latent.dtype)
    attend = attend_in_splits("latent_attention", kernel, specs, result, tiles, splits, cost, interpret)
    out = attend(*scalars, by_pair(q_latent, latent_width), by_pair(q_rope, rope_width), *arrays)
    return out[:, : C * H, :M].reshape(R, C, H, M)


def attend_in_splits(
    name: str, kernel: Callable, specs: list[pl.BlockSpec], result: jax.ShapeDtypeStruct, tiles: AttentionTiles, splits: int,
    cost: KernelCost, interpret: bool,
) -> Callable[..., Float[Array, "R P M"]]:  # fmt: skip
    """Return a function of a kernel's inputs. Program (tile, split, row) computes ``tiles.rows`` pairs of a row over a part of its context.

    kernel: writes the attention over its part, and the base-2 logarithm of its sum of weights. specs: of the inputs. result: padded.
    """
    rows, pairs, width = result.shape
    order = KernelOrder({"positions": tiles.positions, "splits": splits, "rows": tiles.rows}, (ROWS, MESH))
    attend = pl.pallas_call(
        kernel,
        grid=(pairs // tiles.rows, splits, rows),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((None, None, tiles.rows, width), lambda tile, split, row: (split, row, tile, 0)),
            pl.BlockSpec((None, None, tiles.rows), lambda tile, split, row: (split, row, tile)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, rows, pairs, width), result.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, pairs), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name=name,
    )
    return lambda *inputs: _merge_splits(*attend(*inputs), result.dtype)


def _merge_splits(out: Float[Array, "splits R P M"], peak: Float[Array, "splits R P"], dtype) -> Float[Array, "R P M"]:
    """Merge attention over parts of the context. peak: base-2 logarithm of each part's sum of weights."""
    if len(out) == 1:
        return out[0]
    with jax.named_scope("context_splits"):
        weights = jnp.exp2(peak - jnp.max(peak, axis=0))
        total = jnp.sum(weights, axis=0)
        return jnp.einsum("srpm,srp->rpm", out, weights / total).astype(dtype)


def _kernel(
    layer_ref, start_ref, length_ref, tables_ref, q_latent_ref, q_rope_ref, latent_ref, rope_ref, *refs,
    heads, widths, page_slots, pages_of_layer, pages, dtypes, scale, positions, splits,
):  # fmt: skip
    *optional, out_ref, peak_ref = refs
    is_fp8 = dtypes[0] == fp8.E4M3
    scale_ref = optional.pop(0) if is_fp8 else None
    filled_ref = optional.pop(0) if optional else None
    tile, split, row = (pl.program_id(axis) for axis in range(3))
    (rows, latent_width), rope_width = q_latent_ref.shape, q_rope_ref.shape[1]
    # FP8 latents are multiplied unscaled, one block of a scale at a time, and the products are scaled.
    chunk = min(latent_width, fp8.BLOCK) if is_fp8 else latent_width
    chunks = [range(first, first + chunk) for first in range(0, latent_width, chunk)]
    q_latent = [q_latent_ref[:, columns.start : columns.stop] for columns in chunks]
    q_rope = q_rope_ref[...]
    dtype = q_rope.dtype
    start, length, first_page = start_ref[row], length_ref[row], layer_ref[0] * pages_of_layer
    token = (tile * rows + jnp.arange(rows)) // heads
    q_position = jnp.where(token < length, start + token, -1)  # -1 sees nothing
    last = jnp.minimum((tile * rows + rows - 1) // heads, length - 1)
    # positions that the tile's last token sees
    context = jnp.where(tile * rows // heads < length, start + last + 1, 0)
    blocks = (jnp.minimum(context, pages * page_slots) + positions - 1) // positions
    blocks_per_split = (blocks + splits - 1) // splits
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def pages_of(block):
        column = lax.div(block * positions + jnp.arange(positions), page_slots)
        return plgpu.load(tables_ref.at[row, jnp.minimum(column, pages - 1)])

    def step(block, carry):
        peak, total, sums, page = carry
        next_page = pages_of(block + 1)  # a block ahead, so that no entry waits for its page's number
        position = block * positions + jnp.arange(positions)
        exists = position < jnp.minimum(context, pages * page_slots)
        slot = page * page_slots + lax.rem(position, page_slots)
        entry = first_page * page_slots + slot
        latent = [load_entries(latent_ref, entry, exists, columns, widths[0], dtypes[0], dtype) for columns in chunks]
        rope = load_entries(rope_ref, entry, exists, range(rope_width), widths[1], dtypes[1], dtype)
        scores = plgpu.dot(q_rope, rope, trans_b=True, precision=precision)
        factors = []
        for index, (query, key) in enumerate(zip(q_latent, latent, strict=True)):
            product = plgpu.dot(query, key, trans_b=True, precision=precision)
            if is_fp8:
                column = jnp.full((positions,), min(index, fp8.num_scales(widths[0]) - 1))
                factors.append(plgpu.load(scale_ref.at[entry, column], mask=exists, other=0)[None, :])
                product = product * factors[index]
            scores = scores + product
        scores = scores * scale
        visible = (q_position[:, None] >= position[None, :]) & exists[None, :]
        if filled_ref is not None:
            is_filled = plgpu.load(filled_ref.at[slot], mask=exists, other=0) != 0
            visible = visible & (is_filled[None, :] | (q_position[:, None] == position[None, :]))
        scores = jnp.where(visible, scores, NOTHING)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp2(scores - new_peak[:, None]), 0.0)
        shrink = jnp.exp2(peak - new_peak)
        new_sums = []
        for index, value in enumerate(latent):
            scaled_weights = weights * factors[index] if is_fp8 else weights
            product = plgpu.dot(scaled_weights.astype(dtype), value, precision=precision)
            new_sums.append(sums[index] * shrink[:, None] + product)
        return new_peak, total * shrink + jnp.sum(weights, axis=1), tuple(new_sums), next_page

    peak = jnp.full((rows,), NOTHING, jnp.float32)
    total = jnp.zeros((rows,), jnp.float32)
    sums = tuple(jnp.zeros((rows, chunk), jnp.float32) for _ in chunks)
    first = split * blocks_per_split
    initial = (peak, total, sums, pages_of(first))
    peak, total, sums, _ = lax.fori_loop(first, jnp.minimum(first + blocks_per_split, blocks), step, initial)
    sees_any = total > 0
    for columns, chunk_sums in zip(chunks, sums, strict=True):
        result = chunk_sums / jnp.where(sees_any, total, 1.0)[:, None]
        out_ref[:, columns.start : columns.stop] = result.astype(out_ref.dtype)
    peak_ref[...] = jnp.where(sees_any, peak + jnp.log2(jnp.where(sees_any, total, 1.0)), NOTHING)


def default_tiles(pairs: int) -> AttentionTiles:
    """Return tiles for rows of so many (token, head) pairs, no larger than a row needs."""
    return AttentionTiles(rows=min(64, power(pairs)), warps=8 if pairs > 32 else 4)


def smaller_tiles(pairs: int) -> Iterator[AttentionTiles]:
    """Yield the default tiles and smaller ones: first half the positions, then half the rows, which reads the context again."""
    largest = default_tiles(pairs)
    rows = largest.rows
    while rows >= 16:
        tiles = replace(largest, rows=rows, warps=largest.warps if rows > 32 else 4)
        yield from (replace(tiles, positions=positions) for positions in (64, 32))
        rows //= 2
    yield replace(tiles, positions=16)


def split_context(programs: int, blocks: int, cores: int) -> int:
    """Return into how many parts to split each row's context of so many blocks, so that every core has a program."""
    return max(1, min(cores // programs, blocks // MIN_BLOCKS))


def attention_cost(
    R: int, C: int, H: int, M: int, O: int, context: int, dtype, stored_bytes: int, tiles: AttentionTiles, splits: int
) -> KernelCost:
    """Return the cost of rows whose last token is the last of ``context`` positions. Each tile reads blocks up to its own last token."""
    programs = -(-C * H // tiles.rows)
    last = np.minimum((np.arange(1, programs + 1) * tiles.rows - 1) // H, C - 1)
    positions = -(-(context - C + last + 1) // tiles.positions) * tiles.positions
    flops = 2.0 * R * tiles.rows * int(positions.sum()) * (2 * power(M) + power(O))
    value_bytes = R * C * H * np.dtype(dtype).itemsize  # of one value per (token, head) pair
    entry_bytes = fp8.row_bytes(M) + 2 * O if stored_bytes == 1 else (M + O) * stored_bytes
    moved = R * context * entry_bytes + value_bytes * (M + O)
    moved += value_bytes * M if splits == 1 else splits * R * C * H * (M + 1) * 4
    return KernelCost(flops, moved, hlo_dtype(dtype), assumed=True)

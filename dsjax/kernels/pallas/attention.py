"""Absorbed MLA over the paged latent cache, for decodes, draft verification and prompt chunks (Pallas on Triton).

A program takes a tile of up to 64 (token, head) pairs of one row, which all read the same latents. It reads its part of
the row's context once, a block of positions at a time, directly from the pages. V3's 512 latent values and 64 rotary values
are two loads, because Triton takes only powers of two. With few rows, their context is split over several programs, whose
partial results are merged (flash decoding).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import addressable_layer
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import MESH, ROWS, KernelOrder
from dsjax.kernels.pallas.shared_memory import AttentionBytes, Cores, first_that_fits
from dsjax.kernels.pallas.tile_table import ATTENTION, Product, TileTable
from sharding import fp8

NOTHING = -1e30
"""Score of an invisible position; finite, so that the difference of two such scores is not NaN."""
LEAST_BLOCKS = 4
"""Least blocks of positions in a split of the context: merging shorter splits moves more bytes than they read."""


@dataclass(frozen=True)
class AttentionTiles:
    """Sizes that shape the kernel, not its results beyond rounding.

    rows: (token, head) pairs per program, a power of two of at least 16. positions: context positions read at once, likewise.
    warps: per program. stages: blocks in flight from memory.
    """

    rows: int = 64
    positions: int = 64
    warps: int = 8
    stages: int = 2

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
    taken = AttentionBytes(power(M), power(O), q_latent.dtype, cache_dtype)
    if not isinstance(tiles, AttentionTiles):
        default = default_tiles(C * H)
        tiles = default.tuned(tiles, attention_product(R, C * H, M + O, cache_dtype))
        tiles = first_that_fits(smaller_tiles(C * H), taken, cores) if tiles == default else tiles
    pairs = -(-C * H // tiles.rows) * tiles.rows
    wide, narrow = power(M), power(O)
    cache, layer = addressable_layer(cache, layer)
    stored = cache["latent"], cache["rope"]
    L, P, G = stored[0].shape[:3]
    pages = tables.shape[1]
    blocks = -(-pages * G // tiles.positions)
    splits = split_context(R * (pairs // tiles.rows), blocks, cores.count)

    def by_pair(q, width):
        q = q.reshape(R, C * H, q.shape[-1])
        return jnp.pad(q, ((0, 0), (0, pairs - C * H), (0, width - q.shape[-1])))

    scales = [cache["scale"]] if "scale" in cache else []
    flat = [array.reshape(L * P * G, array.shape[-1]) for array in (*stored, *scales)]
    holes = [] if filled is None else [filled.reshape(-1).astype(jnp.int8)]
    kernel = partial(
        _kernel,
        heads=H,
        widths=(M, O),
        page_slots=G,
        pages_of_layer=P,
        pages=pages,
        dtypes=(cache_dtype, jnp.bfloat16 if scales else cache_dtype),
        scale=scale * math.log2(math.e),
        positions=tiles.positions,
        splits=splits,
    )
    tile = lambda width: pl.BlockSpec((None, tiles.rows, width), lambda t, s, r: (r, t, 0))  # noqa: E731
    whole = lambda array: pl.BlockSpec(array.shape, lambda t, s, r: (0,) * array.ndim)  # noqa: E731
    scalars = [jnp.reshape(layer, 1), start, length, tables]
    scalars = [array.astype(jnp.int32) for array in scalars]
    part = lambda *width: pl.BlockSpec((None, None, tiles.rows, *width), lambda t, s, r: (s, r, t) + (0,) * len(width))  # noqa: E731
    out_dtype = q_latent.dtype if splits == 1 else jnp.float32
    cost = attention_cost(R, C, H, M, O, pages * G, q_latent.dtype, stored[0].dtype.itemsize, tiles, splits)
    sizes = {"positions": tiles.positions, "splits": splits, "rows": tiles.rows}
    order = KernelOrder(sizes, (ROWS, MESH))
    out, peak = pl.pallas_call(
        kernel,
        grid=(pairs // tiles.rows, splits, R),
        in_specs=[*map(whole, scalars), tile(wide), tile(narrow), *map(whole, [*flat, *holes])],
        out_specs=[part(wide), part()],
        out_shape=[
            jax.ShapeDtypeStruct((splits, R, pairs, wide), out_dtype),
            jax.ShapeDtypeStruct((splits, R, pairs), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name="latent_attention",
    )(*scalars, by_pair(q_latent, wide), by_pair(q_rope, narrow), *flat, *holes)
    return merge_splits(out, peak, q_latent.dtype)[:, : C * H, :M].reshape(R, C, H, M)


def merge_splits(out: Float[Array, "splits R P M"], peak: Float[Array, "splits R P"], dtype) -> Float[Array, "R P M"]:
    """Merge attention over parts of the context. peak: base-2 logarithm of each part's sum of weights."""
    if len(out) == 1:
        return out[0]
    with jax.named_scope("context_splits"):
        weights = jnp.exp2(peak - jnp.max(peak, axis=0))
        total = jnp.sum(weights, axis=0)
        return jnp.einsum("srpm,srp->rpm", out, weights / total).astype(dtype)


def _kernel(
    layer_ref, start_ref, length_ref, tables_ref, q_latent_ref, q_rope_ref, *refs,
    heads, widths, page_slots, pages_of_layer, pages, dtypes, scale, positions, splits,
):  # fmt: skip
    cached, refs = refs[:2], refs[2:]
    scaled, (*holes, out_ref, peak_ref) = (refs[0], refs[1:]) if dtypes[0] == fp8.E4M3 else (None, refs)
    tile, split, row = (pl.program_id(axis) for axis in range(3))
    (rows, wide), narrow = q_latent_ref.shape, q_rope_ref.shape[1]
    # FP8 latents are multiplied unscaled, one block of a scale at a time, and the products are scaled.
    part = wide if scaled is None else min(wide, fp8.BLOCK)
    parts = range(0, wide, part)
    q_latent, q_rope = [q_latent_ref[:, at : at + part] for at in parts], q_rope_ref[...]
    dtype = q_rope.dtype
    start, length, first_page = start_ref[row], length_ref[row], layer_ref[0] * pages_of_layer
    token = (tile * rows + jnp.arange(rows)) // heads
    position = jnp.where(token < length, start + token, -1)  # -1 sees nothing
    last = jnp.minimum((tile * rows + rows - 1) // heads, length - 1)
    seen = jnp.where(tile * rows // heads < length, start + last + 1, 0)  # positions that the tile's last token sees
    blocks = (jnp.minimum(seen, pages * page_slots) + positions - 1) // positions
    share = (blocks + splits - 1) // splits
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def entries(ref, index, mask, columns, width, stored):
        """Return ``columns`` of the entries at ``index``; zero where masked and beyond the ``width`` columns that exist."""
        at = columns.start + jnp.arange(len(columns))
        mask = jnp.broadcast_to(mask[:, None], (positions, len(columns)))
        if columns.stop > width:
            mask, at = mask & (at < width), jnp.minimum(at, width - 1)
        if stored != fp8.E4M3:
            values = plgpu.load(ref.at[index[:, None], at[None, :]], mask=mask, other=0)
            return (values if values.dtype == stored else lax.bitcast_convert_type(values, stored)).astype(dtype)
        values = plgpu.load(ref.at[index[:, None], at[None, :]], mask=mask)  # Triton has no FP8 zero for `other`
        values = values if values.dtype == stored else lax.bitcast_convert_type(values, stored)
        return jnp.where(mask, values.astype(dtype), 0)

    def pages_of(block):
        column = lax.div(block * positions + jnp.arange(positions), page_slots)
        return plgpu.load(tables_ref.at[row, jnp.minimum(column, pages - 1)])

    def step(block, carry):
        peak, total, sums, page = carry
        next_page = pages_of(block + 1)  # a block ahead, so that no entry waits for its page's number
        at = block * positions + jnp.arange(positions)
        inside = at < jnp.minimum(seen, pages * page_slots)
        index = page * page_slots + lax.rem(at, page_slots)
        where = first_page * page_slots + index
        latent = [entries(cached[0], where, inside, range(p, p + part), widths[0], dtypes[0]) for p in parts]
        rope = entries(cached[1], where, inside, range(narrow), widths[1], dtypes[1])
        scores, factors = plgpu.dot(q_rope, rope, trans_b=True, precision=precision), [None] * len(parts)
        for i, (q, context) in enumerate(zip(q_latent, latent, strict=True)):
            product = plgpu.dot(q, context, trans_b=True, precision=precision)
            if scaled is not None:
                number = jnp.full((positions,), min(i, fp8.num_scales(widths[0]) - 1))
                factors[i] = plgpu.load(scaled.at[where, number], mask=inside, other=0)[None, :]
                product = product * factors[i]
            scores = scores + product
        scores = scores * scale
        visible = (position[:, None] >= at[None, :]) & inside[None, :]
        if holes:
            held = plgpu.load(holes[0].at[index], mask=inside, other=0) != 0
            visible = visible & (held[None, :] | (position[:, None] == at[None, :]))
        scores = jnp.where(visible, scores, NOTHING)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.where(visible, jnp.exp2(scores - higher[:, None]), 0.0)
        shrink = jnp.exp2(peak - higher)
        for i, context in enumerate(latent):
            scaled_weights = weights if factors[i] is None else weights * factors[i]
            product = plgpu.dot(scaled_weights.astype(dtype), context, precision=precision)
            sums = (*sums[:i], sums[i] * shrink[:, None] + product, *sums[i + 1 :])
        return higher, total * shrink + jnp.sum(weights, axis=1), sums, next_page

    nothing = (
        jnp.full((rows,), NOTHING, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        tuple(jnp.zeros((rows, part), jnp.float32) for _ in parts),
    )
    first = split * share
    start_of = (*nothing, pages_of(first))
    peak, total, sums, _ = lax.fori_loop(first, jnp.minimum(first + share, blocks), step, start_of)
    held = total > 0
    for at, own_sums in zip(parts, sums, strict=True):
        out_ref[:, at : at + part] = (own_sums / jnp.where(held, total, 1.0)[:, None]).astype(out_ref.dtype)
    peak_ref[...] = jnp.where(held, peak + jnp.log2(jnp.where(held, total, 1.0)), NOTHING)


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
    return max(1, min(cores // programs, blocks // LEAST_BLOCKS))


def attention_cost(
    R: int, C: int, H: int, M: int, O: int, context: int, dtype, stored_bytes: int, tiles: AttentionTiles, splits: int
) -> KernelCost:
    """Return the cost of rows whose last token is the last of ``context`` positions. Each tile reads blocks up to its own last token."""
    programs = -(-C * H // tiles.rows)
    last = np.minimum((np.arange(1, programs + 1) * tiles.rows - 1) // H, C - 1)
    seen = -(-(context - C + last + 1) // tiles.positions) * tiles.positions
    flops = 2.0 * R * tiles.rows * int(seen.sum()) * (2 * power(M) + power(O))
    queries = R * C * H * np.dtype(dtype).itemsize
    entry = fp8.row_bytes(M) + 2 * O if stored_bytes == 1 else (M + O) * stored_bytes
    moved = R * context * entry + queries * (M + O)
    moved += queries * M if splits == 1 else splits * R * C * H * (M + 1) * 4
    return KernelCost(flops, moved, hlo_dtype(dtype), assumed=True)

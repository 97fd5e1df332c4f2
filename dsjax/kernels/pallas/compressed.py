"""DeepSeek-V4's attention over a paged cache: to a sink, a window of tokens, and compressed entries (Pallas on Triton).

A vector of the cache is key and value of all heads, so it is loaded once and multiplied twice. A program takes one query with up to 64
heads. It reads a block of the query's window or entries at a time, directly from the pages. With few queries, their entries are split over
several programs, whose partial results are merged (flash decoding).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import addressable_layer, load_entries, whole_spec
from dsjax.kernels.pallas.attention import NOTHING, AttentionTiles, attend_in_splits, smaller_tiles, split_context
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.shared_memory import AttentionBytes, Cores, first_that_fits


def compressed_attention(
    query: Float[Array, "R C H M"],
    sink: Float[Array, "H"],
    window: Array,
    entries: Array | None,
    layers: tuple[Int[Array, ""], Int[Array, ""]],
    positions: Int[Array, "R C"],
    ring: Int[Array, "R Pw"],
    tables: Int[Array, "R Pr"],
    filled: Bool[Array, "W G"] | None,
    chosen: Int[Array, "R C k"] | None,
    count: Int[Array, "R C"],
    *,
    span: int,
    scale: float,
    stored: np.dtype,
    interpret: bool = False,
    tiles: AttentionTiles | None = None,
    cores: Cores = Cores(),
) -> Float[Array, "R C H M"]:
    """Return each query's attention, in its dtype. Arguments as in ``NativeKernels.compressed_attention``.

    window, entries: ``[L, W, G, M]`` and ``[L, P, E, M]``, as bits of ``stored``, which is not FP8. sink: float32, a score without a value.
    tiles: sizes; None: those that fit ``cores``. Scores, weights and sums are float32; weights are rounded to the queries' dtype before
        they multiply the context, as in the plain form.
    """
    R, C, H, M = query.shape
    wide = power(M)
    if tiles is None:
        tiles = first_that_fits(smaller_tiles(H), AttentionBytes(wide, 0, query.dtype, stored), cores)
    heads = -(-H // tiles.rows) * tiles.rows
    cached, most = [_flat(window, layers[0])], 0
    if entries is not None:
        cached.append(_flat(entries, layers[1]))
        most = tables.shape[1] * entries.shape[2] if chosen is None else chosen.shape[2]
    vectors, first_rows, page_slots = zip(*cached, strict=True)
    blocks = -(-span // tiles.positions) + -(-most // tiles.positions)
    splits = split_context(R * C * (heads // tiles.rows), blocks, cores.count) if most else 1
    by_head = ((0, 0), (0, heads - H))
    queries = jnp.pad(query.reshape(R * C, H, M), (*by_head, (0, wide - M)))
    scalars = [jnp.stack(first_rows), positions.reshape(-1), count.reshape(-1), ring, tables]
    scalars += [] if chosen is None else [chosen.reshape(R * C, -1)]
    scalars = [array.astype(jnp.int32) for array in scalars]
    holes = [] if filled is None else [filled.reshape(-1).astype(jnp.int8)]
    kernel = partial(
        _kernel, page_slots=page_slots, is_chosen=chosen is not None, has_holes=filled is not None, chunk=C,
        width=M, span=span, scale=scale * math.log2(math.e), stored=np.dtype(stored), positions=tiles.positions, splits=splits,
    )  # fmt: skip
    arrays = [*holes, *vectors]
    cost = compressed_cost(
        R, C, H, M, span, most, chosen is not None, query.dtype, window.dtype.itemsize, tiles, splits
    )
    specs = [
        *map(whole_spec, scalars),
        pl.BlockSpec((None, tiles.rows, wide), lambda tile, split, item: (item, tile, 0)),
        pl.BlockSpec((tiles.rows,), lambda tile, split, item: (tile,)),
        *map(whole_spec, arrays),
    ]
    result = jax.ShapeDtypeStruct((R * C, heads, wide), query.dtype)
    attend = attend_in_splits("compressed_attention", kernel, specs, result, tiles, splits, cost, interpret)
    out = attend(*scalars, queries, jnp.pad(sink.astype(jnp.float32), by_head[1]), *arrays)
    return out[:, :H, :M].reshape(R, C, H, M)


def _flat(stack: Array, layer: Int[Array, ""]) -> tuple[Array, Int[Array, ""], int]:
    """Return the vectors of a stack ``[L, P, G, M]`` as rows of a matrix, the first row of a layer, and the rows of a page."""
    arrays, layer = addressable_layer({"stack": stack}, layer)
    _, P, G, M = arrays["stack"].shape
    return arrays["stack"].reshape(-1, M), layer * P * G, G


def _kernel(
    first_ref, positions_ref, count_ref, ring_ref, tables_ref, *refs,
    page_slots, is_chosen, has_holes, chunk, width, span, scale, stored, positions, splits,
):  # fmt: skip
    chosen_ref, (query_ref, sink_ref, *refs) = (refs[0], refs[1:]) if is_chosen else (None, refs)
    holes_ref, (window_ref, *refs) = (refs[0], refs[1:]) if has_holes else (None, refs)
    *entries_ref, out_ref, peak_ref = refs
    split, item = pl.program_id(1), pl.program_id(2)
    row, position, count = lax.div(item, chunk), positions_ref[item], count_ref[item]
    query, (rows, wide) = query_ref[...], query_ref.shape
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = jnp.arange(positions)

    def over(source, number, places, first, end, state, listed=None, holes=None):
        """Return the running maximum, sum and values after blocks of one source (arXiv 1805.02867).

        source: its vectors and its pages. number: of the source in ``first_ref``. places: a block's positions in the table of pages, or in
        ``listed``, which has such positions; and which of them the query sees.
        """
        (ref, table_ref), slots = source, page_slots[number]

        def pages_of(block):
            at, seen = places(block)
            if listed is not None:
                at = plgpu.load(listed.at[item, at], mask=seen, other=0)
            column = lax.rem(lax.div(at, slots), table_ref.shape[1])
            page = plgpu.load(table_ref.at[row, column], mask=seen, other=0)
            return (page,) if listed is None else (page, at)

        def step(block, carry):
            peak, total, sums, (page, *chosen) = carry
            following = pages_of(block + 1)  # a block ahead, so that no vector waits for its page's number
            at, seen = places(block)
            slot = page * slots + lax.rem(chosen[0] if chosen else at, slots)
            entry = first_ref[number] + slot
            context = load_entries(ref, entry, seen, range(wide), width, stored, query.dtype)
            scores = plgpu.dot(query, context, trans_b=True, precision=precision) * scale
            if holes is not None:
                held = plgpu.load(holes.at[slot], mask=seen, other=0) != 0
                seen = seen & (held | (at == position))
            scores = jnp.where(seen[None, :], scores, NOTHING)
            higher = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights, shrink = jnp.where(seen[None, :], jnp.exp2(scores - higher[:, None]), 0.0), jnp.exp2(peak - higher)
            product = plgpu.dot(weights.astype(query.dtype), context, precision=precision)
            sums = sums * shrink[:, None] + product
            return higher, total * shrink + jnp.sum(weights, axis=1), sums, following

        return lax.fori_loop(first, end, step, (*state, pages_of(first)))[:3]

    oldest = jnp.maximum(position - span + 1, 0)

    def tokens_of(block):
        at = oldest + block * positions + numbers
        return at, at <= position

    def entries_of(block):
        at = block * positions + numbers
        return at, at < count

    is_first = split == 0  # has the sink and the window
    peak = jnp.where(is_first, sink_ref[...] * math.log2(math.e), NOTHING)
    state = peak, jnp.where(is_first, jnp.ones_like(peak), 0.0), jnp.zeros((rows, wide), jnp.float32)
    tokens = jnp.where(is_first & (position >= 0), position - oldest + 1, 0)
    blocks = lax.div(tokens + positions - 1, positions)
    state = over((window_ref, ring_ref), 0, tokens_of, 0, blocks, state, holes=holes_ref)
    if entries_ref:
        blocks = lax.div(count + positions - 1, positions)
        share = lax.div(blocks + splits - 1, splits)
        first, end = split * share, jnp.minimum((split + 1) * share, blocks)
        state = over((entries_ref[0], tables_ref), 1, entries_of, first, end, state, listed=chosen_ref)
    peak, total, sums = state
    held = total > 0
    total = jnp.where(held, total, 1.0)
    out_ref[...] = (sums / total[:, None]).astype(out_ref.dtype)
    peak_ref[...] = jnp.where(held, peak + jnp.log2(total), NOTHING)


def compressed_cost(
    R: int, C: int, H: int, M: int, span: int, entries: int, chosen: bool, dtype, stored_bytes: int, tiles: AttentionTiles, splits: int
) -> KernelCost:  # fmt: skip
    """Return the cost if each query sees ``span`` tokens and ``entries`` entries. A row's queries read its window, and entries that are not
    chosen by each query, from memory once."""
    seen = sum(-(-count // tiles.positions) * tiles.positions for count in (span, entries))
    heads, queries = -(-H // tiles.rows) * tiles.rows, R * C * H * M * np.dtype(dtype).itemsize
    read = R * (span + C - 1 + entries * (C if chosen else 1)) * M * stored_bytes
    written = queries if splits == 1 else splits * R * C * H * (M + 1) * 4
    return KernelCost(
        2.0 * R * C * heads * seen * 2 * power(M), read + queries + written, hlo_dtype(dtype), assumed=True
    )

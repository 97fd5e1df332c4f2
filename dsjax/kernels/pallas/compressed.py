"""DeepSeek-V4's attention over a paged cache: to a sink, a window of tokens, and compressed entries (Pallas on Triton).

A vector of the cache is key and value of all heads, so it is loaded once and multiplied twice. A program takes one query with up to 64
heads. It reads a block of the query's window or entries at a time, directly from the pages. With few queries, their entries are split over
several programs, whose partial results are merged (flash decoding).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import addressable_layer
from dsjax.kernels.pallas.attention import NOTHING, AttentionTiles, merge_splits, smaller_tiles, split_context
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import MESH, ROWS, KernelOrder
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
    cached, most = [_Pages.of(window, layers[0])], 0
    if entries is not None:
        cached.append(_Pages.of(entries, layers[1]))
        most = tables.shape[1] * entries.shape[2] if chosen is None else chosen.shape[2]
    blocks = -(-span // tiles.positions) + -(-most // tiles.positions)
    splits = split_context(R * C * (heads // tiles.rows), blocks, cores.count) if most else 1
    by_head = ((0, 0), (0, heads - H))
    queries = jnp.pad(query.reshape(R * C, H, M), (*by_head, (0, wide - M)))
    scalars = [jnp.stack([pages.first for pages in cached]), positions.reshape(-1), count.reshape(-1), ring, tables]
    scalars += [] if chosen is None else [chosen.reshape(R * C, -1)]
    scalars = [array.astype(jnp.int32) for array in scalars]
    holes = [] if filled is None else [filled.reshape(-1).astype(jnp.int8)]
    kernel = partial(
        _kernel,
        page_slots=tuple(pages.slots for pages in cached),
        is_chosen=chosen is not None,
        has_holes=filled is not None,
        chunk=C,
        width=M,
        span=span,
        scale=scale * math.log2(math.e),
        stored=np.dtype(stored),
        positions=tiles.positions,
        splits=splits,
    )
    whole = lambda array: pl.BlockSpec(array.shape, lambda t, s, q: (0,) * array.ndim)  # noqa: E731
    part = lambda *width: pl.BlockSpec((None, None, tiles.rows, *width), lambda t, s, q: (s, q, t) + (0,) * len(width))  # noqa: E731
    arrays = [*holes, *(pages.flat for pages in cached)]
    cost = compressed_cost(
        R, C, H, M, span, most, chosen is not None, query.dtype, window.dtype.itemsize, tiles, splits
    )
    order = KernelOrder({"positions": tiles.positions, "splits": splits, "rows": tiles.rows}, (ROWS, MESH))
    out, peak = pl.pallas_call(
        kernel,
        grid=(heads // tiles.rows, splits, R * C),
        in_specs=[
            *map(whole, scalars),
            pl.BlockSpec((None, tiles.rows, wide), lambda t, s, q: (q, t, 0)),
            pl.BlockSpec((tiles.rows,), lambda t, s, q: (t,)),
            *map(whole, arrays),
        ],
        out_specs=[part(wide), part()],
        out_shape=[
            jax.ShapeDtypeStruct((splits, R * C, heads, wide), query.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, R * C, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name="compressed_attention",
    )(*scalars, queries, jnp.pad(sink.astype(jnp.float32), by_head[1]), *arrays)
    return merge_splits(out, peak, query.dtype)[:, :H, :M].reshape(R, C, H, M)


class _Pages(NamedTuple):
    """Vectors of all layers as rows of a matrix. first: the first row of the layer that is read. slots: rows of a page."""

    flat: Array
    first: Int[Array, ""]
    slots: int

    @classmethod
    def of(cls, stack: Array, layer: Int[Array, ""]) -> _Pages:
        """Return layer ``layer`` of a stack ``[L, P, G, M]``."""
        arrays, layer = addressable_layer({"stack": stack}, layer)
        _, P, G, M = arrays["stack"].shape
        return cls(arrays["stack"].reshape(-1, M), layer * P * G, G)


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
    numbers, columns = jnp.arange(positions), jnp.arange(wide)

    def page_of(ref, column, pages, seen):
        return plgpu.load(ref.at[row, jnp.minimum(column, pages - 1)], mask=seen, other=0)

    oldest = jnp.maximum(position - span + 1, 0)

    def window_block(block):
        """Return the rows of a block of the window; −1 where the query sees nothing."""
        at, slots, pages = oldest + block * positions + numbers, page_slots[0], ring_ref.shape[1]
        seen = at <= position
        slot = page_of(ring_ref, lax.rem(lax.div(at, slots), pages), pages, seen) * slots + lax.rem(at, slots)
        if has_holes:
            held = plgpu.load(holes_ref.at[slot], mask=seen, other=0) != 0
            seen = seen & (held | (at == position))
        return jnp.where(seen, first_ref[0] + slot, -1)

    def entries_block(block):
        """Return the rows of a block of entries; −1 from ``count`` on."""
        at, slots = block * positions + numbers, page_slots[1]
        seen = at < count
        if is_chosen:
            at = plgpu.load(chosen_ref.at[item, jnp.minimum(at, chosen_ref.shape[1] - 1)], mask=seen, other=0)
        page = page_of(tables_ref, lax.div(at, slots), tables_ref.shape[1], seen)
        return jnp.where(seen, first_ref[1] + page * slots + lax.rem(at, slots), -1)

    def over(ref, block_of, first, end, state):
        """Return the running maximum, sum and values after these blocks (arXiv 1805.02867)."""

        def step(block, carry):
            peak, total, sums, at = carry
            following = block_of(block + 1)  # a block ahead, so that no vector waits for its page's number
            seen = at >= 0
            mask, across = jnp.broadcast_to(seen[:, None], (positions, wide)), columns
            if wide > width:
                mask, across = mask & (columns < width), jnp.minimum(columns, width - 1)
            context = plgpu.load(ref.at[jnp.maximum(at, 0)[:, None], across[None, :]], mask=mask, other=0)
            context = context if context.dtype == stored else lax.bitcast_convert_type(context, stored)
            context = context.astype(query.dtype)
            scores = plgpu.dot(query, context, trans_b=True, precision=precision) * scale
            scores = jnp.where(seen[None, :], scores, NOTHING)
            higher = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights, shrink = jnp.where(seen[None, :], jnp.exp2(scores - higher[:, None]), 0.0), jnp.exp2(peak - higher)
            product = plgpu.dot(weights.astype(query.dtype), context, precision=precision)
            return higher, total * shrink + jnp.sum(weights, axis=1), sums * shrink[:, None] + product, following

        return lax.fori_loop(first, end, step, (*state, block_of(first)))[:3]

    is_first = split == 0  # has the sink and the window
    peak = jnp.where(is_first, sink_ref[...] * math.log2(math.e), NOTHING)
    state = peak, jnp.where(is_first, jnp.ones_like(peak), 0.0), jnp.zeros((rows, wide), jnp.float32)
    tokens = jnp.where(is_first & (position >= 0), position - oldest + 1, 0)
    state = over(window_ref, window_block, 0, lax.div(tokens + positions - 1, positions), state)
    if entries_ref:
        blocks = lax.div(count + positions - 1, positions)
        share = lax.div(blocks + splits - 1, splits)
        first = split * share
        state = over(entries_ref[0], entries_block, first, jnp.minimum(first + share, blocks), state)
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

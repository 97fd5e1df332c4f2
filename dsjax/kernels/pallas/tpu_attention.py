"""Absorbed MLA over the paged latent cache on TPUs, for decodes, draft verification and prompt chunks (Pallas on Mosaic).

A program takes a tile of (token, head) pairs of one row, which all read the same latents. The cache stays in main memory: the pages of a
block of positions, looked up in the row's table, are copied into VMEM while the previous block is multiplied; the first block of the
next program is copied during the last block of this one. ``cache_groups(lanes=128)`` rounds the widths of entries up to
whole registers of 128 values, so neither XLA nor a copy rearranges them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.pallas import pl, pltpu
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import MESH, ROWS, KernelOrder

NOTHING = -1e30
"""Score of an invisible position; finite, so that the difference of two such scores is not NaN."""
LANES = 128
"""Lanes of a vector register; the widths of cache entries are multiples of it."""
MOST_TABLE_ENTRIES = 2**17
"""Most page numbers of one call: they take half of the core's 1 MiB of scalar memory. More rows are split into several calls."""


@dataclass(frozen=True)
class TpuAttentionTiles:
    """Sizes that shape the kernel, not its results beyond rounding: (token, head) pairs per program, a power of two of at least 16, and
    context positions read at once."""

    rows: int = 512
    positions: int = 512

    @classmethod
    def of(cls, pairs: int) -> TpuAttentionTiles:
        """Return tiles for rows of so many pairs, no larger than a row needs."""
        return cls(rows=min(512, power(pairs)))


def refuses(page_size: int, cache_dtype: np.dtype) -> str:
    """Return why the kernel cannot read a cache of such pages, or ""."""
    if np.dtype(cache_dtype).itemsize == 1:
        return "attention's kernel for TPUs reads no FP8 cache: the plain form does"
    sublanes = 32 // np.dtype(cache_dtype).itemsize  # rows of a VMEM tile, which copies cannot split
    if page_size % sublanes:
        return f"attention's kernel for TPUs wants a --page-size that {sublanes} divides, and it is {page_size}: attention is plain"
    return ""


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
    tiles: TpuAttentionTiles | None = None,
) -> Float[Array, "R C H M"]:
    """Return causal attention, in latent space, of each row's queries from ``start`` on over the cache; zero for tokens from ``length`` on.

    cache: ``latent [L, P, G, ≥ M]`` and ``rope [L, P, G, ≥ O]``, as bits of ``cache_dtype``; the padding after an entry's own values
        is 0. filled: which slots of the cache hold an entry; a token sees these and its own. None: all slots.
    scale: of the scores. Scores, weights and sums are float32; weights are rounded to the queries' dtype before they multiply the
        latents, as in the plain form.
    """
    R, C, H, M = q_latent.shape
    if R * tables.shape[1] > MOST_TABLE_ENTRIES and R > 1:
        options = {"scale": scale, "interpret": interpret, "tiles": tiles}
        half = lambda at: latent_attention(  # noqa: E731
            q_latent[at], q_rope[at], cache, cache_dtype, layer, start[at], length[at], tables[at], filled, **options
        )
        return jnp.concatenate([half(slice(R // 2)), half(slice(R // 2, R))])
    tiles = tiles or TpuAttentionTiles.of(C * H)
    pairs = -(-C * H // tiles.rows) * tiles.rows
    stored, queries = [cache["latent"], cache["rope"]], [q_latent, q_rope]
    widths = [array.shape[-1] for array in stored]
    G, pages = stored[0].shape[2], tables.shape[1]
    # As many whole pages as fit in a block, but no more than a row has.
    block_pages = max(1, min(tiles.positions // G, pages))
    positions = block_pages * G

    def by_pair(q, width):
        q = q.reshape(R, C * H, q.shape[-1])
        return jnp.pad(q, ((0, 0), (0, pairs - C * H), (0, width - q.shape[-1])))

    holes = []
    if filled is not None:
        blocks = -(-pages // block_pages)
        held = filled.at[jnp.pad(tables, ((0, 0), (0, blocks * block_pages - pages)))].get(mode="promise_in_bounds")
        holes = [held.reshape(R, blocks, 1, positions).astype(jnp.int32)]
    kernel = partial(
        _kernel, heads=H, pages=pages, block_pages=block_pages, page_slots=G, programs=(R, pairs // tiles.rows),
        cache_dtype=np.dtype(cache_dtype), scale=scale * math.log2(math.e), parts=len(stored), holes=bool(holes),
    )  # fmt: skip
    scalars = [array.astype(jnp.int32) for array in (jnp.reshape(layer, 1), start, length, tables)]
    tile = lambda width: pl.BlockSpec((None, tiles.rows, width), lambda r, t, *_: (r, t, 0))  # noqa: E731
    whole_row = [pl.BlockSpec((None, *array.shape[1:]), lambda r, t, *_: (r, 0, 0, 0)) for array in holes]
    cost = attention_cost(
        R, C, H, widths, pages * G, q_latent.dtype, stored[0].dtype.itemsize, TpuAttentionTiles(tiles.rows, positions)
    )
    order = KernelOrder({"positions": positions, "rows": tiles.rows}, (ROWS, MESH))
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(R, pairs // tiles.rows),
            in_specs=[*map(tile, widths), *whole_row, *[pl.BlockSpec(memory_space=pl.ANY) for _ in stored]],
            out_specs=tile(widths[0]),
            scratch_shapes=[
                *(pltpu.VMEM((2, positions, width), array.dtype) for width, array in zip(widths, stored, strict=True)),
                pltpu.VMEM((tiles.rows, widths[0]), jnp.float32),
                pltpu.VMEM((tiles.rows, LANES), jnp.float32),
                pltpu.VMEM((tiles.rows, LANES), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, len(stored))),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((R, pairs, widths[0]), q_latent.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=pltpu.InterpretParams() if interpret else False,
        name="latent_attention",
    )(*scalars, *map(by_pair, queries, widths), *holes, *stored)
    return out[:, : C * H, :M].reshape(R, C, H, M)


def _kernel(
    layer_ref, start_ref, length_ref, tables_ref, *refs,
    heads, pages, block_pages, page_slots, programs, cache_dtype, scale, parts, holes,
):  # fmt: skip
    queries, refs = refs[:parts], refs[parts:]
    held_ref, refs = (refs[0], refs[1:]) if holes else (None, refs)
    stored, out_ref, buffers, refs = refs[:parts], refs[parts], refs[parts + 1 : 2 * parts + 1], refs[2 * parts + 1 :]
    sums_ref, peak_ref, total_ref, state_ref, arrived = refs
    row, tile = pl.program_id(0), pl.program_id(1)
    rows, positions, dtype = queries[0].shape[0], block_pages * page_slots, queries[0].dtype

    def seen_by(row, tile):
        """Return how many positions the last token of a tile sees; 0 if all its tokens are padding."""
        length = length_ref[row]
        last = jnp.minimum(lax.div(tile * rows + (rows - 1), heads), length - 1)
        seen = jnp.minimum(start_ref[row] + last + 1, pages * page_slots)
        return jnp.where(lax.div(tile * rows, heads) < length, seen, 0)

    def each_copy(row, seen, block, place, act):
        """Apply ``act`` to the copy of each visible page of a block, for each array."""
        used = jnp.minimum(block_pages, pl.cdiv(seen, page_slots) - block * block_pages)

        @pl.loop(0, used)
        def _(i):
            page = tables_ref[row, block * block_pages + i]
            to = pl.ds(pl.multiple_of(i * page_slots, page_slots), page_slots)
            for part, (array, buffer) in enumerate(zip(stored, buffers, strict=True)):
                act(pltpu.make_async_copy(array.at[layer_ref[0], page], buffer.at[place, to], arrived.at[place, part]))

    def fetch(row, seen, block, place):
        each_copy(row, seen, block, place, lambda copy: copy.start())

    # state_ref: the number of a program's first buffer, and whether the previous program has begun to fill it.
    @pl.when((row == 0) & (tile == 0))
    def _():
        state_ref[0], state_ref[1] = 0, 0
        for buffer in buffers:  # so that slots without a page are not NaN, and a weight of 0 removes them
            buffer[...] = jnp.zeros_like(buffer)

    turned = tile + 1 == programs[1]
    next_row, next_tile = row + turned.astype(jnp.int32), jnp.where(turned, 0, tile + 1)
    another = next_row < programs[0]
    next_row = jnp.minimum(next_row, programs[0] - 1)
    next_seen = jnp.where(another, seen_by(next_row, next_tile), 0)
    seen, first_place = seen_by(row, tile), state_ref[0]
    blocks = pl.cdiv(seen, positions)

    @pl.when((blocks > 0) & (state_ref[1] == 0))
    def _():
        fetch(row, seen, 0, first_place)

    sums_ref[...] = jnp.zeros_like(sums_ref)
    peak_ref[...] = jnp.full_like(peak_ref, NOTHING)
    total_ref[...] = jnp.zeros_like(total_ref)
    token = lax.div(tile * rows + lax.broadcasted_iota(jnp.int32, (rows, 1), 0), heads)
    position = jnp.where(token < length_ref[row], start_ref[row] + token, -1)  # -1 sees nothing

    @pl.loop(0, blocks)
    def _(block):
        place = lax.rem(first_place + block, 2)

        @pl.when(block + 1 < blocks)
        def _():
            fetch(row, seen, block + 1, 1 - place)

        @pl.when((block + 1 == blocks) & (next_seen > 0))
        def _():
            fetch(next_row, next_seen, 0, 1 - place)

        each_copy(row, seen, block, place, lambda copy: copy.wait())
        context = [widened(buffer[place], cache_dtype, dtype) for buffer in buffers]
        scores = sum(multiply(q[...], entries, transposed=True) for q, entries in zip(queries, context, strict=True))
        at = block * positions + lax.broadcasted_iota(jnp.int32, (1, positions), 1)
        visible = position >= at
        if held_ref is not None:
            visible = visible & ((held_ref[block] != 0) | (position == at))
        scores = jnp.where(visible, scores * scale, NOTHING)
        peak = peak_ref[:, :1]
        higher = jnp.maximum(peak, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(visible, jnp.exp2(scores - higher), 0.0)
        shrink = jnp.exp2(peak - higher)
        sums_ref[...] = sums_ref[...] * shrink + multiply(weights.astype(dtype), context[0])
        total = total_ref[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        peak_ref[...] = jnp.broadcast_to(higher, peak_ref.shape)

    total = total_ref[:, :1]
    out_ref[...] = (sums_ref[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
    state_ref[0] = lax.rem(first_place + blocks, 2)
    state_ref[1] = ((blocks > 0) & (next_seen > 0)).astype(jnp.int32)


def multiply(x: Array, y: Array, *, transposed: bool = False) -> Array:
    """Inside a kernel: return ``x · y``, or ``x · yᵀ``, in float32. Operands of float32 are not rounded."""
    across = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, across, precision=precision, preferred_element_type=jnp.float32)


def widened(values: Array, stored: np.dtype, dtype) -> Array:
    """Cast values to ``dtype``, reading their bits as ``stored``."""
    values = values if values.dtype == stored else lax.bitcast_convert_type(values, stored)
    return values.astype(dtype)


def attention_cost(
    R: int, C: int, H: int, widths: list[int], context: int, dtype, stored_bytes: int, tiles: TpuAttentionTiles
) -> KernelCost:
    """Return the cost of rows whose last token is the last of ``context`` positions. Each tile copies the pages of all blocks up to its own
    last token from main memory."""
    programs = -(-C * H // tiles.rows)
    last = np.minimum((np.arange(1, programs + 1) * tiles.rows - 1) // H, C - 1)
    seen = np.minimum(context - C + last + 1, context)
    blocks = -(-seen // tiles.positions) * tiles.positions
    flops = 2.0 * R * tiles.rows * int(blocks.sum()) * (sum(widths) + widths[0])
    queries = R * programs * tiles.rows * np.dtype(dtype).itemsize
    moved = R * int(seen.sum()) * sum(widths) * stored_bytes + queries * (sum(widths) + widths[0])
    return KernelCost(flops, moved, hlo_dtype(dtype), assumed=True)

"""Index scores of sparse attention over a paged cache of index keys, on TPUs (Pallas, Mosaic backend).

A program takes up to eight queries of one row with all of their index heads, and a block of the row's positions. It copies the keys' pages
into VMEM and prefetches those of the next program while it multiplies. Head × key products stay in VMEM; in HBM they would take `heads`
times the space of the scores. Masking happens after the kernel, where XLA fuses it into the consumer of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.pallas import pl, pltpu
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype
from dsjax.kernels.pallas.order import KernelOrder
from dsjax.kernels.pallas.tpu_attention import LANES, MOST_TABLE_ENTRIES, multiply, widened

QUERIES, POSITIONS, SUBLANES = 8, 512, 8
"""Maximum queries and positions per program, and rows of a float32 register."""


def takes(width: int, key_dtype: np.dtype, page_size: int) -> bool:
    """Whether the kernel can read these keys: width in whole registers, pages in whole VMEM tiles, not FP8."""
    itemsize = np.dtype(key_dtype).itemsize
    return width % LANES == 0 and itemsize > 1 and page_size % (32 // itemsize) == 0


def index_scores(
    query: Float[Array, "R C I A"],
    weight: Float[Array, "R C I"],
    cache: Mapping[str, Array],
    key_dtype: np.dtype,
    layer: Int[Array, ""],
    positions: Int[Array, "R C"],
    tables: Int[Array, "R Pr"],
    filled: Bool[Array, "P G"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "R C S"]:
    """Return float32 scores of each query against its row's context; −inf at masked positions. S is whole blocks of at most ``POSITIONS``.

    cache: ``index [L, P, G, A]``, with bits of ``key_dtype``. filled: which slots of the cache hold an entry; a query sees those and its
        own. None: all of them.
    """
    (R, C, I, A), G, pages = query.shape, cache["index"].shape[2], tables.shape[1]
    if R * pages > MOST_TABLE_ENTRIES and R > 1:
        half = lambda at: index_scores(  # noqa: E731
            query[at], weight[at], cache, key_dtype, layer, positions[at], tables[at], filled, interpret=interpret
        )
        return jnp.concatenate([half(slice(R // 2)), half(slice(R // 2, R))])
    block_pages = max(1, min(POSITIONS // G, pages))
    block, end = block_pages * G, pages * G
    blocks = -(-pages // block_pages)
    tile = min(C, QUERIES)
    tiles, heads = -(-C // tile), -(-I // SUBLANES) * SUBLANES
    more, rows = tiles * tile - C, tile * heads
    queries = jnp.pad(query, ((0, 0), (0, more), (0, heads - I), (0, 0))).reshape(R, tiles, rows, A)
    weights = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, more), (0, heads - I))).reshape(R, tiles, rows, 1)
    last = jnp.pad(positions, ((0, 0), (0, more)), mode="edge").reshape(R, tiles, tile).max(axis=-1)
    scalars = [
        jnp.reshape(layer, 1).astype(jnp.int32),
        jnp.clip(last + 1, 0, end).astype(jnp.int32).reshape(-1),
        tables.astype(jnp.int32),
    ]
    kernel = partial(
        _kernel, grid=(R, tiles, blocks), block_pages=block_pages, page_slots=G, tile=tile, stored=np.dtype(key_dtype), factor=A**-0.5
    )  # fmt: skip
    of_tile = lambda width: pl.BlockSpec((None, None, rows, width), lambda r, t, b, *_: (r, t, 0, 0))  # noqa: E731
    cost = index_cost(R, C, I, A, end, query.dtype, np.dtype(key_dtype))
    order = KernelOrder({"depth": A, "terms": heads})  # fixed by the model: the same for every shape and mesh
    scores = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(R, tiles, blocks),
            in_specs=[of_tile(A), of_tile(LANES), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((None, tile, block), lambda r, t, b, *_: (r, t, b)),
            scratch_shapes=[pltpu.VMEM((2, block, A), cache["index"].dtype), pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=jax.ShapeDtypeStruct((R, tiles * tile, blocks * block), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=pltpu.InterpretParams() if interpret else False,
        name="index_scores",
    )(*scalars, queries, jnp.broadcast_to(weights, (R, tiles, rows, LANES)), cache["index"])
    at = jnp.arange(blocks * block)
    visible = positions[..., None] >= at
    if filled is not None:
        own = jnp.minimum(positions, end - 1)[..., None] == at
        held = filled.at[jnp.pad(tables, ((0, 0), (0, blocks * block_pages - pages)))].get(mode="promise_in_bounds")
        visible = own | (visible & held.reshape(R, 1, -1))
    return jnp.where(visible & (at < end), scores[:, :C], -jnp.inf)


def _kernel(
    layer_ref, seen_ref, tables_ref, query_ref, weight_ref, keys_ref, out_ref, buffers, arrived,
    *, grid, block_pages, page_slots, tile, stored, factor,
):  # fmt: skip
    here = row, part, block = tuple(pl.program_id(axis) for axis in range(3))
    number = (row * grid[1] + part) * grid[2] + block
    place, dtype = lax.rem(number, 2), query_ref.dtype

    def pages_of(row, part, block):
        """Return how many pages of a program's block at least one of its queries sees."""
        seen = pl.cdiv(seen_ref[row * grid[1] + part], page_slots)
        return jnp.clip(seen - block * block_pages, 0, block_pages)

    def each_copy(row, part, block, place, act):
        @pl.loop(0, pages_of(row, part, block))
        def _(i):
            page = tables_ref[row, block * block_pages + i]
            to = pl.ds(pl.multiple_of(i * page_slots, page_slots), page_slots)
            act(pltpu.make_async_copy(keys_ref.at[layer_ref[0], page], buffers.at[place, to], arrived.at[place]))

    @pl.when(number == 0)
    def _():
        each_copy(*here, place, lambda copy: copy.start())

    wrapped = block + 1 == grid[2]
    turned = wrapped & (part + 1 == grid[1])
    after = (
        row + turned.astype(jnp.int32),
        jnp.where(turned, 0, part + wrapped.astype(jnp.int32)),
        jnp.where(wrapped, 0, block + 1),
    )

    @pl.when(after[0] < grid[0])
    def _():
        each_copy(*after, 1 - place, lambda copy: copy.start())

    each_copy(*here, place, lambda copy: copy.wait())
    used = pages_of(*here)

    @pl.when(used > 0)
    def _():
        products = multiply(query_ref[...], widened(buffers[place], stored, dtype), transposed=True)
        weighed = jnp.maximum(products * factor, 0.0) * weight_ref[:, :1]
        out_ref[...] = jnp.sum(weighed.reshape(tile, -1, weighed.shape[-1]), axis=1)

    @pl.when(used == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)


def index_cost(R: int, C: int, I: int, A: int, context: int, dtype, key_dtype: np.dtype) -> KernelCost:
    """Return the cost if all queries see the whole context. Its keys are read once per ``QUERIES`` queries of a row."""
    blocks, tiles = -(-context // POSITIONS) * POSITIONS, -(-C // QUERIES)
    heads = -(-I // SUBLANES) * SUBLANES
    flops = 2.0 * R * tiles * min(C, QUERIES) * blocks * heads * A
    moved = R * tiles * context * A * key_dtype.itemsize
    moved += R * C * (blocks * 4 + heads * (A * np.dtype(dtype).itemsize + 4 * LANES))
    return KernelCost(flops, moved, hlo_dtype(dtype), assumed=True)

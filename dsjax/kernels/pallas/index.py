"""Index scores of sparse attention over a paged cache of index keys (Pallas, Triton backend).

A program takes one query with all of its index heads and a block of its row's positions, and reads their keys in place from the pages.
Head × key products stay in registers; in memory they would take `heads` times the space of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dsjax.kernels.pallas import pl, plgpu
from dsjax.kernels.pallas.addressing import addressable_layer, load_entries, whole_spec
from dsjax.kernels.pallas.cost import KernelCost, hlo_dtype, power
from dsjax.kernels.pallas.order import KernelOrder
from sharding import fp8

POSITIONS = 128
"""Positions per program."""


def takes(width: int, key_dtype: np.dtype, page_size: int) -> bool:
    """Whether the kernel can read keys of this width: FP8 keys need exactly one scale; any page size works."""
    return np.dtype(key_dtype) != fp8.E4M3 or fp8.num_scales(width) == 1


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
    """Return float32 scores of each query against its row's context; −inf at masked positions. S is a multiple of ``POSITIONS``.

    cache: ``index [L, P, G, A]``, with bits of ``key_dtype``; with FP8 also ``index_scale [L, P, G, 1]``. filled: which slots of the
        cache hold an entry; a query sees those and its own. None: all of them.
    """
    R, C, I, A = query.shape
    cache, layer = addressable_layer(cache, layer)
    L, P, G = cache["index"].shape[:3]
    pages = tables.shape[1]
    blocks = -(-pages * G // POSITIONS)
    heads, wide = power(I), power(A)
    queries = jnp.pad(query.reshape(R * C, I, A), ((0, 0), (0, heads - I), (0, wide - A)))
    weights = jnp.pad(weight.reshape(R * C, I).astype(jnp.float32), ((0, 0), (0, heads - I)))
    keys = [cache["index"].reshape(L * P * G, A)]
    keys += [cache["index_scale"].reshape(-1)] if "index_scale" in cache else []
    holes = [] if filled is None else [filled.reshape(-1).astype(jnp.int8)]
    kernel = partial(
        _kernel,
        chunk=C,
        width=A,
        page_slots=G,
        pages_of_layer=P,
        pages=pages,
        stored=np.dtype(key_dtype),
        factor=A**-0.5,
    )
    scalars = [array.astype(jnp.int32) for array in (jnp.reshape(layer, 1), positions.reshape(-1), tables)]
    cost = index_cost(R, C, I, A, pages * G, query.dtype, np.dtype(key_dtype))
    order = KernelOrder({"depth": wide, "terms": heads})  # fixed by the model: the same for every shape and mesh
    out = pl.pallas_call(
        kernel,
        grid=(R * C, blocks),
        in_specs=[
            *map(whole_spec, scalars),
            pl.BlockSpec((None, heads, wide), lambda q, b: (q, 0, 0)),
            pl.BlockSpec((None, heads), lambda q, b: (q, 0)),
            *map(whole_spec, [*keys, *holes]),
        ],
        out_specs=pl.BlockSpec((None, POSITIONS), lambda q, b: (q, b)),
        out_shape=jax.ShapeDtypeStruct((R * C, blocks * POSITIONS), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=cost.estimate,
        metadata=cost.metadata | order.metadata,
        interpret=interpret,
        name="index_scores",
    )(*scalars, queries, weights, *keys, *holes)
    return out.reshape(R, C, -1)


def _kernel(
    layer_ref, positions_ref, tables_ref, query_ref, weight_ref, keys_ref, *refs,
    chunk, width, page_slots, pages_of_layer, pages, stored, factor,
):  # fmt: skip
    scaled, refs = (refs[0], refs[1:]) if stored == fp8.E4M3 else (None, refs)
    *holes, out_ref = refs
    item, block = pl.program_id(0), pl.program_id(1)
    row, position = lax.div(item, chunk), positions_ref[item]
    query, (_, wide) = query_ref[...], query_ref.shape
    at = block * POSITIONS + jnp.arange(POSITIONS)
    end = pages * page_slots
    visible = (at <= position) & (at < end)
    page = plgpu.load(tables_ref.at[row, jnp.minimum(lax.div(at, page_slots), pages - 1)], mask=visible, other=0)
    slot = page * page_slots + lax.rem(at, page_slots)
    where = layer_ref[0] * pages_of_layer * page_slots + slot
    keys = load_entries(keys_ref, where, visible, range(wide), width, stored, query.dtype)
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else lax.Precision.DEFAULT
    products = jnp.maximum(plgpu.dot(query, keys, trans_b=True, precision=precision) * factor, 0.0)
    scores = jnp.sum(products * weight_ref[...][:, None], axis=0)
    if scaled is not None:
        scores = scores * plgpu.load(scaled.at[where], mask=visible, other=0)
    if holes:
        held = plgpu.load(holes[0].at[slot], mask=visible, other=0) != 0
        visible = visible & (held | (at == jnp.minimum(position, end - 1)))
    out_ref[...] = jnp.where(visible, scores, -jnp.inf)


def index_cost(R: int, C: int, I: int, A: int, context: int, dtype, key_dtype: np.dtype) -> KernelCost:
    """Return the cost if all queries see the whole context. A row's keys count as read once, because its queries run consecutively."""
    blocks = -(-context // POSITIONS) * POSITIONS
    flops = 2.0 * R * C * blocks * power(I) * power(A)
    entry = fp8.row_bytes(A) if key_dtype == fp8.E4M3 else A * key_dtype.itemsize
    moved = R * context * entry + R * C * (blocks * 4 + I * (A * np.dtype(dtype).itemsize + 4))
    return KernelCost(flops, moved, hlo_dtype(dtype), assumed=True)

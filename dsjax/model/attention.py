"""MLA over the paged cache, in five forms (see ``forms.py``), for one row group of a step.

Everything with a leading ``B`` is spread over the DP ranks, heads over ``tp``. Reading and writing the cache is explicit
(``shard_map``): a page table holds page numbers of its own rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt32

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import tpu_attention, tpu_heads
from dsjax.kernels.pallas.attention import latent_attention
from dsjax.kernels.pallas.heads import absorb
from dsjax.kernels.pallas.heads import expand as expand_values
from dsjax.kernels.pallas.heads import takes as takes_by_head
from dsjax.kernels.table import Kernels
from dsjax.model import paging
from dsjax.model.cache_groups import INDEX_ARRAYS, Arrays, CacheGroup, Layout, cache_groups
from dsjax.model.forms import Form
from dsjax.model.paging import Cache, Rows
from dsjax.model.parameters import reinterpret, store, value_of
from dsjax.model.softmax import attend_in_blocks
from dsjax.model.sparse import IndexScores, attend_to_chosen, unpack
from dsjax.model.transformer import MLA, Projections, expand, with_rotary
from sharding import Rules, fp8
from sharding.indices import cut
from sharding.on_ranks import on_ranks
from sharding.sums import pieces_here, tree_sum

SHORTEST_BLOCK, LONGEST_BLOCK = 128, 1024
BLOCK_BYTES = 256 * 2**20
"""Most bytes of a block's float32 scores on a device."""

MeshAxes = tuple[str, ...] | None


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one layer against the cache, for a mesh and a cache layout."""

    mesh: Mesh
    rules: Rules
    config: ModelConfig
    layout: Layout
    cache_dtype: jnp.dtype
    block_tokens: int | None = None
    """Context positions read at once; longer contexts are accumulated block by block. None: `block` decides."""
    kernels: Kernels = Kernels()
    index_scores: IndexScores = IndexScores()

    @property
    def batch(self) -> MeshAxes:
        """The mesh axes that DP ranks lie over."""
        return self.rules.spec(("ranks",))[0]

    @property
    def heads(self) -> MeshAxes:
        """The mesh axes that heads are split over."""
        return self.rules.spec(("heads",))[0]

    def groups(self, layers: Iterable[int], entries: int = 1) -> tuple[CacheGroup, ...]:
        """What the cache keeps of these layers, ``entries`` tokens to a page, in arrays as wide as the kernels want them."""
        tpu = self.layout != "decompressed" and self.kernels.name("decode attention") == "pallas"
        lanes = tpu_attention.LANES if tpu and self.kernels.pallas.platform == "tpu" else 1
        kept = {"layout": self.layout, "entries": entries, "lanes": lanes, "fp8_index": self.index_scores.fp8}
        return cache_groups(self.config, layers, self.cache_dtype, **kept)

    @property
    def arrays(self) -> Arrays:
        """All groups' arrays."""
        return {name: array for group in self.groups(()) for name, array in group.arrays.items()}

    @property
    def form_of_pages(self) -> dict[str, Any]:
        """Say in plain values in which form the cache holds what it holds: a page that is read in another form is another page."""
        indexed = self.config.index_head_dim is not None
        return {"layout": self.layout} | ({"index_scores": dataclasses.asdict(self.index_scores)} if indexed else {})

    def block(self, rows: int, chunk: int) -> int:
        """Context positions that a rank reads at once for ``rows`` rows of ``chunk`` queries.

        A CPU works best within its caches. On accelerators each block is a dozen kernels and a wait for the host, so that it
        is as long as ``BLOCK_BYTES`` of scores allow, but no longer than a short context is likely to be.
        """
        if self.block_tokens is not None:
            return self.block_tokens
        if self.mesh.devices.flat[0].platform == "cpu":
            return SHORTEST_BLOCK
        scores = 4 * rows * chunk * -(-self.config.num_attention_heads // self.rules.ways(self.mesh, "heads"))
        longest = max(BLOCK_BYTES // scores, 1)
        return min(max(1 << (longest.bit_length() - 1), SHORTEST_BLOCK), LONGEST_BLOCK)

    def write(self, mla: MLA, cache: Cache, layer: Int[Array, ""], slots: Int[Array, "B T"], p: Projections) -> Cache:
        """Store what this layer's cache keeps of each token."""
        with jax.named_scope("cache_write"):
            values, arrays = self._cached_values(mla, p), self.arrays
            if self.layout != "decompressed":
                values = {name: widen(value, arrays[name][0][-1]) for name, value in values.items()}
            if p.index is not None:
                values["index"] = self.index_scores.rotate(p.index.key)
            batch, heads = self.batch, self.heads if self.layout == "decompressed" else None

            def local(cache, layer, slots, values):
                values = {name: array[0] for name, array in values.items()}
                if "scale" in cache:
                    values["latent"], values["scale"] = fp8.quantise(values["latent"])
                if "index_scale" in cache:
                    powers = self.index_scores.powers
                    values["index"], values["index_scale"] = fp8.quantise(values["index"], powers=powers)
                return {
                    name: paging.write(array, layer, slots[0], store(values[name], arrays[name][1], array.dtype))
                    for name, array in cache.items()
                }

            cache_specs = {name: P(None, batch, None, heads) for name in cache}
            value_specs = {name: P(batch, None, heads) for name in values}
            return self._shard_map(local, (cache_specs, P(), P(batch), value_specs), cache_specs)(
                cache, layer, slots, values
            )

    def attend(
        self,
        mla: MLA,
        form: Form,
        cache: Cache,
        layer: Int[Array, ""],
        rows: Rows,
        p: Projections,
        index: Int[Array, ""] | None = None,
        chosen: UInt32[Array, "B R C _"] | None = None,
    ) -> Float[Array, "B R C D"] | Float[Array, "B R C H U"]:
        """Attention of a row group (``p`` with leading ``[B, R, C]``).

        index: of the layer in its stack, where ``mla.kv_b`` is the whole stack's; None where it is the layer's own.
        chosen: form ``CC`` only: bits of the context positions that each query attends to (``sparse.pack``); None: to all.

        Returns the heads' values, or for ``AM_CC_ME`` the layer's output itself (without bias).
        """
        with jax.named_scope(f"attend_{form}"):
            dtype = p.latent.dtype
            scale = self.config.softmax_scale
            topk = self.config.index_topk
            if topk is not None and "index" in cache:
                # Where a table has room for no more than that many tokens, all are chosen, and nothing needs to be scored.
                if rows.tables.shape[-1] * cache["index"].shape[2] > topk:
                    return attend_to_chosen(self, mla, form, cache, layer, rows, p, index)
                cache = {name: array for name, array in cache.items() if name not in INDEX_ARRAYS}
            if self.kernels.name("decode attention", form) == "pallas":
                return self._pallas(mla, form, cache, layer, rows, p, index)
            native = self.kernels.name("decode attention", form) == "native"
            if native and dtype == jnp.float32:
                return self._native(mla, form, cache, layer, rows, p, chosen)
            if form == "CD":
                q = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)
                return self._over_context(_decompressed(scale), (q,), (), cache, layer, rows, heads_first=True)
            if form == "CC":
                q = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)
                weights = mla.key_value_weight(dtype)
                return self._over_context(_expanded(scale), (q,), weights, cache, layer, rows, True, chosen)
            if form == "AM_CC_ME":
                q_latent = jnp.einsum("brcq,qhm->brchm", p.q_latent, value_of(mla.query_key).astype(dtype))
                heads = self._over_context(_apart(scale), (q_latent, p.q_rope), (), cache, layer, rows)
                return jnp.einsum("brchm,hmd->brcd", heads, value_of(mla.value_output).astype(dtype))
            up_key, up_value = mla.key_value_weight(dtype)
            q_latent = jnp.einsum("brchn,mhn->brchm", p.q_nope, up_key)
            if form == "A_CC":
                q = jnp.concatenate([q_latent, p.q_rope], axis=-1)
                heads = self._over_context(_joined(scale, self.config.kv_lora_rank), (q,), (), cache, layer, rows)
            else:
                heads = self._over_context(_apart(scale), (q_latent, p.q_rope), (), cache, layer, rows)
            return jnp.einsum("brchm,mhu->brchu", heads, up_value)

    def _native(self, mla: MLA, form: Form, cache: Cache, layer, rows: Rows, p: Projections, chosen=None):
        """``attend`` by the native kernels: the same five forms' results from two ways of computing them."""
        config, batch, heads = self.config, self.batch, self.heads
        native = self.kernels.native
        kernel = native.expanded_attention if form in ("CC", "CD") else native.absorbed_attention
        settings = {
            "scale": config.softmax_scale,
            "value_width": config.v_head_dim,
            "latent_width": config.kv_lora_rank,
        }
        q, weights = p.q_nope, ()
        if form == "AM_CC_ME":
            q = self._by_heads(p.q_latent, value_of(mla.query_key).astype(p.latent.dtype))
        elif form != "CD":
            weight = mla.kv_b.value(p.latent.dtype)
            weights = (weight.reshape(weight.shape[0], config.num_attention_heads, -1),)

        def local(q, q_rope, weights, cache, layer, positions, length, tables, filled, chosen):
            weight, start = weights[0] if weights else None, positions[0, :, 0]
            words = None if chosen is None else chosen[0]
            out = kernel(q[0], q_rope[0], weight, cache, layer, start, length[0], tables[0], filled, words, **settings)
            return out[None]

        length = jnp.full(rows.positions.shape[:2], rows.positions.shape[2]) if rows.length is None else rows.length
        query = P(batch, None, None, heads)
        kept = P(None, batch, None, heads) if self.layout == "decompressed" else P(None, batch)
        specs = (query, query, (P(None, heads),) * len(weights), dict.fromkeys(cache, kept), P())
        out = self._shard_map(local, (*specs, P(batch), P(batch), P(batch), P(batch), P(batch)), query)(
            q, p.q_rope, weights, cache, layer, rows.positions, length, rows.tables, rows.filled, chosen
        )
        if form != "AM_CC_ME":
            return out
        return self._over_heads(out, value_of(mla.value_output).astype(out.dtype))

    def _by_heads(self, x: Float[Array, "B R C Q"], weight: Float[Array, "Q H M"]) -> Float[Array, "B R C H M"]:
        """``x`` times each head's matrix, natively."""

        def local(x, weight):
            rows, (_, H, M) = x.reshape(-1, x.shape[-1]), weight.shape
            out = self.kernels.native.dense(weight.reshape(1, -1, H * M), None, jnp.int32(0), rows)
            return out.reshape(*x.shape[:-1], H, M)

        batch, heads = self.batch, self.heads
        return self._shard_map(local, (P(batch), P(None, heads)), P(batch, None, None, heads))(x, weight)

    def _over_heads(self, x: Float[Array, "B R C H M"], weight: Float[Array, "H M D"]) -> Float[Array, "B R C D"]:
        """The sum over heads of ``x`` times each head's matrix, natively, in an order that no mesh changes (``sharding.sums``)."""
        shares = self.rules.ways(self.mesh, "heads")
        depth = x.shape[3] * x.shape[4]

        def local(x, weight):
            (H, M, D), pieces = weight.shape, pieces_here(depth, shares)
            out = self.kernels.native.dense(
                weight.reshape(1, H * M, D), None, jnp.int32(0), x.reshape(-1, H * M), pieces=pieces
            )
            return tree_sum(out, heads, shares).reshape(*x.shape[:3], D)

        batch, heads = self.batch, self.heads
        return self._shard_map(local, (P(batch, None, None, heads), P(heads)), P(batch))(x, weight)

    def _pallas(self, mla: MLA, form: Form, cache: Cache, layer, rows: Rows, p: Projections, index):
        """``attend`` by the Pallas kernels: in latent space, whatever the form, so that keys and values are never expanded."""
        config, batch, heads, dtype = self.config, self.batch, self.heads, p.latent.dtype
        own, stored = self.kernels.pallas, mla.kv_b.weight.info.dtype
        interpret, fixed = own.interpret, own.fixed
        q, weights, up_value = p.q_nope, {}, None
        if form == "AM_CC_ME":
            q = jnp.einsum("brcq,qhm->brchm", p.q_latent, value_of(mla.query_key).astype(dtype))
        elif fixed and own.platform == "tpu":
            up_key, up_value = mla.key_value_weight(dtype)
            weights = {"keys": jnp.transpose(up_key, (1, 2, 0)), "values": jnp.swapaxes(up_value, 0, 1)}
        elif index is None and not fixed:
            up_key, up_value = mla.key_value_weight(dtype)
            q = jnp.einsum("brchn,mhn->brchm", q, up_key)
        else:
            weights = {"weight": mla.kv_b.weight[...]}
            weights |= {"scale": mla.kv_b.scale[...]} if hasattr(mla.kv_b, "scale") else {}
            if index is None:  # a layer's own, which is read as a stack of one
                if "scale" in weights and not takes_by_head(
                    *weights.values(), config.qk_nope_head_dim, config.v_head_dim
                ):
                    weights, stored = {"weight": mla.kv_b.value(dtype)}, dtype
                weights, index = {name: array[None] for name, array in weights.items()}, jnp.int32(0)

        def by_head(product, weights, index, x):
            if "keys" in weights:
                name, part = ("absorb_keys", "keys") if product is absorb else ("expand_values", "values")
                values = tpu_heads.by_head(weights[part], x.reshape(-1, *x.shape[2:]), name, interpret=interpret)
                return values.reshape(*x.shape[:2], *values.shape[1:])
            values = product(
                weights["weight"], weights.get("scale"), stored, index, x.reshape(-1, *x.shape[2:]),
                config.v_head_dim, interpret=interpret, fixed=fixed, cores=own.cores,
            )  # fmt: skip
            return values.reshape(*x.shape[:2], *values.shape[1:])

        def local(q, q_rope, weights, index, cache, layer, positions, length, tables, filled):
            q = by_head(absorb, weights, index, q[0]) if weights else q[0]
            if own.platform == "gpu":
                attend = partial(latent_attention, tiles=own.tiles, cores=own.cores)
            else:
                attend = tpu_attention.latent_attention
            out = attend(
                q, q_rope[0], cache, np.dtype(self.cache_dtype), layer, positions[0, :, 0], length[0], tables[0], filled,
                scale=config.softmax_scale, interpret=interpret, fixed=fixed,
            )  # fmt: skip
            return (by_head(expand_values, weights, index, out) if weights else out)[None]

        length = jnp.full(rows.positions.shape[:2], rows.positions.shape[2]) if rows.length is None else rows.length
        query, by_row = P(batch, None, None, heads), P(batch)
        by_columns = {name: P(heads) if name in ("keys", "values") else P(None, None, heads) for name in weights}
        specs = (
            query,
            query,
            by_columns,
            P(),
            {name: P(None, batch) for name in cache},
            P(),
            by_row,
            by_row,
            by_row,
            by_row,
        )
        out = self._shard_map(local, specs, query)(
            q, p.q_rope, weights, index, cache, layer, rows.positions, length, rows.tables, rows.filled
        )
        if form == "AM_CC_ME":
            return jnp.einsum("brchm,hmd->brcd", out, value_of(mla.value_output).astype(dtype))
        return out if weights else jnp.einsum("brchm,mhu->brchu", out, up_value)

    def _cached_values(self, mla: MLA, p: Projections) -> Cache:
        if self.layout == "split":
            return {"latent": p.latent, "rope": p.k_rope}
        if self.layout == "joined":
            return {"joined": jnp.concatenate([p.latent, p.k_rope], axis=-1)}
        weights = mla.key_value_weight(p.latent.dtype)
        if self.kernels.name("decode attention") == "native" and p.latent.dtype == jnp.float32:
            k_nope, values = (self._by_heads(p.latent[:, None], weight)[:, 0] for weight in weights)
            return {"key": with_rotary(k_nope, p.k_rope), "value": values}
        keys, values = expand(p.latent, p.k_rope, *weights)
        return {"key": keys, "value": values}

    def _over_context(
        self, kernel, queries, weights, cache: Cache, layer, rows: Rows, heads_first: bool = False, chosen=None
    ) -> Float[Array, "B R C H W"]:
        """Run ``kernel`` on each rank over its rows' context, block by block. ``heads_first``: its scores are ``[R, H, C, S]``.

        chosen: as of ``attend``, where heads come first.
        """
        batch, heads = self.batch, self.heads
        G = next(iter(cache.values())).shape[2]
        _, R, C = rows.positions.shape
        pages = rows.tables.shape[-1]
        block_pages = max(1, min(pages, self.block(R, C) // G))
        num_blocks = -(-pages // block_pages)
        arrays = self.arrays

        def local(queries, weights, cache, layer, positions, tables, filled, chosen):
            # Pages past a row's table are page 0: no query sees their positions.
            tables = jnp.pad(tables[0], ((0, 0), (0, num_blocks * block_pages - pages)))

            def pages_of(index):
                return cut(tables, index * block_pages, block_pages, axis=1)

            def fetch(index):
                part = pages_of(index)
                entries = {
                    name: reinterpret(paging.read(array, layer, part), arrays[name][1]) for name, array in cache.items()
                }
                if "scale" in entries:
                    entries["latent"] = fp8.dequantise(entries["latent"], entries.pop("scale"))
                return {name: array.astype(queries[0].dtype) for name, array in entries.items()}

            def fetch_filled(index):
                return paging.read_filled(filled, pages_of(index))

            score, weigh = kernel([q[0] for q in queries], weights)
            if chosen is not None:
                fetch, score = _masked(fetch, score, chosen[0], block_pages * G)
            at = positions[0][:, None] if heads_first else positions[0][..., None]
            out = attend_in_blocks(
                at,
                fetch,
                score,
                weigh,
                num_blocks=num_blocks,
                block=block_pages * G,
                filled=None if filled is None else fetch_filled,
            )
            out = jnp.swapaxes(out, 1, 2) if heads_first else out
            return out[None].astype(queries[0].dtype)

        cache_heads = heads if self.layout == "decompressed" else None
        specs = (
            [P(batch, None, None, heads)] * len(queries),
            [P(None, heads)] * len(weights),
            {name: P(None, batch, None, cache_heads) for name in cache},
            P(),
            P(batch),
            P(batch),
            P(batch),
            P(batch),
        )
        return self._shard_map(local, specs, P(batch, None, None, heads))(
            list(queries), list(weights), cache, layer, rows.positions, rows.tables, rows.filled, chosen
        )

    def _shard_map(self, function: Callable, in_specs, out_specs) -> Callable:
        return on_ranks(function, self.mesh, in_specs, out_specs)


def widen(values: Float[Array, "*n W"], width: int) -> Float[Array, "*n V"]:
    """Zeros behind the values of each entry, up to ``width``."""
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _shared_scores(context: Float[Array, "R S W"], q: Float[Array, "R C H W"]) -> Float[Array, "R C H S"]:
    """Scores of all heads against the one latent they share.

    ``queries × contextᵀ`` makes XLA's CPU backend transpose the context, which pays for many queries; for one query a row it
    is the other way round (256 rows of 128 positions: 1.5 against 2.0 ms).
    """
    if q.shape[1] == 1:
        return jnp.transpose(_product("rsw,rchw->rsch", context, q), (0, 2, 3, 1))
    return _product("rchw,rsw->rchs", q, context)


def _masked(fetch: Callable, score: Callable, chosen: UInt32[Array, "R C _"], block: int) -> tuple[Callable, Callable]:
    """``fetch`` and ``score`` of ``attend_in_blocks`` that leave out the positions which a query has not chosen."""

    def fetch_masked(index):
        return fetch(index) | {"chosen": unpack(chosen, index * block, block)}

    return fetch_masked, lambda c: jnp.where(c["chosen"][:, None], score(c), -jnp.inf)


# Each form's arithmetic: from queries and weights the functions ``score`` and ``weigh`` of ``attend_in_blocks``. Forms with
# keys of each head keep the heads before the queries, so that a head's product is one matrix product in place.


def _decompressed(scale: float):
    def kernel(queries, weights):
        (q,) = queries
        return (
            lambda c: _product("rchw,rshw->rhcs", q, c["key"]) * scale,
            lambda probs, c: _product("rhcs,rshu->rhcu", probs.astype(q.dtype), c["value"]),
        )

    return kernel


def _expanded(scale: float):
    def kernel(queries, weights):
        (q,), (up_key, up_value) = queries, weights
        M = up_key.shape[0]

        def parts(c):
            return (c["joined"][..., :M], c["joined"][..., M:]) if "joined" in c else (c["latent"], c["rope"])

        def score(c):
            latent, k_rope = parts(c)
            k_nope = jnp.einsum("rsm,mhn->rhsn", latent, up_key)
            shared = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
            return _product("rchw,rhsw->rhcs", q, jnp.concatenate([k_nope, shared], axis=-1)) * scale

        def weigh(probs, c):
            values = jnp.einsum("rsm,mhu->rhsu", parts(c)[0], up_value)
            return _product("rhcs,rhsu->rhcu", probs.astype(q.dtype), values)

        return score, weigh

    return kernel


def _joined(scale: float, latent_width: int):
    def kernel(queries, weights):
        (q,) = queries

        def weigh(probs, c):
            # All of the row, and then the latent's part: a slice of the context would be copied first.
            return _product("rchs,rsw->rchw", probs.astype(q.dtype), c["joined"])[..., :latent_width]

        return lambda c: _shared_scores(c["joined"], q) * scale, weigh

    return kernel


def _apart(scale: float):
    def kernel(queries, weights):
        q_latent, q_rope = queries

        def score(c):
            return (_shared_scores(c["latent"], q_latent) + _shared_scores(c["rope"], q_rope)) * scale

        return score, lambda probs, c: _product("rchs,rsm->rchm", probs.astype(q_rope.dtype), c["latent"])

    return kernel

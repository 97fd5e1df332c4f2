"""MLA over the paged cache, in five forms (see ``forms.py``), for one row group of a step.

Everything with a leading ``B`` is spread over the DP ranks, heads over ``tp``. Reading and writing the cache is explicit
(``shard_map``): a page table holds page numbers of its own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import tpu_attention
from dsjax.kernels.pallas.attention import latent_attention
from dsjax.kernels.pallas.heads import absorb
from dsjax.kernels.pallas.heads import expand as expand_values
from dsjax.kernels.table import Kernels
from dsjax.model import paging
from dsjax.model.forms import Form, Layout, cache_arrays
from dsjax.model.mla import MLA, Projections
from dsjax.model.parameters import reinterpret, store, value_of
from dsjax.model.softmax import attend_in_blocks
from sharding import MeshSpec, fp8

Cache = dict[str, Array]

SHORTEST_BLOCK, LONGEST_BLOCK = 128, 1024
BLOCK_BYTES = 256 * 2**20
"""Most bytes of a block's float32 scores on a device."""


@jax.tree_util.register_dataclass
@dataclass
class Rows:
    """Where a row group's tokens stand: positions, and the pages that hold their context.

    A row's positions follow one another. ``length``: how many of its tokens are no padding; None: all. What padding attends to
    means nothing; native kernels leave it out, and give zeros.
    filled: which cache slots hold an entry, of all pages; a token attends to those and to itself. None: all of them.
    """

    positions: Int[Array, "B R C"]
    tables: Int[Array, "B R Pr"]
    length: Int[Array, "B R"] | None = None
    filled: Bool[Array, "P G"] | None = None


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one layer against the cache, for a mesh and a cache layout."""

    mesh: Mesh
    spec: MeshSpec
    config: ModelConfig
    layout: Layout
    cache_dtype: jnp.dtype
    block_tokens: int | None = None
    """Context positions read at once; longer contexts are accumulated block by block. None: `block` decides."""
    kernels: Kernels = Kernels()

    @property
    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        """The cache's arrays as ``cache_arrays`` has them, as wide as the kernels want them."""
        tpu = self.layout != "decompressed" and self.kernels.name("decode attention") == "pallas"
        tpu = tpu and self.kernels.pallas.platform == "tpu"
        return cache_arrays(self.layout, self.config, self.cache_dtype, tpu_attention.LANES if tpu else 1)

    def block(self, rows: int, chunk: int) -> int:
        """Context positions that a rank reads at once for ``rows`` rows of ``chunk`` queries.

        A CPU works best within its caches. On accelerators each block is a dozen kernels and a wait for the host, so that it
        is as long as ``BLOCK_BYTES`` of scores allow, but no longer than a short context is likely to be.
        """
        if self.block_tokens is not None:
            return self.block_tokens
        if self.mesh.devices.flat[0].platform == "cpu":
            return SHORTEST_BLOCK
        scores = 4 * rows * chunk * -(-self.config.num_attention_heads // self.spec.tp_size)
        longest = max(BLOCK_BYTES // scores, 1)
        return min(max(1 << (longest.bit_length() - 1), SHORTEST_BLOCK), LONGEST_BLOCK)

    def write(self, mla: MLA, cache: Cache, layer: Int[Array, ""], slots: Int[Array, "B T"], p: Projections) -> Cache:
        """Store what this layer's cache keeps of each token."""
        with jax.named_scope("cache_write"):
            values, arrays = self._cached_values(mla, p), self.arrays
            if self.layout != "decompressed":
                values = {name: widen(value, arrays[name][0][-1]) for name, value in values.items()}
            heads = self.spec.head_axes if self.layout == "decompressed" else None
            batch = self.spec.batch_axes

            def local(cache, layer, slots, values):
                values = {name: array[0] for name, array in values.items()}
                if "scale" in cache:
                    values["latent"], values["scale"] = fp8.quantise(values["latent"])
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
    ) -> Float[Array, "B R C D"] | Float[Array, "B R C H U"]:
        """Attention of a row group (``p`` with leading ``[B, R, C]``).

        index: of the layer in its stack, where ``mla.kv_b`` is the whole stack's; None where it is the layer's own.

        Returns the heads' values, or for ``AM_CC_ME`` the layer's output itself (without bias).
        """
        with jax.named_scope(f"attend_{form}"):
            dtype = p.latent.dtype
            scale = self.config.softmax_scale
            if self.kernels.name("decode attention", form) == "pallas":
                return self._pallas(mla, form, cache, layer, rows, p, index)
            native = self.kernels.name("decode attention", form) == "native"
            if native and dtype == jnp.float32:
                return self._native(mla, form, cache, layer, rows, p)
            if form == "CD":
                q = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)
                return self._over_context(_decompressed(scale), (q,), (), cache, layer, rows, heads_first=True)
            if form == "CC":
                q = jnp.concatenate([p.q_nope, p.q_rope], axis=-1)
                weights = mla.key_value_weight(dtype)
                return self._over_context(_expanded(scale), (q,), weights, cache, layer, rows, heads_first=True)
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

    def _native(self, mla: MLA, form: Form, cache: Cache, layer, rows: Rows, p: Projections):
        """``attend`` by the native kernels: the same five forms' results from two ways of computing them."""
        config, batch, heads = self.config, self.spec.batch_axes, self.spec.head_axes
        kernel = self.kernels.native.expanded_attention if form == "CC" else self.kernels.native.absorbed_attention
        settings = {
            "scale": config.softmax_scale,
            "value_width": config.v_head_dim,
            "latent_width": config.kv_lora_rank,
        }
        q, weights = p.q_nope, ()
        if form == "AM_CC_ME":
            q = jnp.einsum("brcq,qhm->brchm", p.q_latent, value_of(mla.query_key).astype(p.latent.dtype))
        else:
            weight = mla.kv_b.value(p.latent.dtype)
            weights = (weight.reshape(weight.shape[0], config.num_attention_heads, -1),)

        def local(q, q_rope, weights, cache, layer, positions, length, tables, filled):
            weight, start = weights[0] if weights else None, positions[0, :, 0]
            out = kernel(q[0], q_rope[0], weight, cache, layer, start, length[0], tables[0], filled, **settings)
            return out[None]

        length = jnp.full(rows.positions.shape[:2], rows.positions.shape[2]) if rows.length is None else rows.length
        query = P(batch, None, None, heads)
        specs = (query, query, (P(None, heads),) * len(weights), {name: P(None, batch) for name in cache}, P())
        out = self._shard_map(local, (*specs, P(batch), P(batch), P(batch), P(batch)), query)(
            q, p.q_rope, weights, cache, layer, rows.positions, length, rows.tables, rows.filled
        )
        if form != "AM_CC_ME":
            return out
        return jnp.einsum("brchm,hmd->brcd", out, value_of(mla.value_output).astype(out.dtype))

    def _pallas(self, mla: MLA, form: Form, cache: Cache, layer, rows: Rows, p: Projections, index):
        """``attend`` by the Pallas kernels: in latent space, whatever the form, so that keys and values are never expanded."""
        config, batch, heads, dtype = self.config, self.spec.batch_axes, self.spec.head_axes, p.latent.dtype
        interpret = self.kernels.pallas.interpret
        q, weights, up_value = p.q_nope, {}, None
        if form == "AM_CC_ME":
            q = jnp.einsum("brcq,qhm->brchm", p.q_latent, value_of(mla.query_key).astype(dtype))
        elif index is None:
            up_key, up_value = mla.key_value_weight(dtype)
            q = jnp.einsum("brchn,mhn->brchm", q, up_key)
        else:
            weights = {"weight": mla.kv_b.weight[...]}
            weights |= {"scale": mla.kv_b.scale[...]} if hasattr(mla.kv_b, "scale") else {}

        def by_head(product, weights, index, x):
            values = product(
                weights["weight"], weights.get("scale"), mla.kv_b.weight.info.dtype, index, x.reshape(-1, *x.shape[2:]),
                config.v_head_dim, interpret=interpret,
            )  # fmt: skip
            return values.reshape(*x.shape[:2], *values.shape[1:])

        def local(q, q_rope, weights, index, cache, layer, positions, length, tables, filled):
            q = by_head(absorb, weights, index, q[0]) if weights else q[0]
            if self.kernels.pallas.platform == "gpu":
                attend = partial(latent_attention, tiles=self.kernels.pallas.tiles)
            else:
                attend = tpu_attention.latent_attention
            out = attend(
                q, q_rope[0], cache, np.dtype(self.cache_dtype), layer, positions[0, :, 0], length[0], tables[0], filled,
                scale=config.softmax_scale, interpret=interpret,
            )  # fmt: skip
            return (by_head(expand_values, weights, index, out) if weights else out)[None]

        length = jnp.full(rows.positions.shape[:2], rows.positions.shape[2]) if rows.length is None else rows.length
        query, by_row = P(batch, None, None, heads), P(batch)
        by_columns = {name: P(None, None, heads) for name in weights}
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
        keys, values = expand(p.latent, p.k_rope, *mla.key_value_weight(p.latent.dtype))
        return {"key": keys, "value": values}

    def _over_context(
        self, kernel, queries, weights, cache: Cache, layer, rows: Rows, heads_first: bool = False
    ) -> Float[Array, "B R C H W"]:
        """Run ``kernel`` on each rank over its rows' context, block by block. ``heads_first``: its scores are ``[R, H, C, S]``."""
        batch, heads = self.spec.batch_axes, self.spec.head_axes
        G = next(iter(cache.values())).shape[2]
        _, R, C = rows.positions.shape
        pages = rows.tables.shape[-1]
        block_pages = max(1, min(pages, self.block(R, C) // G))
        num_blocks = -(-pages // block_pages)
        arrays = self.arrays

        def local(queries, weights, cache, layer, positions, tables, filled):
            # Pages past a row's table are page 0: no query sees their positions.
            tables = jnp.pad(tables[0], ((0, 0), (0, num_blocks * block_pages - pages)))

            def pages_of(index):
                return jax.lax.dynamic_slice_in_dim(tables, index * block_pages, block_pages, axis=1)

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
        )
        return self._shard_map(local, specs, P(batch, None, None, heads))(
            list(queries), list(weights), cache, layer, rows.positions, rows.tables, rows.filled
        )

    def _shard_map(self, function: Callable, in_specs, out_specs) -> Callable:
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def widen(values: Float[Array, "*n W"], width: int) -> Float[Array, "*n V"]:
    """Zeros behind the values of each entry, up to ``width``."""
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])])


def expand(latent: Array, k_rope: Array, up_key: Array, up_value: Array) -> tuple[Array, Array]:
    """Keys ``[..., H, N+O]`` and values ``[..., H, U]`` of all heads from latents ``[..., M]``, rotary keys ``[..., O]``."""
    k_nope = jnp.einsum("...m,mhn->...hn", latent, up_key)
    shared = jnp.broadcast_to(k_rope[..., None, :], (*k_nope.shape[:-1], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, shared], axis=-1), jnp.einsum("...m,mhu->...hu", latent, up_value)


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

"""Attention over the paged KV cache: the interface of an attention family, and MLA in the forms of ``forms.py`` with their kernels.

Arrays with a leading ``B`` are sharded over the DP ranks, heads over ``tp``. Cache reads and writes are explicit
(``shard_map``): a page table holds page numbers local to its rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt32

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import tpu_attention
from dsjax.kernels.pallas.attention import latent_attention
from dsjax.kernels.pallas.heads import absorb
from dsjax.kernels.pallas.heads import expand as expand_values
from dsjax.kernels.table import Kernels
from dsjax.model import paging
from dsjax.model.cache_groups import Arrays, CacheGroup, Layout, cache_groups
from dsjax.model.forms import Form, Prepared
from dsjax.model.layer_values import Tokens
from dsjax.model.norm import Normalise, normalise
from dsjax.model.paging import Cache, Rows
from dsjax.model.parameters import Matrix, Multiply, reinterpret, store
from dsjax.model.rope import Rotation
from dsjax.model.rows import GroupShape
from dsjax.model.softmax import attend_in_blocks
from dsjax.model.sparse import unpack
from dsjax.model.transformer import MLA, Projections, expand
from sharding import Rules, fp8
from sharding.indices import cut
from sharding.on_ranks import OneRank, constrain, on_ranks

SHORTEST_BLOCK, LONGEST_BLOCK = 128, 1024
BLOCK_BYTES = 256 * 2**20
"""Upper limit of one block's float32 scores on a device, in bytes."""

MeshAxes = tuple[str, ...] | None


class AttentionFamily(Protocol):
    """Interface of a kind of attention: its cache groups, and the parts of a layer that a step runs.

    ``weights`` is a layer's attention module; matrices named by ``in_stack`` may still be the whole stack. ``index`` is the layer's
    number in its stack, ``layer`` its number in the cache. A family's module declares its own parameters (``transformer.py``).
    """

    def groups(self, layers: Iterable[int], entries: int = 1) -> tuple[CacheGroup, ...]:
        """Cache groups of these layers, with ``entries`` tokens on a page."""

    @property
    def form_of_pages(self) -> dict[str, Any]:
        """How the cache stores a token, as plain values. Engines share pages only if these values are equal."""

    def turns(self, groups: Sequence[GroupShape], context: int, page_size: int) -> dict[str, int]:
        """Trip counts of the data-dependent loops in ``attend``, by their name scope.

        Each row of the groups attends to ``context`` positions.
        """

    def block(self, rows: int, chunk: int) -> int:
        """Return the context positions that a rank reads at once for ``rows`` rows of ``chunk`` queries."""

    def backend(self, form: Form) -> str:
        """Return the backend that computes a form: ``plain``, ``native`` or ``pallas``."""

    def in_stack(self, forms: Sequence[Form]) -> frozenset[str]:
        """Return names of the matrices that a step with these forms can read from the stack of layers without slicing it."""

    def project(
        self, weights: nnx.Module, x: Float[Array, "B T D"], rotation: Rotation, forms: Sequence[Form], *,
        multiply: Multiply, normalise: Normalise,
    ) -> Projections:  # fmt: skip
        """Return the projections that ``cache_entries`` and ``attend`` need for these forms, sharded over the mesh."""

    def cache_entries(self, weights: nnx.Module, cache: Cache, layer, tokens: Tokens, p: Projections) -> Cache:
        """Write each token's entry of this layer to the cache; slot −1 writes nothing."""

    def attend(self, weights: nnx.Module, form: Form, cache: Cache, layer, index, rows: Rows, p: Projections) -> Array:
        """Return attention's result for a row group (``p`` with leading ``[B, R, C]``), before ``output``."""

    def output(self, weights: nnx.Module, form: Form, found: Array, multiply: Multiply) -> Float[Array, "*b D"]:
        """Return the layer's output from the result of ``attend``."""


@dataclass(frozen=True)
class PagedMLA:
    """MLA as an ``AttentionFamily``, for a mesh and a cache layout."""

    mesh: Mesh | OneRank
    rules: Rules
    config: ModelConfig
    layout: Layout
    cache_dtype: jnp.dtype
    block_tokens: int | None = None
    """Context positions read at once; longer contexts are accumulated block by block. None: as `block` computes."""
    kernels: Kernels = Kernels()

    @property
    def batch(self) -> MeshAxes:
        """Mesh axes of the DP ranks."""
        return self.rules.spec(("ranks",))[0]

    @property
    def heads(self) -> MeshAxes:
        """Mesh axes that heads are sharded over."""
        return self.rules.spec(("heads",))[0]

    @property
    def _loaded(self) -> str:
        """Backend whose kernels read this cache; ``plain`` if none does."""
        return self.kernels.name("decode attention") if self.layout == "split" else "plain"

    def backend(self, form: Form) -> str:
        """Return the form's kernel backend if it is loaded and reads this cache, else ``plain``."""
        return self._loaded if self._loaded in form.kernels else "plain"

    def in_stack(self, forms: Sequence[Form]) -> frozenset[str]:
        """Return the matrices that all forms multiply with as stored, and ``kv_b`` if kernels read it from the stack."""
        whole = {"q_a", "kv_a"} if any(form.materialised for form in forms) else {"q_a", "kv_a", "q", "q_b", "o"}
        loaded = self._loaded
        by_head = loaded == "native" or (loaded == "pallas" and self.kernels.pallas.platform == "gpu")
        return frozenset(whole | ({"kv_b"} if by_head and all(loaded in form.kernels for form in forms) else set()))

    @property
    def _lanes(self) -> int:
        """Alignment of the widths of the cache's latents."""
        return tpu_attention.LANES if self._loaded == "pallas" and self.kernels.pallas.platform == "tpu" else 1

    def groups(self, layers: Iterable[int], entries: int = 1, **kept) -> tuple[CacheGroup, ...]:
        """Return cache groups whose array widths suit the kernels. kept: further arguments of ``cache_groups``."""
        kept |= {"layout": self.layout, "entries": entries, "lanes": self._lanes}
        return cache_groups(self.config, layers, self.cache_dtype, **kept)

    @property
    def arrays(self) -> Arrays:
        """Arrays of all cache groups."""
        return {name: array for group in self.groups(()) for name, array in group.arrays.items()}

    @property
    def form_of_pages(self) -> dict[str, Any]:
        """The layout."""
        return {"layout": self.layout}

    def block(self, rows: int, chunk: int) -> int:
        """Return the context positions that a rank reads at once for ``rows`` rows of ``chunk`` queries.

        On CPUs small blocks stay in the processor's caches. On accelerators each block costs a dozen kernels and a host
        synchronisation, so blocks are as long as ``BLOCK_BYTES`` of scores allow, but no longer than a typical short context.
        """
        if self.block_tokens is not None:
            return self.block_tokens
        if self.mesh.devices.flat[0].platform == "cpu":
            return SHORTEST_BLOCK
        scores = 4 * rows * chunk * -(-self.config.num_attention_heads // self.rules.ways(self.mesh, "heads"))
        longest = max(BLOCK_BYTES // scores, 1)
        return min(max(1 << (longest.bit_length() - 1), SHORTEST_BLOCK), LONGEST_BLOCK)

    def turns(self, groups: Sequence[GroupShape], context: int, page_size: int) -> dict[str, int]:
        """Return context blocks by form. Groups of one form share a name scope, so the group with the smallest blocks counts."""
        found: dict[str, int] = {}
        for group in groups:
            pages = min(-(-context // page_size), self.block(group.rows, group.chunk) // page_size)
            turns, name = -(-context // (max(1, pages) * page_size)), f"attend_{group.form.name}"
            found[name] = max(turns, found.get(name, 0))
        return found

    def project(
        self, mla: MLA, x: Float[Array, "B T D"], rotation: Rotation, forms: Sequence[Form], *,
        multiply: Multiply, normalise: Normalise = normalise,
    ) -> Projections:  # fmt: skip
        """Return projections with heads sharded over ``tp``; values that all heads share are replicated."""
        query_heads = not all(form.materialised for form in forms)
        p = mla.project(x, rotation, query_heads=query_heads, multiply=multiply, normalise=normalise)

        def spread(name: str):
            spec = P(self.batch, None, self.heads) if name in ("q_nope", "q_rope") else P(self.batch)
            return jax.tree.map(lambda array: constrain(array, self.mesh, spec), getattr(p, name))

        return Projections(*(spread(field.name) for field in dataclasses.fields(p)))

    def output(self, mla: MLA, form: Form, found: Array, multiply: Multiply) -> Float[Array, "*b D"]:
        """Apply the output projection and its bias. In a materialised form the projection is already applied."""
        return mla.add_output_bias(found) if form.materialised else mla.output(found, multiply)

    def cache_entries(self, mla: MLA, cache: Cache, layer: Int[Array, ""], tokens: Tokens, p: Projections) -> Cache:
        """Write each token's entry to this layer's cache."""
        with jax.named_scope("cache_write"):
            values, arrays = self._entries(mla, p), self.arrays
            batch, heads = self.batch, self.heads if self.layout == "decompressed" else None

            def local(cache, layer, slots, values):
                values = self._quantised({name: array[0] for name, array in values.items()}, cache)
                return {
                    name: paging.write(array, layer, slots[0], store(values[name], arrays[name][1], array.dtype))
                    for name, array in cache.items()
                }

            cache_specs = {name: P(None, batch, None, heads) for name in cache}
            value_specs = {name: P(batch, None, heads) for name in values}
            return self._shard_map(local, (cache_specs, P(), P(batch), value_specs), cache_specs)(
                cache, layer, tokens.slots, values
            )

    def _entries(self, mla: MLA, p: Projections) -> Cache:
        """Return each token's cache values before quantisation."""
        if self.layout == "decompressed":
            keys, values = expand(p.latent, p.k_rope, *mla.key_value_weight(p.latent.dtype))
            return {"key": keys, "value": values}
        values = {"latent": p.latent, "rope": p.k_rope}
        if self.layout == "joined":
            return {"joined": jnp.concatenate(list(values.values()), axis=-1)}
        spare = {name: self.arrays[name][0][-1] - value.shape[-1] for name, value in values.items()}
        return {name: jnp.pad(value, [(0, 0)] * 2 + [(0, spare[name])]) for name, value in values.items()}

    def _quantised(self, values: Cache, cache: Cache) -> Cache:
        """Return the values as ``cache`` stores them, with their scales."""
        if "scale" in cache:
            values["latent"], values["scale"] = fp8.quantise(values["latent"])
        return values

    def attend(
        self, mla: MLA, form: Form, cache: Cache, layer: Int[Array, ""], index: Int[Array, ""] | None, rows: Rows,
        p: Projections, chosen: UInt32[Array, "B R C _"] | None = None,
    ) -> Float[Array, "B R C D"] | Float[Array, "B R C H U"]:  # fmt: skip
        """Return the heads' values, or the layer's output without bias in a materialised form.

        index: None if ``mla`` holds one layer, not a stack. chosen: for a form that ``masks``, a bitmask of the context positions that each
        query attends to (``sparse.pack``); None: all positions.
        """
        with jax.named_scope(f"attend_{form}"):
            if self.backend(form) == "pallas":
                return self._pallas(mla, cache, layer, index, rows, p)
            if self.backend(form) == "native":
                return self._native(mla, form, cache, layer, index, rows, p, chosen)
            prepared = form.prepare(mla, p)
            return prepared.finish(self._over_context(form, prepared, cache, layer, rows, chosen))

    def _native(self, mla: MLA, form: Form, cache: Cache, layer, index, rows: Rows, p: Projections, chosen=None):
        """Run ``attend`` with the native kernels, which convert stored weights as they read them."""
        kernel = partial(self.kernels.native.attention, form.kernels["native"], scale=self.config.softmax_scale)
        weights, index = _stacked(mla.kv_b, index)

        def local(q, q_rope, weights, index, cache, layer, positions, length, tables, filled, chosen):
            start, words = positions[0, :, 0], None if chosen is None else chosen[0]
            out = kernel(q[0], q_rope[0], weights, index, cache, layer, start, length[0], tables[0], filled, words)
            return out[None]

        return self._by_rank(local, p.q_nope, p.q_rope, weights, index, cache, layer, rows, chosen)

    def _by_rank(self, local: Callable, q, q_rope, weights, index, cache: Cache, layer, rows: Rows, *more) -> Array:
        """Run a kernel on each rank's rows and heads. more: further arrays with a dimension of ranks."""
        length = jnp.full(rows.positions.shape[:2], rows.positions.shape[2]) if rows.length is None else rows.length
        query, by_row = P(self.batch, None, None, self.heads), P(self.batch)
        by_columns = dict.fromkeys(weights, P(None, None, self.heads))
        cached = dict.fromkeys(cache, P(None, self.batch))
        specs = (query, query, by_columns, P(), cached, P(), *[by_row] * (4 + len(more)))
        return self._shard_map(local, specs, query)(
            q, q_rope, weights, index, cache, layer, rows.positions, length, rows.tables, rows.filled, *more
        )

    def _pallas(self, mla: MLA, cache: Cache, layer, index, rows: Rows, p: Projections):
        """Run ``attend`` with the Pallas kernels. They work in latent space for every form and never expand keys and values."""
        if index is not None and mla.kv_b.weight[...].ndim < len(mla.kv_b.weight.info.shape):
            index = None  # a scan has sliced it
        config, dtype = self.config, p.latent.dtype
        own, stored = self.kernels.pallas, mla.kv_b.weight.info.dtype
        interpret, q, weights, up_value = own.interpret, p.q_nope, {}, None
        if index is None:
            up_key, up_value = mla.key_value_weight(dtype)
            q = jnp.einsum("brchn,mhn->brchm", q, up_key)
        else:
            weights, index = _stacked(mla.kv_b, index)

        def by_head(product, weights, index, x):
            values = product(
                weights["weight"], weights.get("scale"), stored, index, rearrange(x, "r c ... -> (r c) ..."), config.mla.v_head_dim,
                interpret=interpret, cores=own.cores,
            )  # fmt: skip
            return rearrange(values, "(r c) ... -> r c ...", r=len(x))

        def local(q, q_rope, weights, index, cache, layer, positions, length, tables, filled):
            q = by_head(absorb, weights, index, q[0]) if weights else q[0]
            if own.platform == "gpu":
                attend = partial(latent_attention, tiles=own.tiles, cores=own.cores)
            else:
                attend = tpu_attention.latent_attention
            out = attend(
                q, q_rope[0], cache, np.dtype(self.cache_dtype), layer, positions[0, :, 0], length[0], tables[0], filled,
                scale=config.softmax_scale, interpret=interpret,
            )  # fmt: skip
            return (by_head(expand_values, weights, index, out) if weights else out)[None]

        out = self._by_rank(local, q, p.q_rope, weights, index, cache, layer, rows)
        return out if weights else jnp.einsum("brchm,mhu->brchu", out, up_value)

    def _over_context(
        self, form: Form, prepared: Prepared, cache: Cache, layer, rows: Rows, chosen=None
    ) -> Float[Array, "B R C H W"]:
        """Apply a form's ``score`` and ``weigh`` on each rank to its rows' context, block by block. chosen: see ``attend``."""
        queries, weights, heads_first = list(prepared.queries), list(prepared.weights), form.heads_first
        batch, heads, (_, R, C) = self.batch, self.heads, rows.positions.shape
        G, pages = next(iter(cache.values())).shape[2], rows.tables.shape[-1]
        block_pages = max(1, min(pages, self.block(R, C) // G))
        num_blocks = -(-pages // block_pages)
        mla = self.config.mla
        arrays, widths = self.arrays, {"latent": mla.kv_lora_rank, "rope": mla.qk_rope_head_dim}

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
                if self._lanes > 1:
                    entries = {name: array[..., : widths[name]] for name, array in entries.items()}
                return {name: array.astype(queries[0].dtype) for name, array in entries.items()}

            def fetch_filled(index):
                return paging.read_filled(filled, pages_of(index))

            own = [q[0] for q in queries]

            def score(context):
                return form.score(own, weights, context) * self.config.softmax_scale

            def weigh(probs, context):
                return form.weigh(probs.astype(own[0].dtype), weights, context)

            if chosen is not None:
                fetch, score = _masked(fetch, score, chosen[0], block_pages * G)
            at = positions[0][:, None] if heads_first else positions[0][..., None]
            sizes = {"num_blocks": num_blocks, "block": block_pages * G}
            out = attend_in_blocks(at, fetch, score, weigh, filled=None if filled is None else fetch_filled, **sizes)
            out = jnp.swapaxes(out, 1, 2) if heads_first else out
            return out[None].astype(queries[0].dtype)

        by_head, kept = P(batch, None, None, heads), P(None, batch, None, heads if "key" in cache else None)
        specs = (
            [by_head] * len(queries),
            [P(None, heads)] * len(weights),
            dict.fromkeys(cache, kept),
            P(),
            *[P(batch)] * 4,
        )
        return self._shard_map(local, specs, by_head)(
            queries, weights, cache, layer, rows.positions, rows.tables, rows.filled, chosen
        )

    def _shard_map(self, function: Callable, in_specs, out_specs) -> Callable:
        return on_ranks(function, self.mesh, in_specs, out_specs)


def _stacked(matrix: Matrix, index: Int[Array, ""] | None) -> tuple[dict[str, Array], Int[Array, ""]]:
    """Return a matrix's stored arrays as a stack, and the layer's number in it. One layer's matrix becomes a stack of one."""
    arrays = {"weight": matrix.weight[...]} | ({"scale": matrix.scale[...]} if hasattr(matrix, "scale") else {})
    if arrays["weight"].ndim == 3:
        return arrays, index
    return {name: array[None] for name, array in arrays.items()}, jnp.int32(0)


def _masked(fetch: Callable, score: Callable, chosen: UInt32[Array, "R C _"], block: int) -> tuple[Callable, Callable]:
    """Return ``fetch`` and ``score`` for ``attend_in_blocks`` that mask the positions a query has not chosen."""

    def fetch_masked(index):
        return fetch(index) | {"chosen": unpack(chosen, index * block, block)}

    return fetch_masked, lambda c: jnp.where(c["chosen"][:, None], score(c), -jnp.inf)

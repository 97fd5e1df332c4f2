"""Sparse attention of a row group to chosen tokens of a paged cache.

Each DP rank scores its rows' contexts and chooses tokens for each query. It then copies the chosen entries in the order of positions to
temporary pages per query, which dense attention reads with its usual kernel. For a form that ``masks``, dense attention masks the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from dsjax.kernels.pallas import index as gpu_index
from dsjax.kernels.pallas import tpu_index
from dsjax.model import paging
from dsjax.model.attention import PagedMLA
from dsjax.model.cache_groups import CacheGroup
from dsjax.model.forms import Form
from dsjax.model.paging import Cache, Rows
from dsjax.model.parameters import reinterpret
from dsjax.model.sparse.choose import choose, index_scores, pack, positions_of
from dsjax.model.sparse.indexer import IndexProjections
from dsjax.model.sparse.precision import IndexScores
from dsjax.model.transformer import MLA, Projections
from sharding import fp8
from sharding.on_ranks import on_ranks

INDEX_ARRAYS = ("index", "index_scale")
"""Cache arrays of index keys; dense attention reads the others."""

CPU_BYTES, ACCELERATOR_BYTES = 8 * 2**20, 256 * 2**20
"""Approximate limit on a device, in bytes, of each of: scores of a block of queries over the context, the entries that these queries
gather, and the products of all index heads with a block of the context."""


@dataclass(frozen=True)
class SparseMLA(PagedMLA):
    """MLA that attends to the ``index_topk`` tokens with the highest scores, and caches each token's index key with its latent."""

    index_scores: IndexScores = IndexScores()

    def groups(self, layers: Iterable[int], entries: int = 1) -> tuple[CacheGroup, ...]:
        """Return cache groups of latents and index keys."""
        return super().groups(layers, entries, fp8_index=self.index_scores.fp8)

    @property
    def form_of_pages(self) -> dict[str, Any]:
        """The layout, and the options of index keys."""
        return super().form_of_pages | {"index_scores": dataclasses.asdict(self.index_scores)}

    def _entries(self, mla: MLA, p: Projections) -> Cache:
        return super()._entries(mla, p) | {"index": self.index_scores.rotate(p.index.key)}

    def _quantised(self, values: Cache, cache: Cache) -> Cache:
        values = super()._quantised(values, cache)
        if "index_scale" in cache:
            values["index"], values["index_scale"] = fp8.quantise(values["index"], powers=self.index_scores.powers)
        return values

    def attend(
        self, mla: MLA, form: Form, cache: Cache, layer: Int[Array, ""], index, rows: Rows, p: Projections
    ) -> Float[Array, "B R C D"] | Float[Array, "B R C H U"]:
        """Run ``PagedMLA.attend`` over the chosen tokens only."""
        dense = partial(super().attend, mla, form)
        latents = {name: array for name, array in cache.items() if name not in INDEX_ARRAYS}
        # If a table holds at most ``index_topk`` tokens, choose all without scoring.
        if rows.tables.shape[-1] * cache["index"].shape[2] <= self.config.mla.indexer.topk:
            return dense(latents, layer, index, rows, p)
        with jax.named_scope(f"attend_{form}"):
            selector = TokenSelector(self, cache, layer, rows)
            projections = dataclasses.replace(p, index=None)
            # Pallas kernels attend in latent space for every form, and do not support masks.
            if form.masks and self.backend(form) != "pallas":
                bitmask = _by_blocks(selector.bitmask, (rows.positions, p.index), selector.query_block(0))
                return dense(latents, layer, index, rows, projections, bitmask)
            entry_bytes = sum(math.prod(array.shape[3:]) * array.dtype.itemsize for array in cache.values())
            block = selector.query_block(selector.selected_pages * selector.page_size * entry_bytes)
            attend = partial(selector.attend_gathered, partial(dense, index=index))
            return _by_blocks(attend, (rows.positions, selector.active, p.index, projections), block)


def _by_blocks(function: Callable, arguments, block: int):
    """Apply ``function`` to arguments ``[B, R, C, …]``, to ``block`` queries of C at a time."""
    C = jax.tree.leaves(arguments)[0].shape[2]
    if block == C:
        return function(*arguments)
    blocks = -(-C // block)

    def split(array):
        # Pad the last block with copies of the last query; their results are dropped.
        filler = [(0, 0), (0, 0), (0, blocks * block - C)] + [(0, 0)] * (array.ndim - 3)
        padded = jnp.pad(array, filler, mode="edge")
        return rearrange(padded, "b r (block c) ... -> block b r c ...", c=block)

    out = jax.lax.map(lambda part: function(*part), jax.tree.map(split, arguments))
    return rearrange(out, "block b r c ... -> b r (block c) ...")[:, :, :C]


@dataclass(frozen=True)
class _MaskedSelection:
    """Selection of the plain implementation: a mask with at most ``k`` chosen positions."""

    chosen: Bool[Array, "R C S"]
    k: int

    @property
    def bitmask(self) -> UInt32[Array, "R C N"]:
        """One bit per position, 32 to a word."""
        return pack(self.chosen)

    @property
    def positions(self) -> tuple[Int[Array, "R C k"], Int[Array, "R C"]]:
        """Chosen positions in ascending order, and their number."""
        return positions_of(self.chosen, self.k)


class _ListedSelection(NamedTuple):
    """Selection of the native kernel, with the properties of ``_MaskedSelection``."""

    positions: tuple[Int[Array, "R C k"], Int[Array, "R C"]]
    bitmask: UInt32[Array, "R C N"]


@dataclass(frozen=True)
class TokenSelector:
    """Selects context tokens for the queries of a row group."""

    mla: SparseMLA
    cache: Cache
    layer: Int[Array, ""]  # number in the cache
    rows: Rows

    @property
    def page_size(self) -> int:
        """Number of cache slots of a page."""
        return self.cache["index"].shape[2]

    @property
    def pages(self) -> int:
        """Number of pages of a row's table."""
        return self.rows.tables.shape[2]

    @property
    def active(self) -> Bool[Array, "B R C"]:
        """Mask of queries that are not padding."""
        rows, C = self.rows, self.rows.positions.shape[2]
        if rows.length is None:
            return jnp.ones(rows.positions.shape, bool)
        return jnp.arange(C) < rows.length[..., None]

    @property
    def selected_pages(self) -> int:
        """Number of pages of a query's chosen entries.

        A multiple of dense attention's block, and at least two blocks if dense attention reads the context in several. One block is a
        plain softmax while several are accumulated, and choosing the whole context must give dense attention's bits.
        """
        block = max(1, min(self.pages, self.mla.block(self.rows.positions.shape[1], 1) // self.page_size))
        needed = -(-self.mla.config.mla.indexer.topk // (block * self.page_size))
        return block * max(needed, min(-(-self.pages // block), 2))

    @property
    def _on_cpu(self) -> bool:
        return self.mla.mesh.devices.flat[0].platform == "cpu"

    @property
    def _max_bytes(self) -> int:
        return CPU_BYTES if self._on_cpu else ACCELERATOR_BYTES

    def query_block(self, gathered_bytes: int) -> int:
        """Return the queries of each row processed at once, limited by memory, in equal blocks. gathered_bytes: of one query's entries."""
        _, R, C = self.rows.positions.shape
        query_bytes = R * max(4 * self.pages * self.page_size, gathered_bytes)
        return -(-C // min(-(-C * query_bytes // self._max_bytes), C))

    def context_block(self, queries: int) -> int:
        """Return the context positions scored at once for ``queries`` queries of a rank: a power of two pages."""
        page_bytes = 4 * queries * self.mla.config.mla.indexer.n_heads * self.page_size
        pages = max(1, min(self._max_bytes // page_bytes, self.pages))
        return self.page_size << (pages.bit_length() - 1)

    def bitmask(self, positions: Int[Array, "B R C"], index: IndexProjections) -> UInt32[Array, "B R C N"]:
        """Return the selection of queries at ``positions`` as a bitmask of context positions."""
        return self._select(lambda selection, *_: selection.bitmask[None], P(self.mla.batch), positions, index)

    def attend_gathered(
        self, attend: Callable[..., Array], positions, active, index: IndexProjections, p: Projections
    ) -> Array:
        """Attend to the chosen entries, copied to separate pages per query. Each query is a row of dense attention."""
        B, R, C = positions.shape
        entries, count = self.gather(positions, index)
        by_query = partial(rearrange, pattern="b r c ... -> b (r c) ...")
        pages = rearrange(jnp.arange(R * C * self.selected_pages), "(q page) -> q page", q=R * C)
        tables = jnp.broadcast_to(pages, (B, *pages.shape))
        length = by_query(active).astype(jnp.int32)
        query_rows = Rows(by_query(count)[..., None] - 1, tables, length)
        query_projections = jax.tree.map(lambda a: jnp.expand_dims(by_query(a), 2), p)
        with jax.named_scope("chosen"):
            out = attend(entries, jnp.int32(0), rows=query_rows, p=query_projections)
        return rearrange(out, "b (r c) 1 ... -> b r c ...", r=R)

    def gather(
        self, positions: Int[Array, "B R C"], index: IndexProjections
    ) -> tuple[dict[str, Array], Int[Array, "B R C"]]:
        """Return a one-layer cache with each query's chosen entries on ``selected_pages`` separate pages, and the number of entries."""
        k, G = self.selected_pages * self.page_size, self.page_size

        def copy(selection, latents, layer, tables):
            with jax.named_scope("gather"):
                chosen, count = selection.positions
                chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, k - chosen.shape[-1])))
                chosen = rearrange(chosen, "r c k -> r (c k)")
                read = {name: paging.read_tokens(array, layer, tables, chosen) for name, array in latents.items()}
                paged = {name: rearrange(a, "r (page g) ... -> 1 (r page) g ...", g=G) for name, a in read.items()}
                return paged, count[None]

        by_rank = P(self.mla.batch)
        specs = {name: P(None, self.mla.batch) for name in self.cache if name not in INDEX_ARRAYS}
        return self._select(copy, (specs, by_rank), positions, index)

    def _select(self, use: Callable, out_specs, positions: Int[Array, "B R C"], index: IndexProjections):
        """Select tokens on each DP rank. Return the result of ``use(selection, latents, layer, tables)`` with the rank's arrays."""
        mla, rows = self.mla, self.rows

        def local(cache, layer, tables, filled, positions, index):
            tables, positions = tables[0], positions[0]
            index = jax.tree.map(lambda array: array[0], index)
            index = dataclasses.replace(index, query=mla.index_scores.query(index.query))
            keys = {name: array for name, array in cache.items() if name in INDEX_ARRAYS}
            latents = {name: array for name, array in cache.items() if name not in INDEX_ARRAYS}
            k = mla.config.mla.indexer.topk
            if mla.kernels.name("index choice") == "native" and index.query.dtype == jnp.float32:
                native = mla.kernels.native.index_choice
                *listed, bitmask = native(index.query, index.weight, keys, layer, positions, tables, filled, k)
                return use(_ListedSelection(tuple(listed), bitmask), latents, layer, tables)
            scores = self._scores(keys, layer, tables, filled, positions, index)
            with jax.named_scope("choose"):
                chosen = choose(scores, k, 1 if self._on_cpu else 4)
            return use(_MaskedSelection(chosen, k), latents, layer, tables)

        by_rank = P(mla.batch)
        in_specs = ({name: P(None, *by_rank) for name in self.cache}, P(), *[by_rank] * 4)
        run = on_ranks(local, mla.mesh, in_specs, out_specs)
        return run(self.cache, self.layer, rows.tables, rows.filled, positions, index)

    def _scores(self, keys, layer, tables, filled, positions: Int[Array, "R C"], index) -> Float[Array, "R C S"]:
        """Return index scores over the whole context, −inf at positions that a query cannot see. S is a multiple of the block."""
        (R, C), arrays, kernels = positions.shape, self.mla.arrays, self.mla.kernels
        key_dtype = arrays["index"][1]
        in_pallas = kernels.name("index choice") == "pallas"
        kernel = tpu_index if in_pallas and kernels.pallas.platform == "tpu" else gpu_index
        if in_pallas and kernel.takes(index.query.shape[-1], key_dtype, self.page_size):
            context = keys, key_dtype, layer, positions, tables, filled
            return kernel.index_scores(index.query, index.weight, *context, interpret=kernels.pallas.interpret)
        block = self.context_block(R * C)
        block_pages, end = block // self.page_size, self.pages * self.page_size
        num_blocks = -(-self.pages // block_pages)
        tables = jnp.pad(tables, ((0, 0), (0, num_blocks * block_pages - self.pages)))

        def fill(number, scores):
            pages = jax.lax.dynamic_slice_in_dim(tables, number * block_pages, block_pages, axis=1)
            read = {
                name: reinterpret(paging.read(array, layer, pages), arrays[name][1]) for name, array in keys.items()
            }
            key = fp8.dequantise(read["index"], read["index_scale"]) if "index_scale" in read else read["index"]
            block_scores = index_scores(index.query, index.weight, key.astype(index.query.dtype))
            position = number * block + jnp.arange(block)
            visible = positions[..., None] >= position
            if filled is not None:
                is_own = jnp.minimum(positions, end - 1)[..., None] == position
                visible = is_own | (visible & paging.read_filled(filled, pages)[:, None])
            block_scores = jnp.where(visible & (position < end), block_scores, -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(scores, block_scores, number * block, axis=2)

        with jax.named_scope("index_scores"):
            scores = jnp.full((R, C, num_blocks * block), -jnp.inf, jnp.float32)
            if num_blocks == 1:
                return fill(jnp.int32(0), scores)
            needed = jnp.minimum(jnp.max(positions) // block + 1, num_blocks)
            return jax.lax.fori_loop(0, needed, fill, scores)

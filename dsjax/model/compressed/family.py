"""DeepSeek-V4's attention over a paged cache, an ``AttentionFamily``. Compressed entries are on context pages, windows on window pages.

On CPUs a token's result has the same bits in every chunk and batch: native kernels (``native/compressed.h``) attend token by token. The
JAX reference also computes each token separately, in loops whose body has the same shape in every program. On accelerators it computes
tokens in parallel. On GPUs Pallas kernels attend and score (``kernels/pallas/compressed.py`` and ``index.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import index as gpu_index
from dsjax.kernels.pallas.compressed import compressed_attention
from dsjax.kernels.table import Kernels
from dsjax.model import paging
from dsjax.model.cache_groups import CacheGroup
from dsjax.model.compressed.attention import CompressedAttention, CompressedProjections, entries
from dsjax.model.compressed.fold import empty, fold_row
from dsjax.model.compressed.groups import compressed_groups
from dsjax.model.compressed.precision import Format
from dsjax.model.compressed.rotations import Rotations, rotate_back
from dsjax.model.forms import Form
from dsjax.model.layer_values import Tokens
from dsjax.model.norm import Normalise, normalise, unweighted
from dsjax.model.paging import Cache, Rows
from dsjax.model.parameters import Multiply, value_of
from dsjax.model.rows import GroupShape
from dsjax.model.softmax import fold
from dsjax.model.sparse.attend import ACCELERATOR_BYTES, CPU_BYTES
from dsjax.model.sparse.choose import choose, index_scores, positions_of
from dsjax.model.sparse.precision import IndexScores
from sharding import Rules
from sharding.indices import take
from sharding.on_ranks import constrain, on_ranks

BLOCK = 128
"""Number of compressed entries that a token attends to at once."""
MATRICES = ("q_a", "q_b", "kv", "gate", "query", "head_weights", "o_b")
"""Names of a layer's ungrouped matrices, including its compressors' and its indexer's."""
IN_STACK = ("q_a", "q_b", "query", "o_b")
"""Names of matrices whose products are in the dtype of computation."""
GROUPS = {"csa": ("c4", "c4_index", "state4"), "hca": ("c128", None, "state128")}
"""Kind of layer → cache groups of its entries, index keys and states. Arrays have the names of their groups."""


@dataclass(frozen=True)
class Compressed:
    """Attention of the three kinds of layers, for a mesh. drafts: maximum draft tokens of a request; the state after each is kept."""

    mesh: Mesh
    rules: Rules
    config: ModelConfig
    cache_dtype: np.dtype
    drafts: int = 0
    kernels: Kernels = Kernels()
    index_scores: IndexScores = IndexScores()

    @property
    def native(self) -> bool:
        """Whether the native kernels attend; they need a float32 or FP8 cache."""
        stored = np.dtype(self.cache_dtype)
        return self.kernels.name("decode attention") == "native" and (stored == np.float32 or self.format.fp8)

    @property
    def format(self) -> Format:
        """The format of entries and index keys."""
        return Format(self.config, np.dtype(self.cache_dtype), self.index_scores.fp4)

    @property
    def in_place(self) -> bool:
        """Whether native or Pallas kernels attend, which read the cache in place. Those of Pallas are for GPUs and unquantised caches."""
        own = self.kernels.pallas
        is_pallas = own is not None and own.platform == "gpu" and self.kernels.name("decode attention") == "pallas"
        return self.native or (is_pallas and not self.format.fp8 and not self.format.fp4_keys)

    @property
    def batch(self) -> tuple[str, ...] | None:
        """Mesh axes of the DP ranks."""
        return self.rules.spec(("ranks",))[0]

    @property
    def heads(self) -> tuple[str, ...] | None:
        """Mesh axes that heads are sharded over."""
        return self.rules.spec(("heads",))[0]

    def groups(self, layers: Iterable[int], entries: int = 1) -> tuple[CacheGroup, ...]:
        """Return the cache groups of these layers, with ``entries`` tokens on a page."""
        fp4_keys = self.index_scores.fp4
        return compressed_groups(
            self.config, layers, np.dtype(self.cache_dtype), entries, drafts=self.drafts, fp4_keys=fp4_keys
        )

    @property
    def form_of_pages(self) -> dict[str, Any]:
        """The compression rates, the number of states on a window page, and the index keys' format if it is not the cache's."""
        index = {"index_scores": "fp4"} if self.index_scores.fp4 else {}
        return {"rates": list(self.config.v4.rates), "states": self.drafts + 1} | index

    def block(self, rows: int, chunk: int) -> int:
        """Return the positions of the smallest page."""
        return self.config.page_tokens

    def turns(self, groups: Sequence[GroupShape], context: int, page_size: int) -> dict[str, int]:
        """Return trip counts for one token: window pages (at most two), and blocks of entries to score and to attend to."""
        first, second = (context // rate for rate in self.config.v4.rates)
        entries = {"csa_scores": first, "csa_entries": min(first, self.config.v4.indexer.topk), "hca_entries": second}
        return {"window_pages": min(2, -(-context // page_size))} | {
            scope: -(-count // BLOCK) for scope, count in entries.items()
        }

    def backend(self, form: Form) -> str:
        """Return the backend, which is the same for prefill and decode."""
        return self.kernels.name("decode attention") if self.in_place else "plain"

    def in_stack(self, forms: Sequence[Form]) -> frozenset[str]:
        """Return ``MATRICES`` for native kernels, and those that are not multiplied in float32 for Pallas kernels."""
        return frozenset(MATRICES if self.kernels.name("other products") == "native" else IN_STACK)

    def project(
        self, weights: CompressedAttention, x: Float[Array, "B T D"], rotation: Rotations, forms: Sequence[Form], *,
        multiply: Multiply, normalise: Normalise = normalise,
    ) -> CompressedProjections:  # fmt: skip
        """Project tokens. Heads are sharded over ``tp``; all other values are replicated."""
        p = weights.project(x, rotation, multiply=multiply, normalise=normalise)

        def spread(path, array):
            of_heads = path[0].name == "query"
            return constrain(array, self.mesh, P(self.batch, None, self.heads) if of_heads else P(self.batch))

        return jax.tree_util.tree_map_with_path(spread, p)

    def output(
        self, weights: CompressedAttention, form: Form, found: Array, multiply: Multiply
    ) -> Float[Array, "*b D"]:
        """Apply the grouped output projection."""
        return weights.output(found, multiply)

    # Writing

    def cache_entries(
        self,
        weights: CompressedAttention,
        cache: Cache,
        layer: Int[Array, ""],
        tokens: Tokens,
        p: CompressedProjections,
    ) -> Cache:
        """Write each token's own entry, the entries of completed windows, and the states of unfinished ones."""
        with jax.named_scope("cache_write"):
            kind, batch, groups = weights.attention, self.batch, [group.shape for group in tokens.groups]
            rows = [(group.start, group.length, group.tables) for group in tokens.groups]
            made = (p.entry, *((p.gates, p.values) if kind != "window" else ()))
            names = [name for name in ("window", *GROUPS.get(kind, ())) if name is not None]
            own = {name: cache[name] for name in names}

            def local(own, at, slots, rows, made, norms):
                own["window"] = self._write("window", own, at, slots[0], made[0][0])
                first = 0
                for shape, group in zip(groups, rows, strict=True):
                    part = [array[0, first : first + shape.tokens] for array in made[1:]]
                    part = [array.reshape(shape.rows, shape.chunk, *array.shape[1:]) for array in part]
                    if part:
                        where = [array[0] for array in group]
                        own |= self._compress(kind, own, at, shape, where, part, norms, made[0].dtype)
                    first += shape.tokens
                return own

            of_cache = dict.fromkeys(own, P(None, batch))
            norms = weights.entry_norms
            specs = (of_cache, P(), P(batch), [(P(batch),) * 3] * len(rows), (P(batch),) * len(made), P())
            write = on_ranks(local, self.mesh, specs, of_cache)
            return cache | write(own, self._at(names, layer), tokens.window_slots, rows, made, norms)

    def _compress(self, kind: str, own: Cache, at, shape: GroupShape, where, made, norms, dtype) -> Cache:
        """Return the arrays of a compressor's groups, updated with a row group. where: starts, lengths and tables of its rows on this
        rank. made: gates and values ``[R, C, series, Y]``. dtype: compute dtype."""
        (start, length, tables), (gates, values) = where, made
        entry_name, index_name, state_name = GROUPS[kind]
        T, rate = own["window"].shape[2], self.config.v4.rate(kind)
        states, places = own[state_name], own[state_name].shape[2]
        series, C, ring = states.shape[3] // 3, shape.chunk, tables[:, shape.pages :]
        # Store a row's state after each token if the page has room for all of them, else at page ends and at the row's end.
        of_each = places >= C
        count = C if of_each else (C - 2) // T + 2
        numbers = jnp.arange(C)

        def state_slots(rows, positions):
            """Return the slots of the states after these positions of a row."""
            page = take(ring, (rows, positions // T % shape.windows))
            return page * places + positions % places

        def fold_one(row, gates, values):
            first, before = start[row], jnp.maximum(start[row] - 1, 0)
            flat = rearrange(states, "l w n a v -> (l w n) a v")
            base = at[state_name] * states.shape[1] * places
            found = take(flat, base + state_slots(row, before))
            state = jnp.where(first == 0, empty(series, states.shape[4]), found)
            kept = numbers if of_each else (first + numbers) // T - first // T
            return fold_row(state, gates, values, first, length[row], kept, count, rate)

        rows = jnp.arange(shape.rows)
        folded, means = self._each(fold_one, rows, gates, values)
        # States after the last token of each place.
        begin, end = start[:, None], (start + length)[:, None]
        last = begin + numbers if of_each else jnp.minimum((begin // T + jnp.arange(count) + 1) * T, end) - 1
        written = (last < end) & (last >= begin) & (of_each | (last // T - begin // T == jnp.arange(count)))
        slots = jnp.where(written, state_slots(rows[:, None], jnp.maximum(last, 0)), -1)
        found = {
            state_name: paging.write(states, at[state_name], slots.reshape(-1), folded.reshape(-1, *folded.shape[2:]))
        }
        # Entries of completed windows.
        window = begin // rate + jnp.arange((C + rate - 1) // rate)
        closes = window * rate + rate - 1
        token = jnp.clip(closes - begin, 0, C - 1)
        sums = jnp.take_along_axis(means, token[..., None], axis=1)

        def finish(mean, number):
            return entries(self.config, norms, mean, number * rate, dtype, self._normalise)

        each = self._each if not self.native else lambda function, *arrays: function(*arrays)
        made = each(finish, sums.reshape(-1, sums.shape[-1]), window.reshape(-1))
        page = jnp.take_along_axis(tables, jnp.minimum(closes // T, shape.pages - 1), axis=1)
        slot = jnp.where(closes < end, page * (T // rate) + window % (T // rate), -1).reshape(-1)
        for name, key in ((entry_name, "entry"), (index_name, "index")):
            if name is not None:
                found[name] = self._write(name, own, at, slot, made[key])
        return found

    # Reading

    def attend(
        self, weights: CompressedAttention, form: Form, cache: Cache, layer: Int[Array, ""], index, rows: Rows,
        p: CompressedProjections,
    ) -> Float[Array, "B R C H M"]:  # fmt: skip
        """Return the heads' values, rotated back. One softmax covers the sink, then window pages and entry blocks in ascending order."""
        with jax.named_scope(f"attend_{weights.attention}"):
            kind, batch, (_, R, C) = weights.attention, self.batch, rows.positions.shape
            names = [name for name in ("window", *GROUPS.get(kind, ())[:2]) if name is not None]
            length = jnp.full(rows.positions.shape[:2], C) if rows.length is None else rows.length
            active = jnp.arange(C) < length[..., None]
            positions = jnp.where(active, rows.positions, -1)
            queries = (p.query, *((p.index_query, p.index_weight) if kind == "csa" else ()))
            sink = value_of(weights.sink)

            def local(own, at, sink, positions, tables, ring, filled, queries):
                if self.in_place:
                    rows = positions[0], tables[0], ring[0], filled
                    return self._attend_in_place(kind, own, at, sink, *rows, *(array[0] for array in queries))[None]
                where = np.repeat(np.arange(R), C)
                one = _Attended(self.config, self.format, kind, own, at, sink, tables[0], ring[0], filled)
                flat = (array[0].reshape(R * C, *array.shape[3:]) for array in queries)
                out = self._each(one, jnp.asarray(where), positions[0].reshape(-1), *flat)
                return out.reshape(1, R, C, *out.shape[1:])

            by_rank, by_head = P(batch), P(batch, None, None, self.heads)
            specs = (
                dict.fromkeys(names, P(None, batch)),
                P(),
                P(self.heads),
                *[by_rank] * 4,
                (by_head, *[by_rank] * (len(queries) - 1)),
            )
            run = on_ranks(local, self.mesh, specs, by_head)
            own = {name: cache[name] for name in names}
            out = run(own, self._at(names, layer), sink, positions, rows.tables, rows.windows, rows.filled, queries)
            return rotate_back(p.rotation, out).astype(p.query.dtype)

    def _attend_in_place(
        self, kind: str, own: Cache, at, sink: Float[Array, "H"], positions: Int[Array, "R C"], tables: Int[Array, "R Pr"],
        ring: Int[Array, "R Pw"], filled: Array | None, query: Float[Array, "R C H M"], *index: Array,
    ) -> Float[Array, "R C H M"]:  # fmt: skip
        """Return the heads' values on one rank, computed by native or Pallas kernels. Arguments as in ``_Attended``."""
        config, chosen, count = self.config, None, jnp.zeros_like(positions)
        name, keys, _ = GROUPS.get(kind, (None, None, None))
        if name is not None:
            count = (positions + 1) // config.v4.rate(kind)
        if keys is not None and tables.shape[1] * own[name].shape[2] > config.v4.indexer.topk:
            choose_by = partial(self._choose_in_place, own[keys], at[keys], tables)
            scores = 4 * tables.shape[0] * tables.shape[1] * own[name].shape[2]
            together = (CPU_BYTES if self.native else ACCELERATOR_BYTES) // scores
            chosen, found = _in_blocks(choose_by, max(1, together), count - 1, *index)
            count = jnp.minimum(count, found)
        native, pallas = self.kernels.native, self.kernels.pallas
        if self.native:
            rotated = config.v4.qk_rope_head_dim if self.format.fp8 else 0
            attend = partial(native.compressed_attention, rotated=rotated)
        else:
            settings = {"interpret": pallas.interpret, "cores": pallas.cores}
            attend = partial(compressed_attention, stored=np.dtype(self.cache_dtype), **settings)
        return attend(
            query,
            sink,
            own["window"],
            own.get(name),
            (at["window"], at.get(name, at["window"])),
            positions,
            ring,
            tables,
            filled,
            chosen,
            count,
            span=config.v4.sliding_window,
            scale=config.softmax_scale,
        )

    def _choose_in_place(
        self, keys: Array, layer: Int[Array, ""], tables: Int[Array, "R Pr"], last: Int[Array, "R C"],
        query: Float[Array, "R C I A"], weight: Float[Array, "R C I"],
    ) -> tuple[Int[Array, "R C k"], Int[Array, "R C"]]:  # fmt: skip
        """Return the entries that queries attend to among entries 0 to ``last``, ascending, and their number."""
        topk, query = self.config.v4.indexer.topk, self.format.index_query(query)
        where = {"index_packed" if self.format.fp4_keys else "index": keys}, layer, last, tables
        if self.native:
            return self.kernels.native.index_choice(query, weight, *where, None, topk)[:2]
        stored, interpret = np.dtype(self.cache_dtype), self.kernels.pallas.interpret
        scores = gpu_index.index_scores(query, weight, where[0], stored, *where[1:], interpret=interpret)
        with jax.named_scope("choose"):
            return positions_of(choose(scores, topk, 1 if interpret else 4), topk)

    def _normalise(self, x: Float[Array, "*b M"], eps: float) -> Float[Array, "*b M"]:
        """Apply ``unweighted``, with the native kernel if native kernels attend."""
        return self.kernels.native.norm(x, jnp.ones(x.shape[-1:], x.dtype), eps) if self.native else unweighted(x, eps)

    def _at(self, names: Sequence[str], layer: Int[Array, ""]) -> dict[str, Int[Array, ""]]:
        """Return a cache layer's number in each group."""
        every = range(self.config.num_hidden_layers + self.config.num_nextn_predict_layers)
        groups, found = {group.name: group.layers for group in self.groups(every, self.config.page_tokens)}, {}
        for name in names:
            numbers = np.zeros(len(every), np.int32)
            numbers[list(groups[name])] = np.arange(len(groups[name]))
            found[name] = jnp.asarray(numbers)[layer]
        return found

    def _each(self, function: Callable, *arrays: Array) -> Any:
        """Map ``function`` over the rows of the arrays: sequentially on CPUs, with ``vmap`` elsewhere."""
        if self.mesh.devices.flat[0].platform != "cpu":
            return jax.vmap(function)(*arrays)
        count = len(arrays[0])
        if count == 1:  # XLA unrolls a loop of one iteration and may then fuse multiply-adds differently
            arrays = [jnp.concatenate([array, array]) for array in arrays]
        found = jax.lax.map(lambda row: function(*row), tuple(arrays))
        return jax.tree.map(lambda array: array[:count], found)

    def _write(self, name: str, own: Cache, at, slots: Int[Array, "T"], values: Array) -> Array:
        """Return the array of a group with these entries or index keys written."""
        return paging.write(own[name], at[name], slots, self.format.pack(name, values, own[name].dtype))


@dataclass(frozen=True)
class _Attended:
    """Attention of one token on one rank. at: the layer's number in each group. tables, ring: page tables of all rows."""

    config: ModelConfig
    format: Format
    kind: str
    cache: Cache
    at: dict[str, Int[Array, ""]]
    sink: Float[Array, "H"]
    tables: Int[Array, "R Pr"]
    ring: Int[Array, "R Pw"]
    filled: Array | None

    def __call__(self, row, position, query: Float[Array, "H M"], *index: Array) -> Float[Array, "H M"]:
        """Return the heads' values of a query at ``position``; −1 sees nothing. index: its index queries and their weights."""
        T, dtype = self.cache["window"].shape[2], query.dtype
        ring, table = self.ring[row], self.tables[row]

        def see(state, context, seen):
            scores = jnp.einsum("hw,sw->hs", query, context, preferred_element_type=jnp.float32)
            scores = jnp.where(seen, scores * self.config.softmax_scale, -jnp.inf)
            weigh = lambda weights: jnp.einsum(  # noqa: E731
                "hs,sw->hw", weights.astype(dtype), context, preferred_element_type=jnp.float32
            )
            return fold(state, scores, weigh)

        def page(number, state):
            own = take(ring, number % len(ring))
            at = number * T + jnp.arange(T)
            seen = (at <= position) & (at > position - self.config.v4.sliding_window)
            if self.filled is not None:
                seen &= take(self.filled, own) | (at == position)
            return see(state, self._read("window", own[None], jnp.arange(T), dtype), seen)

        first = jnp.maximum(position - self.config.v4.sliding_window + 1, 0) // T
        state = self.sink, jnp.ones_like(self.sink), jnp.zeros(query.shape, jnp.float32)
        with jax.named_scope("window_pages"):
            state = jax.lax.fori_loop(first, jnp.where(position < 0, 0, position // T + 1), page, state)
        if self.kind != "window":
            name, (places, count) = GROUPS[self.kind][0], self._chosen(table, position, index)

            def block(number, state):
                numbers = number * BLOCK + jnp.arange(BLOCK)
                at = numbers if places is None else take(places, numbers)
                return see(state, self._read(name, table, at, dtype), numbers < count)

            with jax.named_scope(f"{self.kind}_entries"):
                state = jax.lax.fori_loop(0, -(-count // BLOCK), block, state)
        _, total, out = state
        return out / total[:, None]

    def _chosen(self, table, position, index: Sequence[Array]) -> tuple[Int[Array, "k"] | None, Int[Array, ""]]:
        """Return the entries that the token attends to, ascending, and their number. None: all visible entries, which come first."""
        visible, topk = (position + 1) // self.config.v4.rate(self.kind), self.config.v4.indexer.topk
        entries = len(table) * self.cache[GROUPS[self.kind][0]].shape[2]
        if self.kind == "hca" or entries <= topk:
            return None, visible
        query, weight = self.format.index_query(index[0]), index[1]
        blocks = -(-entries // BLOCK)

        def score(number, scores):
            at = number * BLOCK + jnp.arange(BLOCK)
            keys = self._read("c4_index", table, at, query.dtype)
            found = index_scores(query[None, None], weight[None, None], keys[None])[0, 0]
            return jax.lax.dynamic_update_slice_in_dim(
                scores, jnp.where(at < visible, found, -jnp.inf), number * BLOCK, 0
            )

        scores = jnp.full((blocks * BLOCK,), -jnp.inf, jnp.float32)
        with jax.named_scope("csa_scores"):
            scores = jax.lax.fori_loop(0, -(-visible // BLOCK), score, scores)
        places, count = positions_of(choose(scores, topk), topk)
        return jnp.pad(places, (0, -topk % BLOCK)), count

    def _read(self, name: str, table: Int[Array, "Pr"], at: Int[Array, "N"], dtype) -> Float[Array, "N M"]:
        """Return the entries at positions ``at`` of a page table; positions past its end give arbitrary entries."""
        array = self.cache[name]
        found = paging.read_tokens(array, self.at[name], table[None], at[None])[0]
        return self.format.unpack(name, found).astype(dtype)


def _in_blocks(run: Callable, most: int, *queries: Shaped[Array, "R C ..."]) -> tuple[Array, ...]:
    """Call ``run`` on at most ``most`` queries of each row at a time, to limit the memory of their scores."""
    C = queries[0].shape[1]
    block = next(width for width in range(min(most, C), 0, -1) if C % width == 0)
    if block == C:
        return run(*queries)
    blocks = [rearrange(array, "r (n c) ... -> n r c ...", c=block) for array in queries]
    found = jax.lax.map(lambda block: run(*block), blocks)
    return tuple(rearrange(array, "n r c ... -> r (n c) ...") for array in found)

"""Cases for the native kernels, and what they should give, by loops in float64."""

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from fp4_weights import in_fp4
from hypothesis import strategies as st

from dsjax.bench.modules.setting import random_parameter
from dsjax.model.sparse import choose

STORED = {4: np.dtype(np.float32), 2: np.dtype(ml_dtypes.bfloat16), 1: np.dtype(ml_dtypes.float8_e4m3fn)}


def blocks(size):
    """Number of blocks of 128."""
    return -(-size // 128)


def scaled(values, scale, axes):
    """The values in float64, each times the scale of its block of 128 along these axes; scale None: the values alone."""
    if scale is None:
        return values.astype(np.float64)
    for axis in axes:
        scale = np.repeat(scale, 128, axis=axis).take(np.arange(values.shape[axis]), axis=axis)
    return values.astype(np.float64) * scale


def as_stored(array):
    """The array as it lies in memory on CPU: bits of what is narrower than float32."""
    return array.view({4: array.dtype, 2: np.uint16, 1: np.uint8}[array.itemsize])


def drawn_from(**values):
    """For hypothesis: a value of each of these, and a seed."""
    return {"seed": st.integers(0, 2**31)} | {name: st.sampled_from(list(own)) for name, own in values.items()}


ROUTINGS = ("all", "some", "one expert", "none")
WIDTHS = {"stored": [4, 2, 1]}
"""Bytes of a stored value."""
EXPERTS = drawn_from(
    X=range(1, 10), D=[1, 8, 37, 130, 300], F=[1, 7, 32, 140], N=[1, 2, 7, 60], K=range(1, 5), routing=ROUTINGS, **WIDTHS
)  # fmt: skip
"""What ``ExpertsCase.drawn`` is given; and so on for the other cases."""
DENSE = drawn_from(K=[8, 24, 72, 400], width=[1, 16, 37, 130, 300], parts=[1, 2], transposed=[False, True], **WIDTHS)
ATTENTION = drawn_from(
    R=range(1, 5), C=[1, 2, 5, 70], H=range(1, 10), **dict.fromkeys("NOU", range(1, 71)), M=[1, 16, 67, 128, 131],
    G=[1, 4, 16], longest=[1, 64, 65, 200], holes=[False, True], **WIDTHS,
)  # fmt: skip
INDEX = drawn_from(
    R=range(1, 4), C=range(1, 5), I=[1, 3, 16, 17, 40], A=[4, 16, 64, 256], G=[1, 4, 16], pages=[1, 7, 40, 150], k=[1, 5, 33],
    holes=[False, True], **WIDTHS,
)  # fmt: skip

_STRIDES = (1, 1, 2, 1, 2, 2, 1, 2, 1, 1, 2)


def spread(**factors):
    """Parametrise a test by as few cases as have every value of every factor, each factor at a pace of its own.

    The first case has the first value of every factor, so put there what is hardest together.
    """
    lists = {name: list(values) for name, values in factors.items()}
    count = max(map(len, lists.values()))
    paces = [next(s for s in (stride, 1) if math.gcd(s, len(own)) == 1)
             for stride, own in zip(_STRIDES, lists.values(), strict=False)]  # fmt: skip
    pairs = list(zip(lists.values(), paces, strict=True))
    cases = [tuple(own[at * pace % len(own)] for own, pace in pairs) for at in range(count)]
    return pytest.mark.parametrize(tuple(lists), cases)


@dataclass(frozen=True)
class ExpertsCase:
    """Weights of all layers as they are stored, of which the last layer is used; rows, ids, routing weights."""

    gate_up: np.ndarray
    down: np.ndarray
    scales: tuple[np.ndarray, np.ndarray] | None
    rows: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @classmethod
    def drawn(cls, seed, *, X, D, F, N, K, stored=4, layers=2, routing="some"):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(size=shape).astype(STORED[stored])  # noqa: E731
        scales = None
        if stored == 1:
            shapes = (layers, X, blocks(D), 2, blocks(F)), (layers, X, blocks(F), blocks(D))
            scales = tuple(rng.uniform(0.5, 2, size=shape).astype(np.float32) for shape in shapes)
        ids = np.stack([rng.permutation(max(X, K))[:K] for _ in range(N)]).astype(np.int32)
        ids[ids >= X] = -1
        if routing == "some":
            ids[rng.random(ids.shape) < 0.5] = -1
        elif routing == "one expert":
            ids[:], ids[:, 0] = -1, X - 1
        elif routing == "none":
            ids[:] = -1
        rows = rng.normal(size=(N, D)).astype(np.float32) / D**0.5
        matrices = draw(layers, X, D, 2, F), draw(layers, X, F, D)
        return cls(*matrices, scales, rows, ids, rng.random((N, K), dtype=np.float32))

    def params(self):
        """As ``ExpertProduct`` takes them on CPU, and the layer's number."""
        found = {"gate_up.weight": as_stored(self.gate_up), "down.weight": as_stored(self.down)}
        if self.scales:
            found |= {"gate_up.scale": self.scales[0], "down.scale": self.scales[1]}
        return found | {"layer": np.int32(len(self.down) - 1)}

    def in_fp4(self, form):
        """The last layer's weights in FP4 as ``ExpertProduct`` takes them, behind a layer of other bytes; and the case of their numbers."""
        packed, decoded = in_fp4({"gate_up.weight": self.gate_up[-1], "down.weight": self.down[-1]}, form)
        stacks = {name: np.stack([np.full_like(array, 0x77), array]) for name, array in packed.items()}
        numbers = replace(self, gate_up=decoded["gate_up.weight"][None], down=decoded["down.weight"][None])
        return stacks | {"layer": np.int32(1)}, numbers

    def first(self, count):
        """The case of these rows alone."""
        return replace(self, rows=self.rows[:count], ids=self.ids[:count], weights=self.weights[:count])

    def by(self, product, params=None, rows=None):
        """What ``ExpertProduct`` gives; params, rows: in place of the case's own."""
        given = self.params() if params is None else params, self.rows if rows is None else rows
        return np.asarray(jax.jit(product)(*given, self.ids, self.weights))

    def expected(self, limit=np.inf, rounded=lambda row: row):
        """Float64, one row and one expert at a time; and the sum of what was added up, to which rounding is relative.

        rounded: what activations ``[n]`` go through before they are multiplied.
        """
        scales = [scale[-1] for scale in self.scales or ()] or (None, None)
        gate_up, down = scaled(self.gate_up[-1], scales[0], (1, 3)), scaled(self.down[-1], scales[1], (1, 2))
        out, size = np.zeros(self.rows.shape), np.zeros(self.rows.shape)
        for n, k in np.argwhere(self.ids >= 0):
            x = self.ids[n, k]
            gate, up = np.einsum("d,dgf->gf", rounded(self.rows[n]).astype(np.float64), gate_up[x])
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            hidden = self.weights[n, k] * rounded(gate / (1 + np.exp(-gate)) * up)
            out[n] += hidden @ down[x]
            size[n] += np.abs(hidden) @ np.abs(down[x])
        return out, size

    def assert_near(self, found, factor=1e-6, **options):
        """Float32 sums of D and of F products: relative to what is added up, a few units in the last place of it."""
        expected, size = self.expected(**options)
        bound = factor * sum(self.down.shape[-2:]) ** 0.5 * (size + 1)
        assert np.all(np.abs(np.reshape(found, expected.shape) - expected) <= bound)


@dataclass(frozen=True)
class DenseCase:
    """A stack of two matrices ``[2, K, parts, width]`` (transposed ``[2, width, K]``) of which the last is used, their scales, and rows."""

    weight: np.ndarray
    scale: np.ndarray | None
    rows: np.ndarray
    transposed: bool

    @classmethod
    def drawn(cls, seed, *, K, width, N, parts=1, stored=4, transposed=False):
        """Transposed: as a tied head, which has one part and is not in FP8."""
        parts, stored = (1, max(stored, 2)) if transposed else (parts, stored)
        rng = np.random.default_rng(seed)
        shape = (2, width, K) if transposed else (2, K, parts, width)
        scale = None
        if stored == 1:
            scale = rng.uniform(0.5, 2, size=(2, blocks(K), parts, blocks(width))).astype(np.float32)
        weight = rng.normal(size=shape).astype(STORED[stored])
        return cls(weight, scale, rng.normal(size=(N, K)).astype(np.float32), transposed)

    def expected(self):
        """``[N, parts, width]`` in float64."""
        if self.transposed:
            return self.rows.astype(np.float64) @ self.weight[-1].T.astype(np.float64)
        weight = scaled(self.weight[-1], None if self.scale is None else self.scale[-1], (0, 2))
        return np.einsum("nk,kpj->npj", self.rows.astype(np.float64), weight)

    def assert_near(self, found):
        expected = self.expected()
        np.testing.assert_allclose(np.reshape(found, expected.shape), expected, atol=1e-5 * self.rows.shape[1] ** 0.5)


@dataclass(frozen=True)
class AttentionCase:
    """Queries, W^UK and W^UV (None: in latent space), the cache of all layers, of which the last is read, and its rows."""

    q_nope: np.ndarray
    q_rope: np.ndarray
    weights: np.ndarray | None
    latent: np.ndarray
    rope: np.ndarray
    start: np.ndarray
    length: np.ndarray
    tables: np.ndarray
    value_width: int
    filled: np.ndarray | None = None
    scales: np.ndarray | None = None
    scale: float = 0.25

    @classmethod
    def drawn(cls, seed, *, R, C, H, N, O, U, M, G, longest, stored=4, absorbs=True, holes=False, layers=2):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        length = rng.integers(0, C + 1, size=R).astype(np.int32)
        start = rng.integers(0, max(longest - C, 0) + 1, size=R).astype(np.int32)
        Pr = -(-max(longest, C) // G)
        pages = R * Pr + 1
        tables = 1 + rng.permutation(R * Pr).reshape(R, Pr).astype(np.int32)
        queries = draw(R, C, H, N if absorbs else M), draw(R, C, H, O)
        weights = draw(M, H, N + U) / M**0.5 if absorbs else None
        latent = draw(layers, pages, G, M).astype(STORED[stored])
        rope = draw(layers, pages, G, O).astype(STORED[max(stored, 2)])
        filled = (rng.random((pages, G)) < 0.6).astype(np.uint8) if holes else None
        scales = rng.uniform(0.5, 2, size=(layers, pages, G, blocks(M))).astype(np.float32) if stored == 1 else None
        return cls(*queries, weights, latent, rope, start, length, tables, U, filled, scales)

    def cache(self):
        """As the kernels take it."""
        found = {"latent": as_stored(self.latent), "rope": as_stored(self.rope)}
        return found if self.scales is None else found | {"scale": self.scales}

    def expected(self):
        """Float64, one row and query at a time; zero for padding."""
        R, C, H, _ = self.q_rope.shape
        G, M = self.latent.shape[2:]
        latents = scaled(self.latent[-1], None if self.scales is None else self.scales[-1], (2,))
        out = np.zeros((R, C, H, M if self.weights is None else self.value_width))
        for r in range(R):
            latent, rope = (a[self.tables[r]].reshape(-1, a.shape[-1]) for a in (latents, self.rope[-1].astype(float)))
            for c in range(self.length[r]):
                seen = min(self.start[r] + c + 1, self.tables.shape[1] * G)
                q = self.q_nope[r, c].astype(np.float64)
                if self.weights is not None:
                    q = np.einsum("hn,mhn->hm", q, self.weights[..., : q.shape[-1]])
                scores = (q @ latent[:seen].T + self.q_rope[r, c] @ rope[:seen].T) * self.scale
                if self.filled is not None:
                    visible = self.filled[self.tables[r]].reshape(-1)[:seen].astype(bool)
                    visible[-1] = True
                    scores = np.where(visible, scores, -np.inf)
                probs = np.exp(scores - scores.max(axis=1, keepdims=True))
                heads = probs / probs.sum(axis=1, keepdims=True) @ latent[:seen]
                if self.weights is not None:
                    heads = np.einsum("hm,mhu->hu", heads, self.weights[..., -self.value_width :])
                out[r, c] = heads
        return out

    def by(self, kernel, tiles, *, spare=0, dtype=np.float32, **options):
        """What a Pallas kernel gives by the interpreter, in float64.

        spare: numbers behind each entry of the cache, which hold zeros.
        """
        cache = self.cache()
        found = kernel(
            *(jnp.asarray(a, dtype) for a in (self.q_nope, self.q_rope)),
            {name: np.pad(array, [(0, 0)] * 3 + [(0, spare)]) for name, array in cache.items()} if spare else cache,
            self.latent.dtype,
            jnp.int32(len(self.latent) - 1),
            *(jnp.asarray(a) for a in (self.start, self.length, self.tables)),
            None if self.filled is None else jnp.asarray(self.filled, bool),
            scale=self.scale,
            interpret=True,
            tiles=tiles,
            **options,
        )
        return np.asarray(found).astype(np.float64)


@dataclass(frozen=True)
class CompressedCase:
    """Queries of rows, some of them padding; of two layers, the second's window pages and the first's entries are read."""

    query: np.ndarray
    sink: np.ndarray
    window: np.ndarray
    entries: np.ndarray | None
    positions: np.ndarray
    ring: np.ndarray
    tables: np.ndarray
    filled: np.ndarray | None
    chosen: np.ndarray | None
    count: np.ndarray
    span: int = 24
    scale: float = 0.25

    @classmethod
    def drawn(cls, seed, *, R, C, H, M, G, E, longest, kind, holes=False, stored=4):
        """kind: "window", "hca" (all entries of 4 tokens) or "csa" (up to 9 of them). E: entries of a page."""
        rng = np.random.default_rng(seed)
        draw = lambda *shape, dtype=np.float32: rng.normal(size=shape).astype(dtype)  # noqa: E731
        numbered = lambda pages: 1 + rng.permutation(R * pages).reshape(R, pages).astype(np.int32)  # noqa: E731
        positions = (rng.integers(0, longest, size=(R, 1)) + np.arange(C)).astype(np.int32)
        positions[0, C // 2 + 1 :] = -1
        Pw, Pr = (C + cls.span - 2) // G + 2, -(-max((longest + C) // 4, 1) // E)
        visible, chosen = (positions + 1) // 4, None
        if kind == "csa":
            chosen = np.full((R, C, 9), Pr * E, np.int32)
            for where in np.ndindex(R, C):
                found = np.sort(rng.permutation(visible[where])[:9])
                chosen[where][: len(found)] = found
        count = {"window": 0 * visible, "hca": visible, "csa": np.minimum(visible, 9)}[kind]
        return cls(
            draw(R, C, H, M),
            rng.uniform(-8, 8, size=H).astype(np.float32),
            draw(2, R * Pw + 1, G, M, dtype=STORED[stored]),
            None if kind == "window" else draw(2, R * Pr + 1, E, M, dtype=STORED[stored]),
            positions,
            numbered(Pw),
            numbered(Pr),
            rng.random((R * Pw + 1, G)) < 0.6 if holes else None,
            chosen,
            count.astype(np.int32),
        )

    def expected(self):
        """Float64, one query at a time; zero for padding."""
        out, G = np.zeros(self.query.shape), self.window.shape[2]
        for r, c in np.ndindex(*self.positions.shape):
            position, context = self.positions[r, c], []
            for at in range(max(position - self.span + 1, 0), position + 1):
                page = self.ring[r, at // G % self.ring.shape[1]]
                if self.filled is None or at == position or self.filled[page, at % G]:
                    context.append(self.window[-1, page, at % G])
            for i in range(self.count[r, c]):
                entry, E = i if self.chosen is None else self.chosen[r, c, i], self.entries.shape[2]
                context.append(self.entries[0, self.tables[r, entry // E], entry % E])
            if context:
                context = np.array(context).astype(np.float64)
                scores = self.query[r, c] @ context.T * self.scale
                highest = np.maximum(scores.max(axis=1), self.sink)[:, None]
                weights, sink = np.exp(scores - highest), np.exp(self.sink[:, None] - highest)
                out[r, c] = weights @ context / (weights.sum(axis=1, keepdims=True) + sink)
        return out

    def by(self, attend, dtype=np.float32, **options):
        """What a form of attention gives, in float64."""
        cached = [None if a is None else as_stored(a) for a in (self.window, self.entries)]
        rest = [self.positions, self.ring, self.tables, self.filled, self.chosen, self.count]
        given = self.query.astype(dtype), self.sink, *cached, (np.int32(1), np.int32(0)), *rest
        run = jax.jit(functools.partial(attend, span=self.span, scale=self.scale, **options))
        out = run(*jax.tree.map(jnp.asarray, given))
        assert out.dtype == dtype
        return np.asarray(out).astype(np.float64)


@dataclass(frozen=True)
class IndexCase:
    """Index queries, weights of heads, keys of all layers as they are stored, of which the last layer is used; positions and pages.

    All numbers are so small and round that no order of summing them rounds: choices are equal exactly, and many scores are.
    """

    query: np.ndarray
    weight: np.ndarray
    keys: np.ndarray
    scale: np.ndarray | None
    positions: np.ndarray
    tables: np.ndarray
    filled: np.ndarray | None
    k: int

    @classmethod
    def drawn(cls, seed, *, R, C, I, A, G, pages, k, stored=4, holes=False, layers=2):
        rng = np.random.default_rng(seed)
        total = R * pages + 2
        tables = rng.permutation(total)[: R * pages].reshape(R, pages).astype(np.int32)
        start = rng.integers(0, max(1, pages * G - C), size=(R, 1))
        scale = 2.0 ** rng.integers(-1, 2, size=(layers, total, G, blocks(A))) if stored == 1 else None
        scale = None if scale is None else scale.astype(np.float32)
        query, weight = (rng.integers(-2, 3, size=shape).astype(np.float32) for shape in ((R, C, I, A), (R, C, I)))
        keys = rng.integers(-2, 3, size=(layers, total, G, A)).astype(STORED[stored])
        filled = rng.integers(0, 4, size=(total, G)).astype(bool) if holes else None
        return cls(query, weight, keys, scale, (start + np.arange(C)).astype(np.int32), tables, filled, k)

    def cache(self):
        """As the step has it on CPU."""
        return {"index": as_stored(self.keys)} | ({} if self.scale is None else {"index_scale": self.scale})

    def expected(self):
        """The chosen positions of each query, in order."""
        keys, found = scaled(self.keys[-1], None if self.scale is None else self.scale[-1], (2,)), []
        for r, c in np.ndindex(*self.positions.shape):
            at = min(self.positions[r, c], self.tables.shape[1] * keys.shape[1] - 1)  # padding may lie behind the table
            slots = np.arange(at + 1)
            pages, slots = self.tables[r, slots // keys.shape[1]], slots % keys.shape[1]
            products = np.maximum(keys[pages, slots] @ self.query[r, c].T, 0)
            scores = products @ self.weight[r, c].astype(np.float64)
            if self.filled is not None:
                hidden = ~self.filled[pages, slots]
                hidden[at] = False
                scores[hidden] = -np.inf
            best = np.argsort(-scores, kind="stable")[: self.k]
            found.append(sorted(int(position) for position in best if scores[position] > -np.inf))
        return found

    def assert_chosen(self, chosen):
        """``[R, C, k]``: the expected positions in order, and zeros where there are fewer."""
        expected = [own + [0] * (self.k - len(own)) for own in self.expected()]
        assert np.reshape(chosen, (-1, self.k)).tolist() == expected

    def chosen_by(self, index_scores):
        """The positions that are chosen by a Pallas kernel's scores, query by query."""
        scores = index_scores(
            *(jnp.asarray(a) for a in (self.query, self.weight)),
            self.cache(),
            self.keys.dtype,
            jnp.int32(len(self.keys) - 1),
            *(jnp.asarray(a) for a in (self.positions, self.tables)),
            None if self.filled is None else jnp.asarray(self.filled),
            interpret=True,
        )
        # The interpreter calls back into Python. A computation dispatched meanwhile can take the thread it needs, and both hang.
        marked = np.asarray(choose(jax.block_until_ready(scores), self.k))
        return [np.flatnonzero(row).tolist() for row in marked.reshape(-1, marked.shape[-1])]


def shared_expert_of(step, sliced=False):
    """The shared expert of the second layer with random weights, for three tokens.

    sliced: the layer's matrices are cut out of the stack before the product, and not read in it.
    """
    params = {path: random_parameter(info, 3) for path, info in step.table.infos.items() if "moe_layers" in path}
    module = step.table.bind(dict.fromkeys(step.table.infos, jnp.zeros(())) | params).moe_layers.moe.shared
    if sliced:
        graph, state = nnx.split(module)
        module = nnx.merge(graph, jax.tree.map(lambda array: array[1], state))
    width = step.config.hidden_size
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, width)), jnp.float32)
    return np.asarray(jax.jit(lambda x: module(x, step.products.multiply(jnp.int32(1))))(x))

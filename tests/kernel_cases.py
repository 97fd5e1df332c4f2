"""Cases for the native kernels, and what they should give, by loops in float64."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from dsjax.bench.modules.setting import random_parameter
from dsjax.model.sparse import choose

STORED = {4: np.dtype(np.float32), 2: np.dtype(ml_dtypes.bfloat16), 1: np.dtype(ml_dtypes.float8_e4m3fn)}


def blocks(size):
    """Number of blocks of 128."""
    return -(-size // 128)


def as_stored(array):
    """The array as it lies in memory on CPU: bits of what is narrower than float32."""
    return array.view({4: array.dtype, 2: np.uint16, 1: np.uint8}[array.itemsize])


EXPERTS = {
    "seed": st.integers(0, 2**31),
    "X": st.integers(1, 9),
    "D": st.sampled_from([1, 8, 37, 130, 300]),
    "F": st.sampled_from([1, 7, 32, 140]),
    "N": st.sampled_from([1, 2, 7, 60]),
    "K": st.integers(1, 4),
    "stored": st.sampled_from([4, 2, 1]),
    "routing": st.sampled_from(["all", "some", "one expert", "none"]),
}
"""What ``ExpertsCase.drawn`` is given, for hypothesis; and so on for the other cases."""
DENSE = {
    "seed": st.integers(0, 2**31),
    "K": st.sampled_from([8, 24, 72, 400]),
    "width": st.sampled_from([1, 16, 37, 130, 300]),
    "parts": st.sampled_from([1, 2]),
    "stored": st.sampled_from([4, 2, 1]),
    "transposed": st.booleans(),
}
ATTENTION = {
    "seed": st.integers(0, 2**31),
    "R": st.integers(1, 4),
    "C": st.sampled_from([1, 2, 5, 70]),
    "H": st.integers(1, 9),
    **{name: st.integers(1, 70) for name in "NOU"},
    "M": st.sampled_from([1, 16, 67, 128, 131]),
    "G": st.sampled_from([1, 4, 16]),
    "longest": st.sampled_from([1, 64, 65, 200]),
    "stored": st.sampled_from([4, 2, 1]),
    "holes": st.booleans(),
}
INDEX = {
    "seed": st.integers(0, 2**31),
    "R": st.integers(1, 3),
    "C": st.integers(1, 4),
    "I": st.sampled_from([1, 3, 16, 17, 40]),
    "A": st.sampled_from([4, 16, 64, 256]),
    "G": st.sampled_from([1, 4, 16]),
    "pages": st.sampled_from([1, 7, 40, 150]),
    "k": st.sampled_from([1, 5, 33]),
    "stored": st.sampled_from([4, 2, 1]),
    "holes": st.booleans(),
}

_STRIDES = (1, 1, 2, 1, 2, 2, 1, 2, 1, 1, 2)


def spread(**factors):
    """Parametrise a test by as few cases as have every value of every factor, each factor at a pace of its own.

    The first case has the first value of every factor, so put there what is hardest together.
    """
    lists = {name: list(values) for name, values in factors.items()}
    count = max(map(len, lists.values()))
    paces = [next(s for s in (stride, 1) if math.gcd(s, len(own)) == 1)
             for stride, own in zip(_STRIDES, lists.values(), strict=False)]  # fmt: skip
    cases = [
        tuple(own[at * pace % len(own)] for own, pace in zip(lists.values(), paces, strict=True)) for at in range(count)
    ]
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
        return cls(
            draw(layers, X, D, 2, F), draw(layers, X, F, D), scales, rows, ids, rng.random((N, K), dtype=np.float32)
        )

    def params(self):
        """As ``ExpertProduct`` takes them on CPU, and the layer's number."""
        found = {"gate_up.weight": as_stored(self.gate_up), "down.weight": as_stored(self.down)}
        if self.scales:
            found |= {"gate_up.scale": self.scales[0], "down.scale": self.scales[1]}
        return found | {"layer": np.int32(len(self.down) - 1)}

    def expected(self, limit=np.inf):
        """Float64, one row and one expert at a time; and the sum of what was added up, to which rounding is relative."""
        gate_up, down = self.gate_up[-1].astype(np.float64), self.down[-1].astype(np.float64)
        if self.scales:
            gate_up = gate_up * self._spread(self.scales[0][-1], gate_up.shape, (1, 3))
            down = down * self._spread(self.scales[1][-1], down.shape, (1, 2))
        out, size = np.zeros(self.rows.shape), np.zeros(self.rows.shape)
        for n, k in np.argwhere(self.ids >= 0):
            x = self.ids[n, k]
            gate, up = np.einsum("d,dgf->gf", self.rows[n].astype(np.float64), gate_up[x])
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            hidden = self.weights[n, k] * gate / (1 + np.exp(-gate)) * up
            out[n] += hidden @ down[x]
            size[n] += np.abs(hidden) @ np.abs(down[x])
        return out, size

    @staticmethod
    def _spread(scale, shape, axes):
        for axis in axes:
            scale = np.repeat(scale, 128, axis=axis).take(np.arange(shape[axis]), axis=axis)
        return scale


@dataclass(frozen=True)
class DenseCase:
    """A stack of two matrices ``[2, K, parts, width]`` (transposed ``[2, width, K]``) of which the last is used, their scales, and rows."""

    weight: np.ndarray
    scale: np.ndarray | None
    rows: np.ndarray
    transposed: bool

    @classmethod
    def drawn(cls, seed, *, K, width, N, parts=1, stored=4, transposed=False):
        rng = np.random.default_rng(seed)
        shape = (2, width, K) if transposed else (2, K, parts, width)
        scale = None
        if stored == 1:
            scale = rng.uniform(0.5, 2, size=(2, blocks(K), parts, blocks(width))).astype(np.float32)
        weight = rng.normal(size=shape).astype(STORED[stored])
        return cls(weight, scale, rng.normal(size=(N, K)).astype(np.float32), transposed)

    def stored(self):
        return as_stored(self.weight)

    def expected(self):
        """``[N, parts, width]`` in float64."""
        weight = self.weight[-1].astype(np.float64)
        if self.transposed:
            return self.rows.astype(np.float64) @ weight.T[:, None].reshape(weight.shape[1], -1)
        if self.scale is not None:
            weight = weight * ExpertsCase._spread(self.scale[-1], weight.shape, (0, 2))
        return np.einsum("nk,kpj->npj", self.rows.astype(np.float64), weight)


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
        return cls(
            draw(R, C, H, N if absorbs else M),
            draw(R, C, H, O),
            draw(M, H, N + U) / M**0.5 if absorbs else None,
            draw(layers, pages, G, M).astype(STORED[stored]),
            draw(layers, pages, G, O).astype(STORED[max(stored, 2)]),
            start,
            length,
            tables,
            U,
            (rng.random((pages, G)) < 0.6).astype(np.uint8) if holes else None,
            rng.uniform(0.5, 2, size=(layers, pages, G, blocks(M))).astype(np.float32) if stored == 1 else None,
        )

    def cache(self):
        """As the kernels take it."""
        found = {"latent": as_stored(self.latent), "rope": as_stored(self.rope)}
        return found if self.scales is None else found | {"scale": self.scales}

    def expected(self):
        """Float64, one row and query at a time; zero for padding."""
        R, C, H, _ = self.q_rope.shape
        G, M = self.latent.shape[2:]
        latents = self.latent[-1].astype(np.float64)
        if self.scales is not None:
            latents = latents * np.repeat(self.scales[-1], 128, axis=-1)[..., :M]
        out = np.zeros((R, C, H, M if self.weights is None else self.value_width))
        for r in range(R):
            latent, rope = (
                a[self.tables[r]].reshape(-1, a.shape[-1]).astype(np.float64) for a in (latents, self.rope[-1])
            )
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
        return cls(
            rng.integers(-2, 3, size=(R, C, I, A)).astype(np.float32),
            rng.integers(-2, 3, size=(R, C, I)).astype(np.float32),
            rng.integers(-2, 3, size=(layers, total, G, A)).astype(STORED[stored]),
            None if scale is None else scale.astype(np.float32),
            (start + np.arange(C)).astype(np.int32),
            tables,
            rng.integers(0, 4, size=(total, G)).astype(bool) if holes else None,
            k,
        )

    def cache(self):
        """As the step has it on CPU."""
        return {"index": as_stored(self.keys)} | ({} if self.scale is None else {"index_scale": self.scale})

    def expected(self):
        """The chosen positions of each query, in order."""
        keys = self.keys[-1].astype(np.float64)
        if self.scale is not None:
            keys = keys * self.scale[-1].astype(np.float64).repeat(128, axis=-1)[..., : keys.shape[-1]]
        found = []
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


def attention_by(kernel, case, tiles, *, spare=0, dtype=np.float32, **options):
    """What a Pallas kernel gives for an ``AttentionCase``, by the interpreter, in float64.

    spare: numbers behind each entry of the cache, which hold zeros.
    """
    cache = case.cache()
    found = kernel(
        *(jnp.asarray(a, dtype) for a in (case.q_nope, case.q_rope)),
        {name: np.pad(array, [(0, 0)] * 3 + [(0, spare)]) for name, array in cache.items()} if spare else cache,
        case.latent.dtype,
        jnp.int32(len(case.latent) - 1),
        *(jnp.asarray(a) for a in (case.start, case.length, case.tables)),
        None if case.filled is None else jnp.asarray(case.filled, bool),
        scale=case.scale,
        interpret=True,
        tiles=tiles,
        **options,
    )
    return np.asarray(found).astype(np.float64)


def choices_by(index_scores, case):
    """The positions that are chosen by a Pallas kernel's scores of an ``IndexCase``, query by query."""
    scores = index_scores(
        *(jnp.asarray(a) for a in (case.query, case.weight)),
        case.cache(),
        case.keys.dtype,
        jnp.int32(len(case.keys) - 1),
        *(jnp.asarray(a) for a in (case.positions, case.tables)),
        None if case.filled is None else jnp.asarray(case.filled),
        interpret=True,
    )
    marked = np.asarray(choose(scores, case.k))
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
    return np.asarray(jax.jit(lambda x: module(x, step.in_place.multiply(jnp.int32(1))))(x))

"""The Pallas kernel of DeepSeek-V4's attention, run by its interpreter, gives what loops in float64 give."""

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import STORED, as_stored, spread

from dsjax.kernels.pallas import addressing
from dsjax.kernels.pallas.attention import AttentionTiles, split_context
from dsjax.kernels.pallas.compressed import compressed_attention, compressed_cost
from dsjax.kernels.pallas.shared_memory import Cores

pytestmark = pytest.mark.slow  # all together
SPAN, SCALE = 24, 0.25


@dataclass(frozen=True)
class Case:
    """Queries of rows, of which some are padding; window pages and entries of all layers, of which the last is read."""

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

    @classmethod
    def drawn(cls, seed, *, R, C, H, M, G, E, longest, kind, holes=False, stored=4):
        """kind: "window", "hca" (all entries of 4 tokens) or "csa" (up to 9 of them). E: entries of a page."""
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        positions = (rng.integers(0, longest, size=(R, 1)) + np.arange(C)).astype(np.int32)
        positions[0, C // 2 + 1 :] = -1
        Pw = (C + SPAN - 2) // G + 2
        most = (longest + C) // 4
        Pr = -(-max(most, 1) // E)
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
            draw(2, R * Pw + 1, G, M).astype(STORED[stored]),
            None if kind == "window" else draw(2, R * Pr + 1, E, M).astype(STORED[stored]),
            positions,
            1 + rng.permutation(R * Pw).reshape(R, Pw).astype(np.int32),
            1 + rng.permutation(R * Pr).reshape(R, Pr).astype(np.int32),
            rng.random((R * Pw + 1, G)) < 0.6 if holes else None,
            chosen,
            count.astype(np.int32),
        )

    def expected(self):
        """Float64, one query at a time; zero for padding."""
        out, G = np.zeros(self.query.shape), self.window.shape[2]
        for r, c in np.ndindex(*self.positions.shape):
            position, context = self.positions[r, c], []
            for at in range(max(position - SPAN + 1, 0), position + 1):
                page = self.ring[r, at // G % self.ring.shape[1]]
                if self.filled is None or at == position or self.filled[page, at % G]:
                    context.append(self.window[-1, page, at % G])
            for i in range(self.count[r, c]):
                entry, E = i if self.chosen is None else self.chosen[r, c, i], self.entries.shape[2]
                context.append(self.entries[-1, self.tables[r, entry // E], entry % E])
            if context:
                context = np.array(context).astype(np.float64)
                scores = self.query[r, c] @ context.T * SCALE
                highest = np.maximum(scores.max(axis=1), self.sink)[:, None]
                weights, sink = np.exp(scores - highest), np.exp(self.sink[:, None] - highest)
                out[r, c] = weights @ context / (weights.sum(axis=1, keepdims=True) + sink)
        return out

    def found(self, tiles=(16, 16), dtype=np.float32, **options):
        """What the kernel gives, in float64."""
        rows, positions = tiles
        layer, arrays = jnp.int32(1), [jnp.asarray(self.query, dtype), jnp.asarray(self.sink)]
        cached = [None if a is None else jnp.asarray(as_stored(a)) for a in (self.window, self.entries)]
        rest = [self.positions, self.ring, self.tables, self.filled, self.chosen, self.count]
        out = compressed_attention(
            *arrays, *cached, (layer, layer), *(None if a is None else jnp.asarray(a) for a in rest), span=SPAN,
            scale=SCALE, stored=self.window.dtype, interpret=True, tiles=AttentionTiles(rows, positions), **options,
        )  # fmt: skip
        assert out.dtype == dtype
        return np.asarray(out).astype(np.float64)


@spread(
    seed=range(6),
    R=[3, 1, 2],
    C=[7, 1, 2],
    H=[20, 2, 16],
    M=[40, 16, 130, 1],
    pages=[(8, 1), (32, 8), (5, 3)],
    longest=[200, 20, 1],
    kind=["csa", "hca", "window"],
    holes=[True, False],
    stored=[4, 2],
    tiles=[(16, 16), (32, 32)],
)
def test_attention_is_softmax_over_sink_window_and_entries(
    seed, R, C, H, M, pages, longest, kind, holes, stored, tiles
):
    """A ring goes around; one query sees a single token. pages: slots of window pages and of pages of entries."""
    sizes = {"R": R, "C": C, "H": H, "M": M, "longest": longest, **dict(zip("GE", pages, strict=True))}
    case = Case.drawn(seed, **sizes, kind=kind, holes=holes, stored=stored)
    # Scores of M products reach 15; e to an error of a few units in their last place.
    np.testing.assert_allclose(case.found(tiles), case.expected(), atol=2e-4, rtol=2e-4)


def test_splitting_a_querys_entries_over_every_core_changes_a_result_by_rounding_alone():
    case = Case.drawn(3, R=2, C=1, H=4, M=16, G=8, E=4, longest=900, kind="hca")
    assert split_context(2, 2 + 16, cores=132) > split_context(2, 2 + 16, cores=2) == 1
    split, whole = (case.found(cores=Cores(count=count)) for count in (132, 2))
    assert np.any(split != whole)
    np.testing.assert_allclose(split, whole, atol=2e-6)
    np.testing.assert_allclose(split, case.expected(), atol=2e-4)


def test_bfloat16_queries_and_cache_give_bfloat16_of_nearly_the_same():
    case = Case.drawn(4, R=2, C=2, H=4, M=32, G=8, E=4, longest=100, kind="csa", stored=2)
    rounded = case.query.astype(ml_dtypes.bfloat16).astype(np.float32)
    case = Case(**{**case.__dict__, "query": rounded})
    # Weights and results are rounded to 8 bits.
    np.testing.assert_allclose(case.found(dtype=jnp.bfloat16), case.expected(), atol=0.02, rtol=0.02)


def test_layers_that_are_copied_are_read_as_the_cache_is(monkeypatch):
    case = Case.drawn(5, R=2, C=2, H=3, M=16, G=8, E=4, longest=60, kind="hca")
    expected = case.found()
    monkeypatch.setattr(addressing, "addressable", lambda array: False)
    np.testing.assert_array_equal(case.found(), expected)


def test_a_call_costs_its_tiles_products_and_each_vector_once():
    tiles, bf16 = AttentionTiles(), jnp.dtype(jnp.bfloat16)
    told = compressed_cost(32, 1, 64, 512, 128, 1024, False, bf16, 2, tiles, 4)
    assert told.flops == 2 * 32 * 64 * (128 + 1024) * 2 * 512
    assert told.bytes == 32 * (128 + 1024) * 1024 + 32 * 64 * 1024 + 4 * 32 * 64 * 513 * 4
    # A prompt's queries share a window and all entries, and each reads the entries that it chose.
    for chosen, reads in ((False, 1024), (True, 256 * 512)):
        entries = 512 if chosen else 1024
        prompt = compressed_cost(1, 256, 64, 512, 128, entries, chosen, bf16, 2, tiles, 1)
        assert prompt.bytes == (128 + 255 + reads) * 1024 + 2 * 256 * 64 * 1024

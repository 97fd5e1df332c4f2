"""Attention to chosen tokens of the paged cache: what a plain loop over queries gives, and dense attention's bits where all are chosen."""

import dataclasses
import functools
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import MODELS, TINY

from dsjax.config import ModelConfig
from dsjax.kernels.pallas import PallasKernels
from dsjax.kernels.table import Kernels
from dsjax.model.attention import PagedMLA
from dsjax.model.forms import FORMS
from dsjax.model.paging import Rows
from dsjax.model.parameters import storage_dtype
from dsjax.model.sparse import IndexProjections, IndexScores
from dsjax.model.sparse import attend as sparse_attend
from dsjax.model.sparse.attend import INDEX_ARRAYS, SparseMLA
from dsjax.model.transformer import Projections
from sharding import MeshSpec, Rules, fp8

pytestmark = pytest.mark.slow  # all together

CONFIG = ModelConfig.from_dict(TINY | MODELS["v3.2"])
H, N, O, M, U = 8, 8, 4, 16, 8
I, A, TOPK = CONFIG.mla.indexer.n_heads, CONFIG.mla.indexer.head_dim, CONFIG.mla.indexer.topk
G, PAGES, R = 4, 100, 2


def attention(form: str, *, dense=False, topk=TOPK, **options) -> PagedMLA:
    spec, family = MeshSpec.parse("dp=1"), PagedMLA if dense else SparseMLA
    config = ModelConfig.from_dict(TINY if dense else TINY | MODELS["v3.2"] | {"index_topk": topk})
    given = spec.build(jax.devices()[:1]), Rules.for_mesh(spec), config, FORMS[form].layouts[0]
    return family(*given, np.dtype(np.float32), **options)


@functools.cache
def drawn(pages: int):
    """Weights, a context of ``pages`` pages for each row, and the projections of all its tokens."""
    rng = np.random.default_rng(pages)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    S = pages * G
    stored = SimpleNamespace(weight=SimpleNamespace(info=SimpleNamespace(dtype=jnp.float32)))
    mla = SimpleNamespace(key_value_weight=lambda dtype, w=(draw(M, H, N), draw(M, H, U)): w, kv_b=stored)
    tables = rng.permutation(np.arange(1, PAGES))[: R * pages].reshape(1, R, pages)
    return mla, projections(draw, R, S), tables


def projections(make, R, S):
    """The projections of S tokens of each row. make: an array of a shape."""
    index = [make(1, R, S, *own) for own in ((I, A), (I,), (A,))]
    own = [make(1, R, S, *own) for own in ((H, N), (H, O), (24,), (M,), (O,))]
    return Projections(*own, IndexProjections(*index))


def run(paged: PagedMLA, form: str, pages: int, chunk: int, start: int, filled=None):
    """Attention of ``chunk`` queries of each row from position ``start`` on, after the whole context was written."""
    mla, p, tables = drawn(pages)
    positions = np.arange(pages * G)
    slots = (tables[..., positions // G] * G + positions % G).reshape(1, -1)
    flat = jax.tree.map(lambda a: a.reshape(1, -1, *a.shape[3:]), p)
    empty = lambda width, dtype: jnp.zeros((1, PAGES, G, *width), storage_dtype(dtype, "cpu"))  # noqa: E731
    cache = {name: empty(*kept) for name, kept in paged.arrays.items()}
    part = jax.tree.map(lambda a: a[:, :, start : start + chunk], p)
    if paged.config.mla.indexer is None:
        flat, part = (dataclasses.replace(one, index=None) for one in (flat, part))
    at = np.broadcast_to(start + np.arange(chunk), (1, R, chunk))

    @jax.jit
    def both(flat, part, cache, filled):
        tokens = SimpleNamespace(slots=jnp.asarray(slots))
        written = paged.cache_entries(mla, cache, jnp.int32(0), tokens, flat)
        rows = Rows(jnp.asarray(at), jnp.asarray(tables), None, filled)
        return paged.attend(mla, FORMS[form], written, jnp.int32(0), None, rows, part)

    return np.asarray(both(flat, part, cache, filled))[0]


def expected(pages: int, chunk: int, start: int, *, key=lambda k: k, query=lambda q: q, topk=TOPK, hidden=()):
    """Attend in NumPy by a loop over queries. hidden: positions that hold nothing, which only a query there sees."""
    mla, p, _ = drawn(pages)
    up_key, up_value = (np.asarray(w, np.float64) for w in mla.key_value_weight(None))
    p = jax.tree.map(lambda a: np.asarray(a[0], np.float64), dataclasses.replace(p, index=None))
    index = drawn(pages)[1].index
    queries, keys = np.asarray(query(index.query))[0], np.asarray(key(index.key))[0]
    out = np.zeros((R, chunk, H, U))
    for r in range(R):
        for c in range(chunk):
            t = start + c
            seen = np.array([s for s in range(t + 1) if s == t or s not in hidden])
            products = np.maximum(np.einsum("jw,sw->js", queries[r, t], keys[r, seen]) * A**-0.5, 0)
            scores = np.asarray(index.weight)[0, r, t] @ products
            chosen = seen[np.sort(np.argsort(-scores, kind="stable")[:topk])]
            k_nope = np.einsum("sm,mhn->shn", p.latent[r, chosen], up_key)
            logits = np.einsum("hn,shn->hs", p.q_nope[r, t], k_nope)
            logits = (logits + np.einsum("ho,so->hs", p.q_rope[r, t], p.k_rope[r, chosen])) * CONFIG.softmax_scale
            probs = np.exp(logits - logits.max(axis=1, keepdims=True))
            probs /= probs.sum(axis=1, keepdims=True)
            out[r, c] = np.einsum("hs,shu->hu", probs, np.einsum("sm,mhu->shu", p.latent[r, chosen], up_value))
    return out


PALLAS = {"kernels": Kernels(pallas=PallasKernels(interpret=True))}


@pytest.mark.parametrize(
    ("form", "pages", "chunk", "start", "options"),
    [("CC", 9, 7, 6, {}), ("A_CC", 9, 1, 30, {}), ("A_CC_ME", 45, 5, 170, {}), ("CC", 45, 5, 170, {}), ("A_CC_ME", 9, 7, 6, PALLAS)],
)  # fmt: skip
def test_each_query_attends_to_what_a_loop_over_queries_would_choose(form, pages, chunk, start, options):
    found = run(attention(form, **options), form, pages, chunk, start)
    # Float32 sums of at most 16 terms in another order, of values up to 4.
    np.testing.assert_allclose(found, expected(pages, chunk, start), atol=2e-5)


@pytest.mark.parametrize("form", ["CC", "A_CC_ME"])
def test_queries_that_choose_in_blocks_choose_the_same(form, monkeypatch):
    monkeypatch.setattr(sparse_attend, "CPU_BYTES", 1)  # one query at a time
    np.testing.assert_allclose(run(attention(form), form, 9, 7, 6), expected(9, 7, 6), atol=2e-5)


@pytest.mark.parametrize("form", ["CC", "A_CC_ME"])
def test_positions_that_hold_nothing_are_not_chosen(form):
    _, _, tables = drawn(9)
    hidden = (2, 3, 8, 9, 20)
    filled = np.ones((PAGES, G), bool)
    for position in hidden:
        filled[tables[0, :, position // G], position % G] = False
    found = run(attention(form), form, 9, 7, 16, jnp.asarray(filled))
    np.testing.assert_allclose(found, expected(9, 7, 16, hidden=hidden), atol=2e-5)


@pytest.mark.parametrize(("form", "chunk", "start"), [("CC", 7, 40), ("A_CC", 1, 46)])
def test_a_context_that_is_chosen_whole_gives_the_bits_of_dense_attention(form, chunk, start):
    """Page tables have room for more than ``index_topk``, so that the choice is made; 45 pages are two blocks of the dense form."""
    sparse = run(attention(form, topk=start + chunk), form, 45, chunk, start)
    np.testing.assert_array_equal(sparse, run(attention(form, dense=True), form, 45, chunk, start))


def test_where_no_context_can_be_longer_nothing_is_scored(monkeypatch):
    monkeypatch.setattr(sparse_attend, "TokenSelector", Mock(side_effect=AssertionError("the choice was made")))
    run(attention("CC", topk=36), "CC", 9, 7, 6)
    with pytest.raises(AssertionError, match="the choice was made"):
        run(attention("CC", topk=35), "CC", 9, 7, 6)


def test_scores_in_fp8_are_those_of_rotated_and_rounded_queries_and_keys():
    paged, rounded = attention("A_CC", index_scores=IndexScores(fp8=True)), IndexScores(fp8=True).query
    assert {paged.arrays[name][1] for name in INDEX_ARRAYS} == {fp8.E4M3, np.dtype(np.float32)}
    found = run(paged, "A_CC", 45, 8, 170)
    np.testing.assert_allclose(found, expected(45, 8, 170, key=rounded, query=rounded), atol=2e-5)
    assert np.abs(found - expected(45, 8, 170)).max() > 1e-2, "the rounding changes no choice: it was not tested"


def test_scores_of_a_long_prompt_are_never_there_all_at_once():
    """The largest array of a program for 512 queries and 32,768 positions holds a fraction of the 16 M scores."""
    C, pages = 512, 32768 // 16
    paged = attention("A_CC_ME", topk=512)
    shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    cache = {name: shape(1, pages, 16, *width) for name, (width, _) in paged.arrays.items()}
    rows = Rows(shape(1, 1, C, dtype=jnp.int32), shape(1, 1, pages, dtype=jnp.int32))
    mla = SimpleNamespace(key_value_weight=lambda dtype: (jnp.ones((M, H, N)), jnp.ones((M, H, U))))
    for form in ("A_CC_ME", "CC"):
        run = lambda *given, f=FORMS[form]: paged.attend(mla, f, given[0], jnp.int32(0), None, *given[1:])  # noqa: E731
        text = str(jax.make_jaxpr(run)(cache, rows, projections(shape, 1, C)))
        assert f"{C},{pages * 16}]" not in text.replace(" ", "")

"""Attention over a paged cache, of one layer with arrays: the plain form's numbers, and the same bits wherever a prompt is cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_layer import CONTEXT, KINDS, LENGTH, WINDOWS, Layer, T, model, programs, projected, weights_of, whole

from dsjax.model.compressed import family
from dsjax.model.native_products import NativeProducts
from dsjax.model.transformer import XlaProducts


@pytest.mark.parametrize(("kind", "topk"), [("window", 16), ("csa", 16), ("csa", 96), ("hca", 16)])
def test_a_prompt_gives_what_the_plain_form_gives(kind, topk, backend):
    layer, out, p = whole(kind, topk, backend)
    plain = jax.jit(lambda params, p: weights_of(layer.table, params, kind).attend(p))
    expected = np.asarray(plain(layer.params, p))[0]
    assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_cut_at_any_place_of_a_window_and_goes_on_token_by_token_gives_the_same_bits(kind, backend):
    # At every place of a window of 128, and so of 4, and about the end of a page.
    cuts = np.arange(1, 130)
    reference, expected, p = whole(kind, kernels=backend)
    layer = Layer(kind, len(cuts), kernels=backend)
    out = np.zeros((len(cuts), *expected.shape), np.float32)
    first = layer.feed(p, np.zeros(len(cuts), int), cuts, int(cuts.max()))
    for row, cut in enumerate(cuts):
        out[row, :cut] = first[0, row, :cut]
    for step in range(LENGTH - cuts.min()):
        at = cuts + step
        found = layer.feed(p, at, (at < LENGTH).astype(int), 1)
        for row in np.flatnonzero(at < LENGTH):
            out[row, at[row]] = found[0, row, 0]
    for row, cut in enumerate(cuts):
        np.testing.assert_array_equal(out[row], expected, err_msg=f"cut at {cut}")
        for name, array in layer.own(row).items():
            there = reference.own(0)[name]
            np.testing.assert_array_equal(array[: len(there)], there, err_msg=f"{name}, cut at {cut}")


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_chunks_that_cross_pages_give_the_same_bits(kind, backend):
    reference, expected, p = whole(kind, kernels=backend)
    layer, start = Layer(kind, kernels=backend), 0
    for size in (5, 150, 1, 130, 14):
        found = layer.feed(p, [start], [size])
        np.testing.assert_array_equal(found[0, 0, :size], expected[start : start + size])
        start += size
    for name, array in layer.own(0).items():
        np.testing.assert_array_equal(array, reference.own(0)[name], err_msg=name)


def test_queries_that_choose_in_blocks_give_the_same_bits(kernels, monkeypatch):
    _, expected, p = whole("csa", kernels=kernels)
    scores_of_a_query = 4 * CONTEXT * T // 4
    monkeypatch.setattr(family, "CPU_BYTES", 70 * scores_of_a_query)
    programs.cache_clear()
    try:
        np.testing.assert_array_equal(Layer("csa", kernels=kernels).feed(p, [0], [LENGTH])[0, 0], expected)
    finally:
        programs.cache_clear()


@pytest.mark.parametrize("kind", ["window", "csa"])
def test_a_rows_window_pages_are_a_ring(kind, backend):
    _, expected, p = whole(kind, kernels=backend)
    layer = Layer(kind, kernels=backend, windows=2)
    for start in range(0, LENGTH, T):
        size = min(T, LENGTH - start)
        found = layer.feed(p, [start], [size], T)
        np.testing.assert_array_equal(found[0, 0, :size], expected[start : start + size])


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_a_prompt_on_pages_that_another_has_had_has_the_same_bits(kind, backend):
    _, expected, p = whole(kind, kernels=backend)
    layer = Layer(kind, kernels=backend)
    layer.feed(projected(kind, seed=1), [0], [LENGTH])
    np.testing.assert_array_equal(layer.feed(p, [0], [LENGTH])[0, 0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_leave_the_bits_of_no_drafts(kind, backend):
    _, expected, p = whole(kind, kernels=backend)
    layer, wrong = Layer(kind, drafts=3, kernels=backend), projected(kind, seed=1)
    layer.feed(p, [0], [120])
    # At 120 a token and three drafts, of which one is right; then from 122 on the right ones, over the states of the wrong.
    mixed = jax.tree.map(lambda right, other: jnp.concatenate([right[:, :122], other[:, 122:]], axis=1), p, wrong)
    found = layer.feed(mixed, [120], [4], 4)
    np.testing.assert_array_equal(found[0, 0, :2], expected[120:122])
    for start in range(122, 140, 4):
        found = layer.feed(p, [start], [4], 4)
        np.testing.assert_array_equal(found[0, 0], expected[start : start + 4])


def test_a_choice_of_everything_has_the_bits_of_reading_in_order(backend):
    # 75 entries are seen at most; a table of 96 is read in order with 96, and by choice with 95.
    _, in_order, _ = whole("csa", 96, backend)
    _, chosen, _ = whole("csa", 95, backend)
    np.testing.assert_array_equal(chosen, in_order)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), [("window", "tp=4"), ("csa", "dp=2,tp=4"), ("hca", "dp=2")])
def test_every_mesh_gives_the_same_bits(kind, mesh, backend):
    _, expected, p = whole(kind, kernels=backend)
    layer = Layer(kind, mesh=mesh, kernels=backend)
    found = layer.feed(jax.tree.map(np.asarray, p), [0], [LENGTH])
    for rank in found:
        np.testing.assert_array_equal(rank[0], expected)


def without_sinks(kind, **options):
    """A layer whose sinks have the weight of a token."""
    layer = Layer(kind, **options)
    layer.params = {path: jnp.zeros_like(a) if path.endswith(".sink") else a for path, a in layer.params.items()}
    return layer


def test_a_window_has_128_tokens_with_the_query_itself(backend):
    layer, p = without_sinks("window", kernels=backend), projected("window")
    p = dataclasses.replace(p, query=jnp.zeros_like(p.query), entry=jnp.ones_like(p.entry))
    out = layer.feed(p, [0], [LENGTH])[0, 0]
    for position, tokens in {0: 1, 126: 127, 127: 128, 128: 128, 260: 128}.items():
        # Weights are equal, and the sink has one of them: the unrotated values are n / (n + 1).
        np.testing.assert_allclose(out[position, :, 0], tokens / (tokens + 1), rtol=1e-6, err_msg=f"{position}")


def test_a_query_sees_the_slots_that_are_filled_and_itself(backend):
    layer, p = without_sinks("window", kernels=backend), projected("window")
    p = dataclasses.replace(p, query=jnp.zeros_like(p.query), entry=jnp.ones_like(p.entry))
    layer.feed(p, [0], [LENGTH])
    filled = np.zeros((WINDOWS + 1, T), bool)
    filled[layer.tables[0, 0, CONTEXT], :10] = True  # of the first page of the ring
    out = layer.feed(p, [0], [LENGTH], writes=False, filled=filled)[0, 0]
    for position, tokens in {5: 6, 9: 10, 50: 11, 200: 1}.items():
        np.testing.assert_allclose(out[position, :, 0], tokens / (tokens + 1), rtol=1e-6, err_msg=f"{position}")


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("csa", {0: 0, 2: 0, 3: 1, 5: 1, 6: 1, 7: 2, 8: 2}), ("hca", {126: 0, 127: 1, 254: 1, 255: 2})],
)
def test_a_query_sees_the_entries_of_windows_that_are_full(kind, counts, backend):
    layer, p = without_sinks(kind, topk=96, kernels=backend), projected(kind, topk=96)
    p = dataclasses.replace(p, query=jnp.zeros_like(p.query), entry=jnp.zeros_like(p.entry))
    layer.feed(p, [0], [LENGTH])
    name = {"csa": "c4", "hca": "c128"}[kind]
    layer.cache[name] = jnp.ones_like(layer.cache[name])
    # What is attended to now: tokens of value 0, entries of value 1.
    out = layer.feed(p, [0], [LENGTH], writes=False)[0, 0]
    for position, entries in counts.items():
        expected = entries / (min(position + 1, 128) + entries + 1)
        np.testing.assert_allclose(out[position, :, 0], expected, rtol=1e-6, err_msg=f"{position}")


def test_a_trainers_products_take_the_model_too(kernels):
    config, table, params = model()
    tokens = jnp.asarray(np.random.default_rng(4).integers(2, config.vocab_size, (1, 40)))
    products = XlaProducts(), NativeProducts(kernels.native)
    plain, native = (np.asarray(table.bind(params)(tokens, products=one).logits) for one in products)
    assert np.abs(native - plain).max() <= 1e-4 * np.abs(plain).max()

"""Attention over a paged cache, of one layer with arrays: the plain form's numbers, and the same bits wherever a prompt is cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_layer import (
    CONTEXT,
    KINDS,
    LENGTH,
    MESHES,
    WINDOWS,
    Layer,
    T,
    assert_a_mesh_gives_the_same_bits,
    assert_chunks_give_the_bits_of_the_whole,
    assert_rejected_drafts_leave_no_trace,
    model,
    programs,
    projected,
    weights_of,
    whole,
)

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
    cuts, most = np.arange(1, 130), 129  # Through a whole window token by token, and then the rest at once.
    reference, expected, p = whole(kind, kernels=backend)
    layer = Layer(kind, len(cuts), kernels=backend)
    out = np.zeros((len(cuts), *expected.shape), np.float32)
    starts = [np.zeros_like(cuts), *(cuts + step for step in range(most)), cuts + most, cuts + 2 * most]
    sizes = [cuts, *[np.ones_like(cuts)] * most, *(np.clip(LENGTH - start, 0, most) for start in starts[-2:])]
    for start, size in zip(starts, sizes, strict=True):
        found = layer.feed(p, start, size, int(size.max()))
        for row in range(len(cuts)):
            out[row, start[row] : start[row] + size[row]] = found[0, row, : size[row]]
    for row, cut in enumerate(cuts):
        np.testing.assert_array_equal(out[row], expected, err_msg=f"cut at {cut}")
        for name, array in layer.own(row).items():
            there = reference.own(0)[name]
            np.testing.assert_array_equal(array[: len(there)], there, err_msg=f"{name}, cut at {cut}")


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_chunks_that_cross_pages_give_the_same_bits(kind, backend):
    assert_chunks_give_the_bits_of_the_whole(kind, (5, 150, 1, 130, 14), kernels=backend)


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
    assert_rejected_drafts_leave_no_trace(kind, kernels=backend)


def test_a_choice_of_everything_has_the_bits_of_reading_in_order(backend):
    # 75 entries are seen at most; a table of 96 is read in order with 96, and by choice with 95.
    _, in_order, _ = whole("csa", 96, backend)
    _, chosen, _ = whole("csa", 95, backend)
    np.testing.assert_array_equal(chosen, in_order)


@pytest.mark.slow
@MESHES
def test_every_mesh_gives_the_same_bits(kind, mesh, backend):
    assert_a_mesh_gives_the_same_bits(kind, mesh, kernels=backend)


def counting(kind, entry, topk=16, **options):
    """A layer after a prompt of tokens of this value, all of which, and the sink, have equal weights; and its projections."""
    layer, p = Layer(kind, topk=topk, **options), projected(kind, topk=topk)
    layer.params = {path: jnp.zeros_like(a) if path.endswith(".sink") else a for path, a in layer.params.items()}
    p = dataclasses.replace(p, query=jnp.zeros_like(p.query), entry=jnp.full_like(p.entry, entry))
    layer.feed(p, [0], [LENGTH])
    return layer, p


def assert_ones_seen(layer, p, expected, **options):
    """expected: by position, how many of so many values are 1; the others and the sink are 0."""
    out = layer.feed(p, [0], [LENGTH], writes=False, **options)[0, 0]
    for position, (ones, values) in expected.items():
        np.testing.assert_allclose(out[position, :, 0], ones / (values + 1), rtol=1e-6, err_msg=f"{position}")


def test_a_window_has_128_tokens_with_the_query_itself(backend):
    counts = {0: 1, 126: 127, 127: 128, 128: 128, 260: 128}
    assert_ones_seen(*counting("window", 1, kernels=backend), {at: (tokens, tokens) for at, tokens in counts.items()})


def test_a_query_sees_the_slots_that_are_filled_and_itself(backend):
    layer, p = counting("window", 1, kernels=backend)
    filled = np.zeros((WINDOWS + 1, T), bool)
    filled[layer.tables[0, 0, CONTEXT], :10] = True  # of the first page of the ring
    counts = {5: 6, 9: 10, 50: 11, 200: 1}
    assert_ones_seen(layer, p, {at: (tokens, tokens) for at, tokens in counts.items()}, filled=filled)


@pytest.mark.parametrize(
    ("kind", "counts"), [("csa", {0: 0, 2: 0, 3: 1, 5: 1, 6: 1, 7: 2, 8: 2}), ("hca", {126: 0, 127: 1, 254: 1, 255: 2})]
)
def test_a_query_sees_the_entries_of_windows_that_are_full(kind, counts, backend):
    layer, p = counting(kind, 0, topk=96, kernels=backend)
    name = {"csa": "c4", "hca": "c128"}[kind]
    layer.cache[name] = jnp.ones_like(layer.cache[name])
    # What is attended to now: tokens of value 0, entries of value 1.
    assert_ones_seen(layer, p, {at: (entries, min(at + 1, 128) + entries) for at, entries in counts.items()})


def test_a_trainers_products_take_the_model_too(kernels):
    config, table, params = model()
    tokens = jnp.asarray(np.random.default_rng(4).integers(2, config.vocab_size, (1, 40)))
    products = XlaProducts(), NativeProducts(kernels.native)
    plain, native = (np.asarray(table.bind(params)(tokens, products=one).logits) for one in products)
    assert np.abs(native - plain).max() <= 1e-4 * np.abs(plain).max()

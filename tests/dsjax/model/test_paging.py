"""The paged cache: what is written where, read through page tables, with values whose place can be read off."""

import jax
import numpy as np
import pytest

from dsjax.model import paging

L, PAGES, G = 3, 5, 4


def coded(*width):
    """Value of layer l, page p, slot g: 1000 l + 10 p + g, plus a ten-thousandth a component."""
    layer, page, slot = np.ogrid[:L, :PAGES, :G]
    base = (1000 * layer + 10 * page + slot).astype(np.float32)
    parts = np.arange(np.prod(width, dtype=int)).reshape(width) / 1024
    return (base.reshape(*base.shape, *[1] * len(width)) + parts).astype(np.float32)


@pytest.mark.parametrize("width", [(2,), (2, 3)], ids=["latent", "heads"])
def test_reading_follows_the_table_of_each_row(width):
    cache = coded(*width)
    tables = np.array([[3, 1, 0], [2, 2, 4]])
    found = np.asarray(jax.jit(paging.read)(cache, 2, tables))
    assert found.shape == (2, 3 * G, *width)
    for row, pages in enumerate(tables):
        for position in range(3 * G):
            np.testing.assert_array_equal(found[row, position], cache[2, pages[position // G], position % G])


@pytest.mark.parametrize("width", [(2,), (2, 3)], ids=["latent", "heads"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_writing_changes_just_the_slots_and_the_layer_that_are_named(width, layer):
    cache = coded(*width)
    slots = np.array([4 * G + 3, -1, 0, 2 * G + 1, -1])
    values = -1.0 - np.arange(5 * np.prod(width), dtype=np.float32).reshape(5, *width)
    expected = cache.copy()
    for slot, value in zip(slots, values, strict=True):
        if slot >= 0:
            expected[layer, slot // G, slot % G] = value
    found = np.asarray(jax.jit(paging.write)(cache, layer, slots, values))
    np.testing.assert_array_equal(found, expected)


def test_a_slot_of_minus_one_never_wraps_to_the_end_of_the_cache():
    cache = coded(2)
    values = np.full((3, 2), np.nan, np.float32)
    for layer in range(L):
        found = np.asarray(jax.jit(paging.write)(cache, layer, np.full(3, -1), values))
        np.testing.assert_array_equal(found, cache)


def test_what_is_written_through_slots_is_read_through_pages():
    cache = np.zeros((L, PAGES, G, 1), np.float32)
    pages = [4, 1, 3]
    positions = np.arange(2 * G + 2)
    slots = np.array([pages[p // G] * G + p % G for p in positions])
    cache = jax.jit(paging.write)(cache, 1, slots, 100.0 + positions[:, None].astype(np.float32))
    found = np.asarray(jax.jit(paging.read)(cache, 1, np.array([pages])))[0, :, 0]
    np.testing.assert_array_equal(found[: len(positions)], 100 + positions)
    assert not found[len(positions) :].any()


def test_values_are_rounded_to_the_cache_s_dtype():
    cache = np.zeros((1, 2, G, 1), jax.numpy.bfloat16)
    written = jax.jit(paging.write)(cache, 0, np.array([5]), np.array([[1.001]], np.float32))
    assert float(written[0, 1, 1, 0]) == 1.0


@pytest.mark.parametrize("slots", [[7, -1, 12], [-1], [5]])
def test_marks_are_set_and_taken_back_and_minus_one_is_dropped(slots):
    filled = np.random.default_rng(0).random((PAGES, G)) < 0.5
    for value in (True, False):
        expected = filled.copy()
        for slot in slots:
            if slot >= 0:
                expected[slot // G, slot % G] = value
        found = np.asarray(jax.jit(paging.mark, static_argnums=2)(filled, np.array(slots), value))
        assert found.dtype == bool
        np.testing.assert_array_equal(found, expected)


def test_reading_marks_follows_the_table_of_each_row():
    filled = np.random.default_rng(0).random((PAGES, G)) < 0.5
    tables = np.array([[3, 1, 0], [2, 2, 4]])
    np.testing.assert_array_equal(jax.jit(paging.read_filled)(filled, tables), filled[tables].reshape(2, 3 * G))

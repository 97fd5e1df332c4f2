"""Pages in the devices' state are cleared and copied without touching others."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from sliding_attention import slides
from tiny_steps import PAGES, RANKS, G, limits_of, tiny

from dsjax.engine.device import device_state


def filled_state(step, dtype=np.float32, limits=None):
    """A state whose cache counts up from 1, and whose MTP entries are all there."""
    described = device_state.describe(step, limits or limits_of(step.spec.dp_size), 1)
    host = {
        name: np.arange(1, 1 + np.prod(array.shape)).reshape(array.shape).astype(dtype)
        for name, array in described.cache.items()
    }
    cache = {name: jax.device_put(array, described.cache[name].sharding) for name, array in host.items()}
    filled = jax.device_put(np.ones(described.filled.shape, bool), described.filled.sharding)
    rest = jax.tree.map(
        lambda one: jax.device_put(np.zeros(one.shape, one.dtype), one.sharding),
        dataclasses.replace(described, cache={}, filled=None),
    )
    return host, dataclasses.replace(rest, cache=cache, filled=filled)


@pytest.mark.parametrize(("layout", "form"), [("dp=2", "A_CC"), ("dp=2,tp=2", "CD")])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_marked_pages_become_zero_in_all_layers_and_no_other_page_changes(layout, form, dtype):
    step = tiny(layout, mla_prefill=form, mla_decode=form)
    before, state = filled_state(step, dtype)
    if dtype is np.float32:
        name = next(iter(before))
        before[name][:, PAGES + 2] = np.nan
        state.cache[name] = jax.device_put(before[name], state.cache[name].sharding)
    marked = np.array([[False, True, False], [False, False, True]])
    after = jax.jit(partial(device_state.clear_pages, step))(state, marked)
    for name, array in before.items():
        expected = array.copy()
        expected[:, [1, PAGES + 2]] = 0
        np.testing.assert_array_equal(after.cache[name], expected)
        assert after.cache[name].dtype == dtype
    np.testing.assert_array_equal(after.filled, ~np.repeat(marked.reshape(-1, 1), G, axis=1))


def test_pages_are_copied_within_their_rank_in_all_layers_with_what_the_mtp_module_has_of_them():
    step = tiny("dp=2,tp=2", mla_prefill="CD", mla_decode="CD")
    before, state = filled_state(step)
    filled = np.ones((RANKS * PAGES, G), bool)
    filled[[1, PAGES + 2]] = False
    state = dataclasses.replace(state, filled=jax.device_put(filled, state.filled.sharding))
    pairs = np.array([[[1, 2], [0, 0]], [[2, 1], [0, 0]]], np.int32)
    after = jax.jit(partial(device_state.copy_pages, step))(state, pairs)
    for name, array in before.items():
        expected = array.copy()
        expected[:, 2], expected[:, PAGES + 1] = array[:, 1], array[:, PAGES + 2]
        np.testing.assert_array_equal(after.cache[name], expected)
    filled[[2, PAGES + 1]] = False
    np.testing.assert_array_equal(after.filled, filled)


W = 4
"""Window pages of a rank."""


def windowed_state(monkeypatch):
    """The step of a model with pages of both kinds, and its state, filled as by `filled_state`; latents and marks are on window pages."""
    with slides():
        step = tiny("dp=2")
        monkeypatch.setattr(type(step), "attention", property(lambda step, made=step.attention: made))
    limits = dataclasses.replace(limits_of(2), windows_per_rank=W, window_columns=3)
    return step, *filled_state(step, limits=limits)


def test_pages_of_both_kinds_are_cleared_by_their_numbers_in_commands(monkeypatch):
    step, before, state = windowed_state(monkeypatch)
    assert [before[name].shape[1] for name in ("latent", "rope")] == [RANKS * W, RANKS * PAGES]
    assert state.filled.shape == (RANKS * W, G), "the last layer's entries are on window pages"
    marked = np.zeros((RANKS, PAGES + W), bool)
    marked[0, [1, PAGES + 2]] = marked[1, PAGES + 3] = True
    after = jax.jit(partial(device_state.clear_pages, step))(state, marked)
    cleared = {"latent": [2, W + 3], "rope": [1]}
    for name, array in before.items():
        expected = array.copy()
        expected[:, cleared[name]] = 0
        np.testing.assert_array_equal(after.cache[name], expected)
    assert np.flatnonzero(~np.asarray(after.filled).all(axis=1)).tolist() == cleared["latent"]


@pytest.mark.parametrize(("table", "moving", "staying"), [("window", "latent", "rope"), ("context", "rope", "latent")])
def test_pages_of_a_kind_are_taken_and_put_without_touching_the_other(monkeypatch, table, moving, staying):
    step, before, state = windowed_state(monkeypatch)
    pages = np.zeros((RANKS, device_state.moved(table)), np.int32)
    pages[:, 0] = 1, 2
    taken = jax.jit(partial(device_state.take_pages, step, table=table))(state, pages)
    described = device_state.describe_moved(step, state, table)
    assert {name: array.shape for name, array in taken.items()} == {name: a.shape for name, a in described.items()}
    assert set(taken) == ({"latent", "filled"} if table == "window" else {"rope"})
    first = before[moving].shape[1] // RANKS
    np.testing.assert_array_equal(taken[moving][1, 0], before[moving][:, first + 2])
    zeros = {name: np.zeros(array.shape, array.dtype) for name, array in taken.items()}
    after = jax.jit(partial(device_state.put_pages, step, table=table))(state, zeros, pages)
    expected = before[moving].copy()
    expected[:, [0, 1, first, first + 2]] = 0  # page 0 is nobody's
    np.testing.assert_array_equal(after.cache[moving], expected)
    np.testing.assert_array_equal(after.cache[staying], before[staying])

"""Pages in the devices' state are cleared and copied without touching others."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from sliding_attention import slides
from tiny_steps import PAGES, RANKS, G, limits_of, tiny

from dsjax.engine.contract.commands import Admission, RankStep, Sampling, Step
from dsjax.engine.device import device_state, slots
from dsjax.engine.device.launch_rows import pack_admissions
from dsjax.engine.device.sampler import SlotSampling


def filled_state(step, dtype=np.float32, limits=None):
    """A state whose cache counts up from 1, and whose MTP entries are all there."""
    described = device_state.describe(step, limits or limits_of(step.spec.dp_size), 1)
    count = lambda array: np.arange(1, 1 + np.prod(array.shape)).reshape(array.shape).astype(dtype)  # noqa: E731
    host = {name: count(array) for name, array in described.cache.items()}
    empty = jax.tree.map(lambda one: np.zeros(one.shape, one.dtype), dataclasses.replace(described, cache=host))
    filled = dataclasses.replace(empty, cache=host, filled=np.ones(described.filled.shape, bool))
    return host, jax.tree.map(lambda array, one: jax.device_put(array, one.sharding), filled, described)


def cleared(array, pages):
    expected = array.copy()
    expected[:, pages] = 0
    return expected


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
        np.testing.assert_array_equal(after.cache[name], cleared(array, [1, PAGES + 2]))
        assert after.cache[name].dtype == dtype
    np.testing.assert_array_equal(after.filled, ~np.repeat(marked.reshape(-1, 1), G, axis=1))


def test_an_admission_sets_how_its_slot_samples_and_no_other_slot():
    step = tiny("dp=2")
    _, state = filled_state(step)
    sampling = Sampling(7, 2**63 + 5, 0.5, 0.25, 3, 0.125, 1.0, -1.0, 2.0)
    ranks = [RankStep([], [], b"", [], []), RankStep([Admission(1, 4, 9, sampling)], [], b"", [], [])]
    (packed,) = pack_admissions(Step(ranks), [[], []])
    rows = jax.jit(partial(slots.admit, step))(state, packed).slots
    after = SlotSampling.unpack(rows[1, 1, device_state.SAMPLING : device_state.DRAFTS])
    expected = {
        "num_prompt_tokens": 7, "seed": 5, "seed_high": 2**31, "top_k": 3, "temperature": 0.5, "top_p": 0.25, "min_p": 0.125,
        "presence": 1.0, "frequency": -1.0, "repetition": 2.0,
    }  # fmt: skip
    assert {name: getattr(after, name).item() for name in expected} == expected
    assert rows[1, 1, : device_state.SAMPLING].tolist() == [4, 9, 0]
    assert not np.delete(np.asarray(rows).reshape(-1, rows.shape[-1]), rows.shape[1] + 1, axis=0).any()


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
    for name, pages in (("latent", [2, W + 3]), ("rope", [1])):
        np.testing.assert_array_equal(after.cache[name], cleared(before[name], pages))
    assert np.flatnonzero(~np.asarray(after.filled).all(axis=1)).tolist() == [2, W + 3]


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
    nobodys = [0, first]  # each rank's page 0
    np.testing.assert_array_equal(after.cache[moving], cleared(before[moving], [*nobodys, 1, first + 2]))
    np.testing.assert_array_equal(after.cache[staying], before[staying])

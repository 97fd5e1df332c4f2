"""Pages in the devices' state are cleared and copied without touching others."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from tiny_steps import PAGES, RANKS, G, limits_of, tiny

from dsjax.engine.contract.commands import Admission, RankStep, Sampling, Step
from dsjax.engine.device import device_state, slots
from dsjax.engine.device.launch_rows import pack_admissions


def filled_state(step, dtype=np.float32):
    """A state whose cache counts up from 1, and whose MTP entries are all there."""
    described = device_state.describe(step, limits_of(step.spec.dp_size), 1)
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


def test_an_admission_sets_how_its_slot_samples_and_no_other_slot():
    step = tiny("dp=2")
    _, state = filled_state(step)
    sampling = Sampling(7, 2**63 + 5, 0.5, 0.25, 3, 0.125, 1.0, -1.0, 2.0)
    ranks = [RankStep([], [], b"", [], []), RankStep([Admission(1, 4, 9, sampling)], [], b"", [], [])]
    (packed,) = pack_admissions(Step(ranks), [[], []])
    after = jax.jit(partial(slots.admit, step))(state, packed).sampling
    expected = {
        "num_prompt_tokens": 7, "seed": 5, "seed_high": 2**31, "top_k": 3, "temperature": 0.5, "top_p": 0.25, "min_p": 0.125,
        "presence": 1.0, "frequency": -1.0, "repetition": 2.0,
    }  # fmt: skip
    assert {name: getattr(after, name)[1, 1].item() for name in expected} == expected
    assert all(
        np.delete(np.asarray(getattr(after, name)).reshape(-1), after.top_k.shape[1] + 1).sum() == 0
        for name in expected
    )


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

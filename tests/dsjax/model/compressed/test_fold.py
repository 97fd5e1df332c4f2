"""Compressors as folds: numbers that can be reckoned by hand, and the softmax of the plain form."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.model.compressed.attention import compress
from dsjax.model.compressed.fold import EMPTY, empty, fold_row


def folded(gates, values, rate, cuts=()):
    """Means of closed windows, and the last state, of a sequence ``[S, series, V]`` that is cut at these places."""
    state, means = empty(gates.shape[1], gates.shape[2]), []
    for start, end in zip((0, *cuts), (*cuts, len(gates)), strict=True):
        kept = jnp.zeros(end - start, jnp.int32)
        states, found = fold_row(
            state, gates[start:end], values[start:end], jnp.int32(start), jnp.int32(end - start), kept, 1, rate
        )
        state = states[0]
        means += [found[p - start] for p in range(start, end) if p % rate == rate - 1]
    return np.array(means), np.asarray(state)


def test_an_entry_of_rate_4_has_the_first_series_of_the_window_before_it():
    p = np.arange(12, dtype=np.float32)
    values = np.stack([100 + p, p], axis=1)[..., None]
    means, _ = folded(jnp.zeros((12, 2, 1)), values, 4)
    assert means.ravel().tolist() == [1.5, 53.5, 57.5], "zeros before the first window would give 0.75"
    _, state = folded(jnp.zeros((6, 2, 1)), values[:6], 4)
    assert state.ravel().tolist() == [0, 6, 415, 0, 2, 209]


def test_at_a_border_only_what_the_next_window_needs_is_left():
    values = np.ones((8, 2, 1), np.float32)
    _, state = folded(jnp.zeros((8, 2, 1)), values, 4)
    np.testing.assert_array_equal(state.ravel(), np.float32([0, 4, 4, *EMPTY]))
    _, state = folded(jnp.zeros((8, 1, 1)), values[:, :1], 4)
    np.testing.assert_array_equal(state.ravel(), np.float32(EMPTY))


@pytest.mark.parametrize("series", [1, 2])
def test_the_fold_is_the_softmax_of_each_window_wherever_it_is_cut(series):
    rng = np.random.default_rng(series)
    gates, values = (jnp.asarray(rng.normal(0, 5, (43, series, 6)), jnp.float32) for _ in range(2))
    plain = compress(gates[None], values[None], 8)[0]
    whole = folded(gates, values, 8)
    np.testing.assert_allclose(whole[0], plain, rtol=1e-5, atol=1e-6)
    for cut in (1, 7, 8, 9, 42):
        for found, expected in zip(folded(gates, values, 8, (cut,)), whole, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_gates_of_any_size_neither_overflow_nor_vanish():
    gates = jnp.asarray([[[300.0]], [[-300.0]], [[300.0]], [[-jnp.inf]]])
    values = jnp.asarray([[[1.0]], [[5.0]], [[3.0]], [[9.0]]])
    means, _ = folded(gates, values, 4)
    assert means.ravel().tolist() == [2.0]
    means, _ = folded(jnp.minimum(gates, -300), values, 4)
    assert means.ravel().tolist() == [3.0]

"""Which tokens a query chooses: the highest scores, of equal ones the first, as a stable sort of NumPy has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.model.sparse.choose import choose, index_scores, pack, positions_of, unpack

SCORES = st.sampled_from([-np.inf, -3e38, -2.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 0.5000001, 1.0, 3e38])


def chosen_of(scores: np.ndarray, k: int) -> list[int]:
    """The reference: XLA takes denormal numbers for zeros, and a score of −inf is not there to be chosen."""
    flushed = np.where(np.abs(scores) < np.finfo(np.float32).tiny, 0, scores)
    best = np.argsort(-flushed, kind="stable")[:k]
    return sorted(int(at) for at in best if flushed[at] > -np.inf)


chosen_by = jax.jit(choose, static_argnums=(1, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(SCORES, min_size=12, max_size=12), st.sampled_from([1, 2, 5, 12]))
def test_the_highest_are_chosen_and_of_equal_ones_the_first(scores, k):
    scores = np.array(scores, np.float32)
    found = np.asarray(chosen_by(jnp.asarray(scores), k))
    assert np.flatnonzero(found).tolist() == chosen_of(scores, k)


@pytest.mark.parametrize("bits", [1, 4])
def test_drawn_scores_of_many_rows_are_chosen_as_by_sorting(bits):
    scores = np.random.default_rng(0).standard_normal((3, 5, 300)).astype(np.float32).round(1)
    found = np.asarray(choose(jnp.asarray(scores), 40, bits))
    for row, chosen in zip(scores.reshape(-1, 300), found.reshape(-1, 300), strict=True):
        assert np.flatnonzero(chosen).tolist() == chosen_of(row, 40)


def test_positions_are_in_order_missing_ones_outside_and_a_score_that_is_no_number_is_not_chosen():
    assert np.asarray(choose(jnp.array([jnp.nan, 1.0, 2.0]), 2)).tolist()[0] is False
    chosen = jnp.array([[False, True, True, False, True], [False, False, False, True, False]])
    positions, count = positions_of(chosen, 3)
    assert np.asarray(positions).tolist() == [[1, 2, 4], [3, 5, 5]]
    assert np.asarray(count).tolist() == [3, 1]


@pytest.mark.parametrize(("start", "size"), [(0, 70), (3, 40), (64, 6), (60, 30)])
def test_packed_bits_come_back(start, size):
    chosen = np.random.default_rng(1).random((2, 70)) < 0.5
    found = np.asarray(unpack(pack(jnp.asarray(chosen)), jnp.int32(start), size))
    expected = np.pad(chosen, ((0, 0), (0, 60)))[:, start : start + size]
    np.testing.assert_array_equal(found, expected)


def test_scores_are_weighted_sums_of_what_is_above_zero():
    rng = np.random.default_rng(2)
    query, weight, key = (rng.standard_normal(s).astype(np.float32) for s in ((1, 2, 3, 4), (1, 2, 3), (1, 5, 4)))
    products = np.maximum(np.einsum("rcjw,rsw->rcjs", query, key) / 2, 0)  # the square root of a width of 4 is 2
    expected = (weight[..., None] * products).sum(axis=2)
    np.testing.assert_allclose(np.asarray(index_scores(query, weight, key)), expected, rtol=1e-5, atol=1e-6)

"""Attention in blocks is plain causal attention, and reads no block that no query sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.model.softmax import attend_in_blocks

R, C, H, W, S = 3, 2, 2, 4, 24


def plain(positions, q, keys, values, filled=None):
    """Float64, one query at a time, over just the positions that it sees: the filled ones up to its own, and its own."""
    out = np.zeros((R, C, H, W))
    for r, c, h in np.ndindex(R, C, H):
        at = positions[r, c]
        seen = [s for s in range(at + 1) if filled is None or filled[r, s] or s == at]
        scores = keys[r, seen].astype(np.float64) @ q[r, c, h].astype(np.float64)
        weights = np.exp(scores - scores.max())
        out[r, c, h] = (weights / weights.sum()) @ values[r, seen]
    return out


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    # Contexts of 1, 8 and 23 positions: at the start, at a block's end, and inside a block.
    positions = np.array([[0, 1], [7, 8], [21, 22]])
    q = rng.normal(size=(R, C, H, W)).astype(np.float32)
    keys, values = rng.normal(size=(2, R, S, W)).astype(np.float32)
    return positions, q, keys, values


def in_blocks(positions, q, keys, values, block, filled=None):
    def block_of(array, index):
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(array), index * block, block, axis=1)

    def run(positions, q, keys, values):
        return attend_in_blocks(
            positions[..., None],
            lambda index: [block_of(array, index) for array in (keys, values)],
            lambda context: jnp.einsum("rchw,rsw->rchs", q, context[0]),
            lambda probs, context: jnp.einsum("rchs,rsw->rchw", probs, context[1]),
            num_blocks=S // block,
            block=block,
            filled=None if filled is None else lambda index: block_of(filled, index),
        )

    return np.asarray(jax.jit(run)(positions, q, keys, values))


# float32 sums of up to 24 products of values around 1
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.mark.parametrize("block", [1, 3, 8, 24])
def test_every_block_size_gives_plain_attention(case, block):
    np.testing.assert_allclose(in_blocks(*case, block), plain(*case), **TOLERANCE)


@pytest.mark.parametrize("block", [4, 24])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores_neither_overflow_nor_vanish(case, block, size):
    positions, q, keys, values = case
    # All scores of the size's sign and magnitude, apart by a few units, which float32 still holds at 1e4 (to 0.001).
    q = np.abs(q) + 0.5
    keys = np.full_like(keys, size / 4) / q.mean() + np.round(keys)
    q = np.full_like(q, q.mean())
    found = in_blocks(positions, q, keys, values, block)
    assert np.all(np.isfinite(found))
    np.testing.assert_allclose(found, plain(positions, q, keys, values), atol=2e-2)


def test_blocks_that_no_query_sees_are_never_read_and_queries_past_the_table_see_all_of_it(case):
    # Padding's positions go on counting; the table ends where it ends.
    positions, q, keys, values = case
    past = np.full_like(positions, 10 * S)
    found = in_blocks(past, q, keys, values, 8)
    np.testing.assert_allclose(found, plain(np.full_like(positions, S - 1), q, keys, values), **TOLERANCE)
    positions = np.minimum(positions, 15)  # the third block of 8 is past every query
    expected = plain(positions, q, keys, values)
    keys[:, 16:] = values[:, 16:] = np.nan
    found = in_blocks(positions, q, keys, values, 8)
    np.testing.assert_allclose(found, expected, **TOLERANCE)


@pytest.mark.parametrize("block", [3, 8, 24])
def test_positions_that_are_not_filled_are_not_seen_but_ones_own_is(case, block):
    positions, q, keys, values = case
    filled = np.random.default_rng(1).random((R, S)) < 0.4
    filled[1] = False  # of this row nothing but each query's own position
    filled[2, :8] = False  # a first block without anything
    expected = plain(positions, q, keys, values, filled)
    keys[1, :7] = values[1, :7] = 1e30  # what lies in a hole has no weight, however large
    np.testing.assert_allclose(in_blocks(positions, q, keys, values, block, filled), expected, **TOLERANCE)


@pytest.mark.parametrize("block", [8, 24])
def test_queries_past_a_table_of_which_nothing_is_filled_give_numbers(case, block):
    positions, q, keys, values = case
    found = in_blocks(np.full_like(positions, 10 * S), q, keys, values, block, np.zeros((R, S), bool))
    np.testing.assert_allclose(found, np.broadcast_to(values[:, None, None, -1], found.shape), **TOLERANCE)

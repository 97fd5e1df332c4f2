"""Placements hold every expert, balance load, and use copies evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import K, coded_rows, compiled, expected, weights_of

from sharding import MeshError
from sharding.dispatch import DispatchConfig
from sharding.placement import Placement, assign_copies, least_redundancy


def test_identity_returns_ids_unchanged_and_drops_inactive_tokens():
    placement = Placement.identity(8)
    ids = jnp.array([[3, 1], [0, 7], [2, 2]])
    slots = assign_copies(placement.tables, ids, jnp.array([True, False, True]))
    np.testing.assert_array_equal(slots, [[3, 1], [-1, -1], [2, 2]])
    np.testing.assert_array_equal(placement.tables.physical_EC, np.arange(8)[:, None])
    np.testing.assert_array_equal(placement.tables_of(3).copies_E, np.ones((3, 8)))


@pytest.mark.parametrize(
    ("experts", "ep", "least"), [(256, 72, 32), (256, 144, 32), (256, 320, 64), (256, 32, 0), (64, 24, 8)]
)
def test_least_redundancy(experts, ep, least):
    assert least_redundancy(experts, ep) == least
    placement = Placement.with_redundancy(experts, experts + least, ranks=ep)
    assert placement.n_physical % ep == 0


def test_tables_and_loads_go_there_and_back():
    placement = Placement((0, 2, 1, 0, 2, 0), 3)
    assert placement.logical_to_physical == ((0, 3, 5), (2,), (1, 4))
    np.testing.assert_array_equal(placement.tables.physical_EC, [[0, 3, 5], [2, -1, -1], [1, 4, -1]])
    np.testing.assert_array_equal(placement.tables.copies_E, [3, 1, 2])
    np.testing.assert_array_equal(placement.logical_load(np.array([[1, 10, 100, 2, 20, 4]])), [[7, 100, 30]])


@pytest.mark.parametrize("ranks", [1, 4])
def test_copies_are_used_evenly_on_every_rank_whatever_the_routing(ranks):
    rng = np.random.default_rng(ranks)
    placement = Placement.with_redundancy(12, 20, ranks=4, load=rng.pareto(1.0, 12))
    assign = jax.jit(assign_copies, static_argnames="ranks")
    for tokens in (1, 5, 40):
        # Every second token alike: choosing by a token's parity would send all of those to one copy.
        logical = np.stack([rng.permutation(12)[:K] for _ in range(tokens * ranks)])
        logical[::2] = [3, 0, 7, 5]
        active = rng.random(tokens * ranks) < 0.8
        slots = np.asarray(assign(placement.tables, logical, active, ranks=ranks))
        np.testing.assert_array_equal(slots >= 0, np.broadcast_to(active[:, None], slots.shape))
        back = np.asarray(placement.physical_to_logical)[slots]
        np.testing.assert_array_equal(back[active], logical[active])
        for run in np.split(slots, ranks):
            used = np.bincount(run[run >= 0], minlength=20)
            for copies in placement.logical_to_physical:
                assert used[list(copies)].max() - used[list(copies)].min() <= 1


def test_ranks_with_one_token_each_do_not_all_choose_the_first_copy():
    placement = Placement((0, 1, 0, 2, 0, 3), 4)
    slots = assign_copies(placement.tables, jnp.zeros((6, 1), jnp.int32), jnp.ones(6, bool), ranks=6)
    np.testing.assert_array_equal(slots[:, 0], [0, 2, 4, 0, 2, 4])


@pytest.mark.parametrize("method", ["gather", "padded", "ragged"])
def test_redundant_experts_where_logical_ones_do_not_divide(method):
    """256 experts on 24 ranks, 8 redundant: each token's sum depends on its logical experts alone."""
    rng = np.random.default_rng(0)
    placement = Placement.with_redundancy(256, 264, ranks=24, load=rng.pareto(1.5, 256))
    gains = np.asarray(placement.physical_to_logical) + 1
    _, call = compiled("dp=24", DispatchConfig(method), 264, gains=gains)
    tokens = 24 * 3
    logical = np.stack([rng.permutation(256)[:K] for _ in range(tokens)])
    hot = placement.physical_to_logical[0]
    logical[:24] = (hot + np.arange(K)) % 256
    slots = assign_copies(placement.tables, jnp.asarray(logical), jnp.ones(tokens, bool), ranks=24)
    x, weights = coded_rows(tokens), weights_of(tokens)
    np.testing.assert_array_equal(call(x, slots, weights)[0], expected(x, logical, weights))


def test_placements_that_cannot_be_say_what_would():
    with pytest.raises(MeshError, match=r"288 is the least"):
        Placement.with_redundancy(256, 256, ranks=72)
    with pytest.raises(MeshError, match=r"missing \[1\]"):
        Placement((0, 2), 3)
    with pytest.raises(MeshError, match=r"load of 3 experts; expected 4 counts"):
        Placement.with_redundancy(4, 8, ranks=4, load=[1, 2, 3])

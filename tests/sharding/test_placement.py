"""Placements hold every expert, balance load, and use copies evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import K

from sharding import MeshError, MeshSpec
from sharding.placement import Placement, assign_copies, slot_distances


def test_identity_returns_ids_unchanged_and_tables_list_the_slots_of_each_expert():
    placement = Placement.identity(8)
    ids = jnp.array([[3, 1], [0, 7], [2, 2]])
    slots = assign_copies(placement.tables, ids, jnp.array([True, False, True]))
    np.testing.assert_array_equal(slots, [[3, 1], [-1, -1], [2, 2]])
    placement = Placement((0, 2, 1, 0, 2, 0), 3)
    assert placement.logical_to_physical == ((0, 3, 5), (2,), (1, 4))
    np.testing.assert_array_equal(placement.tables.physical_EC, [[0, 3, 5], [2, -1, -1], [1, 4, -1]])
    np.testing.assert_array_equal(placement.tables.copies_E, [3, 1, 2])


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


@pytest.mark.slow
def test_the_nearest_copies_take_turns_and_fewer_choices_leave_their_host():
    spec, tokens = MeshSpec.parse("dp=32"), 64
    # Experts 0 to 31 have a copy on each of four hosts, four of them on a rank, beside seven of the others.
    rows = [[*range(4 * (r % 8), 4 * (r % 8) + 4), *range(32 + 7 * r, 39 + 7 * r)] for r in range(32)]
    placement = Placement(tuple(np.ravel(rows).tolist()), 256)
    away = slot_distances(spec, np.arange(32) // 8, placement.n_physical)
    assert away[9, 9 * 11] == 0
    assert away[9, 8 * 11] == 1
    assert away[9, 0] == 2
    rng = np.random.default_rng(5)
    logical, active = np.argsort(rng.random((32 * tokens, 256)), axis=1)[:, :8], np.ones(32 * tokens, bool)
    leaving = {}
    for distance in (None, away):
        slots = np.asarray(assign_copies(placement.tables, logical, active, 32, distance))
        np.testing.assert_array_equal(np.asarray(placement.physical_to_logical)[slots], logical)
        own = np.repeat(np.arange(32), tokens)[:, None]
        leaving[distance is None] = (away[own, slots] == 2).mean()
        if distance is not None:
            for run, ids in zip(slots.reshape(32, -1), range(32), strict=True):
                used = np.bincount(run, minlength=placement.n_physical)
                for copies in map(np.array, placement.logical_to_physical):
                    near = away[ids, copies] == away[ids, copies].min()
                    assert used[copies[~near]].sum() == 0
                    assert np.ptp(used[copies[near]]) <= 1
    # In turn three of four choices leave their host; those of experts 0 to 31, an eighth of all, need not.
    assert leaving[True] == pytest.approx(3 / 4, abs=0.01)
    assert leaving[False] == pytest.approx(3 / 4 * 7 / 8, abs=0.01)


def test_a_slot_is_as_near_as_the_nearest_device_that_holds_a_part_of_it():
    away = slot_distances(MeshSpec.parse("dp=4,tp=2,ep=2,etp=4"), np.arange(8) // 4, 2)
    np.testing.assert_array_equal(away, [[0, 2], [0, 2], [2, 0], [2, 0]])
    split = slot_distances(MeshSpec.parse("dp=8,tp=2,ep=8"), np.arange(16) // 4, 8)  # two copies of the experts
    np.testing.assert_array_equal(split[5], [1, 1, 0, 0, 2, 2, 2, 2])


@pytest.mark.slow
def test_ranks_with_one_token_each_do_not_all_choose_the_first_copy():
    placement = Placement((0, 1, 0, 2, 0, 3), 4)
    slots = assign_copies(placement.tables, jnp.zeros((6, 1), jnp.int32), jnp.ones(6, bool), ranks=6)
    np.testing.assert_array_equal(slots[:, 0], [0, 2, 4, 0, 2, 4])
    one = placement.tables, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool)
    each = [assign_copies(*one, first_rank=rank)[0, 0] for rank in range(6)]
    assert each == slots[:, 0].tolist(), "a rank that chooses for itself chooses as beside the others"


def test_placements_that_cannot_be_say_what_would():
    with pytest.raises(MeshError, match=r"288 is the least"):
        Placement.with_redundancy(256, 256, ranks=72)
    with pytest.raises(MeshError, match=r"missing \[1\]"):
        Placement((0, 2), 3)
    with pytest.raises(MeshError, match=r"load of 3 experts; expected 4 counts"):
        Placement.with_redundancy(4, 8, ranks=4, load=[1, 2, 3])

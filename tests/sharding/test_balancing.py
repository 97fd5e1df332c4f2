"""Placements by load: the published example, the bounds that the policies promise, and as few moves as can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import MeshError
from sharding.balancing import balancedness, experts_moved, keep_in_place, rank_loads, rebalance

README_LOAD = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
"""The example of github.com/deepseek-ai/EPLB's README: 2 layers, 12 experts in 4 groups, 16 copies on 2 hosts of 4 GPUs."""

README_PLACEMENT = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@st.composite
def problems(draw):
    """Loads `[L, E]` with zeros, ties and very hot experts, and the numbers of a machine that they fit."""
    hosts = draw(st.sampled_from([1, 2, 4]))
    ranks = hosts * draw(st.integers(1, 4))
    groups = hosts * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 6))
    slots = ranks * draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 3))
    counts = st.one_of(st.integers(0, 5), st.integers(0, 10_000))
    layers = draw(st.integers(1, 3))
    load = draw(st.lists(st.lists(counts, min_size=experts, max_size=experts), min_size=layers, max_size=layers))
    policy = draw(st.sampled_from(["global", "hierarchical"]))
    return np.array(load), {"n_physical": slots, "ranks": ranks, "groups": groups, "hosts": hosts, "policy": policy}


def copies(placement_P, experts):
    return np.bincount(placement_P, minlength=experts)


def shares(load_E, placement_P):
    """Load of each copy, where an expert that nobody asked for, or a layer without load, counts as what it is taken for."""
    load_E = load_E if load_E.sum() else np.ones(len(load_E))
    return (load_E / copies(placement_P, len(load_E)))[placement_P]


def test_the_published_example_comes_out_slot_by_slot_and_auto_is_global_where_groups_do_not_divide():
    options = {"n_physical": 16, "ranks": 8, "groups": 4, "hosts": 2}
    np.testing.assert_array_equal(rebalance(README_LOAD, **options), README_PLACEMENT)
    np.testing.assert_array_equal(rebalance(README_LOAD, **options, policy="hierarchical"), README_PLACEMENT)
    anywhere = rebalance(README_LOAD, **options, policy="global")
    most, of_groups = (rank_loads(README_LOAD, one, 8).max(axis=1) for one in (anywhere, README_PLACEMENT))
    assert (most < of_groups).any()
    options = {"n_physical": 16, "ranks": 8, "hosts": 8, "groups": 4}
    np.testing.assert_array_equal(rebalance(README_LOAD, **options), rebalance(README_LOAD, **options, policy="global"))


@settings(max_examples=100, deadline=None)
@given(problems())
def test_every_expert_has_a_slot_copies_go_where_load_is_and_ranks_are_as_even_as_greedy_packing_promises(problem):
    load_LE, options = problem
    hierarchical = options["policy"] == "hierarchical"
    hosts = options["hosts"] if hierarchical else 1
    placement_LP = rebalance(load_LE, **options)
    assert placement_LP.shape == (len(load_LE), options["n_physical"])
    np.testing.assert_array_equal(placement_LP, rebalance(load_LE, **options))
    for load_E, placement_P in zip(load_LE, placement_LP, strict=True):
        assert set(placement_P) == set(range(len(load_E)))
        share_P, most = shares(load_E, placement_P), options["ranks"] // hosts
        load_E = load_E if load_E.sum() else np.ones(len(load_E))
        for host_S, share_S in zip(placement_P.reshape(hosts, -1), share_P.reshape(hosts, -1), strict=True):
            # The bound of packing the heaviest first onto the least loaded; one part in a million for a sum in floats.
            assert np.ptp(share_S.reshape(most, -1).sum(axis=1)) <= share_S.max() * (1 + 1e-6)
            held = np.unique(host_S)
            count = copies(host_S, len(load_E))[held]
            if count.max() <= most:  # no copy is wasted on an expert with less load than another
                one_less = (load_E[held] / np.maximum(count - 1, 1))[count > 1]
                highest = (load_E[held] / count)[count < most]
                assert not len(one_less) or not len(highest) or highest.max() <= one_less.min() * (1 + 1e-6) + 1e-6
        if hierarchical:  # each group of experts is on one host
            groups = [set(host_S // (len(load_E) // options["groups"])) for host_S in placement_P.reshape(hosts, -1)]
            assert all(not a & b for a, b in itertools.combinations(groups, 2))
            assert {len(own) for own in groups} == {options["groups"] // hosts}


def test_copies_of_an_expert_lie_on_different_ranks_while_there_are_ranks():
    for load in ([100, 90, 1, 1, 1, 1, 1, 1], np.ones(8), np.zeros(8)):
        placement_P = rebalance(np.array([load]), n_physical=16, ranks=4)[0]
        for expert in range(8):
            ranks = np.flatnonzero(placement_P == expert) // 4
            assert len(set(ranks)) == len(ranks)


def test_balancedness_by_its_definitions():
    load = np.array([[6, 2, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    found = balancedness(load, np.arange(4), ranks=2)
    assert found.of_sums == pytest.approx((5 + 2) / (8 + 2))
    assert found.of_layers == pytest.approx((5 / 8 + 1) / 2)
    assert found.busiest == pytest.approx((8 / 5 + 1) / 2)
    assert balancedness(np.zeros((2, 4)), np.arange(4), ranks=2) == (1, 1, 1)
    # Two copies share a load.
    np.testing.assert_array_equal(rank_loads(np.array([[6, 2, 1]]), np.array([[0, 1, 0, 2]]), 2), [[5, 4]])


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_renumbering_moves_no_more_experts_and_changes_no_ranks_content(problem, seed):
    load_LE, options = problem
    rng = np.random.default_rng(seed)
    ranks, hosts = options["ranks"], options["hosts"]
    old_LP = rebalance(load_LE, **options)
    new_LP = rebalance(load_LE * rng.uniform(0.5, 2, load_LE.shape), **options)
    kept_LP = keep_in_place(old_LP, new_LP, ranks, hosts)
    assert (experts_moved(old_LP, kept_LP) <= experts_moved(old_LP, new_LP)).all()

    def contents(placement_P):
        by_host = np.sort(placement_P.reshape(hosts, ranks // hosts, -1), axis=2)
        return sorted(sorted(map(tuple, host)) for host in by_host)

    for kept_P, new_P in zip(kept_LP, new_LP, strict=True):
        assert contents(kept_P) == contents(new_P)

    # The same placement under other numbers is no move at all.
    for old_P in old_LP:
        shuffled = rng.permuted(old_P.reshape(ranks, -1), axis=1).reshape(hosts, ranks // hosts, -1)
        shuffled = rng.permuted(shuffled[rng.permutation(hosts)].reshape(hosts, -1, 1, shuffled.shape[2]), axis=2)
        shuffled = np.stack([host[rng.permutation(len(host))] for host in shuffled]).reshape(1, -1)
        assert experts_moved(old_P[None], keep_in_place(old_P[None], shuffled, ranks, hosts)) == [0]


def test_renumbering_moves_the_fewest_of_all_renumberings():
    rng = np.random.default_rng(1)
    for _ in range(10):
        old, new = (rebalance(rng.pareto(1.0, (1, 10)), n_physical=12, ranks=4) for _ in range(2))
        stay = lambda a, b: np.minimum(copies(a, 10), copies(b, 10)).sum()  # noqa: E731
        orders = itertools.permutations(new.reshape(4, 3))
        fewest = 12 - max(sum(map(stay, old.reshape(4, 3), order)) for order in orders)
        assert experts_moved(old, keep_in_place(old, new, 4)) == [fewest]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_physical": 17}, "13 is the least|16 is the least"),
        ({"n_physical": 8}, "16 is the least"),
        ({"hosts": 3}, "8 ranks on 3 hosts"),
        ({"groups": 5}, "12 experts in 5 groups"),
        ({"policy": "random"}, "expected auto, global or hierarchical"),
        ({"policy": "hierarchical", "groups": 2, "hosts": 4}, "2 groups of experts on 4 hosts"),
    ],
)
def test_numbers_that_do_not_fit_are_named(changed, message):
    options = {"n_physical": 16, "ranks": 8, "groups": 4, "hosts": 2} | changed
    with pytest.raises(MeshError, match=message):
        rebalance(README_LOAD, **options)
    with pytest.raises(MeshError, match=r"finite counts of tokens \[layers, logical experts\]"):
        rebalance(-README_LOAD, n_physical=16, ranks=8)

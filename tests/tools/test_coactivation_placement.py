"""Experts that tokens choose together come to lie on one host, and what crosses hosts is counted right."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import MeshError
from sharding.balancing import rebalance
from tools.coactivation_placement import chosen_together, crossings, place_together, together_on_a_host


def routing(rng, tokens, families, layers=2, top_k=4):
    """Ids `[L, T, K]`: each token chooses of one family of experts alone. families: `[layers, families, members]`."""
    which = rng.integers(families.shape[1], size=(layers, tokens))
    order = np.argsort(rng.random((layers, tokens, families.shape[2])), axis=2)[..., :top_k]
    chosen = np.take_along_axis(families, which[:, :, None], axis=1)
    return np.take_along_axis(chosen, order, axis=2)


def test_pairs_are_the_tokens_that_chose_both():
    ids = np.array([[[0, 1], [1, 2], [0, 1]]])
    np.testing.assert_array_equal(chosen_together(ids, 3), [[[2, 2, 0], [2, 3, 1], [0, 1, 1]]])


def test_families_of_experts_that_tokens_choose_together_get_a_host_each():
    rng = np.random.default_rng(0)
    families = np.stack([rng.permutation(32).reshape(4, 8) for _ in range(2)])
    pairs = chosen_together(routing(rng, 600, families), 32)
    options = {"n_physical": 40, "ranks": 8, "hosts": 4}
    placed = place_together(pairs, **options, groups=8, slack=0.5)
    for layer in range(2):
        hosts = [set(host) for host in placed[layer].reshape(4, 10)]
        assert sorted(map(sorted, hosts)) == sorted(map(sorted, families[layer]))
    apart = pairs * ~np.eye(32, dtype=bool)
    np.testing.assert_allclose(together_on_a_host(pairs, placed, 4), apart.sum(axis=(1, 2)) / 2)
    published = rebalance(np.einsum("lee->le", pairs), **options, groups=8)
    assert (together_on_a_host(pairs, published, 4) < 0.5 * apart.sum(axis=(1, 2)) / 2).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pairs_are_never_more_often_apart_than_by_the_published_policy(data):
    hosts = data.draw(st.sampled_from([2, 4]))
    groups = hosts * data.draw(st.integers(1, 2))
    experts = groups * data.draw(st.integers(1, 3))
    ranks = hosts * data.draw(st.integers(1, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    ids = np.argsort(rng.random((2, 20, experts)) * rng.random(experts), axis=2)[..., : min(experts, 3)]
    pairs = chosen_together(ids, experts)
    load = np.einsum("lee->le", pairs)
    options = {"n_physical": -(-experts // ranks) * ranks + ranks, "ranks": ranks, "hosts": hosts, "groups": groups}
    placed = place_together(pairs, **options)
    published = rebalance(load, **options, policy="hierarchical")
    together = together_on_a_host(pairs, placed, hosts)
    assert (together >= together_on_a_host(pairs, published, hosts) * (1 - 1e-5)).all()
    np.testing.assert_array_equal(placed, place_together(pairs, **options))

    def most_loaded_host(placement):
        share = load / np.stack([np.bincount(row, minlength=experts) for row in placement])
        return np.take_along_axis(share, placement, axis=1).reshape(2, hosts, -1).sum(axis=2).max(axis=1)

    assert all(set(row) == set(range(experts)) for row in placed)
    allowed = np.maximum(load.sum(axis=1) / hosts * 1.1, most_loaded_host(published))
    assert (most_loaded_host(placed) <= allowed * (1 + 1e-5)).all()


def test_crossings_by_hand():
    # 4 ranks of 2 slots on 2 hosts. One token on rank 0, which uses slots of ranks 1 (its host), 2, 2 and 3.
    slots = np.array([[[2, 4, 5, 7]]])
    assert crossings(slots, np.array([0]), per_rank=2, ranks=4, hosts=2) == (2, 1, 3)
    assert crossings(slots, np.array([3]), per_rank=2, ranks=4, hosts=2) == (1, 1, 1)


def test_experts_that_do_not_divide_over_the_hosts_are_refused():
    with pytest.raises(MeshError, match="10 experts on 4 hosts"):
        place_together(np.ones((1, 10, 10)), n_physical=12, ranks=4, hosts=4)

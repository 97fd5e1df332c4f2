"""Placements layer by layer: tables of one width, and ways from one placement to another that lose no expert."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.errors import MeshError
from sharding.layer_placement import LayerPlacements, exchange_rounds


def random_row(seed: int, experts: int, physical: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, physical - experts)]))


def test_tables_are_as_wide_as_any_placement_needs_and_slots_loads_add_up_to_those_of_their_experts():
    rows = LayerPlacements(np.array([[0, 1, 2, 2, 2, 2], [0, 1, 2, 0, 1, 2]]), 3)
    physical, copies = rows.tables
    assert physical.shape == (2, 3, 4)
    assert rows.width == 4
    assert copies.tolist() == [[1, 1, 4], [2, 2, 2]]
    assert physical[0].tolist() == [[0, -1, -1, -1], [1, -1, -1, -1], [2, 3, 4, 5]]
    assert physical[1].tolist() == [[0, 3, -1, -1], [1, 4, -1, -1], [2, 5, -1, -1]]
    with pytest.raises(MeshError, match=r"MoE layer 1: .* missing \[2\]"):
        LayerPlacements(np.array([[0, 1, 2, 2], [0, 1, 1, 0]]), 3)
    rows = LayerPlacements(np.array([[0, 1, 0, 2], [2, 2, 1, 0]]), 3)
    assert rows.logical_load(np.array([[5, 7, 3, 2], [1, 2, 3, 4]])).tolist() == [[8, 7, 2], [4, 3, 3]]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), experts=st.integers(1, 4))
def test_rounds_bring_every_slot_its_expert_within_what_a_rank_may_send_and_receive(seed, experts):
    ranks, per_rank = 4, 6
    old, new = random_row(seed, 16, 24), random_row(seed + 1, 16, 24)
    staged = {}
    for moves in exchange_rounds(old, new, ranks=ranks, experts=experts):
        sources = {source for source, _ in moves}
        for rank in range(ranks):
            assert sum(source // per_rank == rank for source in sources) <= experts
            assert sum(slot // per_rank == rank for _, slot in moves) <= experts
        pairs = [(source // per_rank, slot // per_rank) for source, slot in moves]
        assert len(pairs) == len(set(pairs))
        assert not staged.keys() & {slot for _, slot in moves}
        staged |= {slot: old[source] for source, slot in moves}
    result = old.copy()
    result[list(staged)] = list(staged.values())
    assert result.tolist() == new.tolist()
    assert all(old[slot] != new[slot] for slot in staged)


def test_a_slot_reads_from_its_own_rank_where_that_has_the_expert():
    old = [0, 1, 2, 0]
    assert list(exchange_rounds(old, [0, 1, 2, 2], ranks=2, experts=1)) == [[(2, 3)]]

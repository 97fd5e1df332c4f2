"""A rank's own code: it opens a region or runs inside one, where it leaves out what it has nothing to do for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.on_ranks import OneRank, constrain, if_any, on_ranks

MESH = MeshSpec.parse("dp=4").build()
BY_RANK = P(MESH.axis_names)


def sum_of_each(rows, mesh):
    """Each rank's own sum, whoever calls this."""
    own = lambda rows: constrain(rows, OneRank(MESH), BY_RANK).sum(keepdims=True)[:1]  # noqa: E731
    return on_ranks(own, mesh, BY_RANK, BY_RANK)(rows)


def test_a_region_inside_a_region_is_the_function_itself():
    rows = jnp.arange(8.0)
    outside = jax.jit(lambda rows: sum_of_each(rows, MESH))(rows)
    inside = jax.jit(on_ranks(lambda rows: sum_of_each(rows, OneRank(MESH)), MESH, BY_RANK, BY_RANK))(rows)
    np.testing.assert_array_equal(outside, [1, 5, 9, 13])
    np.testing.assert_array_equal(inside, outside)


def test_an_array_is_spread_outside_a_region_alone():
    spread = jax.jit(lambda rows: constrain(rows, MESH, BY_RANK))(jnp.arange(8.0))
    assert len(spread.sharding.device_set) == 4
    assert constrain(spread, OneRank(MESH), P()) is spread


def test_a_rank_with_nothing_active_computes_nothing_and_outside_a_region_all_compute_in_step():
    def rank(active, rows):
        return if_any(OneRank(MESH), active, lambda: rows * 2, lambda: jnp.full_like(rows, -1))

    active = jnp.asarray([False, False, True, False, False, False, True, True])
    found = jax.jit(on_ranks(rank, MESH, BY_RANK, BY_RANK))(active, jnp.arange(8.0))
    np.testing.assert_array_equal(found, [-1, -1, 4, 6, -1, -1, 12, 14])
    whole = lambda rows: if_any(MESH, rows < 0, lambda: rows * 2, lambda: jnp.full_like(rows, -1))  # noqa: E731
    np.testing.assert_array_equal(jax.jit(whole)(jnp.arange(4.0)), [0, 2, 4, 6])

"""Sums in an order that no mesh changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.sums import MOST_PIECES, add_as_tree, add_by_halves, add_in_order, pieces_here, pieces_of, tree_sum


def test_a_sum_has_as_many_pieces_as_a_power_of_two_divides_and_devices_share_them_where_that_comes_out_even():
    assert [pieces_of(depth) for depth in (1, 6, 12, 16, 56, 2048)] == [1, 2, 4, 8, 8, MOST_PIECES]
    assert [pieces_here(64, shares) for shares in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert pieces_here(48, 3) == 1
    assert pieces_here(512, 16) == 1


def summed(terms, shares):
    """What devices that share eight terms give, each adding its own as a branch."""
    branches = [add_as_tree(part) for part in jnp.split(terms, shares)]
    return add_as_tree(jnp.stack(branches))


def test_branches_of_any_number_of_devices_add_up_to_the_same_bits():
    terms = jnp.asarray(np.random.default_rng(0).normal(size=(8, 1000)) * 10.0 ** np.arange(8)[:, None], jnp.float32)
    whole = add_as_tree(terms)
    for shares in (1, 2, 4, 8):
        np.testing.assert_array_equal(summed(terms, shares), whole)
    assert not np.array_equal(whole, sum(terms[1:], terms[0]))  # the order matters here


@pytest.mark.parametrize(
    ("layout", "rows", "split"),
    [("tp=2", 5, False), ("tp=4", 64, False), ("tp=8", 1, False), ("tp=8", 5, False), ("tp=4", 8, True)],
)
def test_the_sum_over_devices_is_the_tree_over_their_branches(layout, rows, split):
    """split: each device has its rows of the sum alone."""
    spec = MeshSpec.parse(layout)
    terms = jnp.asarray(np.random.default_rng(rows).normal(size=(spec.tp_size, rows, 3)), jnp.float32)
    run = jax.shard_map(
        lambda branch: tree_sum(branch[0], ("tp",), spec.tp_size, split=split),
        mesh=spec.build(), in_specs=P("tp"), out_specs=P("tp") if split else P(), check_vma=False,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(run)(terms), add_as_tree(terms))


@pytest.mark.parametrize("width", [1, 5, 64])
def test_other_rows_change_no_bit_of_a_row(width):
    terms = np.random.default_rng(width).normal(size=(33, width)).astype(np.float32)
    for add in (add_in_order, add_by_halves):
        whole = np.asarray(jax.jit(add)(terms))
        np.testing.assert_allclose(whole, terms.astype(np.float64).sum(axis=1), rtol=1e-4, atol=1e-5)
        for rows in (1, 2, 7):
            np.testing.assert_array_equal(jax.jit(add)(terms[:rows]), whole[:rows])

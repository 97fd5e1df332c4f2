"""Look-ups that know their indices not to be negative give what JAX's own give, in fewer operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.indices import counted, cut, pick, put, take

ARRAY = np.arange(20).reshape(5, 4)


@pytest.mark.parametrize(
    ("function", "index", "plain"),
    [
        (take, np.array([3, 0, 4]), lambda array, at: array[at]),
        (pick, 2, lambda array, at: array[at]),
        (lambda array, at: cut(array, at, 3, axis=1), 1, lambda array, at: jax.lax.dynamic_slice_in_dim(array, at, 3, 1)),
        (lambda array, at: put(array, at, 7), np.array([2, 4]), lambda array, at: array.at[at].set(7)),
    ],
)  # fmt: skip
def test_indices_are_not_looked_through_for_negative_ones(function, index, plain):
    np.testing.assert_array_equal(jax.jit(function)(ARRAY, index), jax.jit(plain)(ARRAY, index))
    ours, jax_s = (str(jax.make_jaxpr(one)(jnp.asarray(ARRAY), index)) for one in (function, plain))
    assert "select_n" in jax_s
    assert "select_n" not in ours


@pytest.mark.parametrize("numbers", [60, 6000])  # compared, and scattered
def test_numbers_are_counted_without_those_out_of_range(numbers):
    drawn = np.random.default_rng(0).integers(-3, 12, (numbers // 6, 6))
    np.testing.assert_array_equal(
        jax.jit(counted, static_argnums=1)(drawn, 10), np.bincount(drawn[(drawn >= 0) & (drawn < 10)], minlength=10)
    )

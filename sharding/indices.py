"""Read and write arrays at indices that are known not to be negative.

JAX counts a negative index from the end, which costs three operations for each look-up.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def take(array: Array, indices: Int[Array, "*i"] | tuple) -> Array:
    """``array[indices]``, all of which must be in bounds."""
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def pick(array: Array, index: Int[Array, ""]) -> Array:
    """``array[index]``; one past the end is the last."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def cut(array: Array, start: Int[Array, ""], size: int, axis: int = 0) -> Array:
    """``size`` entries from ``start`` on, which is moved back where they would reach past the end."""
    return lax.dynamic_slice_in_dim(array, start, size, axis, allow_negative_indices=False)


def put(array: Array, indices: Any, values: Any) -> Array:
    """The array with ``values`` at these indices. Values at negative indices and past the end are dropped."""
    return array.at[indices].set(values, mode="drop", wrap_negative_indices=False)


def counted(numbers: Int[Array, "*n"], size: int) -> Int[Array, "size"]:
    """How many of the numbers are 0, 1 … ``size - 1``; others are not counted.

    Few are compared, in one pass that XLA fuses with what makes them. Many are scattered: on a CPU one after the other.
    """
    if numbers.size * size <= 1 << 14:
        return jnp.sum(numbers.reshape(-1, 1) == jnp.arange(size), axis=0, dtype=jnp.int32)
    return jnp.zeros((size + 1,), jnp.int32).at[jnp.where(numbers < 0, size, numbers)].add(1, mode="drop")[:size]

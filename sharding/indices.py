"""Read and write arrays at indices that are known to be non-negative.

JAX wraps negative indices, which costs three operations per look-up.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def take(array: Array, indices: Int[Array, "*i"] | tuple) -> Array:
    """Return ``array[indices]``. All indices must be in bounds."""
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def pick(array: Array, index: Int[Array, ""]) -> Array:
    """Return ``array[index]``. An index past the end is clamped to the last entry."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)


def cut(array: Array, start: Int[Array, ""], size: int, axis: int = 0) -> Array:
    """Return ``size`` entries from ``start`` on. ``start`` is clamped so that the slice stays in bounds."""
    return lax.dynamic_slice_in_dim(array, start, size, axis, allow_negative_indices=False)


def put(array: Array, indices: Any, values: Any) -> Array:
    """Return the array with ``values`` set at these indices. Values at negative or out-of-bounds indices are dropped."""
    return array.at[indices].set(values, mode="drop", wrap_negative_indices=False)


def counted(numbers: Int[Array, "*n"], size: int) -> Int[Array, "size"]:
    """Count how often each of 0, 1 … ``size - 1`` occurs; ignore other numbers.

    A small input is compared in one pass, which XLA fuses with its producer. A large input is scattered (serially on a CPU).
    """
    if numbers.size * size <= 1 << 14:
        return jnp.sum(numbers.reshape(-1, 1) == jnp.arange(size), axis=0, dtype=jnp.int32)
    return jnp.zeros((size + 1,), jnp.int32).at[jnp.where(numbers < 0, size, numbers)].add(1, mode="drop")[:size]

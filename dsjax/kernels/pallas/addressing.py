"""Which arrays Triton's kernels address rightly, and what is done with a stack of layers that they do not."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def addressable(array: Array) -> bool:
    """Whether Pallas addresses the array rightly: up to 2³² bytes it counts elements in 32 bits, of which one is the sign."""
    return array.size < 2**31 or array.size * array.dtype.itemsize > 2**32


def addressable_layer(arrays: Mapping[str, Array], layer: Int[Array, ""]) -> tuple[Mapping[str, Array], Int[Array, ""]]:
    """Stacks of layers, and which layer is meant. Where one of them is not addressable, all are cut to that layer, which is copied."""
    if all(map(addressable, arrays.values())):
        return arrays, layer
    return {name: lax.dynamic_index_in_dim(array, layer, 0) for name, array in arrays.items()}, jnp.zeros_like(layer)

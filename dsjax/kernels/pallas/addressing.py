"""How Triton's kernels read arrays: limits of addressing, specs of whole arrays, and masked loads of cache entries."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dsjax.kernels.pallas import pl, plgpu
from sharding import fp8


def addressable(array: Array) -> bool:
    """Whether Pallas addresses the array rightly: up to 2³² bytes it counts elements in 32 bits, of which one is the sign."""
    return array.size < 2**31 or array.size * array.dtype.itemsize > 2**32


def addressable_layer(arrays: Mapping[str, Array], layer: Int[Array, ""]) -> tuple[Mapping[str, Array], Int[Array, ""]]:
    """Return stacks of layers and the layer's index in them. If a stack is not addressable, return a copy of that layer of each stack."""
    if all(map(addressable, arrays.values())):
        return arrays, layer
    return {name: lax.dynamic_index_in_dim(array, layer, 0) for name, array in arrays.items()}, jnp.zeros_like(layer)


def whole_spec(array: Array) -> pl.BlockSpec:
    """Return the spec of an array that every program of a grid sees whole."""
    return pl.BlockSpec(array.shape, lambda *program: (0,) * array.ndim)


def load_entries(ref, entry, exists, columns: range, width: int, stored, dtype):
    """Load ``columns`` of cache entries as ``dtype``; zero where they do not exist and beyond the ``width`` columns of an entry.

    stored: dtype of the cache, whose bits ``ref`` may have as another dtype.
    """
    column = columns.start + jnp.arange(len(columns))
    mask = jnp.broadcast_to(exists[:, None], (len(exists), len(columns)))
    if columns.stop > width:
        mask, column = mask & (column < width), jnp.minimum(column, width - 1)
    is_fp8 = stored == fp8.E4M3  # Triton has no FP8 zero for `other`
    values = plgpu.load(ref.at[entry[:, None], column[None, :]], mask=mask, other=None if is_fp8 else 0)
    if values.dtype != stored:
        values = lax.bitcast_convert_type(values, stored)
    values = values.astype(dtype)
    return jnp.where(mask, values, 0) if is_fp8 else values

"""Between the host and a mesh that other processes may share: each process has the parts of arrays that are on its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def put(tree: Any, sharding: Sharding) -> Any:
    """A pytree of host arrays on the devices of ``sharding``. Where those are of several processes, each calls this with equal values.

    There ``jax.device_put`` would compare the values of all processes first, which is a collective, for every array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), arrays)


def own_parts(array: jax.Array) -> list[jax.Array]:
    """Give the parts of an array on the devices of this process, in the order of its first axis, the only one that is divided."""
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda shard: _start(shard.index))]


def put_own_parts(parts: Sequence[np.ndarray], described: jax.ShapeDtypeStruct) -> jax.Array:
    """Make an array of the parts that ``own_parts`` would give of it. Each process calls this with those of its own devices."""
    indices = described.sharding.addressable_devices_indices_map(described.shape)
    devices = sorted(indices, key=lambda device: _start(indices[device]))
    arrays = jax.device_put(list(parts), devices)
    return jax.make_array_from_single_device_arrays(described.shape, described.sharding, arrays)


def _start(index: tuple[slice, ...]) -> int:
    """Where a part begins on the first axis."""
    return index[0].start or 0

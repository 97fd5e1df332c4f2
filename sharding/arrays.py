"""Move arrays between the host and a mesh that may span several processes, each of which holds only its own devices' shards."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def put(tree: Any, sharding: Sharding) -> Any:
    """Put a pytree of host arrays on the devices of ``sharding``. If these span several processes, each must pass equal values.

    ``jax.device_put`` would first compare the values of all processes, with one collective per array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), arrays)


def own_parts(array: jax.Array) -> list[jax.Array]:
    """Return the array's shards on this process's devices, in the order of the first axis, which must be the only sharded one."""
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda shard: _start(shard.index))]


def put_own_parts(parts: Sequence[np.ndarray], described: jax.ShapeDtypeStruct) -> jax.Array:
    """Make an array from its ``own_parts``. Each process passes the shards of its own devices."""
    indices = described.sharding.addressable_devices_indices_map(described.shape)
    devices = sorted(indices, key=lambda device: _start(indices[device]))
    arrays = jax.device_put(list(parts), devices)
    return jax.make_array_from_single_device_arrays(described.shape, described.sharding, arrays)


def _start(index: tuple[slice, ...]) -> int:
    """Return the start of a shard on the first axis."""
    return index[0].start or 0

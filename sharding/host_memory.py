"""Arrays in the memory of a device's host, and rows of them that a program fetches while it runs."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from sharding import jax_internals

HOST = "pinned_host"
"""JAX's name of host memory that a device reads by itself."""


class _DescribedHost(NamedSharding):
    """A sharding over devices that are only described, which know of no memory and so would drop its kind."""

    memory_kind = property(lambda self: HOST)


def host_sharding(sharding: NamedSharding) -> NamedSharding:
    """Give the same sharding for arrays in the memory of each device's host."""
    placed = sharding.with_memory_kind(HOST)
    return placed if placed.memory_kind == HOST else _DescribedHost(sharding.mesh, sharding.spec)


def memory_of(device: jax.Device, sharding: NamedSharding) -> jax.Device | SingleDeviceSharding:
    """Where ``jax.device_put`` brings a device's part of an array of this sharding."""
    return device if on_device(sharding) else SingleDeviceSharding(device, memory_kind=HOST)


def on_device(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays of this sharding take memory of the devices."""
    return sharding.memory_kind != HOST


def rows_from_host(table: Array, indices: Int[Array, "B *t"], mesh: Mesh, batch_axes: tuple[str, ...]) -> Array:
    """Inside ``jit``: ``table[indices]`` on the devices, of a table that is whole in each host's memory.

    Each device sends the indices of its part of the batch to its host, which looks them up there and sends these rows alone. All of it is
    part of the program: indices that the program itself has computed, as tokens that were sampled a moment ago, need nobody to wait.

    batch_axes: mesh axes that the leading axis of ``indices`` is split over.
    """

    def look_up(table: Array, indices: Array) -> Array:
        gather = jax_internals.computed_by_host(lambda table, indices: table[indices])
        return jax.device_put(gather(table, jax.device_put(indices, jax.memory.Space.Host)), jax.memory.Space.Device)

    over_batch = P(batch_axes)
    run = jax.shard_map(look_up, mesh=mesh, in_specs=(P(), over_batch), out_specs=over_batch, check_vma=False)
    return run(table, indices)

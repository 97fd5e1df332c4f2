"""Arrays in pinned host memory, and look-ups of their rows from inside a program."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from sharding import jax_internals
from sharding.on_ranks import on_ranks

HOST = "pinned_host"
"""JAX's memory kind for host memory that a device can read."""


class _DescribedHost(NamedSharding):
    """A sharding in host memory over topology-only devices, which list no memories and so would drop the memory kind."""

    memory_kind = property(lambda self: HOST)


def host_sharding(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding with host memory as its memory kind."""
    placed = sharding.with_memory_kind(HOST)
    return placed if placed.memory_kind == HOST else _DescribedHost(sharding.mesh, sharding.spec)


def memory_of(device: jax.Device, sharding: NamedSharding) -> jax.Device | SingleDeviceSharding:
    """Return the target of ``jax.device_put`` for a device's shard of an array with this sharding."""
    return device if on_device(sharding) else SingleDeviceSharding(device, memory_kind=HOST)


def on_device(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays with this sharding use device memory."""
    return sharding.memory_kind != HOST


def rows_from_host(table: Array, indices: Int[Array, "B *t"], mesh: Mesh, batch_axes: tuple[str, ...]) -> Array:
    """Return ``table[indices]`` on the devices, for a table that is replicated in each host's memory. Inside ``jit``.

    Each device sends the indices of its part of the batch to its host, which looks up the rows and sends back only these. This is part of
    the program, so indices that the program computes itself (such as tokens just sampled) need no synchronisation.

    batch_axes: mesh axes that shard the leading axis of ``indices``.
    """

    def look_up(table: Array, indices: Array) -> Array:
        gather = jax_internals.computed_by_host(lambda table, indices: table[indices])
        return jax.device_put(gather(table, jax.device_put(indices, jax.memory.Space.Host)), jax.memory.Space.Device)

    over_batch = P(batch_axes)
    return on_ranks(look_up, mesh, (P(), over_batch), over_batch)(table, indices)

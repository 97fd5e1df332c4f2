"""One collective as a compiled program, over the devices that meet in it: a loop that can be timed, and an application that is checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.bench.modules.timing import device_loop
from dsjax.errors import UserError
from sharding import MeshSpec

_RANK = "rank"
_ALL = P(("group", _RANK))
_PERIOD = 3
"""Values that are checked repeat after so many: sums of them over 100 ranks are exact in bfloat16 too."""


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Groups of as many devices each, that run the same collective at the same time, as they do in a step.

    uses: what such groups are to the mesh: `host` (all devices of a process), `hosts` (one device of each process), `experts` (the ranks
    that tokens travel between), `tp`; or `pair` (two devices of a process, or one of each of two). devices: [groups, ranks]. hosts:
    processes that a group spans.
    """

    uses: tuple[str, ...]
    devices: np.ndarray
    hosts: int

    @property
    def ranks(self) -> int:
        """Devices of one group."""
        return self.devices.shape[1]

    @property
    def between_hosts(self) -> bool:
        """Whether a collective leaves the host."""
        return self.hosts > 1

    @property
    def name(self) -> str:
        """The name that tables show."""
        return ", ".join(self.uses)

    def mesh(self) -> Mesh:
        """Make a mesh of the groups, with the axes `group` and `rank`."""
        return Mesh(self.devices, ("group", "rank"))

    @property
    def takes_part(self) -> bool:
        """Whether a device of this process is in one of the groups."""
        return any(device.process_index == jax.process_index() for device in self.devices.flat)

    def near(self, domain: int, devices_per_host: int) -> int:
        """Ranks of a group that one rank reaches without the network, itself among them, where the fast link joins `domain` devices."""
        hosts_in_domain = max(1, domain // devices_per_host)
        each = min(domain, self.ranks // self.hosts)
        return min(self.ranks, each * min(self.hosts, hosts_in_domain))


def device_groups(spec: MeshSpec, mesh: Mesh) -> list[DeviceGroup]:
    """The groups of more than one device; those that several uses share stand once.

    Raises:
        UserError: the processes have different numbers of the mesh's devices, so that there is no one of each.
    """
    processes: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        processes.setdefault(device.process_index, []).append(device)
    counts = {len(devices) for devices in processes.values()}
    if len(counts) > 1:
        raise UserError(
            f"--mesh {spec} has {min(counts)} to {max(counts)} devices of a process; give a mesh with as many of each"
        )
    by_host = _array(processes.values())
    candidates = [("host", by_host), ("hosts", by_host.T)]
    for use, axes in (("experts", spec.expert_axes), ("tp", spec.head_axes)):
        if spec.ep_size > 1 or use == "tp":
            candidates.append((use, _along(mesh, [spec.axes.index(axis) for axis in axes])))
    groups: dict[tuple, DeviceGroup] = {}
    for use, devices in candidates:
        if devices.shape[1] == 1:
            continue
        key = tuple(sorted(tuple(device.id for device in row) for row in devices))
        known = groups.get(key)
        hosts = len({device.process_index for device in devices[0]})
        groups[key] = DeviceGroup((*known.uses, use) if known else (use,), devices, hosts)
    return list(groups.values())


def device_pairs(mesh: Mesh) -> list[DeviceGroup]:
    """Pairs for messages from one device to another: two devices of each host; the first device of each two hosts.

    The last of an odd number of hosts is in no pair of hosts.
    """
    processes: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        processes.setdefault(device.process_index, []).append(device)
    hosts = list(processes.values())
    inside = [devices[:2] for devices in hosts if len(devices) > 1]
    between = [[one[0], other[0]] for one, other in zip(hosts[::2], hosts[1::2], strict=False)]
    return [DeviceGroup(("pair",), _array(rows), spans) for rows, spans in ((inside, 1), (between, 2)) if rows]


def _along(mesh: Mesh, kept: list[int]) -> np.ndarray:
    others = [k for k in range(mesh.devices.ndim) if k not in kept]
    ranks = int(np.prod([mesh.devices.shape[k] for k in kept]))
    return mesh.devices.transpose(*others, *kept).reshape(-1, ranks)


def _array(rows: Iterable[list[jax.Device]]) -> np.ndarray:
    rows = list(rows)
    array = np.empty((len(rows), len(rows[0])), object)
    for k, row in enumerate(rows):
        array[k] = row
    return array


def all_gather(x, ranks: int):
    """Every rank's values, in the order of ranks."""
    return lax.all_gather(x, _RANK, tiled=True)


def reduce_scatter(x, ranks: int):
    """The sum of block k of all ranks, on rank k."""
    return lax.psum_scatter(x, _RANK, scatter_dimension=0, tiled=True)


def all_to_all(x, ranks: int):
    """Block k of each rank, on rank k."""
    return lax.all_to_all(x, _RANK, split_axis=0, concat_axis=0, tiled=True)


def ragged_all_to_all(x, ranks: int):
    """Block k of each rank, on rank k, by the collective that is told how many values go where."""
    block = x.shape[0] // ranks
    starts, sizes = jnp.arange(ranks, dtype=jnp.int32) * block, jnp.full(ranks, block, jnp.int32)
    lands = jnp.full(ranks, lax.axis_index(_RANK) * block, jnp.int32)
    return lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, sizes, lands, sizes, axis_name=_RANK)


def all_reduce(x, ranks: int):
    """The sum over all ranks, on every rank."""
    return lax.psum(x, _RANK)


def send_receive(x, ranks: int):
    """Rank 0's values to rank 1, and back again: two messages, one after the other, so that half of the time is one way's."""
    there = lax.optimization_barrier(lax.ppermute(x, _RANK, [(0, 1)]))
    return lax.ppermute(there, _RANK, [(1, 0)])


_COLLECTIVES = (all_gather, reduce_scatter, all_to_all, ragged_all_to_all, all_reduce, send_receive)
_APPLY: dict[str, Callable] = {collective.__name__: collective for collective in _COLLECTIVES}


class CollectiveProgram:
    """`collective` over each of a group's rows of devices, with operands of about `sent` bytes that leave a device.

    Attributes:
        hops: times that the bytes travel, one after another, in one application: 2 for a message there and back.
        operand_bytes: of one device. sent_bytes: that leave a device: what a ring or a direct exchange of this operand sends.
    """

    def __init__(self, group: DeviceGroup, collective: str, sent: int, dtype: np.dtype):
        self._group, self._dtype, self._apply = group, jnp.dtype(dtype), _APPLY[collective]
        self._collective = collective
        ranks, size = group.ranks, self._dtype.itemsize
        blocks = {"all_gather": ranks - 1, "all_reduce": 2 * (ranks - 1)}.get(collective, ranks - 1)
        block = max(1, round(sent / blocks / size))
        self.hops = 2 if collective == "send_receive" else 1
        self._length = block if collective in ("all_gather", "send_receive") else block * ranks
        self.operand_bytes, self.sent_bytes = self._length * size, block * blocks * size
        self._place = NamedSharding(group.mesh(), _ALL)
        self._global = (group.devices.size * self._length,)

    @property
    def memory(self) -> int:
        """Bytes of a device while the loop runs: operand and result, each once more for the copy that a loop may make. Of a message there
        and back only what is on its way is kept beside the operand."""
        if self._collective == "send_receive":
            return 2 * self.operand_bytes
        result = self.operand_bytes * (self._group.ranks if self._collective == "all_gather" else 1)
        return 2 * (self.operand_bytes + result)

    def loop(self) -> Callable[[int], None]:
        """A function that applies the collective so many times, one after another, and waits."""

        def once(x):
            if self._collective == "send_receive":  # what has come back is sent again: it lies where it was sent from
                return self._apply(x, self._group.ranks)
            # The barrier keeps all of the result; the one value makes the next application wait for this one.
            result = lax.optimization_barrier(self._apply(x, self._group.ranks))
            return x.at[0].set(result[-1])

        mapped = jax.shard_map(once, mesh=self._place.mesh, in_specs=_ALL, out_specs=_ALL, check_vma=False)
        zeros = jax.jit(lambda: jnp.zeros(self._global, self._dtype), out_shardings=self._place)
        return device_loop(lambda inputs, index, x: mapped(x), None, zeros()).run

    def arrives_right(self) -> bool:
        """Apply it once to values that tell rank and place; whether this process's devices have what they should."""
        ranks, length = self._group.ranks, self._length

        def value(rank, place):
            return ((rank + place) % _PERIOD).astype(self._dtype)

        def local():
            me = lax.axis_index(_RANK)
            here = jnp.arange(length)
            result = self._apply(value(me, here), ranks)
            block = length // ranks
            if self._collective == "all_gather":
                right = jnp.concatenate([value(jnp.int32(rank), here) for rank in range(ranks)])
            elif self._collective in ("all_to_all", "ragged_all_to_all"):
                block_places = me * block + jnp.arange(block)
                right = jnp.concatenate([value(jnp.int32(rank), block_places) for rank in range(ranks)])
            elif self._collective == "send_receive":
                right = jnp.where(me == 0, value(0 * me, here), jnp.zeros_like(result))
            else:
                block_places = here if self._collective == "all_reduce" else me * block + jnp.arange(block)
                right = functools.reduce(jnp.add, [value(jnp.int32(rank), block_places) for rank in range(ranks)])
            return jnp.all(result == right)[None]

        mapped = jax.shard_map(local, mesh=self._place.mesh, in_specs=(), out_specs=_ALL, check_vma=False)
        is_right = jax.block_until_ready(jax.jit(mapped)())
        return all(bool(np.asarray(shard.data).all()) for shard in is_right.addressable_shards)

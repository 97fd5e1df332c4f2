"""`CollectiveProgram`: a collective compiled for a group of devices, as a loop to time and as one run to check its result."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.bench.modules.timing import PreparedCase, device_loop
from dsjax.errors import UserError
from sharding import MeshSpec

_RANK = "rank"
_ALL = P(("group", _RANK))
_PERIOD = 3
"""Period of the checked values −1, 0 and 1: their sums over several hundred ranks are exact even in bfloat16."""


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Groups of equal size that run the same collective at the same time, as in a step of the model."""

    # what the groups are in the mesh: `host` (all devices of a process), `hosts` (one device of each process), `experts` (EP ranks, which
    # exchange tokens), `tp`; or `pair` (two devices of a process, or one of each of two processes)
    uses: tuple[str, ...]
    devices: np.ndarray  # [groups, ranks]
    hosts: int  # processes that a group spans

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

    @property
    def takes_part(self) -> bool:
        """Whether a device of this process is in one of the groups."""
        return any(device.process_index == jax.process_index() for device in self.devices.flat)

    def near(self, domain: int, devices_per_host: int) -> int:
        """Return how many ranks of a group, itself included, a rank reaches inside a fast-link domain (NVLink) of `domain` devices."""
        hosts_in_domain = max(1, domain // devices_per_host)
        near_per_host = min(domain, self.ranks // self.hosts)
        return min(self.ranks, near_per_host * min(self.hosts, hosts_in_domain))


def device_groups(spec: MeshSpec, mesh: Mesh) -> list[DeviceGroup]:
    """Return the mesh's groups of more than one device. Uses that have the same groups, such as `host` and `tp`, share an entry.

    Raises:
        UserError: the processes have different numbers of the mesh's devices.
    """
    hosts = _by_process(mesh)
    counts = {len(devices) for devices in hosts}
    if len(counts) > 1:
        raise UserError(
            f"--mesh {spec} has {min(counts)} to {max(counts)} devices of a process; give a mesh with as many of each"
        )
    by_host = _array(hosts)
    candidates = [("host", by_host), ("hosts", by_host.T)]
    for use, axes in (("experts", spec.expert_axes), ("tp", spec.head_axes)):
        if spec.ep_size > 1 or use == "tp":
            group_axes = [spec.axes.index(axis) for axis in axes]
            other_axes = [k for k in range(mesh.devices.ndim) if k not in group_axes]
            ranks = int(np.prod([mesh.devices.shape[k] for k in group_axes]))
            candidates.append((use, mesh.devices.transpose(*other_axes, *group_axes).reshape(-1, ranks)))
    groups: dict[tuple, DeviceGroup] = {}
    for use, devices in candidates:
        if devices.shape[1] == 1:
            continue
        key = tuple(sorted(tuple(device.id for device in row) for row in devices))  # the groups, in any order
        uses = (*groups[key].uses, use) if key in groups else (use,)
        groups[key] = DeviceGroup(uses, devices, len({device.process_index for device in devices[0]}))
    return list(groups.values())


def device_pairs(mesh: Mesh) -> list[DeviceGroup]:
    """Return pairs for point-to-point messages: the first two devices of each host; the first devices of every two hosts.

    With an odd number of hosts, the last one has no partner.
    """
    hosts = _by_process(mesh)
    inside = [devices[:2] for devices in hosts if len(devices) > 1]
    between = [[first[0], second[0]] for first, second in zip(hosts[::2], hosts[1::2], strict=False)]
    return [DeviceGroup(("pair",), _array(rows), num_hosts) for rows, num_hosts in ((inside, 1), (between, 2)) if rows]


def _by_process(mesh: Mesh) -> list[list[jax.Device]]:
    processes: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        processes.setdefault(device.process_index, []).append(device)
    return list(processes.values())


def _array(rows: list[list[jax.Device]]) -> np.ndarray:
    array = np.empty((len(rows), len(rows[0])), object)
    array[:] = rows
    return array


def _ragged_all_to_all(x: jax.Array, ranks: int) -> jax.Array:
    block = x.shape[0] // ranks
    input_offsets = jnp.arange(ranks, dtype=jnp.int32) * block
    sizes = jnp.full(ranks, block, jnp.int32)
    output_offsets = jnp.full(ranks, lax.axis_index(_RANK) * block, jnp.int32)
    return lax.ragged_all_to_all(x, jnp.zeros_like(x), input_offsets, sizes, output_offsets, sizes, axis_name=_RANK)


def _there_and_back(x: jax.Array, ranks: int) -> jax.Array:
    """Send from rank 0 to rank 1 and back. The barrier keeps the two transfers apart, so that one takes half the time."""
    received = lax.optimization_barrier(lax.ppermute(x, _RANK, [(0, 1)]))
    return lax.ppermute(received, _RANK, [(1, 0)])


_APPLY: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "all_gather": lambda x, ranks: lax.all_gather(x, _RANK, tiled=True),
    "reduce_scatter": lambda x, ranks: lax.psum_scatter(x, _RANK, scatter_dimension=0, tiled=True),
    "all_to_all": lambda x, ranks: lax.all_to_all(x, _RANK, split_axis=0, concat_axis=0, tiled=True),
    "ragged_all_to_all": _ragged_all_to_all,
    "all_reduce": lambda x, ranks: lax.psum(x, _RANK),
    "send_receive": _there_and_back,
}
"""Collective → its function. Rank k gets: all operands, in order; the sum of all blocks k; block k of every rank (both all-to-alls);
the sum of the operands; with `send_receive`, rank 0 gets its own operand back from rank 1, and rank 1 nothing."""


class CollectiveProgram:
    """A collective over each row of `group.devices`, with operands for which a device sends about `sent` bytes.

    hops: sequential transfers in one run: 2 for `send_receive`, else 1. operand_bytes: of one device.
    sent_bytes: bytes that a device sends in a ring or a direct exchange of this operand.
    """

    def __init__(self, group: DeviceGroup, collective: str, sent: int, dtype: np.dtype):
        self._group = group
        self._dtype = jnp.dtype(dtype)
        self._collective = collective
        self._apply = functools.partial(_APPLY[collective], ranks=group.ranks)
        sent_blocks = (2 if collective == "all_reduce" else 1) * (group.ranks - 1)  # all-reduce sends each block twice
        block = max(1, round(sent / sent_blocks / self._dtype.itemsize))
        self.hops = 2 if collective == "send_receive" else 1
        self._length = block if collective in ("all_gather", "send_receive") else block * group.ranks
        self.operand_bytes, self.sent_bytes = (n * self._dtype.itemsize for n in (self._length, block * sent_blocks))
        self._place = NamedSharding(Mesh(group.devices, ("group", _RANK)), _ALL)
        self._global_shape = (group.devices.size * self._length,)

    @property
    def memory(self) -> int:
        """Bytes of a device while the loop runs: operand and result (`send_receive`: only the operand), each with a possible copy."""
        if self._collective == "send_receive":
            return 2 * self.operand_bytes
        result = self.operand_bytes * (self._group.ranks if self._collective == "all_gather" else 1)
        return 2 * (self.operand_bytes + result)

    def loop(self) -> PreparedCase:
        """Compile a loop over the collective."""

        def once(x):
            if self._collective == "send_receive":  # the returned message can be sent again: it is back at its sender
                return self._apply(x)
            # The barrier keeps the whole result alive; one of its values in `x` makes the next run depend on this one.
            result = lax.optimization_barrier(self._apply(x))
            return x.at[0].set(result[-1])

        mapped = jax.shard_map(once, mesh=self._place.mesh, in_specs=_ALL, out_specs=_ALL, check_vma=False)
        zeros = jax.jit(lambda: jnp.zeros(self._global_shape, self._dtype), out_shardings=self._place)
        return device_loop(lambda inputs, index, x: mapped(x), None, zeros())

    def arrives_right(self) -> bool:
        """Run the collective once on values that encode rank and position; return whether this process's devices have the right results."""
        ranks = self._group.ranks
        length = self._length

        def value(rank, place):  # of an operand at a position
            return ((rank + place) % _PERIOD - 1).astype(self._dtype)

        def local():
            me = lax.axis_index(_RANK)
            positions = jnp.arange(length)
            result = self._apply(value(me, positions))
            block = length // ranks
            # The positions of the ranks' operands that this rank's result holds or sums.
            places = positions if self._collective in ("all_gather", "all_reduce") else me * block + jnp.arange(block)
            by_rank = [value(jnp.int32(rank), places) for rank in range(ranks)]
            if self._collective == "send_receive":
                expected = jnp.where(me == 0, value(0 * me, positions), jnp.zeros_like(result))  # rank 1 gets none back
            elif self._collective in ("all_reduce", "reduce_scatter"):
                expected = functools.reduce(jnp.add, by_rank)
            else:
                expected = jnp.concatenate(by_rank)
            return jnp.all(result == expected)[None]

        mapped = jax.shard_map(local, mesh=self._place.mesh, in_specs=(), out_specs=_ALL, check_vma=False)
        is_right = jax.block_until_ready(jax.jit(mapped)())
        return all(bool(np.asarray(shard.data).all()) for shard in is_right.addressable_shards)

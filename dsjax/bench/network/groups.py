"""`DeviceGroup`: which devices of a mesh meet in a collective: those of a host, one of each host, and those that serving's mesh forms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from dsjax.errors import UserError
from sharding import MeshSpec
from sharding.mesh import AXES


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Groups of as many devices each, that run the same collective at the same time, as they do in a step.

    uses: what such groups are to the mesh: `host` (all devices of a process), `hosts` (one device of each process), `experts` (the ranks
    that tokens travel between), `tp`. devices: [groups, ranks]. hosts: processes that a group spans.
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
        """For tables."""
        return ", ".join(self.uses)

    def mesh(self) -> Mesh:
        """With the axes `group` and `rank`."""
        return Mesh(self.devices, ("group", "rank"))

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
    counts = {len(found) for found in processes.values()}
    if len(counts) > 1:
        raise UserError(
            f"--mesh {spec} has {min(counts)} to {max(counts)} devices of a process; give a mesh with as many of each"
        )
    by_host = _array(processes.values())
    candidates = [("host", by_host), ("hosts", by_host.T)]
    for use, axes in (("experts", spec.expert_axes), ("tp", spec.head_axes)):
        if spec.ep_size > 1 or use == "tp":
            candidates.append((use, _along(mesh, axes)))
    found: dict[tuple, DeviceGroup] = {}
    for use, devices in candidates:
        if devices.shape[1] == 1:
            continue
        key = tuple(sorted(tuple(device.id for device in row) for row in devices))
        known = found.get(key)
        hosts = len({device.process_index for device in devices[0]})
        found[key] = DeviceGroup((*known.uses, use) if known else (use,), devices, hosts)
    return list(found.values())


def _along(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    kept = [AXES.index(axis) for axis in axes]
    others = [k for k in range(len(AXES)) if k not in kept]
    ranks = int(np.prod([mesh.devices.shape[k] for k in kept]))
    return mesh.devices.transpose(*others, *kept).reshape(-1, ranks)


def _array(rows: Iterable[list[jax.Device]]) -> np.ndarray:
    rows = list(rows)
    found = np.empty((len(rows), len(rows[0])), object)
    for k, row in enumerate(rows):
        found[k] = row
    return found

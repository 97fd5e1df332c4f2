"""How long `dsjax serve` is silent after a host of a mesh is lost, before the smaller mesh goes on (docs/many-hosts.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsjax.plan.cold_start import storage_rate
from dsjax.plan.figure import Figure, assumed, measured, spread
from dsjax.plan.instance import Instance

_MANY_HOSTS = "docs/many-hosts.md, Measured: ten processes of four killed on emulated devices"


@dataclass(frozen=True)
class Recovery:
    """What the loss of one host costs.

    read: bytes of experts that the other hosts read from the checkpoint. seconds: without compiling. compiling: more seconds unless the
    smaller mesh was compiled ahead, which is never so where experts have devices of their own.
    """

    read: Figure
    seconds: Figure
    compiling: Figure

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`."""
        names = {"bytes_read": "read", "seconds": "seconds", "compiling_s": "compiling"}
        return {field: getattr(self, name).to_json() for field, name in names.items()}


def read_share(hosts: int, lost: int = 1) -> float:
    """Share of the experts that survivors read. Before the loss each host holds an equal part of the experts.

    A survivor keeps what lies in its old and its new part: by chance 1 of `hosts` in all, as the order of devices changes with each
    generation, and at most what contiguous parts in the old order have in common. It reads the rest.
    """
    left = hosts - lost
    if left == 1:  # it keeps all of its part
        return lost / hosts
    most = max(_kept_in_order(hosts, first, lost) for first in range(left + 1))
    why = "the order of devices after a loss is another one"
    return assumed(1 - 1 / hosts, 1 - most, 1.0, "experts that their new host did not hold", why)


def _kept_in_order(hosts: int, first: int, lost: int) -> float:
    """Share of the experts that stays where it is if survivors keep their order."""
    survivors = [host for host in range(hosts) if not first <= host < first + lost]
    width = 1 / len(survivors)
    return sum(
        max(0.0, min((place + 1) * width, (host + 1) / hosts) - max(place * width, host / hosts))
        for place, host in enumerate(survivors)
    )


def recovery(instance: Instance) -> Recovery | None:
    """What the loss of one host costs an instance of several. None: nothing goes on without it, and a loss is a start (`cold_start`).

    That is so of an instance of one host, and of one with stages, whose processes all end. Where experts have devices of their own, the
    host is one with attention: a process with experts comes back by itself, for which attention waits.
    """
    cluster, layout = instance.cluster, instance.layout
    hosts = layout.mesh.num_devices // cluster.devices_per_host
    if hosts < 2 or layout.mesh.pp_size > 1:
        return None
    held = 0 if layout.experts else instance.memory.weights.get("experts", 0)
    experts = held * layout.devices

    def compute() -> tuple[float, float, float]:
        read = experts * read_share(hosts)
        notice = measured(0.3, 0.1, 0.9, "noticing a process that died", _MANY_HOSTS, "s")
        log = "docs/measurements/2026-11-22-host-losses.csv, --ahead"
        seconds = notice + measured(0.5, 0.4, 1.0, "meeting, a new generation", log, "s")
        if read:
            seconds += read / (storage_rate(cluster) * (hosts - 1))
        why = "nobody has compiled this model's step beside a service"
        why += "; experts apart are not compiled for ahead" if layout.experts else "; --compile-ahead leaves it out"
        return read, seconds, assumed(60, 10, 300, "compiling", why, "s")

    return Recovery(*spread(compute))

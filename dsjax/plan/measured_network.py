"""`MeasuredNetwork`: a file of `dsjax bench network`: seconds of collectives by bytes sent, inside a host and between hosts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dsjax.errors import UserError
from dsjax.hardware import Hardware
from dsjax.plan.curves import Curve
from dsjax.plan.figure import Figure, Kind, drawn
from dsjax.plan.measured import opened

FORMAT = "dsjax network 1"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all", "all_reduce")
"""All that a step's program sends, by `jax.lax`'s names (`psum_scatter` is a reduce-scatter, `psum` an all-reduce)."""
SEND_RECEIVE = "send_receive"
"""A message from one device to another, which no step sends; `dsjax bench network` times it beside the collectives."""


class CollectiveCurves(NamedTuple):
    """One collective over groups of `ranks` devices: seconds (middle, low, high) over the bytes that leave a device."""

    ranks: int
    ends: Sequence[Curve]


@dataclass(frozen=True, eq=False)
class MeasuredNetwork:
    """The rows of a file as curves, for a planner's `Cluster.measured`.

    curves: (collective, whether its groups span hosts) → curves for each number of ranks. inside_host, between_hosts, latency: how many
    times as much of a link's bandwidth, or as short a latency, is asked about than was measured (a planner's sweep).
    """

    path: str
    body: Mapping[str, Any]
    curves: Mapping[tuple[str, bool], Sequence[CollectiveCurves]]
    inside_host: float = 1.0
    between_hosts: float = 1.0
    latency: float = 1.0

    def scaled(self, resource: str, factor: float) -> MeasuredNetwork:
        """As it would be with `factor` times as much of one of the planner's resources."""
        name = {"scale-up": "inside_host", "network": "between_hosts", "latency": "latency"}.get(resource)
        return dataclasses.replace(self, **{name: getattr(self, name) * factor}) if name else self

    def seconds(self, collective: str, between_hosts: bool, ranks: int, sent: float) -> float | None:
        """One collective in which a device sends so many bytes; None where the file has none like it.

        Of groups of another size than was timed, the nearest size tells, and the interval reaches to time in proportion to the ranks.
        An exchange of several messages of other sizes (`ragged`) is told by `all_to_all` where it was not timed itself.
        """
        if collective == "ragged_all_to_all" and (collective, between_hosts) not in self.curves:
            collective = "all_to_all"
        if (collective, between_hosts) not in self.curves:
            return None
        timed, curves = min(
            self.curves[collective, between_hosts], key=lambda found: abs(math.log(found.ranks / ranks))
        )
        wire, latency = (self.between_hosts, self.latency) if between_hosts else (self.inside_host, 1.0)
        ends = []
        for curve in curves:
            whole = curve(sent)
            fixed = min(curves[0].seconds[0], whole)
            ends.append(fixed / latency + (whole - fixed) / wire)
        value, low, high = ends
        low, high = low * min(1.0, ranks / timed), high * max(1.0, ranks / timed)
        told = timed == ranks and sent <= curves[0].sizes[-1] and wire == latency == 1.0
        kinds = Kind.MEASURED if told else Kind.MEASURED | Kind.ASSUMPTION
        name = f"{collective} {'between hosts' if between_hosts else 'inside a host'}, measured"
        source = f"{self.path}: {self.body['date']}, {self.body['device']['name']}"
        return drawn(Figure(value, min(low, value), max(high, value), kinds, name=name, unit="s", source=source))


def read_network(path: str | Path, option: str = "--network") -> MeasuredNetwork:
    """A file of `dsjax bench network --json`, which was given with `option`.

    Raises:
        UserError: it cannot be read, is of another kind, lacks fields, or was a run whose data arrived wrong.
    """
    of_row = {"collective": str, "between_hosts": bool, "ranks": int, "sent_bytes": int | float}
    body = opened(path, option, "dsjax bench network", FORMAT, {}, of_row)
    rows = body["rows"]
    if any(row.get("correct") is False for row in rows):
        raise UserError(f"{option} {path}: data arrived wrong in that run (correct: false); repair the network first")
    timed: dict[tuple[str, bool], dict[int, dict[float, tuple[float, float, float]]]] = {}
    for row in rows:
        sizes = timed.setdefault((row["collective"], row["between_hosts"]), {}).setdefault(row["ranks"], {})
        times = (row["median_s"], row["low_s"], row["high_s"])
        # Two groups of as many ranks (every device of a host; one of each host in turn): the slower one is what a plan must bear.
        sizes[row["sent_bytes"]] = max(times, sizes.get(row["sent_bytes"], times))
    curves = {
        key: [
            CollectiveCurves(ranks, [Curve((size, times[end]) for size, times in sizes.items()) for end in range(3)])
            for ranks, sizes in sorted(of_ranks.items())
        ]
        for key, of_ranks in timed.items()
    }
    return MeasuredNetwork(str(path), body, curves)


def check_device(network: MeasuredNetwork, hardware: Hardware, cluster: str) -> None:
    """Make sure that a file speaks of a cluster's devices.

    Raises:
        UserError: it was taken on others.
    """
    device = network.body["device"]
    if hardware.key != device.get("hardware") and hardware.name != device.get("name"):
        raise UserError(
            f"--network {network.path} was taken on {device.get('name')}, and {cluster} has {hardware.name}; measure on the "
            "cluster's devices, or leave --network out"
        )

"""`MeasuredNetwork`: a file of `dsjax bench network`: seconds of collectives by bytes sent, inside a host and between hosts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.errors import UserError
from dsjax.hardware import Hardware
from dsjax.plan.figure import Figure, Kind, drawn
from dsjax.plan.measured import opened

FORMAT = "dsjax network 1"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all", "all_reduce")
"""All that a step's program sends, by `jax.lax`'s names (`psum_scatter` is a reduce-scatter, `psum` an all-reduce)."""
SEND_RECEIVE = "send_receive"
"""A message from one device to another, which no step sends; `dsjax bench network` times it beside the collectives."""
_FIELDS = {"collective", "between_hosts", "ranks", "sent_bytes", "median_s", "low_s", "high_s"}
_NUMBERS = ("ranks", "sent_bytes", "median_s", "low_s", "high_s")


@dataclass(frozen=True)
class CollectiveCurve:
    """One collective over groups of `ranks` devices: (bytes that leave a device, (middle, low, high) seconds), ascending."""

    ranks: int
    points: Sequence[tuple[float, tuple[float, float, float]]]

    @property
    def fixed(self) -> float:
        """Seconds of the smallest message that was timed."""
        return self.points[0][1][0]

    def at(self, sent: float, end: int) -> tuple[float, bool]:
        """(seconds of the middle, low or high curve; whether so many bytes lie beyond the points).

        Straight lines between points; below the first, the first; above the last, as the last two points go on, but by no less
        than half in proportion.
        """
        sizes = [size for size, _ in self.points]
        seconds = [times[end] for _, times in self.points]
        if sent <= sizes[0]:
            return seconds[0], False
        for k in range(1, len(sizes)):
            if sent <= sizes[k]:
                share = (sent - sizes[k - 1]) / (sizes[k] - sizes[k - 1])
                return seconds[k - 1] + share * (seconds[k] - seconds[k - 1]), False
        slope = seconds[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), slope / 2)
        return seconds[-1] + slope * (sent - sizes[-1]), True


@dataclass(frozen=True, eq=False)
class MeasuredNetwork:
    """The rows of a file as curves, for a planner's `Cluster.measured`.

    curves: (collective, whether its groups span hosts) → a curve for each number of ranks. inside_host, between_hosts, latency: how many
    times as much of a link's bandwidth, or as short a latency, is asked about than was measured (a planner's sweep).
    """

    path: str
    body: Mapping[str, Any]
    curves: Mapping[tuple[str, bool], Sequence[CollectiveCurve]]
    inside_host: float = 1.0
    between_hosts: float = 1.0
    latency: float = 1.0

    @property
    def source(self) -> str:
        """For derivations."""
        return f"{self.path}: {self.body['date']}, {self.body['device']['name']}"

    def scaled(self, resource: str, factor: float) -> MeasuredNetwork:
        """As it would be with `factor` times as much of one of the planner's resources."""
        name = {"scale-up": "inside_host", "network": "between_hosts", "latency": "latency"}.get(resource)
        return dataclasses.replace(self, **{name: getattr(self, name) * factor}) if name else self

    def seconds(self, collective: str, between_hosts: bool, ranks: int, sent: float) -> float | None:
        """One collective in which a device sends so many bytes; None where the file has none like it.

        Of groups of another size than was timed, the nearest size tells, and the interval reaches to time in proportion to the ranks.
        An exchange of several messages of other sizes (`ragged`) is told by `all_to_all` where it was not timed itself.
        """
        points = self.curves.get((collective, between_hosts))
        if not points and collective == "ragged_all_to_all":
            collective, points = "all_to_all", self.curves.get(("all_to_all", between_hosts))
        if not points:
            return None
        curve = min(points, key=lambda c: abs(math.log(c.ranks / ranks)))
        wire = self.between_hosts if between_hosts else self.inside_host
        latency = self.latency if between_hosts else 1.0
        ends, beyond = [], False
        for end in range(3):
            whole, outside = curve.at(sent, end)
            fixed = min(curve.fixed, whole)
            ends.append(fixed / latency + (whole - fixed) / wire)
            beyond |= outside
        value, low, high = ends
        if curve.ranks != ranks:
            low, high = low * min(1.0, ranks / curve.ranks), high * max(1.0, ranks / curve.ranks)
        told = curve.ranks == ranks and not beyond and (wire, latency) == (1.0, 1.0)
        kinds = Kind.MEASURED if told else Kind.MEASURED | Kind.ASSUMPTION
        name = f"{collective} {'between hosts' if between_hosts else 'inside a host'}, measured"
        return drawn(Figure(value, min(low, value), max(high, value), kinds, name=name, unit="s", source=self.source))


def _is_row(row: Any) -> bool:
    """Whether it has all that a curve is made of."""
    if not isinstance(row, dict) or _FIELDS - row.keys():
        return False
    if not all(isinstance(row[name], int | float) for name in _NUMBERS) or row["ranks"] < 1:
        return False
    return 0 < row["low_s"] <= row["median_s"] <= row["high_s"]


def read_network(path: str | Path, option: str = "--network") -> MeasuredNetwork:
    """A file of `dsjax bench network --json`, which was given with `option`.

    Raises:
        UserError: it cannot be read, is of another kind, lacks fields, or was a run whose data arrived wrong.
    """
    body = opened(path, option, "dsjax bench network", FORMAT)
    rows = body.get("rows")
    missing = sorted({"date", "device", "rows"} - body.keys())
    bad = [k for k, row in enumerate(rows if isinstance(rows, list) else ()) if not _is_row(row)]
    wrong = [name for name, kind in (("device", dict), ("rows", list)) if not isinstance(body.get(name), kind)]
    if missing or wrong or bad or not rows:
        what = (
            f"no {', '.join(missing)}"
            if missing
            else f"{wrong[0]} is {body[wrong[0]]!r}"
            if wrong
            else f"row {bad[0]} is incomplete"
            if bad
            else "it has no rows"
        )
        raise UserError(f"{option} {path}: {what}; write it anew with dsjax bench network --json")
    if any(row.get("correct") is False for row in rows):
        raise UserError(f"{option} {path}: data arrived wrong in that run (correct: false); repair the network first")
    curves: dict[tuple[str, bool], dict[int, dict[float, tuple[float, float, float]]]] = {}
    for row in rows:
        sizes = curves.setdefault((row["collective"], row["between_hosts"]), {}).setdefault(row["ranks"], {})
        times = (row["median_s"], row["low_s"], row["high_s"])
        # Two groups of as many ranks (every device of a host; one of each host in turn): the slower one is what a plan must bear.
        sizes[row["sent_bytes"]] = max(times, sizes.get(row["sent_bytes"], times))
    made = {
        key: [CollectiveCurve(ranks, sorted(points.items())) for ranks, points in sorted(by_ranks.items())]
        for key, by_ranks in curves.items()
    }
    return MeasuredNetwork(str(path), body, made)


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

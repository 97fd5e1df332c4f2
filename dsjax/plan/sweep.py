"""Sensitivity: the winner, and the best replacement, as the network or the number of hosts changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate
from dsjax.plan.cluster import Cluster
from dsjax.plan.limits import on
from dsjax.plan.question import Question
from dsjax.plan.search import search

SWEEPS = ("latency", "bandwidth", "loss-of-hosts")
_LATENCIES_US = (1, 2, 5, 10, 20, 50, 100)
_GBPS = (10, 25, 50, 100, 200, 400, 800)
_UNITS = {"latency": "µs one way", "bandwidth": "Gb/s a card", "loss-of-hosts": "hosts lost"}
_EXAMPLES = {"latency": "latency=1,10,100", "bandwidth": "bandwidth=1,25,400", "loss-of-hosts": "loss-of-hosts=1,2"}


@dataclass(frozen=True)
class SweepPoint:
    """value: of the swept quantity, in its unit; same: the winner's deployment there (None: it cannot run);
    best: the best of all layouts there, objectives met or not (None: none can run)."""

    value: float
    same: Candidate | None
    best: Candidate | None
    met: bool


@dataclass(frozen=True)
class Sweep:
    """A quantity, its unit, the value of the cluster as it is, and the points."""

    quantity: str
    unit: str
    now: float
    points: list[SweepPoint]

    def to_json(self) -> dict[str, Any]:
        """Stable fields."""

        def shown(candidate: Candidate | None) -> dict[str, Any] | None:
            return None if candidate is None else {"deployment": candidate.name(), **candidate.to_json()}

        points = [
            {"value": p.value, "same": shown(p.same), "best": shown(p.best), "meets_objective": p.met}
            for p in self.points
        ]
        return {"quantity": self.quantity, "unit": self.unit, "now": self.now, "points": points}


def read_sweep(text: str) -> tuple[str, tuple[float, ...] | None]:
    """`latency`, or `latency=1,10,100` with points of one's own, in the quantity's unit.

    Raises:
        UserError: an unknown quantity; points that are none, or out of range.
    """
    quantity, given, numbers = text.partition("=")
    if quantity not in SWEEPS:
        raise UserError(
            f"--sweep {text!r}: expected one of {', '.join(SWEEPS)}, or with points of your own: latency=1,10,100"
        )
    if not given:
        return quantity, None
    try:
        points = tuple(sorted({float(number) for number in numbers.split(",")}))
    except ValueError:
        points = ()
    whole = quantity == "loss-of-hosts"
    wrong = [point for point in points if not math.isfinite(point) or (point < 0 or point % 1 if whole else point <= 0)]
    if not points or wrong:
        found = (
            f"{wrong[0]:g} is not {'a number of hosts' if whole else 'above 0'}"
            if wrong
            else f"{numbers!r} are no numbers"
        )
        raise UserError(
            f"--sweep {text!r}: {found}; expected {_UNITS[quantity]} between commas, for example {_EXAMPLES[quantity]}"
        )
    return quantity, points


def sweep(question: Question, winner: Candidate, quantity: str, points: Sequence[float] | None = None) -> Sweep:
    """One of `SWEEPS` around a plan's winner, at the points that are given or at usual ones, and at the cluster as it is.

    Raises:
        UserError: an unknown quantity; more hosts lost than there are.
    """
    cluster = question.cluster
    if quantity == "latency":
        now = cluster.latency * 1e6
        clusters = {us: cluster.scaled("latency", now / us) for us in sorted({*(points or _LATENCIES_US), now})}
        unit = _UNITS[quantity]
    elif quantity == "bandwidth":
        now = cluster.network_gbps
        clusters = {gbps: cluster.scaled("network", gbps / now) for gbps in sorted({*(points or _GBPS), now})}
        unit = _UNITS[quantity]
    elif quantity == "loss-of-hosts":
        now, unit = 0.0, _UNITS[quantity]
        lost = sorted({0, *map(int, points)}) if points else range(min(cluster.hosts, 9))
        if max(lost) >= cluster.hosts:
            raise UserError(f"--sweep loss-of-hosts={max(lost)}: the cluster has {cluster.hosts} hosts; expected fewer")
        clusters = {n: cluster.resized(cluster.hosts - n) for n in lost}
    else:
        raise UserError(f"--sweep {quantity!r}: expected one of {', '.join(SWEEPS)}")
    found = [_point(question, winner, value, changed) for value, changed in clusters.items()]
    return Sweep(quantity, unit, now, found)


def _point(question: Question, winner: Candidate, value: float, cluster: Cluster) -> SweepPoint:
    plan = search(dataclasses.replace(question, cluster=cluster))
    best = plan.winner or (plan.missed[0] if plan.missed else None)
    return SweepPoint(value, _same(winner, cluster), best, plan.winner is not None)


def _same(winner: Candidate, cluster: Cluster) -> Candidate | None:
    """The winner's deployment with as many of its instances as still fit; the requests of lost ones are lost."""
    if winner.devices <= cluster.num_devices:
        return on(winner, cluster)
    if winner.mode == "separated":
        return None
    count = cluster.num_devices // winner.decode.layout.devices
    return on(dataclasses.replace(winner, count=count), cluster) if count else None

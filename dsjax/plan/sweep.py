"""Sensitivity: the winner, and the best replacement, as the network or the number of hosts changes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate
from dsjax.plan.cluster import Cluster
from dsjax.plan.limits import on
from dsjax.plan.search import Question, search

SWEEPS = ("latency", "bandwidth", "loss-of-hosts")
_LATENCIES_US = (1, 2, 5, 10, 20, 50, 100)
_GBPS = (10, 25, 50, 100, 200, 400, 800)


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


def sweep(question: Question, winner: Candidate, quantity: str) -> Sweep:
    """One of `SWEEPS` around a plan's winner.

    Raises:
        UserError: an unknown quantity.
    """
    cluster = question.cluster
    if quantity == "latency":
        now = cluster.latency * 1e6
        clusters = {us: cluster.scaled("latency", now / us) for us in sorted({*_LATENCIES_US, now})}
        unit = "µs one way"
    elif quantity == "bandwidth":
        now = cluster.network_gbps
        clusters = {gbps: cluster.scaled("network", gbps / now) for gbps in sorted({*_GBPS, now})}
        unit = "Gb/s a card"
    elif quantity == "loss-of-hosts":
        now, unit = 0.0, "hosts lost"
        lost = range(min(cluster.hosts, 9))
        clusters = {n: cluster.resized(cluster.hosts - n) for n in lost}
    else:
        raise UserError(f"--sweep {quantity!r}: expected one of {', '.join(SWEEPS)}")
    points = [_point(question, winner, value, changed) for value, changed in clusters.items()]
    return Sweep(quantity, unit, now, points)


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

"""Sensitivity: the winner, and the best replacement, as the network, the number of hosts or the users in flight change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate, moved, with_intervals
from dsjax.plan.pools import devices_kept, most_instances
from dsjax.plan.question import Question
from dsjax.plan.search import search

_LATENCIES_US = (1, 2, 5, 10, 20, 50, 100)
_GBPS = (10, 25, 50, 100, 200, 400, 800)
_USERS = (1, 4, 16, 64, 256, 1024, 4096)
_UNITS = {
    "latency": "µs one way",
    "bandwidth": "Gb/s a card",
    "loss-of-hosts": "hosts lost",
    "hosts": "hosts in all",
    "concurrency": "requests in flight",
}
_EXAMPLES = {
    "latency": "latency=1,10,100",
    "bandwidth": "bandwidth=1,25,400",
    "loss-of-hosts": "loss-of-hosts=1,2",
    "hosts": "hosts=4,8,16, or hosts=8:400,16:800 with so many requests in flight on each",
    "concurrency": "concurrency=1,16,256",
}
SWEEPS = tuple(_UNITS)
_HOSTS = ("hosts", "loss-of-hosts")


@dataclass(frozen=True)
class SweepPoint:
    """value: of the swept quantity, in its unit; same: the winner's deployment there (None: it cannot run);
    best: the best of all layouts there, objectives met or not (None: none can run). users: requests in flight that were given with
    a number of hosts."""

    value: float
    same: Candidate | None
    best: Candidate | None
    met: bool
    users: float | None = None

    @property
    def label(self) -> str:
        """`16`, or `16, 800 in flight`."""
        return f"{self.value:g}" + (f", {self.users:g} in flight" if self.users is not None else "")


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
            {
                "value": p.value,
                **({"concurrency": p.users} if p.users is not None else {}),
                "same": shown(p.same),
                "best": shown(p.best),
                "meets_objective": p.met,
            }
            for p in self.points
        ]
        return {"quantity": self.quantity, "unit": self.unit, "now": self.now, "points": points}


Point = float | tuple[float, float]
"""A value of a swept quantity; of hosts also with so many requests in flight."""


def read_sweep(text: str) -> tuple[str, tuple[Point, ...] | None]:
    """`latency`, or `latency=1,10,100` with points of one's own, in the quantity's unit; `hosts=8:400` has 400 requests in flight.

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
    expected = f"expected {_UNITS[quantity]} between commas, for example {_EXAMPLES[quantity]}"
    points: set[Point] = set()
    for number in numbers.split(","):
        value, with_users, users = number.partition(":")
        try:
            pair = (float(value), float(users)) if with_users and quantity == "hosts" else (float(number),)
        except ValueError:
            raise UserError(f"--sweep {text!r}: {number!r} is no number; {expected}") from None
        for at, each in enumerate(pair):
            whole = quantity in _HOSTS and not at
            least = each >= (0 if quantity == "loss-of-hosts" else 1) and each % 1 == 0 if whole else each > 0
            if not (math.isfinite(each) and least):
                raise UserError(
                    f"--sweep {text!r}: {each:g} is not {'a number of hosts' if whole else 'above 0'}; {expected}"
                )
        points.add(pair if len(pair) == 2 else pair[0])
    return quantity, tuple(sorted(points, key=lambda point: point if isinstance(point, tuple) else (point, 0.0)))


def sweep(question: Question, winner: Candidate, quantity: str, points: Sequence[Point] | None = None) -> Sweep:
    """One of `SWEEPS` around a plan's winner, at the points that are given or at usual ones, and at the cluster as it is (of hosts with
    points of one's own at those alone).

    With a number of requests in flight a point is answered for as many, whatever load the question has.

    Raises:
        UserError: an unknown quantity; more hosts lost than there are; other numbers of hosts with a bound on the devices.
    """
    if quantity not in SWEEPS:
        raise UserError(f"--sweep {quantity!r}: expected one of {', '.join(SWEEPS)}")
    cluster, of = question.cluster, partial(dataclasses.replace, question)
    if quantity == "latency":
        now = cluster.latency * 1e6
        asked = {us: of(cluster=cluster.scaled("latency", now / us)) for us in {*(points or _LATENCIES_US), now}}
    elif quantity == "bandwidth":
        now = cluster.network_gbps
        asked = {gbps: of(cluster=cluster.scaled("network", gbps / now)) for gbps in {*(points or _GBPS), now}}
    elif quantity == "loss-of-hosts":
        now = 0.0
        lost = {0, *map(int, points)} if points else set(range(min(cluster.hosts, 9)))
        if max(lost) >= cluster.hosts:
            raise UserError(f"--sweep loss-of-hosts={max(lost)}: the cluster has {cluster.hosts} hosts; expected fewer")
        asked = {n: of(cluster=cluster.resized(cluster.hosts - n)) for n in lost}
    elif quantity == "hosts":
        if question.options.max_devices is not None:
            raise UserError(
                "--sweep hosts asks for other numbers of hosts, and "
                f"--max-devices {question.options.max_devices} bounds the devices; leave one of them out"
            )
        now = float(cluster.hosts)
        asked = {}
        for point in points or sorted({float(int(now * factor)) for factor in (0.5, 1, 2, 4) if now * factor >= 1}):
            hosts, users = point if isinstance(point, tuple) else (point, None)
            there = of(cluster=cluster.resized(int(hosts)))
            asked[point] = there if users is None else _with_users(there, users)
    else:
        now = _in_flight(winner)
        asked = {users: _with_users(question, users) for users in {*(points or _USERS), now}}
    order = sorted(asked, key=lambda point: point if isinstance(point, tuple) else (point, 0.0))
    return Sweep(quantity, _UNITS[quantity], now, [_point(question, winner, point, asked[point]) for point in order])


def _in_flight(winner: Candidate) -> float:
    """Requests in flight at the winner's own figures, by Little's law: where prefill holds it back, it has room for more."""
    output = winner.decode.workload.output.mean
    stay = winner.ttft + winner.tpot * max(output - 1, 0)
    return float(max(1, round(winner.throughput / output * stay)))


def _with_users(question: Question, users: float) -> Question:
    """Ask the question with so many requests in flight."""
    return dataclasses.replace(question, workload=dataclasses.replace(question.workload, concurrency=users, rate=None))


def _point(question: Question, winner: Candidate, point: Point, there: Question) -> SweepPoint:
    value, users = point if isinstance(point, tuple) else (point, None)
    same = _same(question, winner, there)
    try:
        plan = search(there)
    except (
        UserError
    ):  # the question itself was answered: it is the mesh that was given that is no layout of fewer hosts
        return SweepPoint(value, same, None, False, users)
    best = plan.winner or (plan.missed[0] if plan.missed else None)
    return SweepPoint(value, same, best, plan.winner is not None, users)


def _same(question: Question, winner: Candidate, there: Question) -> Candidate | None:
    """The winner's deployment: on fewer hosts with as many of its instances as fit, the requests of lost ones being lost; on a multiple
    of the hosts as many times."""
    cluster, users = there.cluster, there.workload.concurrency
    times = 1 if cluster.prefill is not None else max(1, there.devices // question.devices)
    if times > 1:
        winner = dataclasses.replace(winner, count=winner.count * times, prefill_count=winner.prefill_count * times)
    if winner.mode == "separated":
        sides = [(winner.decode, winner.count)]
        sides += [(winner.prefill, winner.prefill_count)] if cluster.prefill is None else []
        if sum(count * devices_kept(there, side) for side, count in sides) > there.devices:
            return None
    elif (most := most_instances(there, winner.decode.layout)) < winner.count:
        if not most:
            return None
        winner = dataclasses.replace(winner, count=most)
    if users is None or (users == question.workload.concurrency and times == 1):
        return with_intervals(moved(winner, cluster))
    batch = users / (winner.decode.replicas * winner.count)
    return with_intervals(moved(winner, cluster, None, batch, users)) if batch <= winner.decode.max_batch else None

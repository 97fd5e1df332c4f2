"""Sensitivity of the winner, and the best plan, to the network, the number of hosts, and the requests in flight."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate, recompute, with_intervals
from dsjax.plan.question import Question
from dsjax.plan.rules import refuse
from dsjax.plan.search import search

_QUANTITIES = {
    "latency": ("µs one way", "latency=1,10,100", (1, 2, 5, 10, 20, 50, 100)),
    "bandwidth": ("Gb/s a card", "bandwidth=1,25,400", (10, 25, 50, 100, 200, 400, 800)),
    "loss-of-hosts": ("hosts lost", "loss-of-hosts=1,2", range(9)),
    "hosts": (
        "hosts in all",
        "hosts=4,8,16, or hosts=8:400,16:800 with so many requests in flight on each",
        (0.5, 1, 2, 4),
    ),
    "concurrency": ("requests in flight", "concurrency=1,16,256", (1, 4, 16, 64, 256, 1024, 4096)),
}
"""Quantity → unit, example, default points (for `hosts`, multiples of the cluster's)."""
Point = tuple[float, float | None]
"""A value of a swept quantity; for hosts, optionally with requests in flight."""


@dataclass(frozen=True)
class SweepPoint:
    """One point: the winner's deployment and the best plan at this value, None if they cannot run."""

    value: float
    same: Candidate | None
    best: Candidate | None
    met: bool  # whether the best plan meets the objectives
    users: float | None = None  # requests in flight that were given with a number of hosts

    @property
    def label(self) -> str:
        """`16`, or `16, 800 in flight`."""
        return f"{self.value:g}" + (f", {self.users:g} in flight" if self.users is not None else "")


@dataclass(frozen=True)
class Sweep:
    """A swept quantity."""

    quantity: str
    unit: str
    now: float  # its value on the given cluster
    points: list[SweepPoint]

    def to_json(self) -> dict[str, Any]:
        """Return plain data with stable fields."""
        points = []
        for p in self.points:
            concurrency = {"concurrency": p.users} if p.users is not None else {}
            plans = {
                name: plan and {"deployment": plan.name(), **plan.to_json()}
                for name, plan in (("same", p.same), ("best", p.best))
            }
            points.append({"value": p.value, **concurrency, **plans, "meets_objective": p.met})
        return {"quantity": self.quantity, "unit": self.unit, "now": self.now, "points": points}


def read_sweep(text: str) -> tuple[str, tuple[Point, ...]]:
    """Read `latency`, or `latency=1,10,100` with points in the quantity's unit; `hosts=8:400` has 400 requests in flight.

    Raises:
        UserError: an unknown quantity, or points that are not numbers or out of range.
    """
    quantity, equals, numbers = text.partition("=")
    if quantity not in _QUANTITIES:
        raise UserError(
            f"--sweep {text!r}: expected one of {', '.join(_QUANTITIES)}, or with points of your own: latency=1,10,100"
        )
    unit, example, _ = _QUANTITIES[quantity]
    expected = f"expected {unit} between commas, for example {example}"
    points = set()
    is_whole = quantity in ("hosts", "loss-of-hosts")
    for number in numbers.split(",") if equals else ():
        value, with_users, users = number.partition(":")
        try:
            pair = (float(value), float(users)) if with_users and quantity == "hosts" else (float(number), None)
        except ValueError:
            raise UserError(f"--sweep {text!r}: {number!r} is no number; {expected}") from None
        least = 0 if quantity == "loss-of-hosts" else 1
        if not (least <= pair[0] < math.inf and pair[0] % 1 == 0 if is_whole else 0 < pair[0] < math.inf):
            kind = "a number of hosts" if is_whole else "above 0"
            raise UserError(f"--sweep {text!r}: {pair[0]:g} is not {kind}; {expected}")
        if pair[1] is not None and not 0 < pair[1] < math.inf:
            raise UserError(f"--sweep {text!r}: {pair[1]:g} is not above 0; {expected}")
        points.add(pair)
    return quantity, tuple(points)


def sweep(question: Question, winner: Candidate, quantity: str, points: Sequence[Point] = ()) -> Sweep:
    """Vary a quantity around a plan's winner, at the given or default points and (except for hosts) at the cluster's own value.

    Raises:
        UserError: more lost hosts than the cluster has, or other numbers of hosts together with a bound on the devices.
    """
    cluster = question.cluster
    bound = question.options.max_devices
    output = winner.decode.workload.output.mean
    # Requests in flight by Little's law; a winner that prefill limits could hold more.
    in_flight = winner.throughput / output * (winner.ttft + winner.tpot * max(output - 1, 0))
    now, cluster_at = {  # the value on the given cluster, and a function from another value to the changed cluster
        "latency": (cluster.latency * 1e6, lambda to: cluster.scaled("latency", now / to)),
        "bandwidth": (cluster.network_gbps, lambda to: cluster.scaled("network", to / now)),
        "loss-of-hosts": (0.0, lambda to: cluster.resized(cluster.hosts - int(to))),
        "hosts": (float(cluster.hosts), lambda to: cluster.resized(int(to))),
        "concurrency": (float(max(1, round(in_flight))), lambda to: cluster),
    }[quantity]
    unit, _, defaults = _QUANTITIES[quantity]
    if quantity == "hosts":
        defaults = [float(int(now * factor)) for factor in defaults if now * factor >= 1]
    elif quantity == "loss-of-hosts":
        defaults = defaults[: cluster.hosts]
    tried = set(points or [(value, None) for value in defaults]) | ({(now, None)} if quantity != "hosts" else set())
    refuse("sweep", quantity=quantity, bound=bound, most=max(value for value, _ in tried), cluster=cluster)
    found = []
    for value, users in sorted(tried, key=lambda point: (point[0], point[1] or 0.0)):
        changed_question = dataclasses.replace(question, cluster=cluster_at(value))
        load = value if quantity == "concurrency" else users
        if load is not None:
            work = dataclasses.replace(question.workload, concurrency=load, rate=None)
            changed_question = dataclasses.replace(changed_question, workload=work)
        found.append(_point(question, winner, value, users, changed_question))
    return Sweep(quantity, unit, now, found)


def _point(question: Question, winner: Candidate, value: float, users: float | None, changed: Question) -> SweepPoint:
    same = _same(question, winner, changed)
    try:
        plan = search(changed)
    except UserError:
        # The question has a plan on the given cluster, so the mesh that the user gave does not fit fewer hosts.
        return SweepPoint(value, same, best=None, met=False, users=users)
    return SweepPoint(value, same, plan.best, plan.winner is not None, users)


def _same(question: Question, winner: Candidate, changed: Question) -> Candidate | None:
    """Return the winner's deployment at a swept point, or None if it does not fit.

    Aggregated instances that no longer fit go with their requests. Without a prefill cluster, N × the devices run N × the instances.
    """
    cluster = changed.cluster
    users = changed.workload.concurrency
    factor = 1 if cluster.prefill is not None else max(1, changed.devices // question.devices)
    count, prefill_count = winner.count * factor, winner.prefill_count * factor
    if winner.mode == "separated":
        devices = count * changed.occupied_devices(winner.decode)
        if cluster.prefill is None:
            devices += prefill_count * changed.occupied_devices(winner.prefill)
        if devices > changed.devices:
            return None
    else:
        count = min(count, changed.max_instances(winner.decode.layout))
        if not count:
            return None
    winner = dataclasses.replace(winner, count=count, prefill_count=prefill_count)
    if users is None or (users == question.workload.concurrency and factor == 1):
        return with_intervals(recompute(winner, cluster))
    batch = users / (winner.decode.replicas * winner.count)
    return with_intervals(recompute(winner, cluster, None, batch, users)) if batch <= winner.decode.max_batch else None

"""Bottlenecks of a candidate, and the hardware that would meet an objective that this hardware cannot."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.plan.candidate import Candidate, recompute
from dsjax.plan.cluster import RESOURCES, Cluster
from dsjax.plan.instance import Instance
from dsjax.plan.question import Question
from dsjax.plan.search import Plan, of_prefill, search
from dsjax.plan.separated import most_decode_instances
from dsjax.plan.workload import Objective

_FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
_MORE_HOSTS = (2, 4, 8)
_NEAREST = 12


@dataclass(frozen=True)
class Bottleneck:
    """A resource, and throughput with twice as much of it ÷ throughput now."""

    resource: str
    gain: float

    def __str__(self) -> str:
        return f"{self.resource} {self.gain - 1:+.0%}"


def bottlenecks(candidate: Candidate, shared: dict | None = None) -> list[Bottleneck]:
    """Return every resource with the gain of doubling it, largest first. shared: cache of one plan's prices; pass all calls the same dict.

    Memory is a bottleneck if the batch fills it: twice the memory holds at least twice the batch.
    """
    now, shared = candidate.decode.cluster, {} if shared is None else shared
    cases = [(resource, now.scaled(resource, 2), candidate.batch) for resource in RESOURCES]
    if candidate.batch >= candidate.decode.max_batch:
        cases.append(("memory", now, candidate.batch * 2))
    rates = [recompute(candidate, there, shared.setdefault(name, {}), batch).throughput for name, there, batch in cases]
    gains = [Bottleneck(name, rate / candidate.throughput) for (name, *_), rate in zip(cases, rates, strict=True)]
    return sorted(gains, key=lambda b: -b.gain)


@dataclass(frozen=True)
class Remedy:
    """A resource, and the factor by which more of it would meet all objectives."""

    resource: str
    factor: float


@dataclass(frozen=True)
class Forbidden:
    """Why no candidate meets the objectives.

    bound: `memory`, `concurrency` (more requests at once than caches hold), `devices` (prefill and decode do not fit beside each other),
    `ttft`, `tpot`, `throughput`, or `together` if each can be met alone. wanted, best: bytes, requests, devices, seconds or tokens a
    second. with_64_times_everything: result of the nearest with 64 times each resource; launches, host and fixed costs remain.
    """

    bound: str
    wanted: float
    best: float
    by: str  # the deployment that comes nearest
    remedies: list[Remedy]  # single resources that would suffice, smallest factor first
    with_64_times_everything: float | None = None


def forbidden(plan: Plan) -> list[Forbidden]:
    """Return the bounds that rule out every candidate; empty if there is a winner."""
    if plan.winner:
        return []
    if not plan.every:
        return [_no_room_for_all(plan) if plan.fitting else _no_room(plan)]
    objective, reasons = plan.question.bounds, []
    for name in ("ttft", "tpot", "throughput"):
        wanted = getattr(objective, name)
        if wanted is None:
            continue
        alone = Objective(**{name: wanted})
        best = max if name == "throughput" else min
        nearest = best(plan.every, key=lambda c, name=name: getattr(c, name))
        if not nearest.meets(alone):
            endless = getattr(recompute(nearest, _scaled(plan.question.cluster, RESOURCES, _FACTORS[-1])), name)
            remedies = _remedies(plan, alone)
            reasons.append(Forbidden(name, wanted, getattr(nearest, name), nearest.name(), remedies, endless))
    if reasons:
        return reasons
    nearest = plan.missed[0]
    missed = nearest.misses(objective)
    worst = max(missed, key=missed.get)
    ends = getattr(objective, worst), getattr(nearest, worst)
    return [Forbidden("together", *ends, nearest.name(), _remedies(plan, objective))]


def _remedies(plan: Plan, objective: Objective) -> list[Remedy]:
    question, remedies = plan.question, []
    near = sorted(plan.every, key=lambda c: max(c.misses(objective).values(), default=0))[:_NEAREST]
    for name, resources in {**{one: (one,) for one in RESOURCES}, "all of these together": RESOURCES}.items():
        for factor in _FACTORS:
            cluster, shared = _scaled(question.cluster, resources, factor), {}
            if any(recompute(candidate, cluster, shared).meets(objective) for candidate in near):
                remedies.append(Remedy(name, factor))
                break
    if question.cluster.num_devices <= 64:
        remedies += _more_hosts(question, objective)
    return sorted(remedies, key=lambda r: r.factor)


def _scaled(cluster: Cluster, resources: Sequence[str], factor: float) -> Cluster:
    for resource in resources:
        cluster = cluster.scaled(resource, factor)
    return cluster


def _more_hosts(question: Question, objective: Objective) -> list[Remedy]:
    """Return the least multiple of all kinds of hosts (or of limited devices) that meets the objectives, aggregated if possible."""
    options, limited = question.options, question.devices < question.cluster.num_devices
    modes = ("aggregated",) if "aggregated" in options.possible_modes else options.modes
    for factor in _MORE_HOSTS:
        most = question.devices * factor if limited else None
        wider = dataclasses.replace(options, max_devices=most, modes=modes)
        cluster = _grown(question.cluster, factor)
        if search(dataclasses.replace(question, cluster=cluster, objective=objective, options=wider)).winner:
            return [Remedy("devices" if limited else "hosts", float(factor))]
    return []


def _grown(cluster: Cluster, factor: int) -> Cluster:
    """Return the cluster with `factor` times the hosts, including those for prefill."""
    prefill = cluster.prefill and _grown(cluster.prefill, factor)
    return dataclasses.replace(cluster.resized(cluster.hosts * factor), prefill=prefill)


def _no_room_for_all(plan: Plan) -> Forbidden:
    """Explain that no layout's caches hold the requests in flight, or that prefill and decode do not fit beside each other."""
    question, fitting = plan.question, plan.fitting
    wanted, pins = question.workload.concurrency, question.options.pins
    apart = "aggregated" not in question.options.possible_modes
    prefilling: list[Instance] = []
    if apart:
        prefilling = [i for i in of_prefill(question, fitting) if pins.prefill_mesh in (None, i.layout.mesh)]
        fitting = [i for i in fitting if pins.decode_mesh in (None, i.layout.mesh)]
        if reason := _too_few_devices(question, prefilling, fitting):
            return reason

    def held(instance: Instance) -> int:
        many = (
            most_decode_instances(question, prefilling, instance) if apart else question.most_instances(instance.layout)
        )
        return instance.max_batch * instance.replicas * many

    largest = max(fitting, key=held)
    most = held(largest)
    return Forbidden("concurrency", wanted, most, str(largest.layout), [Remedy("cache", wanted / most)] if most else [])


def _too_few_devices(question: Question, prefilling: list[Instance], decoding: list[Instance]) -> Forbidden | None:
    """Explain that the smallest instances of a separated service do not fit beside each other; None if they do."""
    pins, there = question.options.pins, question.cluster.prefill
    if not prefilling:
        return Forbidden("devices", 0, there.num_devices, "", [])
    first, second = (min(some, key=question.devices_kept) for some in (prefilling, decoding))
    counts = pins.prefill_count or 1, pins.decode_count or 1
    needed, decode = (count * question.devices_kept(i) for count, i in zip(counts, (first, second), strict=True))
    pairs = [(needed + decode, question.devices)]
    if there is not None:
        pairs = [(needed, there.num_devices), (decode, question.devices)]
    for wanted, at_hand in pairs:
        if wanted > at_hand:
            by = f"{counts[0]} × {first.layout} | {counts[1]} × {second.layout}"
            return Forbidden("devices", wanted, at_hand, by, [Remedy("devices", wanted / at_hand)])
    return None


def _no_room(plan: Plan) -> Forbidden:
    """Explain that weights and one request's cache fit in no layout."""
    device = plan.question.cluster.hardware.visible_bytes
    if not plan.too_large:
        return Forbidden("memory", 0, device, "no layout", [])
    least = min(plan.too_large, key=lambda i: i.memory.weights_total)
    memory = least.memory
    needed = memory.weights_total + memory.request_bytes(plan.question.workload.held) + memory.reserve
    remedies = [Remedy("memory of a device", needed / device), *_more_hosts(plan.question, Objective())]
    return Forbidden("memory", needed, device, str(least.layout), sorted(remedies, key=lambda r: r.factor))

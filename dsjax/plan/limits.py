"""Bottlenecks of a candidate, and the hardware that would meet an objective that this hardware cannot."""

import dataclasses
import operator
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
_MOST_CANDIDATES = 12
"""Number of candidates, those nearest to the objectives, that are tried with more of a resource."""


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
    cluster = candidate.decode.cluster
    shared = {} if shared is None else shared
    cases = [(resource, cluster.scaled(resource, 2), candidate.batch) for resource in RESOURCES]
    if candidate.batch >= candidate.decode.max_batch:
        cases.append(("memory", cluster, candidate.batch * 2))
    gains = []
    for resource, doubled, batch in cases:
        throughput = recompute(candidate, doubled, shared.setdefault(resource, {}), batch).throughput
        gains.append(Bottleneck(resource, throughput / candidate.throughput))
    return sorted(gains, key=lambda bottleneck: -bottleneck.gain)


@dataclass(frozen=True)
class Remedy:
    """A resource, and the factor by which more of it would meet all objectives."""

    resource: str
    factor: float


@dataclass(frozen=True)
class Forbidden:
    """Why no candidate meets the objectives."""

    # `memory`, `concurrency` (more requests at once than caches hold), `devices` (prefill and decode do not fit beside each other), `ttft`,
    # `tpot`, `throughput`, or `together` if each can be met alone
    bound: str
    wanted: float  # bytes, requests, devices, seconds or tokens a second
    best: float  # likewise
    by: str  # the deployment that comes nearest
    remedies: list[Remedy]  # resources of which more would suffice, smallest factor first
    # result of the nearest with 64 times each resource; launches, host and fixed costs remain
    with_64_times_everything: float | None = None


def forbidden(plan: Plan) -> list[Forbidden]:
    """Return the bounds that rule out every candidate; empty if there is a winner."""
    if plan.winner:
        return []
    if not plan.every:
        return [_too_little_cache(plan) if plan.fitting else _too_little_memory(plan)]
    objective = plan.question.all_objectives
    reasons = []
    for name in ("ttft", "tpot", "throughput"):
        bound = getattr(objective, name)
        if bound is None:
            continue
        alone = Objective(**{name: bound})
        choose = max if name == "throughput" else min
        nearest = choose(plan.every, key=operator.attrgetter(name))
        if not nearest.meets(alone):
            with_everything = recompute(nearest, _scaled(plan.question.cluster, RESOURCES, _FACTORS[-1]))
            values = getattr(nearest, name), nearest.name(), _remedies(plan, alone), getattr(with_everything, name)
            reasons.append(Forbidden(name, bound, *values))
    if reasons:
        return reasons
    nearest = plan.missed[0]
    missed = nearest.misses(objective)
    worst = max(missed, key=missed.get)
    wanted, best = getattr(objective, worst), getattr(nearest, worst)
    return [Forbidden("together", wanted, best, nearest.name(), _remedies(plan, objective))]


def _remedies(plan: Plan, objective: Objective) -> list[Remedy]:
    question = plan.question
    remedies = []
    candidates = sorted(plan.every, key=lambda c: max(c.misses(objective).values(), default=0))[:_MOST_CANDIDATES]
    choices = {resource: (resource,) for resource in RESOURCES} | {"all resources": RESOURCES}
    for name, resources in choices.items():
        for factor in _FACTORS:
            cluster = _scaled(question.cluster, resources, factor)
            shared = {}
            if any(recompute(candidate, cluster, shared).meets(objective) for candidate in candidates):
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
    options = question.options
    limited = question.devices < question.cluster.num_devices
    modes = ("aggregated",) if "aggregated" in options.possible_modes else options.modes
    for factor in _MORE_HOSTS:
        max_devices = question.devices * factor if limited else None
        wider = dataclasses.replace(options, max_devices=max_devices, modes=modes)
        cluster = _grown(question.cluster, factor)
        if search(dataclasses.replace(question, cluster=cluster, objective=objective, options=wider)).winner:
            return [Remedy("devices" if limited else "hosts", float(factor))]
    return []


def _grown(cluster: Cluster, factor: int) -> Cluster:
    """Return the cluster with `factor` times the hosts, including those for prefill."""
    prefill = cluster.prefill and _grown(cluster.prefill, factor)
    return dataclasses.replace(cluster.resized(cluster.hosts * factor), prefill=prefill)


def _too_little_cache(plan: Plan) -> Forbidden:
    """Explain that no layout's caches hold the requests in flight, or that prefill and decode do not fit beside each other."""
    question, fitting = plan.question, plan.fitting
    concurrency, pins = question.workload.concurrency, question.options.pins
    is_separated = "aggregated" not in question.options.possible_modes
    prefilling: list[Instance] = []
    if is_separated:
        prefilling = [i for i in of_prefill(question, fitting) if pins.prefill_mesh in (None, i.layout.mesh)]
        fitting = [i for i in fitting if pins.decode_mesh in (None, i.layout.mesh)]
        if reason := _too_few_devices(question, prefilling, fitting):
            return reason

    def max_concurrency(instance: Instance) -> int:
        if is_separated:
            count = most_decode_instances(question, prefilling, instance)
        else:
            count = question.max_instances(instance.layout)
        return instance.max_batch * instance.replicas * count

    largest = max(fitting, key=max_concurrency)
    best = max_concurrency(largest)
    remedies = [Remedy("cache", concurrency / best)] if best else []
    return Forbidden("concurrency", concurrency, best, str(largest.layout), remedies)


def _too_few_devices(question: Question, prefilling: list[Instance], decoding: list[Instance]) -> Forbidden | None:
    """Explain that the smallest instances of a separated service do not fit beside each other; None if they do."""
    pins, prefill_cluster = question.options.pins, question.cluster.prefill
    if not prefilling:
        return Forbidden("devices", wanted=0, best=prefill_cluster.num_devices, by="", remedies=[])
    prefill, decode = (min(instances, key=question.occupied_devices) for instances in (prefilling, decoding))
    prefill_count, decode_count = pins.prefill_count or 1, pins.decode_count or 1
    prefill_devices = prefill_count * question.occupied_devices(prefill)
    decode_devices = decode_count * question.occupied_devices(decode)
    if prefill_cluster is None:
        demands = [(prefill_devices + decode_devices, question.devices)]
    else:
        demands = [(prefill_devices, prefill_cluster.num_devices), (decode_devices, question.devices)]
    for wanted, available in demands:
        if wanted > available:
            by = f"{prefill_count} × {prefill.layout} | {decode_count} × {decode.layout}"
            return Forbidden("devices", wanted, available, by, [Remedy("devices", wanted / available)])
    return None


def _too_little_memory(plan: Plan) -> Forbidden:
    """Explain that weights and one request's cache fit in no layout."""
    device = plan.question.cluster.hardware.visible_bytes
    if not plan.too_large:
        return Forbidden("memory", wanted=0, best=device, by="no layout", remedies=[])
    least = min(plan.too_large, key=lambda i: i.memory.weights_total)
    memory = least.memory
    needed = memory.weights_total + memory.request_bytes(plan.question.workload.held) + memory.reserve
    remedies = [Remedy("memory of a device", needed / device), *_more_hosts(plan.question, Objective())]
    return Forbidden("memory", needed, device, str(least.layout), sorted(remedies, key=lambda r: r.factor))

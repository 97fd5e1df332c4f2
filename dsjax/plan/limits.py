"""What holds a candidate back, and what hardware would meet an objective that this hardware cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from dsjax.plan.candidate import Candidate, moved
from dsjax.plan.cluster import RESOURCES, Cluster
from dsjax.plan.instance import Instance
from dsjax.plan.pools import devices_kept, most_instances
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
    """Every resource by what doubling it would give, most first.

    Memory is a bottleneck where the batch fills it: twice the memory holds at least twice the batch. shared: what the deployments of
    one plan have in common; give all of them the same dict.
    """
    now, cluster, shared = candidate.throughput, candidate.decode.cluster, {} if shared is None else shared

    def gain(resource: str, there: Cluster, batch: float | None = None) -> Bottleneck:
        again = moved(candidate, there, shared.setdefault(resource, {}), batch)
        return Bottleneck(resource, again.throughput / now)

    gains = [gain(resource, cluster.scaled(resource, 2)) for resource in RESOURCES]
    if candidate.batch >= candidate.decode.max_batch:
        gains.append(gain("memory", cluster, candidate.batch * 2))
    return sorted(gains, key=lambda b: -b.gain)


@dataclass(frozen=True)
class Remedy:
    """`factor` times as much of a resource with which all objectives hold."""

    resource: str
    factor: float


@dataclass(frozen=True)
class Forbidden:
    """Why no candidate meets the objectives.

    bound: `memory`, `concurrency` (more requests at once than caches hold), `devices` (prefill and decode do not fit beside each
    other), `ttft`, `tpot`, `throughput`, or `together` where each can be met alone. wanted, best: bytes, requests, devices, seconds or
    tokens a second; by: the deployment that comes nearest.
    remedies: single resources that would do, smallest factor first. floor: what the nearest would reach with 64 times of
    everything: launches, host and fixed costs remain.
    """

    bound: str
    wanted: float
    best: float
    by: str
    remedies: list[Remedy]
    floor: float | None = None


def forbidden(plan: Plan) -> list[Forbidden]:
    """The bounds that forbid a plan without a winner; empty where there is one."""
    if plan.winner or plan.unkept:
        return []
    if not plan.every:
        return [_no_room_for_all(plan) if plan.fitting else _no_room(plan)]
    objective, reasons = plan.question.bounds, []
    for name, metric in _METRICS.items():
        wanted = getattr(objective, name)
        if wanted is None:
            continue
        alone = dataclasses.replace(Objective(), **{name: wanted})
        nearest = min(plan.every, key=lambda c, m=metric: m(c) if name != "throughput" else -m(c))
        if not nearest.meets(alone):
            endless = metric(moved(nearest, _of_everything(plan.question.cluster, _FACTORS[-1])))
            remedies = _remedies(plan, alone)
            reasons.append(Forbidden(name, wanted, metric(nearest), nearest.name(), remedies, endless))
    if reasons:
        return reasons
    nearest = plan.missed[0]
    worst = max(nearest.misses(objective), key=nearest.misses(objective).get)
    return [
        Forbidden(
            "together", getattr(objective, worst), _METRICS[worst](nearest), nearest.name(), _remedies(plan, objective)
        )
    ]


_METRICS: dict[str, Callable[[Candidate], float]] = {
    "ttft": lambda c: c.ttft,
    "tpot": lambda c: c.tpot,
    "throughput": lambda c: c.throughput,
}


def _remedies(plan: Plan, objective: Objective) -> list[Remedy]:
    question, remedies = plan.question, []
    near = sorted(plan.every, key=lambda c: max(c.misses(objective).values(), default=0))[:_NEAREST]
    for resource in RESOURCES:
        for factor in _FACTORS:
            cluster, shared = question.cluster.scaled(resource, factor), {}
            if any(moved(candidate, cluster, shared).meets(objective) for candidate in near):
                remedies.append(Remedy(resource, factor))
                break
    for factor in _FACTORS:
        cluster, shared = _of_everything(question.cluster, factor), {}
        if any(moved(candidate, cluster, shared).meets(objective) for candidate in near):
            remedies.append(Remedy("all of these together", factor))
            break
    if question.cluster.num_devices <= 64:
        remedies += _more_hosts(question, objective)
    return sorted(remedies, key=lambda r: r.factor)


def _of_everything(cluster: Cluster, factor: float) -> Cluster:
    for resource in RESOURCES:
        cluster = cluster.scaled(resource, factor)
    return cluster


def _more_hosts(question: Question, objective: Objective) -> list[Remedy]:
    """The least of so many times the hosts, of all kinds, with which a deployment meets the objectives, or of the devices where these are
    limited. A service that may be aggregated is looked at as such: the search for separated ones takes many times as long."""
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
    """So many times the hosts, those for prefill and for experts among them."""
    sides = {name: side for name in ("prefill", "experts") if (side := getattr(cluster, name)) is not None}
    sides = {name: _grown(side, factor) for name, side in sides.items()}
    return dataclasses.replace(cluster.resized(cluster.hosts * factor), **sides)


def _no_room_for_all(plan: Plan) -> Forbidden:
    """No layout's caches hold the requests in flight, or prefill and decode do not fit beside each other."""
    question = plan.question
    wanted, apart = question.workload.concurrency, "aggregated" not in question.options.possible_modes
    if apart and (reason := _too_few_devices(question, plan.fitting)):
        return reason
    prefilling = _prefilling(question, plan.fitting) if apart else []

    def held(instance: Instance) -> int:
        count = most_instances(question, instance.layout)
        if apart:
            count = most_decode_instances(question, prefilling, instance)
        return instance.max_batch * instance.replicas * count

    largest = max(_decoding(question, plan.fitting) if apart else plan.fitting, key=held)
    most = held(largest)
    remedies = [Remedy("cache", wanted / most)] if most else []
    return Forbidden("concurrency", wanted, most, str(largest.layout), remedies)


def _decoding(question: Question, fitting: list[Instance]) -> list[Instance]:
    wanted = question.options.pins.decode_mesh
    return [instance for instance in fitting if wanted in (None, instance.layout.mesh)]


def _prefilling(question: Question, fitting: list[Instance]) -> list[Instance]:
    """The instances that may compute prompts."""
    wanted = question.options.pins.prefill_mesh
    return [instance for instance in of_prefill(question, fitting) if wanted in (None, instance.layout.mesh)]


def _least_prefill(question: Question, fitting: list[Instance]) -> tuple[Instance | None, int]:
    """(the smallest instance that may compute prompts, devices that so many as there must be keep)."""
    pins = question.options.pins
    least = min(_prefilling(question, fitting), key=lambda i: devices_kept(question, i), default=None)
    return least, (pins.prefill_count or 1) * devices_kept(question, least) if least else 0


def _too_few_devices(question: Question, fitting: list[Instance]) -> Forbidden | None:
    """Say where the smallest instances of a separated service do not fit beside each other."""
    pins, cluster = question.options.pins, question.cluster
    first, needed = _least_prefill(question, fitting)
    if first is None:
        return Forbidden("devices", 0, cluster.prefill.num_devices, "", [])
    smallest = min(_decoding(question, fitting), key=lambda i: devices_kept(question, i))
    decode = (pins.decode_count or 1) * devices_kept(question, smallest)
    pairs = [(needed + decode, question.devices)]
    if cluster.prefill is not None:
        pairs = [(needed, cluster.prefill.num_devices), (decode, question.devices)]
    for wanted, at_hand in pairs:
        if wanted > at_hand:
            by = f"{pins.prefill_count or 1} × {first.layout} | {pins.decode_count or 1} × {smallest.layout}"
            return Forbidden("devices", wanted, at_hand, by, [Remedy("devices", wanted / at_hand)])
    return None


def _no_room(plan: Plan) -> Forbidden:
    """Weights and one request's cache fit in no layout."""
    least = min(plan.too_large, key=lambda i: i.memory.weights_total) if plan.too_large else None
    chip = plan.question.cluster.hardware
    if least is None:
        return Forbidden("memory", 0, chip.visible_bytes, "no layout", [])
    needed = least.memory.weights_total + plan.question.workload.held * least.memory.cache_per_token
    needed += least.memory.reserve
    remedies = [Remedy("memory of a device", needed / chip.visible_bytes)]
    remedies += _more_hosts(plan.question, Objective())
    return Forbidden("memory", needed, chip.visible_bytes, str(least.layout), sorted(remedies, key=lambda r: r.factor))

"""The search: every layout of an instance, every way to fill the cluster with it, ranked by the objective."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate, PrefillPool, aggregated, prefill_pool, separated
from dsjax.plan.cluster import Cluster
from dsjax.plan.dry_runs import Usage, usage
from dsjax.plan.instance import Instance
from dsjax.plan.layout import Layout, layouts
from dsjax.plan.precision import FP8_BLOCK
from dsjax.plan.prompts import best_step
from dsjax.plan.workload import Objective, Options, Workload

_POOLS, _DECODERS = 10, 400
"""Best prefill pools and decode instances that are paired; below the best of their size, others cannot win a pair."""
_RELIEVED = (0.83, 0.8, 0.75, 0.7, 0.6, 0.4)
"""Shares of the time that prefill may be busy which are tried where the TTFT forbids the 0.85 that it is kept below."""
_TYPICAL_BATCH = 64
"""Requests of a DP rank at which the size of a step's prompts is chosen for all batches."""


@dataclass(frozen=True)
class Question:
    """All that a plan is asked."""

    config: ModelConfig
    cluster: Cluster
    workload: Workload
    objective: Objective
    options: Options

    @property
    def devices(self) -> int:
        """Devices that may be used."""
        return min(self.cluster.num_devices, self.options.max_devices or self.cluster.num_devices)

    @property
    def bounds(self) -> Objective:
        """The objectives, with the throughput that the rate asks for."""
        rate, wanted = self.workload.rate, self.objective.throughput
        if rate is None:
            return self.objective
        return dataclasses.replace(self.objective, throughput=max(rate * self.workload.output.mean, wanted or 0))

    def instance(self, layout: Layout, steps: dict) -> Instance:
        """A layout, asked about this workload; steps: shared by all layouts of the same unit."""
        return Instance(self.config, self.cluster, layout, self.options, self.workload, steps)


@dataclass(frozen=True)
class Plan:
    """The answer: candidates that meet the objectives, best first; the others, nearest first; layouts that do not fit.

    frontier: of candidates that keep the TTFT's objective; late: those that would be on it if they did.
    considered: layouts looked at; fitting, too_large: those with and without room for one request beside the weights. every: all
    candidates, not only the best of each layout, where none meets the objectives.
    """

    question: Question
    ranked: list[Candidate]
    missed: list[Candidate]
    frontier: list[Candidate]
    late: list[Candidate]
    considered: list[Layout]
    fitting: list[Instance]
    too_large: list[Instance]
    every: list[Candidate]

    @property
    def usages(self) -> list[Usage]:
        """What was taken of each dry run that was given."""
        return usages(self.question, self.fitting + self.too_large)

    @property
    def winner(self) -> Candidate | None:
        """The best that meets the objectives."""
        return self.ranked[0] if self.ranked else None


def instances(question: Question) -> tuple[list[Layout], list[Instance], list[Instance]]:
    """(all layouts, instances with room for at least one request, instances without)."""
    question.options.check(question.config, question.workload)
    block = 128 if question.options.precision.linear == FP8_BLOCK else None
    cluster = question.cluster
    found = list(
        layouts(
            question.config,
            question.devices,
            min(cluster.devices_per_host, question.devices),
            redundant=question.options.redundant,
            block=block,
            copies=question.devices <= 64,
        )
    )
    wanted = question.options.mesh
    if wanted is not None:
        possible, found = found, [layout for layout in found if layout.mesh == wanted]
        if not found:
            sizes = sorted({layout.devices for layout in possible})
            raise UserError(
                f"--mesh {wanted} is no layout of this plan: {wanted.num_devices} devices wanted, {question.devices} at hand in "
                f"hosts of {cluster.devices_per_host}; instances of {', '.join(map(str, sizes))} devices are looked at, with "
                f"{question.options.redundant if question.options.redundant is not None else 'the fewest'} redundant experts"
            )
    steps: dict[Layout, dict] = {}
    shared: dict = {}
    made = [question.instance(layout, steps.setdefault(layout.unit, {"shared": shared})) for layout in found]
    return found, [i for i in made if i.max_batch > 0], [i for i in made if i.max_batch <= 0]


def usages(question: Question, among: Sequence[Instance]) -> list[Usage]:
    """What a plan over these instances takes of each dry run that was given."""
    options = question.options
    weights = {i.layout.unit: i.memory.weights_total for i in among}
    about = (question.config, question.cluster, options.precision, options.dispatch, weights)
    return [usage(run, *about) for run in options.compiled]


def search(question: Question) -> Plan:
    """Answer a question. Deterministic; no JAX."""
    # Derivations are millions of small tuples without a cycle; looking for cycles among them costs more than making them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _search(question)
    finally:
        if collecting:
            gc.enable()


def _search(question: Question) -> Plan:
    found, fitting, too_large = instances(question)
    candidates: list[Candidate] = []
    if "aggregated" in question.options.modes:
        candidates += _aggregated(question, fitting)
    if "separated" in question.options.modes:
        candidates += _separated(question, fitting)
    objective = question.bounds
    met = [c for c in candidates if c.meets(objective)]
    missed = [c for c in candidates if not c.meets(objective)]
    ranked = _best_of_each(sorted(met, key=_order(question)))
    missed = _best_of_each(sorted(missed, key=lambda c: (max(c.misses(objective).values()), *_order(question)(c))))
    every = [] if ranked else candidates
    bound = objective.ttft
    front = frontier([c for c in candidates if bound is None or c.ttft.value <= bound])
    late = [] if bound is None else [c for c in frontier(candidates) if c.ttft.value > bound]
    return Plan(question, ranked, missed, front, late, found, fitting, too_large, every)


def _order(question: Question):
    """Most tokens a second; at a given load, which all of them serve, fewest devices for it and then the fastest."""
    work = question.workload
    if work.rate is not None:
        return lambda c: (c.devices, c.tpot.value, c.ttft.value)
    return lambda c: (-c.throughput.value, c.devices, c.tpot.value)


def _best_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first of each pair of layouts and mode."""
    seen, kept = set(), []
    for candidate in candidates:
        key = (candidate.mode, candidate.decode.layout, candidate.prefill.layout)
        if key not in seen:
            seen.add(key)
            kept.append(candidate)
    return kept


def _batches(question: Question, instance: Instance, count: int) -> list[float]:
    """Batches of a DP rank: those that memory holds, or just the one that the concurrency gives."""
    wanted = question.workload.concurrency
    if wanted is None:
        return [float(b) for b in instance.batches()]
    batch = wanted / (instance.replicas * count)
    return [batch] if batch <= instance.max_batch else []


def _counts(question: Question, instance: Instance) -> list[int]:
    """Numbers of instances: all that fit; with a given load also fewer."""
    most = question.devices // instance.layout.devices
    if question.workload.rate is None and question.workload.concurrency is None:
        return [most]
    return sorted({max(1, most // divisor) for divisor in (1, 2, 4, 8)}, reverse=True)


def _aggregated(question: Question, fitting: list[Instance]) -> list[Candidate]:
    found = []
    for instance in fitting:
        tokens = _prefill_size(question, instance)
        for count in _counts(question, instance):
            for batch in _batches(question, instance, count):
                found.append(aggregated(instance, count, batch, tokens))
    return found


def _prefill_size(question: Question, instance: Instance) -> float:
    """The step size with which decodes wait least for prompts, among those that leave half of the TTFT's budget for waiting."""
    sizes = instance.prefill_sizes(chunks=True)
    bound = question.objective.ttft
    short = [s for s in sizes if bound is None or instance.prefill_step(s).value <= 0.5 * bound] or sizes[:1]
    return best_step(instance, min(instance.max_batch, _TYPICAL_BATCH), short)


def _separated(question: Question, fitting: list[Instance]) -> list[Candidate]:
    if question.devices < 2:
        return []
    pools = [prefill_pool(i, size) for i in fitting for size in _pool_sizes(question, i)]
    chosen = _best(
        pools, lambda p: p.rate.value / p.instance.layout.devices, lambda p: p.instance.layout.devices, _POOLS
    )
    points = [(i, b) for i in fitting for b in _decode_batches(question, i)]
    rate = {(id(i), b): b * i.replicas / i.tpot(b).value / i.layout.devices for i, b in points}
    decoders = _best(points, lambda p: rate[id(p[0]), p[1]], lambda p: (p[0].layout.devices, _rung(p[1])), _DECODERS)
    found = []
    for pool in chosen:
        for instance, batch in decoders:
            for left, right in _splits(question, pool, instance, batch):
                users = question.workload.concurrency
                here = batch if users is None else users / (instance.replicas * right)
                if here > instance.max_batch:
                    continue
                found.append(separated(pool, left, instance, right, here))
                bound = question.objective.ttft
                if users is None and bound is not None and found[-1].ttft.value > bound:
                    found += _relieved(pool, left, instance, right, here, bound)
    return found


def _relieved(
    pool: PrefillPool, left: int, instance: Instance, right: int, batch: float, ttft: float
) -> list[Candidate]:
    """Where prefill is too busy for the TTFT: the same with the most requests that leave it time enough, if any do."""
    output = max(instance.workload.output.mean - 1, 1.0)

    def served(batch: float) -> float:
        return batch * instance.replicas * right / (instance.tpot(batch).value * output)

    if served(batch) <= _RELIEVED[0] * pool.rate.value * left or pool.alone.value > ttft:
        return []
    for share in _RELIEVED:
        # Two steps of a fixed point; rounded, so that others ask for the same batch.
        for _ in range(2):
            batch = max(1.0, round(batch * share * pool.rate.value * left / served(batch)))
        found = separated(pool, left, instance, right, batch)
        if found.ttft.value <= ttft:
            return [found]
    return []


def _rung(batch: float) -> int:
    """Batches that are compared with each other: within a factor of the square root of two."""
    return round(2 * math.log2(batch))


def _pool_sizes(question: Question, instance: Instance) -> list[float]:
    bound = question.objective.ttft
    sizes = instance.prefill_sizes()
    return [s for s in sizes if bound is None or instance.prefill_step(s).value <= bound] or sizes[:1]


def _decode_batches(question: Question, instance: Instance) -> list[float]:
    bound = question.objective.tpot
    wanted = question.workload.concurrency
    if wanted is not None:
        most = max(1, 3 * question.devices // (4 * instance.layout.devices))
        batch = wanted / (instance.replicas * most)
        return [batch] if batch <= instance.max_batch else []
    held = [float(b) for b in instance.batches() if bound is None or instance.tpot(b).value <= bound]
    return held or [1.0]


def _best(items: list, rate, group, most: int) -> list:
    """The item with the highest rate of each group; of those the `most` best, and the best of each size among them."""
    best: dict = {}
    for item in sorted(items, key=rate, reverse=True):
        best.setdefault(group(item), item)
    return sorted(best.values(), key=rate, reverse=True)[:most]


def _splits(question: Question, pool: PrefillPool, instance: Instance, batch: float) -> list[tuple[int, int]]:
    """(prefill instances, decode instances) that balance both sides, rounded both ways, on the devices at hand."""
    own, other = pool.instance.layout.devices, instance.layout.devices
    devices = question.devices
    if own + other > devices:
        return []
    work = question.workload
    if work.concurrency is not None:
        lefts = {max(1, devices * share // (own * 8)) for share in (1, 2, 4, 6)}
    else:
        served = batch * instance.replicas / (instance.tpot(batch).value * max(work.output.mean - 1, 1.0))
        needed = served / (0.85 * pool.rate.value)  # prefill instances for each decode instance
        rights = devices / (other + needed * own)
        lefts = {max(1, math.floor(needed * rights)), math.ceil(needed * rights)}
    found = []
    for left in sorted(lefts):
        right = (devices - left * own) // other
        if right >= 1:
            found.append((left, right))
    return found


def frontier(candidates: list[Candidate]) -> list[Candidate]:
    """Pareto front of tokens a second a device against tokens a second a user, by the user's rate ascending."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (-c.per_user.value, -c.per_device.value)):
        if not front or candidate.per_device.value > front[-1].per_device.value:
            front.append(candidate)
    return front[::-1]

"""The search: every layout of an instance, every way to fill the cluster with it, ranked by the objective."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate, PrefillPool, in_full, quick_aggregated, quick_pool, quick_separated
from dsjax.plan.cluster import Cluster
from dsjax.plan.dry_runs import Usage, usage
from dsjax.plan.instance import Instance
from dsjax.plan.layout import Layout, layouts
from dsjax.plan.precision import FP8_BLOCK
from dsjax.plan.prompts import best_step
from dsjax.plan.workload import Objective, Options, Workload
from sharding.mesh import MeshSpec

_POOLS, _DECODERS = 6, 400
"""Best prefill pools and decode instances that are paired; below the best of their size, others cannot win a pair."""
_FEW_DEVICES = 64
"""Up to which every size of a prefill instance is paired; among more the best sizes are enough."""
_BISECTED, _TYPICAL_BATCH = 60, 64
"""Among more: decode instances whose batch is bisected, and the batch at which the size of a step's prompts is chosen."""
_SHOWN = 60
"""Candidates of a list that get intervals and derivations."""


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
    candidates, not only the best of each layout, where none meets the objectives. unkept: some meet them, but when played none kept
    the percentiles that were asked for.
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
    unkept: bool = False

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
    if question.options.fused:
        if question.config.n_shared_experts != 1:
            raise UserError(
                f"--enable-shared-experts-fusion needs a model with one shared expert; this one has {question.config.n_shared_experts}"
            )
        found = [dataclasses.replace(layout, fused=True) for layout in found]
    widest = question.options.widest
    if widest is not None:
        found = [layout for layout in found if layout.devices <= widest]
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
    if "aggregated" in question.options.possible_modes:
        candidates += _aggregated(question, fitting)
    if "separated" in question.options.possible_modes:
        candidates += _separated(question, fitting)
    objective = question.bounds
    met = [c for c in candidates if c.meets(objective)]
    missed = [c for c in candidates if not c.meets(objective)]
    ranked = _shown(_best_of_each(sorted(met, key=_order(question))))
    missed = _shown(
        _best_of_each(sorted(missed, key=lambda c: (max(c.misses(objective).values()), *_order(question)(c))))
    )
    every = [] if ranked else candidates
    bound = objective.ttft
    front = frontier([c for c in candidates if bound is None or c.ttft.value <= bound])
    late = [] if bound is None else [c for c in frontier(candidates) if c.ttft.value > bound]
    full = ([in_full(c) for c in some] for some in (front, late))
    return Plan(question, ranked, missed, *full, found, fitting, too_large, every)


def _shown(candidates: list[Candidate]) -> list[Candidate]:
    """With intervals and derivations, as many as anybody will look at."""
    return [in_full(c) for c in candidates[:_SHOWN]]


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
        return [float(b) for b in _rungs(question, instance)]
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
        sizes = _sizes(question, instance)
        for count in _counts(question, instance):
            for batch in _batches(question, instance, count):
                some = [quick_aggregated(instance, count, batch, size) for size in sizes]
                met = [c for c in some if c.meets(question.bounds)]
                found.append(min(met or some, key=_order(question)))
    if question.workload.concurrency is None:
        found += _filled(question, [(c, partial(_best_size, question, c)) for c in found])
    return found


def _sizes(question: Question, instance: Instance) -> list[float]:
    """Prompt tokens of a step to try beside decodes; on many devices the best one at a typical batch for all batches."""
    sizes = instance.prefill_sizes(chunks=True)
    if question.devices <= _FEW_DEVICES:
        return sizes
    bound = question.objective.ttft
    short = [s for s in sizes if bound is None or instance.middle.prefill_step(s).value <= 0.5 * bound] or sizes[:1]
    return [best_step(instance, min(instance.max_batch, _TYPICAL_BATCH), short)]


def _best_size(question: Question, like: Candidate, batch: float) -> Candidate:
    """With another batch, and the size of a step's prompts that is best at it."""
    instance, bounds = like.decode, question.bounds
    some = [quick_aggregated(instance, like.count, batch, s) for s in _sizes(question, instance)]
    met = [c for c in some if c.meets(bounds)]
    return min(met or some, key=_order(question))


def _filled(question: Question, known: list[tuple[Candidate, Callable[[float], Candidate]]]) -> list[Candidate]:
    """Between the batches that were tried, the largest that meets the objectives: by bisection, where it may be the best answer.

    known: what was tried, with a function that makes the same with another batch. Throughput grows with the batch, so that what
    meets the objectives between two batches is not better than the upper one; where that is no better than the best so far,
    nothing is tried. With a given rate the least batch that keeps up, the fastest, is looked for in the same way.
    """
    objective, order = question.bounds, _order(question)
    groups: dict[tuple, list] = {}
    for candidate, make in known:
        key = (candidate.mode, id(candidate.decode), candidate.count, id(candidate.prefill), candidate.prefill_count)
        groups.setdefault((*key, candidate.prefill_tokens if candidate.mode == "separated" else 0), []).append(
            (candidate.batch, candidate, make)
        )
    best = min((c for c, _ in known if c.meets(objective)), key=order, default=None)
    pairs = []
    for tried in groups.values():
        tried.sort(key=lambda one: one[0])
        for (low, below, make), (high, above, _) in itertools.pairwise(tried):
            if below.meets(objective) != above.meets(objective):
                pairs.append((above if below.meets(objective) else below, low, high, below.meets(objective), make))
        if not tried[0][1].meets(objective):
            pairs.append((tried[0][1], 0.0, tried[0][0], True, tried[0][2]))
    found = []
    for bound, low, high, rising, make in sorted(pairs, key=lambda pair: order(pair[0])):
        if best is not None and order(bound) >= order(best):
            continue
        good, users = None, _users(bound.decode, bound.count)
        low, high = math.floor(low * users), math.ceil(high * users)
        while high - low > 1:
            middle = (low + high) // 2
            here = make(middle / users)
            if here.meets(objective):
                good = here
            if here.meets(objective) == rising:
                low = middle
            else:
                high = middle
        if good is not None:
            found.append(good)
            best = good if best is None or order(good) < order(best) else best
    return found


def _separated(question: Question, fitting: list[Instance]) -> list[Candidate]:
    if question.devices < 2:
        return []
    pins = question.options.pins
    where = ""
    if question.options.engine.on_one_host:
        where = ", on one host, where dsjax runs each side of a separated service"
        fitting = [one for one in fitting if one.layout.devices <= question.cluster.devices_per_host]
    chosen = _pools(question, _pinned(fitting, pins.prefill_mesh, "--prefill-mesh", where))
    decoding = _pinned(fitting, pins.decode_mesh, "--decode-mesh", where)
    points = [(i, b) for i in decoding for b in _decode_batches(question, i)]
    rate = {(id(i), b): b * i.replicas / i.middle.tpot(b).value / i.layout.devices for i, b in points}
    decoders = _best(points, lambda p: rate[id(p[0]), p[1]], lambda p: (p[0].layout.devices, _rung(p[1])), _DECODERS)
    if question.devices > _FEW_DEVICES and question.objective.tpot is not None:
        # Bisected for the best only: there are a thousand layouts.
        top = sorted(decoders, key=lambda p: -rate[id(p[0]), p[1]])[:_BISECTED]
        more = [(i, _largest_batch(question, i)) for i in {id(i): i for i, _ in top}.values()]
        points += more
        rate |= {(id(i), b): b * i.replicas / i.middle.tpot(b).value / i.layout.devices for i, b in more}
    # Of each size the fastest layout at the largest batch that keeps the objective, whatever rung it stands on.
    decoders += _best(points, lambda p: rate[id(p[0]), p[1]], lambda p: p[0].layout.devices, _DECODERS)
    found, tried = [], set()
    for pool in chosen:
        for instance, batch in decoders:
            for left, right in _splits(question, pool, instance, batch):
                users = question.workload.concurrency
                here = batch if users is None else users / (instance.replicas * right)
                key = (id(pool), left, id(instance), right, here)
                if here > instance.max_batch or key in tried:
                    continue
                tried.add(key)
                found.append(quick_separated(pool, left, instance, right, here))
                bound = question.objective.ttft
                if users is None and bound is not None and found[-1].ttft.value > bound:
                    found += _relieved(pool, left, instance, right, here, bound)
    return found


def _pinned(fitting: list[Instance], mesh: MeshSpec | None, flag: str, where: str) -> list[Instance]:
    """Those of the mesh that was given. where: what the layouts are bound to, for the message.

    Raises:
        UserError: no layout that fits has it.
    """
    if mesh is None:
        return fitting
    found = [instance for instance in fitting if instance.layout.mesh == mesh]
    if not found:
        near = sorted(
            {i.layout.mesh for i in fitting},
            key=lambda m: (abs(m.num_devices - mesh.num_devices), m.tp_size != mesh.tp_size),
        )
        raise UserError(
            f"{flag} {mesh} is no layout that fits here{where}; nearest are {', '.join(str(m) for m in near[:4]) or 'none: nothing fits'}"
        )
    return found


def _pools(question: Question, fitting: list[Instance]) -> list[PrefillPool]:
    """For each size of an instance those that no other beats: in prompts a second, and in a prompt's time alone and in full steps."""
    bound = question.objective.ttft
    best: dict[int, list[PrefillPool]] = {}
    for instance in fitting:
        for size in instance.prefill_sizes():
            pool = quick_pool(instance, size)
            if bound is not None and pool.alone.value > bound and size > instance.prefill_sizes()[0]:
                continue
            best.setdefault(instance.layout.devices, []).append(pool)
    kept = []
    for pools in best.values():
        pools.sort(key=lambda p: -p.rate.value)
        front: list[PrefillPool] = []
        for pool in pools:
            better = (p for p in front if p.seconds.value <= pool.seconds.value and p.alone.value <= pool.alone.value)
            if next(better, None) is None:
                front.append(pool)
        # Without a bound on the TTFT only the rate counts; with one, slower but sooner ones too.
        kept += front[:1] if bound is None else front[:_POOLS] + front[max(_POOLS, len(front) - _POOLS) :]
    kept.sort(key=lambda p: -p.rate.value / p.instance.layout.devices)
    return kept if question.devices <= _FEW_DEVICES else kept[: 4 * _POOLS]


def _relieved(
    pool: PrefillPool, left: int, instance: Instance, right: int, batch: float, ttft: float
) -> list[Candidate]:
    """Where prefill is too busy for the TTFT: the same with the most requests that leave it time enough, if any do."""
    if pool.alone.value > ttft:
        return []
    users, tried = _users(instance, right), {}

    def keeps(part: int, seconds: Callable[[float], float] | None = None) -> bool:
        tried[part] = quick_separated(pool, left, instance, right, part / users, seconds)
        return tried[part].ttft.value <= ttft

    most = math.ceil(batch * users)
    # Where it is by the curve of a decode step's seconds, which is at hand, so that few steps of other batches have to be priced.
    near = _last(0, most, lambda part: keeps(part, instance.decode_curve))
    low, high, far = max(near, 0), min(near + 1, most), 1
    while low and not keeps(low):
        low, high, far = max(low - far, 0), low, 2 * far
    while high < most and keeps(high):
        low, high, far = high, min(high + far, most), 2 * far
    found = _last(low, high, keeps)
    return [quick_separated(pool, left, instance, right, found / users)] if found else []


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last number from `low`, which holds, before `high`, which does not, that holds; by bisection."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _users(instance: Instance, count: int) -> int:
    """Parts of a batch that are told apart where one is bisected: single users of the whole service, at most 64."""
    return min(64, instance.replicas * count)


def _rung(batch: float) -> int:
    """Batches that are compared with each other: within a factor of the square root of two."""
    return round(2 * math.log2(batch))


def _decode_batches(question: Question, instance: Instance) -> list[float]:
    """Batches that keep the objective, the largest of all among them, found by bisection between two that were tried."""
    bound = question.objective.tpot
    wanted = question.workload.concurrency
    if wanted is not None:
        most = max(1, 3 * question.devices // (4 * instance.layout.devices))
        batch = wanted / (instance.replicas * most)
        return [batch] if batch <= instance.max_batch else []
    if bound is None:
        return [float(b) for b in _rungs(question, instance)]
    held = [float(b) for b in _rungs(question, instance) if instance.middle.tpot(float(b)).value <= bound]
    if question.devices <= _FEW_DEVICES:
        held.append(_largest_batch(question, instance))
    return sorted(set(held)) or [1.0]


def _rungs(question: Question, instance: Instance) -> list[int]:
    """Batches to try: on many devices powers of two and the largest, between which the best are bisected."""
    tried = instance.batches()
    return tried if question.devices <= _FEW_DEVICES else [b for b in tried if b & (b - 1) == 0 or b == tried[-1]]


def _largest_batch(question: Question, instance: Instance) -> float:
    """The largest batch whose decode step alone keeps the TPOT's objective, by bisection; 1 where none does."""
    bound, tried = question.objective.tpot, _rungs(question, instance)
    low = max((b for b in tried if instance.middle.tpot(float(b)).value <= bound), default=0)
    high = next((b for b in tried if b > low), low + 1)
    ranks = _users(instance, 1)
    low, high = low * ranks, high * ranks
    while low and high - low > 1:
        middle = (low + high) // 2
        if instance.middle.tpot(middle / ranks).value <= bound:
            low = middle
        else:
            high = middle
    return max(low / ranks, 1.0)


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
        served = batch * instance.replicas / (instance.middle.tpot(batch).value * max(work.output.mean - 1, 1.0))
        needed = served / (0.85 * pool.rate.value)  # prefill instances for each decode instance
        rights = devices / (other + needed * own)
        lefts = {max(1, math.floor(needed * rights)), math.ceil(needed * rights)}
    # Where the TTFT forbids prefill to be as busy, one or two more instances of it relieve the rest.
    lefts |= {left + more for left in tuple(lefts) for more in (1, 2)}
    pins = question.options.pins
    if pins.prefill_count is not None:
        lefts = {pins.prefill_count}
    elif pins.decode_count is not None:
        lefts |= {max(1, (devices - pins.decode_count * other) // own)}
    found = []
    for left in sorted(lefts):
        room = (devices - left * own) // other
        right = room if pins.decode_count is None else min(pins.decode_count, room + 1)
        if 1 <= right <= room and right == (pins.decode_count or right):
            found.append((left, right))
    return found


def frontier(candidates: list[Candidate]) -> list[Candidate]:
    """Pareto front of tokens a second a device against tokens a second a user, by the user's rate ascending."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (-c.per_user.value, -c.per_device.value)):
        if not front or candidate.per_device.value > front[-1].per_device.value:
            front.append(candidate)
    return front[::-1]

"""The search: every layout of an instance, every way to fill the cluster with it, ranked by the objective."""

from __future__ import annotations

import bisect
import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate, aggregated, frontier, with_intervals
from dsjax.plan.dry_runs import DryRunUsage, usage
from dsjax.plan.instance import Instance
from dsjax.plan.launch import LAUNCHED, unfit
from dsjax.plan.layout import InstanceLayout, layouts, named_layouts
from dsjax.plan.pools import layouts_apart, most_instances
from dsjax.plan.prompts import best_step
from dsjax.plan.question import FEW_DEVICES, SHOWN, Question, users_told_apart
from dsjax.plan.separated import separated_candidates
from dsjax.plan.stages import cut_stage
from dsjax.plan.workload import Objective, PlanOptions
from sharding import MeshSpec

_NO_PAGES = (
    "prefill and decode on instances of their own are asked for, and all layouts of this plan have stages, or attention and experts apart "
    "as dsjax has it or on hosts of two kinds: these take no pages of prompts from one another; give --mode aggregated, or other meshes"
)
NO_LAYOUT = (
    "no layout of the model is left to look at: the devices at hand and their hosts, and the meshes, redundant experts and widest instance "
    "that were given, allow none"
)
_TYPICAL_BATCH = 64
"""At which the size of a step's prompts is chosen on many devices."""


Row = TypeVar("Row")


@dataclass(frozen=True)
class Plan:
    """The answer: candidates that meet the objectives, best first; the others, nearest first; layouts that do not fit.

    frontier: of candidates that keep the TTFT's objective; late: those that would be on it if they did.
    considered: layouts looked at; fitting, too_large: those with and without room for one request beside the weights. every: all
    candidates, not only the best of each layout, where none meets the objectives. unkept: some meet them, but when played none kept
    the percentiles that were asked for.
    """

    question: Question
    ranked: Sequence[Candidate]
    missed: Sequence[Candidate]
    frontier: Sequence[Candidate]
    late: Sequence[Candidate]
    considered: list[InstanceLayout]
    fitting: list[Instance]
    too_large: list[Instance]
    every: list[Candidate]
    unkept: bool = False

    @property
    def usages(self) -> list[DryRunUsage]:
        """What was taken of each dry run that was given."""
        return usages(self.question, self.fitting + self.too_large)

    @property
    def winner(self) -> Candidate | None:
        """The best that meets the objectives."""
        return self.ranked[0] if self.ranked else None


def instances(question: Question) -> tuple[list[InstanceLayout], list[Instance], list[Instance]]:
    """(all layouts, instances with room for at least one request, instances without)."""
    question.options.check(question.config, question.workload)
    blocks = question.options.precision.blocks
    cluster = question.cluster
    runnable = list(
        layouts(
            question.config,
            question.devices,
            min(cluster.devices_per_host, question.devices),
            redundant=question.options.redundant,
            copies=question.devices <= 64,
            stages=tried_stages(question.options),
            **blocks,
        )
    )
    runnable += [
        layout
        for layout in named_layouts(
            question.config, wanted_meshes(question.options), redundant=question.options.redundant, **blocks
        )
        if most_instances(question, layout)
    ]
    if question.options.afd == "on":
        runnable = []
    if question.options.fused:
        if question.config.n_shared_experts != 1:
            raise UserError(
                f"--enable-shared-experts-fusion needs a model with one shared expert; this one has {question.config.n_shared_experts}"
            )
        runnable = [dataclasses.replace(layout, fused=True) for layout in runnable]
    runnable = _runnable(question, runnable)
    widest = question.options.widest
    if widest is not None:
        runnable = [layout for layout in runnable if layout.devices <= widest]
    wanted = question.options.mesh
    if wanted is not None and question.options.afd != "on":
        possible, runnable = runnable, [layout for layout in runnable if layout.mesh == wanted]
        if not runnable:
            sizes = sorted({layout.devices for layout in possible})
            most = max((layout.mesh.tp_size for layout in possible), default=1)
            redundant = "the fewest" if question.options.redundant is None else question.options.redundant
            raise UserError(
                f"--mesh {wanted} is no layout of this plan: {wanted.num_devices} devices wanted, {question.devices} at hand in "
                f"hosts of {cluster.devices_per_host}; instances of {', '.join(map(str, sizes))} devices with tp up to {most} are "
                f"looked at, with {redundant} redundant experts"
            )
    if question.options.afd != "off":
        apart = (layout for layout in layouts_apart(question) if most_instances(question, layout))
        runnable += [layout for layout in apart if widest is None or layout.devices <= widest]
    steps: dict[InstanceLayout, dict] = {}
    shared: dict = {}
    made = []
    for layout in runnable:
        of_unit = steps.setdefault(layout.unit, {"shared": shared})
        own = of_unit if layout.mesh.pp_size == 1 else {"shared": shared, "stage": of_unit}
        made.append(question.instance(layout, own))
    return runnable, [i for i in made if i.max_batch > 0], [i for i in made if i.max_batch <= 0]


def wanted_meshes(options: PlanOptions) -> set[MeshSpec]:
    """The meshes that a user named."""
    return {options.mesh, options.pins.prefill_mesh, options.pins.decode_mesh} - {None}


def tried_stages(options: PlanOptions) -> list[int]:
    """Numbers of stages to look at: those that were asked for, and those of meshes that a user named."""
    return sorted({*options.stages, *(mesh.pp_size for mesh in wanted_meshes(options))})


def _runnable(question: Question, layouts: list[InstanceLayout]) -> list[InstanceLayout]:
    """Without those that the engine cannot be asked for.

    Raises:
        UserError: the mesh that was given is one of them.
    """
    options, cluster = question.options, question.cluster
    if options.engine.name in LAUNCHED:
        reasons = {
            layout: unfit(options.engine.name, layout, cluster.devices_per_host, cluster.hardware, options.precision)
            for layout in layouts
        }
    elif options.engine.name == "dsjax":
        reasons = {layout: cut_stage(layout, cluster.devices_per_host) for layout in layouts}
    else:
        return layouts
    kept = [layout for layout in layouts if reasons[layout] is None]
    wanted = wanted_meshes(options)
    for mesh in sorted(wanted, key=str):
        refused = next((reasons[layout] for layout in layouts if layout.mesh == mesh and reasons[layout]), None)
        if refused and not any(layout.mesh == mesh for layout in kept):
            raise UserError(
                f"--engine {options.engine.name} cannot run {refused}; give another mesh, or --engine published"
            )
    return kept


def usages(question: Question, among: Sequence[Instance]) -> list[DryRunUsage]:
    """What a plan over these instances takes of each dry run that was given."""
    options = question.options
    weights = {i.layout.unit: i.memory.weights_total for i in among}
    about = (question.config, question.cluster, options.precision, options.dispatch, weights, options.overlap)
    return [usage(run, *about) for run in options.compiled]


def search(question: Question) -> Plan:
    """Answer a question. Deterministic; no JAX."""
    # What is kept of prices is millions of small objects without a cycle; looking for cycles among them costs more than making them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _search(question)
    finally:
        if collecting:
            gc.enable()


def _search(question: Question) -> Plan:
    layouts, fitting, too_large = instances(question)
    candidates: list[Candidate] = []
    if "aggregated" in question.options.possible_modes:
        candidates += _aggregated(question, fitting)
    if "separated" in question.options.possible_modes:
        decoding = _taking_pages(question, fitting)
        if fitting and not decoding and "aggregated" not in question.options.possible_modes:
            raise UserError(_NO_PAGES)
        first = [one for one in of_prefill(question, fitting) if one.stage is None] if decoding else []
        candidates += separated_candidates(question, decoding, first) if decoding else []
    objective = question.bounds
    met, missed = [], []
    for candidate in candidates:
        (met if candidate.meets(objective) else missed).append(candidate)
    ranked = Shown(_best_of_each(sorted(met, key=question.order))[:SHOWN])
    missed = Shown(
        _best_of_each(sorted(missed, key=lambda c: (max(c.misses(objective).values()), *question.order(c))))[:SHOWN]
    )
    every = [] if ranked else candidates
    bound = objective.ttft
    front = frontier([c for c in candidates if bound is None or c.ttft <= bound])
    late = [] if bound is None else [c for c in frontier(candidates) if c.ttft > bound]
    return Plan(question, ranked, missed, Shown(front), Shown(late), layouts, fitting, too_large, every)


def _taking_pages(question: Question, fitting: list[Instance]) -> list[Instance]:
    """Instances that may decode what others have computed the prompts of.

    Pages are not handed over between engines with stages. Where a cluster has hosts for experts, how many of them are left beside prefill
    is not reckoned, and dsjax refuses prefill apart from decode with experts apart.
    """
    both = question.options.engine.name != "dsjax" and question.cluster.experts is None
    return [one for one in fitting if one.stage is None and (both or not one.layout.experts)]


def of_prefill(question: Question, fitting: list[Instance]) -> list[Instance]:
    """Instances that may compute prompts: the same, or those on hosts of another kind where the cluster has two; experts are not apart."""
    if question.options.afd == "on":
        return of_prefill(*_without_apart(question))
    if question.cluster.prefill is None:
        return [one for one in fitting if not one.layout.experts]
    # A mesh that is given is of every instance; one that those hosts are too few for is no answer.
    there = instances(dataclasses.replace(question, cluster=question.cluster.prefill))[1]
    return [one for one in there if not one.layout.experts]


def _without_apart(question: Question) -> tuple[Question, list[Instance]]:
    """The question of layouts of one mesh, and those that fit."""
    other = dataclasses.replace(question, options=dataclasses.replace(question.options, afd="off"))
    return other, instances(other)[1]


class Shown(Sequence[Row]):
    """Rows that get their intervals when they are looked at: most of them never are. rows: those without."""

    def __init__(self, rows: Sequence[Row], with_intervals: Callable[[Row], Row] = with_intervals):
        self.rows, self._full, self._with_intervals = rows, {}, with_intervals

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):
        """The row at a place, or a list of those of a slice."""
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        if at not in self._full:
            self._full[at] = self._with_intervals(self.rows[at])
        return self._full[at]

    def __add__(self, others: Sequence[Row]) -> list[Row]:
        """All of them and the others."""
        return [*self, *others]


def _best_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first of each pair of layouts and mode, and of each ratio of prefill to decode instances."""
    seen, kept = set(), []
    for candidate in candidates:
        if candidate.row not in seen:
            seen.add(candidate.row)
            kept.append(candidate)
    return kept


def _batches(question: Question, instance: Instance, count: int) -> list[float]:
    """Batches of a DP rank: those that memory holds, or just the one that the concurrency gives."""
    wanted = question.workload.concurrency
    if wanted is None:
        return [float(b) for b in question.rungs(instance)]
    batch = wanted / (instance.replicas * count)
    return [batch] if batch <= instance.max_batch else []


def _counts(question: Question, instance: Instance, fullest: Sequence[Candidate]) -> list[int]:
    """Numbers of instances: all that fit; with a given rate the fewest that serve it; with a given concurrency also fewer."""
    most = most_instances(question, instance.layout)
    if question.workload.rate is not None and fullest:
        needed = question.bounds.throughput / max(one.throughput for one in fullest)
        return [min(most, math.ceil(needed))]
    if question.workload.concurrency is None:
        return [most]
    return sorted({max(1, most // divisor) for divisor in (1, 2, 4, 8)}, reverse=True)


def _aggregated(question: Question, fitting: list[Instance]) -> list[Candidate]:
    kept, every = [], []
    for instance in fitting:
        sizes = _sizes(question, instance)
        fullest = _fullest(question, instance, sizes) if question.workload.rate is not None else []
        for count in _counts(question, instance, fullest):
            some = [aggregated(instance, count, one.batch, one.prefill_tokens) for one in fullest]
            kept += some
            every += some
            for batch in _batches(question, instance, count):
                some = [aggregated(instance, count, batch, size) for size in sizes]
                met = [c for c in some if c.meets(question.bounds)]
                kept.append(min(met or some, key=question.order))
                every += some
    if question.workload.concurrency is None:
        kept += _filled(question, [(c, partial(_of_size, c)) for c in every])
    return kept


def _fullest(question: Question, instance: Instance, sizes: Sequence[float]) -> list[Candidate]:
    """For each prefill size, return one instance at the largest batch that meets TTFT and TPOT, where any does."""
    found, parts = [], users_told_apart(instance, most_instances(question, instance.layout))
    bounds = dataclasses.replace(question.objective, throughput=None)
    for size in sizes:
        keeps = partial(_keeps, instance, size, bounds)
        tried = [0, *question.rungs(instance)]
        at = bisect.bisect_left(tried, True, 1, key=lambda batch: not keeps(batch)) - 1
        low, high = tried[at] * parts, tried[min(at + 1, len(tried) - 1)] * parts
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keeps(middle / parts) else (low, middle)
        if low:
            found.append(aggregated(instance, 1, low / parts, size))
    return found


def _keeps(instance: Instance, size: float, bounds: Objective, batch: float) -> bool:
    return aggregated(instance, 1, batch, size).meets(bounds)


def _sizes(question: Question, instance: Instance) -> list[float]:
    """Prompt tokens of a step to try beside decodes; on many devices the best one at a typical batch for all batches."""
    sizes = instance.prefill_sizes(chunks=True)
    if question.devices <= FEW_DEVICES:
        return sizes
    bound = question.objective.ttft
    short = [s for s in sizes if bound is None or instance.prefill_step(s) <= 0.5 * bound] or sizes[:1]
    return [best_step(instance, min(instance.max_batch, _TYPICAL_BATCH), short)]


def _of_size(like: Candidate, batch: float) -> Candidate:
    """With another batch, and the same size of a step's prompts."""
    return aggregated(like.decode, like.count, batch, like.prefill_tokens)


def _filled(question: Question, known: list[tuple[Candidate, Callable[[float], Candidate]]]) -> list[Candidate]:
    """Between the batches that were tried, the largest that meets the objectives: by bisection, where it may be the best answer.

    known: what was tried, with a function that makes the same with another batch. Throughput grows with the batch, so that what
    meets the objectives between two batches is not better than the upper one; where that is no better than the best so far,
    nothing is tried. With a given rate the least batch that keeps up, the fastest, is looked for in the same way.
    """
    objective, order = question.bounds, question.order
    groups: dict[tuple, list] = {}
    for candidate, make in known:
        key = (id(candidate.decode), candidate.count, candidate.prefill_tokens)
        groups.setdefault(key, []).append((candidate.batch, candidate, make))
    best = min((c for c, _ in known if c.meets(objective)), key=order, default=None)
    pairs = []
    for tried in groups.values():
        tried.sort(key=lambda one: one[0])
        for (low, below, make), (high, above, _) in itertools.pairwise(tried):
            if below.meets(objective) != above.meets(objective):
                pairs.append((above if below.meets(objective) else below, low, high, below.meets(objective), make))
        if not tried[0][1].meets(objective):
            pairs.append((tried[0][1], 0.0, tried[0][0], True, tried[0][2]))
    filled = []
    for bound, low, high, rising, make in sorted(pairs, key=lambda pair: order(pair[0])):
        if best is not None and order(bound) >= order(best):
            continue
        good, users = None, users_told_apart(bound.decode, bound.count)
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
            filled.append(good)
            best = good if best is None or order(good) < order(best) else best
    return filled

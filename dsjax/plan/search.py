"""The search: every layout of an instance and every way to fill the cluster with it, ranked by the objectives."""

import bisect
import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate, aggregated, all_with_intervals, frontier
from dsjax.plan.instance import Instance
from dsjax.plan.launch import LAUNCHED, unfit
from dsjax.plan.layout import InstanceLayout, layouts, with_redundancy
from dsjax.plan.program import DryRunUsage, usage
from dsjax.plan.prompts import prompts_beside_decodes
from dsjax.plan.question import Question, batch_divisor
from dsjax.plan.rules import refusal, refuse
from dsjax.plan.separated import separated_candidates
from sharding import MeshSpec

NO_LAYOUT = (
    "no layout of the model is left to look at: the devices at hand and their hosts, and the meshes, redundant experts and widest instance "
    "that were given, allow none"
)
_SHOWN = 60
"""Most rows of a list."""
_TYPICAL_BATCH = 64
"""Batch for which the prompt tokens of a step are chosen on many devices."""


Row = TypeVar("Row")


@dataclass(frozen=True)
class Plan:
    """The best candidate of each layout: `ranked` meet the objectives, best first; `missed` do not, nearest first."""

    question: Question
    ranked: Sequence[Candidate]
    missed: Sequence[Candidate]
    frontier: Sequence[Candidate]  # Pareto front of candidates that meet the TTFT objective
    late: Sequence[Candidate]  # candidates that would be on the front without the TTFT objective
    considered: list[InstanceLayout]
    fitting: list[Instance]  # instances with memory for one request besides the weights
    too_large: list[Instance]  # instances without
    every: list[Candidate]  # all candidates if none meets the objectives, else empty

    @property
    def usages(self) -> list[DryRunUsage]:
        """How the plan uses each dry run."""
        return usages(self.question, self.fitting + self.too_large)

    @property
    def winner(self) -> Candidate | None:
        """The best candidate that meets the objectives."""
        return self.ranked[0] if self.ranked else None

    @property
    def best(self) -> Candidate | None:
        """The winner, or the nearest candidate if none meets the objectives."""
        return next(iter([*self.ranked[:1], *self.missed[:1]]), None)


class Shown(Sequence[Row]):
    """Rows that get their intervals on access, because most are never shown. rows: without intervals."""

    def __init__(self, rows: Sequence[Row], with_intervals: Callable[[list[Row]], list[Row]] = all_with_intervals):
        self.rows = rows
        self._full = {}
        self._with_intervals = with_intervals

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        """The row at an index, or a list of the rows of a slice."""
        places = range(len(self))[index]
        wanted = places if isinstance(index, slice) else [places]
        if missing := [place for place in wanted if place not in self._full]:
            self._full |= zip(missing, self._with_intervals([self.rows[place] for place in missing]), strict=True)
        rows = [self._full[place] for place in wanted]
        return rows if isinstance(index, slice) else rows[0]

    def __iter__(self) -> Iterator[Row]:
        return iter(self[:])


def instances(question: Question) -> tuple[list[InstanceLayout], list[Instance], list[Instance]]:
    """Return (all layouts, instances with memory for at least one request, other instances)."""
    options = question.options
    widest = options.widest or math.inf
    options.check(question.config, question.workload)
    if options.apart:
        sides = [(options.pins.attention_mesh, options.pins.expert_mesh.num_devices)]
        all_layouts = with_redundancy(question.config, sides, options.redundant, **options.precision.blocks)
        looked_at = [one for one in all_layouts if one.devices <= widest and question.max_instances(one)]
    else:
        looked_at = _of_one_mesh(question, widest)
    steps: dict[tuple[InstanceLayout, int], dict] = {}
    shared: dict = {}
    made = []
    for layout in looked_at:
        unit_steps = steps.setdefault((layout.unit, layout.mesh.pp_size), {"shared": shared})
        made.append(question.instance(layout, unit_steps))
    return looked_at, [i for i in made if i.max_batch > 0], [i for i in made if i.max_batch <= 0]


def _of_one_mesh(question: Question, widest: float) -> list[InstanceLayout]:
    """Return the layouts with one mesh that fit the model and the engine. Raises `UserError` if the given mesh is not one of them."""
    options, config, cluster = question.options, question.config, question.cluster
    named = {options.mesh, options.pins.prefill_mesh, options.pins.decode_mesh} - {None}
    per_host = min(cluster.devices_per_host, question.devices)
    alike = options.precision.blocks
    stages = sorted({*options.stages, *(mesh.pp_size for mesh in named)})
    about = {"redundant": options.redundant, "copies": question.is_small, "stages": stages, **alike}
    all_layouts = list(layouts(config, question.devices, per_host, **about))
    # Layouts whose DP ranks share the width of an expert are tried only if they are given.
    shared_width = [(mesh, 0) for mesh in named if "etp" in mesh.axes]
    more = with_redundancy(config, shared_width, options.redundant, **alike)
    all_layouts += [layout for layout in more if question.max_instances(layout)]
    if options.fused:
        all_layouts = [dataclasses.replace(layout, fused=True) for layout in all_layouts]
    runnable = [layout for layout in _runnable(question, all_layouts, named) if layout.devices <= widest]
    sizes = sorted({layout.devices for layout in runnable})
    meshes = {layout.mesh for layout in runnable}
    about = {"sizes": sizes, "meshes": meshes, "most": max((mesh.tp_size for mesh in meshes), default=1)}
    refuse("mesh", o=options, config=config, devices=question.devices, per_host=cluster.devices_per_host, **about)
    return [layout for layout in runnable if options.mesh in (None, layout.mesh)]


def _runnable(question: Question, all_layouts: list[InstanceLayout], named: set[MeshSpec]) -> list[InstanceLayout]:
    """Leave out layouts that the engine cannot run. Raises `UserError` if a given mesh is one of them."""
    cluster = question.cluster
    engine = question.options.engine.name
    reasons: dict[InstanceLayout, str | None] = dict.fromkeys(all_layouts)
    if engine in LAUNCHED:
        about = (cluster.devices_per_host, cluster.hardware, question.options.precision)
        reasons = {layout: unfit(engine, layout, *about) for layout in all_layouts}
    elif engine == "dsjax":
        reasons |= {
            layout: refusal("stages", mesh=layout.mesh, per_host=cluster.devices_per_host)
            for layout in all_layouts
            if layout.mesh.pp_size > 1
        }
    runnable = [layout for layout in all_layouts if reasons[layout] is None]
    for mesh in sorted(named - {layout.mesh for layout in runnable}, key=str):
        if refused := next((reasons[layout] for layout in all_layouts if layout.mesh == mesh), None):
            raise UserError(f"--engine {engine} cannot run {refused}; give another mesh, or --engine published")
    return runnable


def usages(question: Question, among: Sequence[Instance]) -> list[DryRunUsage]:
    """Return how a plan over these instances uses each dry run."""
    weights = {i.layout.unit: i.memory.weights_total for i in among if i.layout.mesh.pp_size == 1}
    return [usage(run, question, weights) for run in question.options.compiled]


def search(question: Question) -> Plan:
    """Return the plan for a question. Deterministic; does not use JAX."""
    # Prices are millions of small objects without cycles; collecting garbage would take longer than making them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _search(question)
    finally:
        if collecting:
            gc.enable()


def _search(question: Question) -> Plan:
    considered, fitting, too_large = instances(question)
    modes, objective, order = question.options.possible_modes, question.all_objectives, question.sort_key
    candidates: list[Candidate] = []
    if "aggregated" in modes:
        candidates += _aggregated(question, fitting)
    if "separated" in modes:
        # Engines with pipeline stages or AFD do not transfer KV pages.
        decoding = [i for i in fitting if i.layout.mesh.pp_size == 1 and not i.layout.experts]
        if "aggregated" not in modes:
            refuse("pages", fitting=fitting, decoding=decoding)
        if decoding:
            first = [i for i in of_prefill(question, fitting) if i.layout.mesh.pp_size == 1]
            candidates += separated_candidates(question, decoding, first)
    misses = [(candidate.misses(objective), candidate) for candidate in candidates]
    met = sorted((c for missed, c in misses if not missed), key=order)
    far = sorted(((m, c) for m, c in misses if m), key=lambda miss: (max(miss[0].values()), *order(miss[1])))
    bound = objective.ttft
    front = frontier([c for c in candidates if bound is None or c.ttft <= bound])
    late = [] if bound is None else [c for c in frontier(candidates) if c.ttft > bound]
    rows = (_best_of_each(met), _best_of_each(c for _, c in far), front, late)
    every = [] if met else candidates
    return Plan(question, *map(Shown, rows), considered, fitting, too_large, every)


def of_prefill(question: Question, fitting: list[Instance]) -> list[Instance]:
    """Instances that may prefill: all that fit, or those on the cluster's hosts for prefill."""
    if question.cluster.prefill is not None:
        # A given mesh applies to every instance, also on these hosts.
        return instances(dataclasses.replace(question, cluster=question.cluster.prefill))[1]
    return fitting


def _best_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first candidate of each mode, pair of layouts, and ratio of prefill to decode instances."""
    best: dict[tuple, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.key, candidate)
    return list(best.values())[:_SHOWN]


def _aggregated(question: Question, fitting: list[Instance]) -> list[Candidate]:
    users = question.workload.concurrency
    bounds = question.all_objectives
    best = []
    every = []
    for instance in fitting:
        sizes = _sizes(question, instance)
        most = question.max_instances(instance.layout)
        counts = [most]
        fullest = []
        if question.workload.rate is not None:
            fullest = _fullest(question, instance, sizes)
            if fullest:  # the fewest instances that serve the rate
                counts = [min(most, math.ceil(bounds.throughput / max(c.throughput for c in fullest)))]
        elif users is not None:
            counts = sorted({max(1, most // divisor) for divisor in (1, 2, 4, 8)}, reverse=True)
        for count in counts:
            full = [aggregated(instance, count, candidate.batch, candidate.prefill_tokens) for candidate in fullest]
            best += full
            every += full
            batches = [users / (instance.replicas * count)] if users is not None else question.batches_to_try(instance)
            for batch in map(float, batches):
                if batch <= instance.max_batch:
                    tried = [aggregated(instance, count, batch, size) for size in sizes]
                    best.append(min([c for c in tried if c.meets(bounds)] or tried, key=question.sort_key))
                    every += tried
    return best if users is not None else best + _filled(question, every)


def _fullest(question: Question, instance: Instance, sizes: Sequence[float]) -> list[Candidate]:
    """Return one instance for each prefill size, at the largest batch that meets TTFT and TPOT, if there is one."""
    fullest = []
    parts = batch_divisor(instance, question.max_instances(instance.layout))
    bounds = dataclasses.replace(question.objective, throughput=None)
    users = range(1, question.batches_to_try(instance)[-1] * parts + 1)
    for size in sizes:
        least = bisect.bisect_left(
            users, True, key=lambda n, size=size: not aggregated(instance, 1, n / parts, size).meets(bounds)
        )
        if least:
            fullest.append(aggregated(instance, 1, users[least - 1] / parts, size))
    return fullest


def _sizes(question: Question, instance: Instance) -> list[float]:
    """Return the prompt tokens per mixed step to try; on many devices only the best size at a typical batch."""
    sizes = instance.prefill_sizes(chunks=True)
    if question.is_small:
        return sizes
    bound = question.objective.ttft
    short = [s for s in sizes if bound is None or instance.prefill_step(s) <= 0.5 * bound] or sizes[:1]
    batch = min(instance.max_batch, _TYPICAL_BATCH)
    best = min(short, key=lambda size: prompts_beside_decodes(instance, batch, size)[0])  # delays decoded tokens least
    return [best]


def _filled(question: Question, candidates: list[Candidate]) -> list[Candidate]:
    """Bisect between tried batches for the largest that meets the objectives (with a given rate, the smallest).

    Throughput grows with the batch, so nothing is tried below a batch that is no better than the best candidate.
    """
    objective, order = question.all_objectives, question.sort_key
    if not question.has_objectives:
        return []
    groups: dict[tuple, list[tuple[Candidate, bool]]] = {}
    for candidate in candidates:
        key = (id(candidate.decode), candidate.count, candidate.prefill_tokens)
        groups.setdefault(key, []).append((candidate, candidate.meets(objective)))
    best = min((c for tried in groups.values() for c, met in tried if met), key=order, default=None)
    gaps = []
    for tried in groups.values():
        tried.sort(key=lambda pair: pair[0].batch)
        for (below, meets), (above, met) in itertools.pairwise(tried):
            if meets != met:
                gaps.append((above if meets else below, below.batch, above.batch, meets))
        first, met = tried[0]
        if not met:
            gaps.append((first, 0.0, first.batch, True))
    filled = []
    for bound, low, high, rising in sorted(gaps, key=lambda gap: order(gap[0])):
        if best is not None and order(bound) >= order(best):
            continue
        good = None
        users = batch_divisor(bound.decode, bound.count)
        low, high = math.floor(low * users), math.ceil(high * users)
        while high - low > 1:
            middle = (low + high) // 2
            here = aggregated(bound.decode, bound.count, middle / users, bound.prefill_tokens)
            met = here.meets(objective)
            good = here if met else good
            low, high = (middle, high) if met == rising else (low, middle)
        if good is not None:
            filled.append(good)
            best = good if best is None or order(good) < order(best) else best
    return filled

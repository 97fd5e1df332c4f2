"""`Timeline`: a compiled step simulated on a target: predicted time, and its breakdown by parts of the model."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.prices import BETWEEN, COPIES, INSIDE, Assumed, TargetPrices
from dsjax.dryrun.program import COMPUTE, LoopIteration, Operation, Program, ProgramCollective, Schedule, Span, play
from dsjax.dryrun.program.text import Computation
from dsjax.dryrun.program.walk import TripCount
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, Kind

_JAX_SCOPES = ("while", "body", "closed_call", "shard_map", "jit(", "eval_jaxpr", "cond", "branch", "checkpoint")
_MAX_STEPS = 6
"""Maximum number of steps from an unnamed operation to the operation that gives it its name."""
Interval = tuple[float, float]
"""Begin and end, in seconds."""


def model_part(op_name: str) -> str:
    """Return the model's own scopes in a path: ``jit(run)/while/body/closed_call/mla_output/dot_general`` → ``mla_output``.

    For an operation outside all scopes, return its primitive: ``(dynamic_slice)``.
    """
    parts = [p for p in op_name.split("/")[:-1] if not p.startswith(_JAX_SCOPES) and "->" not in p]
    return "/".join(parts) or f"({op_name.split('/')[-1]})"


def parts_by_operation(program: Program) -> dict[Operation, str]:
    """Map each operation to a part of the model.

    An operation that XLA created gets the part of its user if its producer's part is nested in that; else the part of its producer, of
    its user, or its opcode, such as ``(copy)``: the first that it has.
    """
    parts: dict[Operation, str] = {}
    for computation in program.computations.values():
        for operation in computation.operations.values():
            op_name = operation.op_name or next(
                (name for name in _fused_op_names(program, operation) if "/" in name), ""
            )
            parts[operation] = model_part(op_name) if op_name else _neighbors_part(program, computation, operation)
    return parts


def _fused_op_names(program: Program, operation: Operation) -> list[str]:
    """Return the ``op_name`` of each operation inside a fusion, the root's first; empty for other operations."""
    fused = program.computations.get(operation.called("calls"))
    return [fused.root.op_name, *(one.op_name for one in fused.operations.values())] if fused else []


def _neighbors_part(program: Program, computation: Computation, operation: Operation) -> str:
    """Return the part of an unnamed operation, from the named operations that produce its inputs and use its result."""

    def producer(consumer: Operation) -> Operation | None:
        return next(
            (computation.operations[name] for name in consumer.operands if name in computation.operations), None
        )

    def user(produced: Operation) -> Operation | None:
        return next(iter(computation.users.get(produced.name, ())), None)

    before, after = _nearest_named(operation, producer), _nearest_named(operation, user)
    if before is None:
        return model_part(after.op_name) if after else f"({operation.opcode})"
    part = model_part(before.op_name)
    for op_name in [after.op_name, *_fused_op_names(program, after)] if after else []:
        if part.startswith(f"{model_part(op_name)}/"):
            return model_part(op_name)
    return part


def _nearest_named(operation: Operation, step: Callable[[Operation], Operation | None]) -> Operation | None:
    """Return the nearest operation with a path that repeated ``step`` calls reach."""
    nearest = step(operation)
    for _ in range(_MAX_STEPS):
        if nearest is None or "/" in nearest.op_name:
            return nearest
        nearest = step(nearest)
    return None


@dataclass
class PartCost:
    """Cost of a part of the model: seconds on the compute thread, on the links and on the critical path; its flops and bytes there."""

    compute: float = 0.0
    network: float = 0.0
    critical: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """A collective on the timeline: its duration in the whole step, and how much of it compute hides."""

    name: str
    part: str  # of the model
    runs: int  # number of runs
    seconds: float  # total time on the links
    beside_compute: float  # seconds of it during which the compute thread works

    @property
    def hidden(self) -> float:
        """Fraction of the time that overlaps with compute."""
        return self.beside_compute / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Timeline:
    """A step on one device of a cluster."""

    cluster: Cluster
    schedule: Schedule  # with all assumptions at their middle
    step: Figure  # its seconds, and an interval whose ends have all assumptions at their most and least favourable
    assumed: Assumed  # converts operations and bytes to seconds
    parts: Mapping[Operation, str]  # operation → part of the model

    @classmethod
    def of(
        cls,
        program: Program,
        collectives: Sequence[ProgramCollective],
        cluster: Cluster,
        trip_count: TripCount,
        ragged_share: float = 1.0,
    ) -> Timeline:
        """Simulate the program at the middle and both ends of the assumptions; keep the schedule of the middle."""
        assumed = Assumed.of(cluster)
        middle, low, high = (
            play(program, TargetPrices(assumed, end, ragged_share), collectives, trip_count)
            for end in ("value", "low", "high")
        )
        kinds = Kind.COMPILED | Kind.ASSUMPTION
        step = Figure(middle.seconds, low.seconds, high.seconds, kinds, name="step", unit="s")
        return cls(cluster, middle, step, assumed, parts_by_operation(program))

    @property
    def compute(self) -> float:
        """Seconds during which the compute thread works."""
        return sum(span.seconds for span in self.schedule.spans if span.thread == COMPUTE)

    @property
    def exposed_copies(self) -> float:
        """Seconds during which the compute thread waits for memory copies or the host, and no link is busy."""
        if not self.network(COPIES):
            return 0.0
        others = [(span.begin, span.end) for span in self.schedule.spans if span.thread != COPIES]
        return self.schedule.seconds - _length(_union(others))

    @property
    def exposed_network(self) -> float:
        """Seconds during which the compute thread waits for a link."""
        return self.schedule.seconds - self.compute - self.exposed_copies

    def network(self, link: str) -> float:
        """Return the seconds during which a link is busy."""
        return sum(span.seconds for span in self.schedule.spans if span.thread == link)

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """Spans that determine the step's time, in order; their durations add up to it."""
        return tuple(self.schedule.spans[index] for index in self.schedule.critical_path())

    def critical_by_bound(self) -> dict[str, float]:
        """Return the critical path's seconds by bound: ``operations``, ``memory``, ``launch``, ``host``, or a link's
        ``bandwidth`` or ``latency``."""
        seconds: dict[str, float] = {}
        for span in self.critical_path:
            for leaf, times in span.leaves():
                bound = leaf.work.bound if leaf.thread == COMPUTE else f"{leaf.thread}: {leaf.work.bound}"
                seconds[bound] = seconds.get(bound, 0.0) + times * leaf.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def by_scope(self) -> dict[str, PartCost]:
        """Return the cost of each part of the model, sorted by time on the critical path, longest first."""
        costs: dict[str, PartCost] = {}
        critical = set(self.schedule.critical_path())
        for index, span in enumerate(self.schedule.spans):
            for leaf, times in span.leaves():
                seconds = times * leaf.seconds
                cost = costs.setdefault(self.parts[leaf.operation], PartCost())
                cost.flops += times * leaf.work.flops
                if leaf.thread == COMPUTE:
                    cost.compute += seconds
                    cost.bytes += times * leaf.work.bytes
                else:
                    cost.network += seconds
                if index in critical:
                    cost.critical += seconds
        return dict(sorted(costs.items(), key=lambda item: -item[1].critical))

    def exchanges(self) -> list[Exchange]:
        """Return the collectives, longest first."""
        transfers: dict[Operation, list[Interval]] = {}
        for span in self.schedule.spans:
            if span.thread in (INSIDE, BETWEEN):
                transfers.setdefault(span.operation, []).append((span.begin, span.end))
        compute = _union((span.begin, span.end) for span in self.schedule.spans if span.thread == COMPUTE)
        exchanges = []
        for operation, intervals in transfers.items():
            runs = _union(intervals)  # a collective over both links counts once
            overlapped = sum(_overlap(run, compute) for run in runs)
            exchanges.append(Exchange(operation.name, self.parts[operation], len(runs), _length(runs), overlapped))
        return sorted(exchanges, key=lambda exchange: -exchange.seconds)

    def middle_layer(self) -> LoopIteration | None:
        """Return the middle iteration of the outer loop that takes most of the time in all: usually a layer of the most frequent kind."""
        iterations = [iteration for iteration in self.schedule.iterations if iteration.depth == 0]
        seconds: dict[str, float] = {}
        for iteration in iterations:
            seconds[iteration.loop.name] = seconds.get(iteration.loop.name, 0.0) + iteration.end - iteration.begin
        longest = max(seconds, key=seconds.__getitem__, default=None)
        middle = (one for one in self.schedule.iterations if one.loop.name == longest and one.index == one.times // 2)
        return next(middle, None)

    def to_json(self) -> dict[str, Any]:
        """Fields of `timeline` in `dsjax dryrun --json`; times in seconds.

        - `step_seconds`, `step`: the time of the step, without and with its interval
        - `compute`, `exposed_network`, `exposed_copies`: computing, waiting for links, waiting for memory copies and the host; their sum
          is the step's time
        - `network`: link → busy seconds; `layer_seconds`: one layer in the middle of the longest loop
        - `exchanges`: `Exchange` of each collective, longest first
        - `critical_path`: its `spans`, and seconds `by_bound`
        - `by_scope`: part of the model → `PartCost`
        - `assumed`: each assumption with its range and source
        """
        layer = self.middle_layer()
        return {
            "cluster": self.cluster.name,
            "step_seconds": self.step.value,
            "step": self.step.to_json(),
            "compute": self.compute,
            "exposed_network": self.exposed_network,
            "exposed_copies": self.exposed_copies,
            "network": {link: self.network(link) for link in (INSIDE, BETWEEN)},
            "exchanges": [vars(exchange) | {"hidden": exchange.hidden} for exchange in self.exchanges()],
            "layer_seconds": layer and layer.end - layer.begin,
            "critical_path": {"spans": len(self.critical_path), "by_bound": self.critical_by_bound()},
            "by_scope": {name: vars(cost) for name, cost in self.by_scope().items()},
            "assumed": [
                {"name": figure.name, **figure.to_json(), "source": figure.source} for figure in self.assumed.figures()
            ],
        }


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sort the intervals and merge those that overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _overlap(interval: Interval, others: Sequence[Interval]) -> float:
    """Return the seconds that an interval shares with ``others``, which are disjoint and sorted."""
    begin, end = interval
    first = max(0, bisect.bisect_right(others, begin, key=lambda other: other[0]) - 1)
    seconds = 0.0
    for other_begin, other_end in others[first:]:
        if other_begin >= end:
            break
        seconds += max(0.0, min(other_end, end) - max(other_begin, begin))
    return seconds

"""`Timeline`: a compiled step simulated on a target: predicted time, and its breakdown by parts of the model."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.prices import BETWEEN, COPIES, INSIDE, Assumed, TargetPrices
from dsjax.dryrun.program import COMPUTE, Operation, Program, ProgramCollective, Schedule, Span, Turn, play
from dsjax.dryrun.program.text import Computation
from dsjax.dryrun.program.walk import TripCount
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, Kind

_MADE_BY_JAX = ("while", "body", "closed_call", "shard_map", "jit(", "eval_jaxpr", "cond", "branch", "checkpoint")
_FAR = 6
"""Maximum number of steps from an unnamed operation to the operation that gives it its name."""


def model_part(op_name: str) -> str:
    """Return the model's own scopes in a path: ``jit(run)/while/body/closed_call/mla_output/dot_general`` → ``mla_output``.

    For an operation outside all scopes, return its primitive: ``(dynamic_slice)``.
    """
    parts = [p for p in op_name.split("/")[:-1] if not p.startswith(_MADE_BY_JAX) and "->" not in p]
    return "/".join(parts) or f"({op_name.split('/')[-1]})"


def parts_of(program: Program) -> Mapping[Operation, str]:
    """Map each operation to a part of the model.

    An operation that XLA created gets the part of its user if its producer's part is nested in that; else the part of its producer, of
    its user, or its opcode, such as ``(copy)``: the first that it has.
    """
    parts: dict[Operation, str] = {}
    for computation in program.computations.values():
        for operation in computation.operations.values():
            name = operation.op_name or _inside(program, operation)
            parts[operation] = model_part(name) if name else _beside(program, computation, operation)
    return parts


def _inside(program: Program, operation: Operation) -> str:
    """Return the first path among a fusion's own operations, starting with its root."""
    names = _fused(program, operation)
    return next((name for name in names if "/" in name), "")


def _fused(program: Program, operation: Operation) -> list[str]:
    called = operation.computation("calls")
    if called not in program.computations:
        return []
    inner = program.computations[called]
    return [inner.root.op_name, *(one.op_name for one in inner.operations.values())]


def _beside(program: Program, computation: Computation, operation: Operation) -> str:
    def producer(one: Operation) -> Operation | None:
        return next((computation.operations[name] for name in one.operands if name in computation.operations), None)

    def user(one: Operation) -> Operation | None:
        return next(iter(computation.users.get(one.name, ())), None)

    before, after = (_first_named(operation, step) for step in (producer, user))
    if before is None:
        return model_part(after.op_name) if after else f"({operation.opcode})"
    part = model_part(before.op_name)
    wholes = [model_part(name) for name in (after.op_name, *_fused(program, after))] if after else []
    return next((whole for whole in wholes if part.startswith(f"{whole}/")), part)


def _first_named(operation: Operation, step: Callable[[Operation], Operation | None]) -> Operation | None:
    """Return the nearest operation with a path that repeated ``step`` calls reach."""
    at = step(operation)
    for _ in range(_FAR):
        if at is None or "/" in at.op_name:
            return at
        at = step(at)
    return None


@dataclass(frozen=True)
class Share:
    """Cost of a part of the model: seconds on the compute thread, on the links and on the critical path; its flops and bytes there."""

    compute: float
    network: float
    critical: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Exchange:
    """A collective on the timeline: its duration in the whole step, and how much of it compute hides.

    part: of the model. runs: number of runs. seconds: total time on the links; beside_compute: seconds of it during which the
    compute thread works.
    """

    name: str
    part: str
    runs: int
    seconds: float
    beside_compute: float

    @property
    def hidden(self) -> float:
        """Fraction of the time that overlaps with compute."""
        return self.beside_compute / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Timeline:
    """A step on one device of a cluster.

    schedule: with all assumptions at their middle; step: its seconds, and an interval whose ends have all assumptions at their most and
    least favourable. assumed: converts operations and bytes to seconds. parts: operation → part of the model.
    """

    cluster: Cluster
    schedule: Schedule
    step: Figure
    assumed: Assumed
    parts: Mapping[Operation, str]

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
        played = {
            end: play(program, TargetPrices(assumed, end, ragged_share), collectives, trip_count)
            for end in ("value", "low", "high")
        }
        seconds = [played[end].seconds for end in ("value", "low", "high")]
        step = Figure(*seconds, Kind.COMPILED | Kind.ASSUMPTION, name="step", unit="s")
        return cls(cluster, played["value"], step, assumed, parts_of(program))

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
        return self.schedule.seconds - sum(end - begin for begin, end in _united(others))

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
        for span, times in _leaves(self.critical_path):
            bound = span.work.bound if span.thread == COMPUTE else f"{span.thread}: {span.work.bound}"
            seconds[bound] = seconds.get(bound, 0.0) + times * span.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def by_scope(self) -> dict[str, Share]:
        """Return the cost of each part of the model, sorted by time on the critical path, longest first."""
        sums: dict[str, list[float]] = {}
        critical = set(self.schedule.critical_path())
        for index, span in enumerate(self.schedule.spans):
            for leaf, times in span.leaves():
                seconds = times * leaf.seconds
                entry = sums.setdefault(self.parts[leaf.operation], [0.0] * 5)
                entry[0 if leaf.thread == COMPUTE else 1] += seconds
                entry[2] += seconds if index in critical else 0.0
                entry[3] += times * leaf.work.flops
                entry[4] += times * leaf.work.bytes if leaf.thread == COMPUTE else 0.0
        return {name: Share(*entry) for name, entry in sorted(sums.items(), key=lambda item: -item[1][2])}

    def exchanges(self) -> list[Exchange]:
        """Return the collectives, longest first."""
        intervals: dict[Operation, list[tuple[float, float]]] = {}
        for span in self.schedule.spans:
            if span.thread in (INSIDE, BETWEEN):
                intervals.setdefault(span.operation, []).append((span.begin, span.end))
        computed = _united((span.begin, span.end) for span in self.schedule.spans if span.thread == COMPUTE)
        begins = [begin for begin, _ in computed]
        found = []
        for operation, own in intervals.items():
            own = _united(own)  # a collective over both links counts once
            beside = sum(_shared(one, computed, begins) for one in own)
            seconds = sum(end - begin for begin, end in own)
            found.append(Exchange(operation.name, self.parts[operation], len(own), seconds, beside))
        return sorted(found, key=lambda one: -one.seconds)

    def layer(self) -> Turn | None:
        """Return the middle iteration of the loop that takes most of the time in all: usually a layer of the most frequent kind."""
        totals: dict[str, float] = {}
        for turn in self.schedule.turns:
            if turn.depth == 0:
                totals[turn.loop.name] = totals.get(turn.loop.name, 0.0) + turn.end - turn.begin
        if not totals:
            return None
        longest = max(totals, key=totals.__getitem__)
        return next(t for t in self.schedule.turns if t.loop.name == longest and t.index == t.times // 2)

    def to_json(self) -> dict[str, Any]:
        """Fields of `timeline` in `dsjax dryrun --json`; times in seconds.

        - `step_seconds`, `step`: the time of the step, without and with its interval
        - `compute`, `exposed_network`, `exposed_copies`: computing, waiting for links, waiting for memory copies and the host; their sum
          is the step's time
        - `network`: link → busy seconds; `layer_seconds`: one layer in the middle of the longest loop
        - `exchanges`: `Exchange` of each collective, longest first
        - `critical_path`: its `spans`, and seconds `by_bound`
        - `by_scope`: part of the model → `Share`
        - `assumed`: each assumption with its range and source
        """
        layer = self.layer()
        return {
            "cluster": self.cluster.name,
            "step_seconds": self.step.value,
            "step": self.step.to_json(),
            "compute": self.compute,
            "exposed_network": self.exposed_network,
            "exposed_copies": self.exposed_copies,
            "network": {link: self.network(link) for link in (INSIDE, BETWEEN)},
            "exchanges": [vars(one) | {"hidden": one.hidden} for one in self.exchanges()],
            "layer_seconds": layer and layer.end - layer.begin,
            "critical_path": {"spans": len(self.critical_path), "by_bound": self.critical_by_bound()},
            "by_scope": {name: vars(share) for name, share in self.by_scope().items()},
            "assumed": [
                {"name": figure.name, **figure.to_json(), "source": figure.source} for figure in self.assumed.figures()
            ],
        }


def _leaves(spans: Iterable[Span]) -> Iterable[tuple[Span, float]]:
    for span in spans:
        yield from span.leaves()


def _united(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort the intervals and merge those that overlap."""
    united: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if united and begin < united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((begin, end))
    return united


def _shared(one: tuple[float, float], others: list[tuple[float, float]], begins: list[float]) -> float:
    """Return the seconds that an interval shares with ``others``, which are disjoint and sorted. begins: of ``others``."""
    seconds = 0.0
    for begin, end in others[max(0, bisect.bisect_right(begins, one[0]) - 1) :]:
        if begin >= one[1]:
            break
        seconds += max(0.0, min(end, one[1]) - max(begin, one[0]))
    return seconds

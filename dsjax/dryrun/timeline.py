"""`Timeline`: a compiled step played through on a target, what it predicts, and what the time is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.dryrun.links import BETWEEN, INSIDE
from dsjax.dryrun.prices import Assumed, TargetPrices
from dsjax.dryrun.scopes import parts_of
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Figure, Kind
from sharding.program import COMPUTE, Operation, Program, ProgramCollective, Schedule, Span, Turn, play
from sharding.program.walk import TripCount


@dataclass(frozen=True)
class Share:
    """What a part of the model takes: seconds of the compute thread, of the links, and of the critical path."""

    compute: float
    network: float
    critical: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Timeline:
    """A step on one device of a cluster.

    schedule: at the middle of everything assumed; step: its seconds, with the ends at which everything assumed is at its
    most and least favourable. assumed: what operations and bytes were turned into seconds with. parts: operation → part of the model.
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
        """Play the program through three times; the first is kept."""
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
        """Seconds in which the compute thread works."""
        return sum(span.seconds for span in self.schedule.spans if span.thread == COMPUTE)

    @property
    def exposed_network(self) -> float:
        """Seconds in which the compute thread waits for a link."""
        return self.schedule.seconds - self.compute

    def network(self, link: str) -> float:
        """Seconds in which a link is busy."""
        return sum(span.seconds for span in self.schedule.spans if span.thread == link)

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """The spans that determine the time, in order; their seconds add up to the step's."""
        return tuple(self.schedule.spans[index] for index in self.schedule.critical_path())

    def critical_by_bound(self) -> dict[str, float]:
        """Seconds of the critical path by what bounds them: ``operations``, ``memory``, ``launch``, ``host``, or a link's
        ``bandwidth`` or ``latency``."""
        found: dict[str, float] = {}
        for span, times in _leaves(self.critical_path):
            bound = span.work.bound if span.thread == COMPUTE else f"{span.thread}: {span.work.bound}"
            found[bound] = found.get(bound, 0.0) + times * span.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def by_scope(self) -> dict[str, Share]:
        """Part of the model → what it takes, those with most of the critical path first."""
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

    def layer(self) -> Turn | None:
        """A turn in the middle of the loop that takes longest: one layer of those that there are most of."""
        totals: dict[str, float] = {}
        for turn in self.schedule.turns:
            if turn.depth == 0:
                totals[turn.loop.name] = totals.get(turn.loop.name, 0.0) + turn.end - turn.begin
        if not totals:
            return None
        longest = max(totals, key=totals.__getitem__)
        return next(t for t in self.schedule.turns if t.loop.name == longest and t.index == t.times // 2)

    def to_json(self) -> dict[str, Any]:
        """Stable fields, which `docs/dryrun.md` documents."""
        layer = self.layer()
        return {
            "cluster": self.cluster.name,
            "step_seconds": self.step.value,
            "step": self.step.to_json(),
            "compute": self.compute,
            "exposed_network": self.exposed_network,
            "network": {link: self.network(link) for link in (INSIDE, BETWEEN)},
            "layer_seconds": layer and layer.end - layer.begin,
            "critical_path": {
                "spans": len(self.critical_path),
                "by_bound": self.critical_by_bound(),
            },
            "by_scope": {name: vars(share) for name, share in self.by_scope().items()},
            "assumed": [
                {"name": figure.name, **figure.to_json(), "source": figure.source} for figure in self.assumed.figures()
            ],
        }


def _leaves(spans: Iterable[Span]) -> Iterable[tuple[Span, float]]:
    for span in spans:
        yield from span.leaves()

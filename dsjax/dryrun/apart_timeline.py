"""`ApartTimeline`: both sides of a compiled step played in turn, with the host and the links between them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from dsjax.dryrun.side_program import SideProgram
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Draw, Figure, Kind, drawing, drawn, spread
from dsjax.plan.moves import Moves, moves
from dsjax.plan.turns import THREADS, Played, Turn, play_turns
from sharding.dispatch.between import Between


class Pass(NamedTuple):
    """A pass through layers with experts: of each micro-batch its four programs by name, and how its rows travel."""

    layers: int
    halves: Sequence[tuple[dict[str, SideProgram], Between]]


@dataclass(frozen=True)
class ApartTimeline:
    """A step of two sides.

    step: its seconds. others: of the programs outside the layers with experts, which are in it. played: each pass at the middle of
    everything assumed. moved: of each pass, what its moves take. assumed: what these were priced with.
    """

    step: Figure
    others: Figure
    played: tuple[Played, ...]
    moved: tuple[Moves, ...]
    assumed: tuple[Figure, ...]

    @classmethod
    def of(
        cls, others: Sequence[Figure], passes: Sequence[Pass], attention: Cluster, experts: Cluster
    ) -> ApartTimeline:
        """others: seconds of the programs outside the layers. attention, experts: the two sides' hosts and network."""

        def compute() -> tuple[float, float, list[tuple[Played, Moves]]]:
            outside, passed = sum(map(drawn, others)), []
            for one in passes:
                ways = [_moves(between, attention, experts) for _, between in one.halves]
                turns = [_turn(programs, way) for (programs, _), way in zip(one.halves, ways, strict=True)]
                passed.append((play_turns(turns, one.layers, one_call=ways[0].one_call), ways[0]))
            return outside + sum(played.seconds for played, _ in passed), outside, passed

        with drawing(Draw()) as middle:
            passed = compute()[2]
        assumed = tuple(figure for figure in middle.seen.values() if figure.kinds == Kind.ASSUMPTION)
        step, outside = spread(lambda: compute()[:2])
        step.unit = outside.unit = "s"
        return cls(step, outside, *zip(*passed, strict=True), assumed)

    def busy(self) -> dict[str, float]:
        """Thread → seconds in which it works in the layers with experts."""
        return {name: sum(one.busy[name] for one in self.played) for name in THREADS}

    def to_json(self) -> dict[str, Any]:
        """Seconds: `step_seconds`, `step` (with its interval), `outside_layers` and `in_layers` with experts, `busy` by thread.

        `assumed`: each assumption with its range and source.
        """
        return {
            "step_seconds": self.step.value,
            "step": self.step.to_json(),
            "outside_layers": self.others.value,
            "in_layers": sum(one.seconds for one in self.played),
            "busy": self.busy(),
            "assumed": [{"name": one.name, **one.to_json(), "source": one.source} for one in self.assumed],
        }

    def write(self, file: Path, title: str) -> None:
        """Write the first pass as a trace for Perfetto: a thread for the host, each side and each way; compressed for ``.gz``."""
        events = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": title}}]
        for number, name in enumerate(THREADS):
            events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
        for thread, name, layer, half, begin, end in self.played[0].spans:
            events.append(
                {
                    "ph": "X", "pid": 1, "tid": THREADS.index(thread), "name": f"{name}, micro-batch {half}" if half else name,
                    "ts": round(begin * 1e6, 3), "dur": round((end - begin) * 1e6, 3), "args": {"layer": layer, "micro-batch": half},
                }
            )  # fmt: skip
        other = {"step_seconds": self.step.value, "low": self.step.low, "high": self.step.high}
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}, separators=(",", ":"))
        if file.suffix == ".gz":
            file.write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            file.write_text(text, encoding="utf-8")


def _moves(between: Between, attention: Cluster, experts: Cluster) -> Moves:
    answer = between.columns * between.wire.width * jnp.dtype(between.wire.dtype).itemsize
    sizes = between.wire.row_bytes, answer
    needed = between.rows * (1 - (1 - 1 / between.group.size) ** between.wire.top_k)
    return moves(attention, experts, between.senders, between.group.size, between.capacity, needed, sizes)


def _turn(programs: dict[str, SideProgram], way: Moves) -> Turn:
    computed = [drawn(programs[name].report.timeline.step) for name in ("attend", "share", "receive", "compute")]
    return Turn(*computed, way.there, way.back, way.launch, way.begin_there, way.begin_back)

"""`ApartTimeline`: simulated timeline of a compiled AFD step: attention side, expert side, host and links."""

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
    """A pass through MoE layers. halves: each micro-batch's four programs by name, and the exchange of its rows."""

    layers: int
    halves: Sequence[tuple[dict[str, SideProgram], Between]]


@dataclass(frozen=True)
class ApartTimeline:
    """A simulated step of the attention and expert sides.

    step: seconds of the whole step. others: seconds of the programs outside the MoE layers, included in `step`. played: each simulated
    pass, with all assumptions at their middle values. moved: seconds of each pass's moves. assumed: the assumptions used.
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
        """Simulate a step. others: seconds of the programs outside the MoE layers. attention, experts: hosts and network of each side."""

        def simulate() -> tuple[float, float, list[tuple[Played, Moves]]]:
            outside, simulated = sum(map(drawn, others)), []
            for layers, halves in passes:
                moved = [_moves(between, attention, experts) for _, between in halves]
                turns = [_turn(programs, move) for (programs, _), move in zip(halves, moved, strict=True)]
                simulated.append((play_turns(turns, layers, one_call=moved[0].one_call), moved[0]))
            return outside + sum(played.seconds for played, _ in simulated), outside, simulated

        with drawing(Draw()) as middle:
            simulated = simulate()[2]
        assumed = tuple(figure for figure in middle.seen.values() if figure.kinds == Kind.ASSUMPTION)
        step, outside = spread(lambda: simulate()[:2])
        step.unit = outside.unit = "s"
        return cls(step, outside, *zip(*simulated, strict=True), assumed)

    def busy(self) -> dict[str, float]:
        """Return thread → seconds busy in the MoE layers."""
        return {name: sum(one.busy[name] for one in self.played) for name in THREADS}

    def to_json(self) -> dict[str, Any]:
        """Return seconds: `step_seconds`, `step` (with its interval), `outside_layers` and `in_layers` (MoE layers), `busy` by thread.

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
        """Write the first pass as a Perfetto trace: one thread for the host, each side and each direction; gzipped for ``.gz``."""
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
    answer_bytes = between.columns * between.wire.width * jnp.dtype(between.wire.dtype).itemsize
    row_bytes = between.wire.row_bytes, answer_bytes
    needed = between.rows * (1 - (1 - 1 / between.group.size) ** between.wire.top_k)  # mean rows, under even routing
    return moves(attention, experts, between.senders, between.group.size, between.capacity, needed, row_bytes)


def _turn(programs: dict[str, SideProgram], moved: Moves) -> Turn:
    computed = [drawn(programs[name].report.timeline.step) for name in ("attend", "share", "receive", "compute")]
    return Turn(*computed, moved.there, moved.back, moved.launch, moved.begin_there, moved.begin_back)

"""`ApartTimeline`: simulated timeline of a compiled AFD step: attention side, expert side, host and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dsjax.dryrun.side_program import SideProgram
from dsjax.dryrun.timeline_trace import write_json
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import Draw, Figure, Kind, drawing, drawn, spread
from dsjax.plan.moves import AfdExchange, afd_exchange
from dsjax.plan.turns import THREADS, LayerTimes, SimulatedLayers, simulate_layers
from sharding.dispatch import even_routing_rows
from sharding.dispatch.between import Between


class Pass(NamedTuple):
    """A pass through MoE layers. micro_batches: each micro-batch's four programs by name, and the exchange of its rows."""

    layers: int
    micro_batches: Sequence[tuple[dict[str, SideProgram], Between]]


@dataclass(frozen=True)
class ApartTimeline:
    """A simulated step of the attention and expert sides."""

    step: Figure  # seconds of the whole step
    outside_layers: Figure  # seconds of the programs outside the MoE layers, included in `step`
    passes: tuple[SimulatedLayers, ...]  # each simulated pass, with all assumptions at their middle values
    exchanges: tuple[AfdExchange, ...]  # seconds of each pass's exchange
    assumed: tuple[Figure, ...]  # the assumptions used

    @classmethod
    def of(
        cls, outside_layers: Sequence[Figure], passes: Sequence[Pass], attention: Cluster, experts: Cluster
    ) -> ApartTimeline:
        """Simulate a step. outside_layers: seconds of each program outside the MoE layers. attention, experts: hosts and network of each
        side."""

        def simulate() -> tuple[float, float, list[tuple[SimulatedLayers, AfdExchange]]]:
            outside = sum(map(drawn, outside_layers))
            simulated = []
            for layers, micro_batches in passes:
                exchanges = [_exchange(between, attention, experts) for _, between in micro_batches]
                times = [
                    _layer_times(programs, one) for (programs, _), one in zip(micro_batches, exchanges, strict=True)
                ]
                simulated.append((simulate_layers(times, layers), exchanges[0]))
            return outside + sum(layers.seconds for layers, _ in simulated), outside, simulated

        with drawing(Draw()) as middle:
            _, _, simulated = simulate()
        assumed = tuple(figure for figure in middle.seen.values() if figure.kinds == Kind.ASSUMPTION)
        step, outside = spread(lambda: simulate()[:2])
        step.unit = outside.unit = "s"
        return cls(step, outside, *zip(*simulated, strict=True), assumed)

    def busy(self) -> dict[str, float]:
        """Return thread → seconds busy in the MoE layers."""
        return {name: sum(layers.busy[name] for layers in self.passes) for name in THREADS}

    def to_json(self) -> dict[str, Any]:
        """Return seconds: `step_seconds`, `step` (with its interval), `outside_layers` and `in_layers` (MoE layers), `busy` by thread.

        `assumed`: each assumption with its range and source.
        """
        return {
            "step_seconds": self.step.value,
            "step": self.step.to_json(),
            "outside_layers": self.outside_layers.value,
            "in_layers": sum(layers.seconds for layers in self.passes),
            "busy": self.busy(),
            "assumed": [{"name": figure.name, **figure.to_json(), "source": figure.source} for figure in self.assumed],
        }

    def write(self, file: Path, title: str) -> None:
        """Write the first pass as a Perfetto trace: one thread for the host, each side and each direction; gzipped for ``.gz``."""
        events = [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": title}}]
        for number, name in enumerate(THREADS):
            events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
        for span in self.passes[0].spans:
            name = f"{span.name}, micro-batch {span.micro_batch}" if span.micro_batch else span.name
            times = {"ts": round(span.begin * 1e6, 3), "dur": round((span.end - span.begin) * 1e6, 3)}
            args = {"layer": span.layer, "micro-batch": span.micro_batch}
            events.append({"ph": "X", "pid": 1, "tid": THREADS.index(span.thread), "name": name, **times, "args": args})
        other = {"step_seconds": self.step.value, "low": self.step.low, "high": self.step.high}
        write_json(file, {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other})


def _exchange(between: Between, attention: Cluster, experts: Cluster) -> AfdExchange:
    row_bytes = between.wire.row_bytes, between.bytes_back
    rows = even_routing_rows(between.rows, between.wire.top_k, between.group.size)
    return afd_exchange(attention, experts, between.senders, between.group.size, between.capacity, rows, row_bytes)


def _layer_times(programs: dict[str, SideProgram], exchange: AfdExchange) -> LayerTimes:
    attend, share, receive, compute = (
        drawn(programs[name].report.timeline.step) for name in ("attend", "share", "receive", "compute")
    )
    return LayerTimes(attend, share, receive, compute, exchange)

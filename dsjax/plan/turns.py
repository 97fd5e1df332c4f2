"""``simulate_layers``: simulate the MoE layers of a step under attention–FFN disaggregation (AFD), one micro-batch after another.

The order is that of ``CompiledPass.run`` (``dsjax/engine/afd/layer_programs.py``). For each layer and micro-batch: sums of the previous
layer, attention, sending rows, experts, and meanwhile shared experts. The dry run simulates compiled programs, the planner prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsjax.plan.moves import AfdExchange

THREADS = HOST, ATTENTION, THERE, EXPERTS, BACK = "host", "attention", "there", "experts", "back"


class LayerTimes(NamedTuple):
    """Seconds of one layer of one micro-batch."""

    attend: float  # attention side: attention and routing
    share: float  # attention side: shared experts
    receive: float  # attention side: adding the experts' answers
    compute: float  # expert side
    exchange: AfdExchange


class LayerSpan(NamedTuple):
    """One program or transfer of a layer on a thread; times in seconds."""

    thread: str
    name: str
    layer: int
    micro_batch: int
    begin: float
    end: float


@dataclass
class SimulatedLayers:
    """Result of ``simulate_layers``."""

    seconds: float = 0.0  # of all layers
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(THREADS, 0.0))  # thread → seconds of work
    spans: list[LayerSpan] = field(default_factory=list)


class _Simulation:
    """Threads that each run one program or transfer at a time, in the order of the calls of `run`."""

    def __init__(self):
        self.free_from = dict.fromkeys(THREADS, 0.0)
        self.connection_free = 0.0
        self.result = SimulatedLayers()

    def run(self, thread: str, name: str, seconds: float, position: tuple[int, int], *ready: float) -> float:
        """Run after the thread is free and all `ready` times have passed; return the end. position: (layer, micro-batch)."""
        begin = max(self.free_from[thread], *ready)
        self.free_from[thread] = end = begin + seconds
        self.result.busy[thread] += seconds
        if seconds:
            self.result.spans.append(LayerSpan(thread, name, *position, begin, end))
        return end

    def launch(self, times: LayerTimes, position: tuple[int, int]) -> float:
        """Have the host launch a program."""
        return self.run(HOST, "launch", times.exchange.launch, position, 0.0)

    def send(self, times: LayerTimes, position: tuple[int, int]) -> float:
        """Run a layer up to its experts' answers. Return when these are ready to be sent back or, with one call, are back."""
        moves = times.exchange
        attended = self.run(ATTENTION, "attend", times.attend, position, self.launch(times, position))
        begun = self.run(HOST, "begin rows", moves.begin_there, position, 0.0)
        arrived = self.run(THERE, "rows", moves.there, position, begun, attended, self.connection_free)
        if moves.one_call:  # the other process starts the experts, and sends their answers
            computed = self.run(EXPERTS, "compute", times.compute, position, arrived)
            answered = self.connection_free = self.run(BACK, "answers", moves.back, position, computed)
        else:
            answered = self.run(EXPERTS, "compute", times.compute, position, arrived, self.launch(times, position))
        self.run(ATTENTION, "share", times.share, position, self.launch(times, position))
        return answered

    def receive(self, times: LayerTimes, position: tuple[int, int], answered: float) -> None:
        """Run the rest of a layer. answered: the result of `send`."""
        moves = times.exchange
        if moves.one_call:
            back = self.run(HOST, "begin answers", moves.begin_back, position, answered)
        else:
            begun = self.run(HOST, "begin answers", moves.begin_back, position, 0.0)
            back = self.run(BACK, "answers", moves.back, position, begun, answered)
        self.run(ATTENTION, "receive", times.receive, position, self.launch(times, position), back)


def simulate_layers(micro_batches: Sequence[LayerTimes], layers: int) -> SimulatedLayers:
    """Simulate `layers` layers for each micro-batch.

    Each side runs one program at a time, in the order in which the host starts them, and each link carries one transfer at a time. If
    rows, experts and answers are one call over one connection, calls run one after another, and the host waits for the answers.
    """
    simulation = _Simulation()
    answered = [0.0] * len(micro_batches)
    for layer in range(layers + 1):
        for index, times in enumerate(micro_batches):
            if layer > 0:
                simulation.receive(times, (layer - 1, index), answered[index])
            if layer < layers:
                answered[index] = simulation.send(times, (layer, index))
    simulation.result.seconds = max(simulation.free_from.values())
    return simulation.result

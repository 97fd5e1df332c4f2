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
    """Seconds of one layer of one micro-batch. attend, share, receive: on the attention side. compute: of the experts."""

    attend: float
    share: float
    receive: float
    compute: float
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
    """Simulated layers. seconds: of all layers. busy: thread → seconds of work."""

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(THREADS, 0.0))
    spans: list[LayerSpan] = field(default_factory=list)


class _Clocks:
    """Clocks of the threads. Each runs one program or transfer at a time, in the order of the calls of `run`."""

    def __init__(self):
        self.free_from = dict.fromkeys(THREADS, 0.0)
        self.result = SimulatedLayers()

    def run(self, thread: str, name: str, seconds: float, position: tuple[int, int], *ready: float) -> float:
        """Run after the thread is free and all `ready` times have passed; return the end. position: (layer, micro-batch)."""
        begin = max(self.free_from[thread], *ready)
        self.free_from[thread] = end = begin + seconds
        self.result.busy[thread] += seconds
        if seconds:
            self.result.spans.append(LayerSpan(thread, name, *position, begin, end))
        return end


def simulate_layers(micro_batches: Sequence[LayerTimes], layers: int) -> SimulatedLayers:
    """Simulate `layers` layers for each micro-batch.

    Each side runs one program at a time, in the order in which the host starts them, and each link carries one transfer at a time. If
    rows, experts and answers are one call over one connection, calls run one after another, and the host waits for the answers.
    """
    clocks, one_call = _Clocks(), micro_batches[0].exchange.one_call
    run = clocks.run
    answered = [0.0] * len(micro_batches)  # when the answers are ready to be sent back, or (one_call) are back
    connection_free = 0.0

    def launch(moves: AfdExchange, at: tuple[int, int]) -> float:
        return run(HOST, "launch", moves.launch, at, 0.0)

    for layer in range(layers + 1):
        for index, times in enumerate(micro_batches):
            moves = times.exchange
            if layer:
                at = layer - 1, index
                back = run(HOST, "begin answers", moves.begin_back, at, answered[index] if one_call else 0.0)
                if not one_call:
                    back = run(BACK, "answers", moves.back, at, back, answered[index])
                run(ATTENTION, "receive", times.receive, at, launch(moves, at), back)
            if layer == layers:
                continue
            at = layer, index
            attended = run(ATTENTION, "attend", times.attend, at, launch(moves, at))
            begun = run(HOST, "begin rows", moves.begin_there, at, 0.0)
            arrived = run(THERE, "rows", moves.there, at, begun, attended, connection_free)
            if not one_call:  # else the other process starts the experts
                arrived = max(arrived, launch(moves, at))
            answered[index] = run(EXPERTS, "compute", times.compute, at, arrived)
            if one_call:
                answered[index] = connection_free = run(BACK, "answers", moves.back, at, answered[index])
            run(ATTENTION, "share", times.share, at, launch(moves, at))
    clocks.result.seconds = max(clocks.free_from.values())
    return clocks.result

"""``play_turns``: the layers with experts of a step whose attention and experts are on devices of their own, micro-batch after micro-batch.

It has the order of ``CompiledPass.run`` (``dsjax/engine/afd/layer_programs.py``): of each layer and micro-batch, the sums of the layer
before, attention, the rows' way there, the experts, shared experts meanwhile. The dry run plays compiled programs, the planner prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HOST, ATTENTION, THERE, EXPERTS, BACK = "host", "attention", "there", "experts", "back"
THREADS = (HOST, ATTENTION, THERE, EXPERTS, BACK)


class Turn(NamedTuple):
    """Seconds of one layer of one micro-batch.

    attend, share, receive: of the attention side; compute: of the experts; there, back: on the links. launch: the host starts a program;
    begin_there, begin_back: the host begins all copies of a move.
    """

    attend: float
    share: float
    receive: float
    compute: float
    there: float
    back: float
    launch: float = 0.0
    begin_there: float = 0.0
    begin_back: float = 0.0


@dataclass
class Played:
    """seconds: of the layers. busy: thread → seconds in which it works. spans: (thread, name, layer, micro-batch, begin, end)."""

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(THREADS, 0.0))
    spans: list[tuple[str, str, int, int, float, float]] = field(default_factory=list)


def play_turns(turns: Sequence[Turn], layers: int, *, one_call: bool = False) -> Played:
    """Play so many layers for each micro-batch.

    Each side computes one program at a time, in the order in which the host starts them, and each link carries one move at a time.
    one_call: rows, experts and answers are one call over one connection, and calls follow each other; the host waits for the answers.
    """
    played = Played()
    free = dict.fromkeys(THREADS, 0.0)
    away: list[float | None] = [None] * len(turns)  # when the answers of a micro-batch can travel back, or are back
    called = 0.0  # when the one connection is free

    def run(thread: str, name: str, layer: int, half: int, ready: float, seconds: float) -> float:
        begin = max(free[thread], ready)
        free[thread] = end = begin + seconds
        played.busy[thread] += seconds
        if seconds:
            played.spans.append((thread, name, layer, half, begin, end))
        return end

    def launch(name: str, layer: int, half: int, seconds: float, ready: float = 0.0) -> float:
        return run(HOST, name, layer, half, ready, seconds)

    def receive(layer: int, half: int, turn: Turn) -> None:
        answered = away[half]
        begun = launch("begin answers", layer, half, turn.begin_back, answered if one_call else 0.0)
        back = begun if one_call else run(BACK, "answers", layer, half, max(begun, answered), turn.back)
        run(ATTENTION, "receive", layer, half, max(launch("launch", layer, half, turn.launch), back), turn.receive)

    for layer in range(layers):
        for half, turn in enumerate(turns):
            if away[half] is not None:
                receive(layer - 1, half, turn)
            started = launch("launch", layer, half, turn.launch)
            attended = run(ATTENTION, "attend", layer, half, started, turn.attend)
            begun = max(attended, launch("begin rows", layer, half, turn.begin_there))
            arrived = run(THERE, "rows", layer, half, max(begun, called if one_call else 0.0), turn.there)
            if not one_call:  # else the other process starts the experts
                arrived = max(arrived, launch("launch", layer, half, turn.launch))
            computed = run(EXPERTS, "compute", layer, half, arrived, turn.compute)
            if one_call:
                computed = called = run(BACK, "answers", layer, half, computed, turn.back)
            away[half] = computed
            run(ATTENTION, "share", layer, half, launch("launch", layer, half, turn.launch), turn.share)
    for half, turn in enumerate(turns):
        receive(layers - 1, half, turn)
    played.seconds = max(free.values())
    return played

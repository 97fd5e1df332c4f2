"""``play_turns``: the layers with experts of a step whose attention and experts are on devices of their own, micro-batch after micro-batch.

It has the order of ``CompiledPass.run`` (``dsjax/engine/afd/layer_programs.py``): of each layer and micro-batch, the sums of the layer
before, attention, the rows' way there, the experts, shared experts meanwhile. The dry run plays compiled programs, the planner prices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

THREADS = HOST, ATTENTION, THERE, EXPERTS, BACK = "host", "attention", "there", "experts", "back"


class Turn(NamedTuple):
    """Seconds of one layer of one micro-batch.

    attend, share, receive: of the attention side. there, back: on the links. begin_there, begin_back: the host begins all copies of a move.
    """

    attend: float
    share: float
    receive: float
    compute: float  # of the experts
    there: float
    back: float
    launch: float = 0.0  # the host starts a program
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
    played, free = Played(), dict.fromkeys(THREADS, 0.0)
    answered = [0.0] * len(turns)  # when the answers of a micro-batch can travel back, or are back
    called = 0.0  # when the one connection is free

    def run(thread: str, name: str, seconds: float, *ready: float) -> float:
        begin = max(free[thread], *ready)
        free[thread] = end = begin + seconds
        played.busy[thread] += seconds
        if seconds:
            played.spans.append((thread, name, layer, half, begin, end))
        return end

    def receive(turn: Turn) -> None:
        back = run(HOST, "begin answers", turn.begin_back, answered[half] if one_call else 0.0)
        if not one_call:
            back = run(BACK, "answers", turn.back, back, answered[half])
        run(ATTENTION, "receive", turn.receive, run(HOST, "launch", turn.launch, 0.0), back)

    for step in range(layers + 1):
        for half, turn in enumerate(turns):
            if step:
                layer = step - 1
                receive(turn)
            if step == layers:
                continue
            layer = step
            attended = run(ATTENTION, "attend", turn.attend, run(HOST, "launch", turn.launch, 0.0))
            begun = run(HOST, "begin rows", turn.begin_there, 0.0)
            end = run(THERE, "rows", turn.there, begun, attended, called)
            if not one_call:  # else the other process starts the experts
                end = max(end, run(HOST, "launch", turn.launch, 0.0))
            end = run(EXPERTS, "compute", turn.compute, end)
            if one_call:
                end = called = run(BACK, "answers", turn.back, end)
            answered[half] = end
            run(ATTENTION, "share", turn.share, run(HOST, "launch", turn.launch, 0.0))
    played.seconds = max(free.values())
    return played

"""``play_turns``: simulate the MoE layers of a step under attention–FFN disaggregation (AFD), one micro-batch after another.

The order is that of ``CompiledPass.run`` (``dsjax/engine/afd/layer_programs.py``). For each layer and micro-batch: sums of the previous
layer, attention, sending rows, experts, and meanwhile shared experts. The dry run simulates compiled programs, the planner prices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

THREADS = HOST, ATTENTION, THERE, EXPERTS, BACK = "host", "attention", "there", "experts", "back"


class Turn(NamedTuple):
    """Seconds of one layer of one micro-batch.

    attend, share, receive: on the attention side. there, back: on the links. begin_there, begin_back: the host starts a transfer's copies.
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
    """seconds: of all layers. busy: thread → seconds of work. spans: (thread, name, layer, micro-batch, begin, end)."""

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(THREADS, 0.0))
    spans: list[tuple[str, str, int, int, float, float]] = field(default_factory=list)


def play_turns(turns: Sequence[Turn], layers: int, *, one_call: bool = False) -> Played:
    """Simulate `layers` layers for each micro-batch.

    Each side runs one program at a time, in the order in which the host starts them, and each link carries one transfer at a time.
    one_call: rows, experts and answers are one call over one connection; calls run one after another, and the host waits for the answers.
    """
    played, free = Played(), dict.fromkeys(THREADS, 0.0)
    answered = [0.0] * len(turns)  # when a micro-batch's answers are ready to be sent back, or (one_call) are back
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

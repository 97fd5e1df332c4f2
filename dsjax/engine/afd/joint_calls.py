"""``JointCalls``: batches the calls of several attention processes for the same layer, so that weights are read once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsjax.engine.afd.messages import Call


@dataclass(eq=False)
class Part:
    """Rows from one attention process, and their cells."""

    name: str  # name of the link that received them
    call: Call
    rows: np.ndarray
    cells: np.ndarray

    def goes_with(self, other: Part) -> bool:
        """Whether one program can compute both parts."""
        own, others = self.call, other.call
        alike = (own.number, own.stack, own.layer) == (others.number, others.stack, others.layer)
        return self is other or (
            alike and (own.tokens, own.cells) == (others.tokens, others.cells) and not (own.again or others.again)
        )


class JointCalls:
    """Calls of one attention side. Its processes make the same calls in the same order, one at a time.

    A call waits until every other connected process has made it or a later one. A repeated call is computed at once and alone, because
    the other processes may already have their answers.

    processes: number of processes of the attention side. change: see ``Open``.
    """

    def __init__(self, processes: int, change: int = 0):
        self.processes, self.change = processes, change
        self._connected: dict[str, int] = {}  # the process at the other end of each link
        self._waiting: dict[int, Part] = {}
        self._latest: dict[int, int] = {}  # number of the last call taken, by process
        self._is_over = False

    def end(self) -> None:
        """Stop waiting for other processes: the attention side continues in another mesh epoch."""
        self._is_over = True

    def enter(self, name: str, process: int) -> None:
        """Add the link of an attention process; calls wait for its parts from now on."""
        self._connected[name] = process

    def leave(self, name: str) -> None:
        """Remove a closed link: no call waits for its part, and its waiting part is dropped."""
        process = self._connected.pop(name)
        if process in self._waiting and self._waiting[process].name == name:
            del self._waiting[process]

    def add(self, part: Part) -> None:
        """Queue a part, unless its call was already taken."""
        process = self._connected[part.name]
        if part.call.again or part.call.number > self._latest.get(process, -1):
            self._waiting[process] = part

    def take(self) -> list[list[Part]]:
        """Remove and return the calls that are ready, each as the parts that one program computes."""
        taken = []
        for part in list(self._waiting.values()):
            process = self._connected[part.name]
            if self._waiting.get(process) is part and (part.call.again or self._is_complete(part.call.number)):
                together = {p: one for p, one in self._waiting.items() if part.goes_with(one)}
                for p, one in together.items():
                    del self._waiting[p]
                    self._latest[p] = max(one.call.number, self._latest.get(p, -1))
                taken.append(list(together.values()))
        return taken

    def _is_complete(self, number: int) -> bool:
        """Whether no further part of a call can arrive."""
        return self._is_over or all(self._has_made(process, number) for process in set(self._connected.values()))

    def _has_made(self, process: int, number: int) -> bool:
        waiting = self._waiting.get(process)
        return self._latest.get(process, -1) >= number or (waiting is not None and waiting.call.number >= number)

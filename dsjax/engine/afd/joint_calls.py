"""``JointCalls``: calls of several attention processes for the same layer, computed together, so that weights are read once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsjax.engine.afd.messages import Call


@dataclass(eq=False)
class Part:
    """Rows of one attention process, and their cells. name: of the link over which they came."""

    name: str
    call: Call
    rows: np.ndarray
    cells: np.ndarray

    def goes_with(self, other: Part) -> bool:
        """Whether one program computes both."""
        own, others = self.call, other.call
        alike = (own.number, own.stack, own.layer) == (others.number, others.stack, others.layer)
        return self is other or (
            alike and (own.tokens, own.cells) == (others.tokens, others.cells) and not (own.again or others.again)
        )


class JointCalls:
    """The calls of one attention side, whose processes make the same ones in the same order, one at a time.

    A call waits until each other process has made it, is past it, or is not connected. A call made again is computed at once and alone:
    the others may have their answers.

    processes: of the attention side. change: see ``Open``.
    """

    def __init__(self, processes: int, change: int = 0):
        self.processes, self.change = processes, change
        self._connected: dict[str, int] = {}  # the process at the other end of each link
        self._waiting: dict[int, Part] = {}
        self._latest: dict[int, int] = {}  # number of the call that was taken last of each process
        self._is_over = False

    def end(self) -> None:
        """Wait for nobody any more: the attention side goes on in another generation."""
        self._is_over = True

    def enter(self, name: str, process: int) -> None:
        """Wait for an attention process's parts, over this link."""
        self._connected[name] = process

    def leave(self, name: str) -> None:
        """Forget a link that has ended: no call waits for its part, and it gets no answer."""
        process = self._connected.pop(name)
        if process in self._waiting and self._waiting[process].name == name:
            del self._waiting[process]

    def add(self, part: Part) -> None:
        """Have a part wait, unless its call was taken already."""
        process = self._connected[part.name]
        if part.call.again or part.call.number > self._latest.get(process, -1):
            self._waiting[process] = part

    def take(self) -> list[list[Part]]:
        """Take the calls that need not wait: of each, the parts that one program computes."""
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
        """Whether no further part of a call can come."""
        return self._is_over or all(self._has_made(process, number) for process in set(self._connected.values()))

    def _has_made(self, process: int, number: int) -> bool:
        waiting = self._waiting.get(process)
        return self._latest.get(process, -1) >= number or (waiting is not None and waiting.call.number >= number)

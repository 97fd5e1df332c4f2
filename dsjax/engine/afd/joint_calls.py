"""``JointCalls``: calls that the processes of one attention side make for the same layer, which the experts compute together.

An expert's weights are read once for all rows of a program. Calls computed one by one would read them once for each attention process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class Part:
    """The rows of one attention process, and in which cells they are.

    number: of the call, the same in all processes. key: what calls that are computed together have alike. begun: somebody computes it.
    answers, error: what came of it, once ``done``.
    """

    number: int
    key: Hashable
    rows: np.ndarray
    cells: np.ndarray
    begun: bool = False
    done: bool = False
    answers: np.ndarray | None = None
    error: Exception | None = None


Compute = Callable[[Sequence[Part]], Sequence[np.ndarray]]
"""The answers to the rows of each part, from one program."""


class JointCalls:
    """The calls of one attention side. Each of its processes makes the same ones in the same order, over a connection of its own.

    A call waits until no other part of it can come any more: each of the others has made it, is past it, or is not connected. What an
    attention process asks for again, after its connection has ended, is computed at once: the others may have their answers.

    Args:
        processes: of the attention side. change: as of ``Hello``.
    """

    def __init__(self, processes: int, change: int = 0):
        self.processes, self.change = processes, change
        self._connections: Counter[int] = Counter()
        self._parts: dict[int, Part] = {}
        self._answered: dict[int, int] = {}  # the latest number of each process
        self._changed = threading.Condition()
        self._is_over = False

    def end(self) -> None:
        """Have nobody waited for any more: the attention side goes on in another generation, and one of its processes may hang."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def enter(self, process: int) -> None:
        """Take notice of a connection of an attention process."""
        with self._changed:
            self._connections[process] += 1

    def leave(self, process: int) -> bool:
        """Take notice that one has ended, so that nobody waits for it; whether it was the last of all."""
        with self._changed:
            self._connections[process] -= 1
            self._changed.notify_all()
            return not self._connections.total()

    def together(self, process: int, part: Part, compute: Compute) -> np.ndarray:
        """Wait for the other parts of a call; the last thread that comes computes all."""
        with self._changed:
            self._forget(process)
            self._parts[process] = part
            self._changed.notify_all()
            self._changed.wait_for(lambda: part.begun or part.done or self._is_complete(part.number))
            parts = []
            if not (part.begun or part.done):
                same = part.number, part.key
                parts = [one for one in self._parts.values() if (one.number, one.key) == same and not one.begun]
            for one in parts:
                one.begun = True
        if parts:
            self._compute(parts, compute)
        with self._changed:
            self._changed.wait_for(lambda: part.done)
            self._has_answered(process, part)
        return _result(part)

    def alone(self, process: int, part: Part, compute: Compute) -> np.ndarray:
        """Compute a call that an attention process makes again."""
        self._compute([part], compute)
        with self._changed:
            self._forget(process)
            self._has_answered(process, part)
        return _result(part)

    def _compute(self, parts: Sequence[Part], compute: Compute) -> None:
        try:
            for part, answers in zip(parts, compute(parts), strict=True):
                part.answers = answers
        except Exception as error:  # each attention process must hear of it
            for part in parts:
                part.error = error
        finally:
            with self._changed:
                for part in parts:
                    part.done = True
                self._changed.notify_all()

    def _is_complete(self, number: int) -> bool:
        """Whether no further part of a call can come."""
        return self._is_over or all(
            self._has_made(process, number) or not self._connections[process] for process in range(self.processes)
        )

    def _has_made(self, process: int, number: int) -> bool:
        part = self._parts.get(process)
        return self._answered.get(process, -1) >= number or (part is not None and part.number >= number)

    def _has_answered(self, process: int, part: Part) -> None:
        if self._parts.get(process) is part:
            del self._parts[process]
        self._answered[process] = max(part.number, self._answered.get(process, -1))
        self._changed.notify_all()

    def _forget(self, process: int) -> None:
        """Give up what the process asked for over a connection that has ended meanwhile."""
        part = self._parts.pop(process, None)
        if part is not None and not part.begun:
            part.error, part.done = ConnectionError("the call was made again over another connection"), True


def _result(part: Part) -> np.ndarray:
    if part.error is not None:
        raise part.error
    return part.answers

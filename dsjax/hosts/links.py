"""Whether the processes of a group reach each other, and which of them to go on without where two do not.

Signs of life go to process 0 alone, so a link that is cut between two others shows only in a collective that never ends. Nobody looks at
links while all is well: all look at all at the start, a process looks before it comes back, and all look when a collective has failed
although every process lives. To be reached is to answer: a process that hangs accepts a connection, and says nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from dsjax.hosts.wire import Arrival, close

SECONDS = 3.0
"""In which a process must have answered. TCP sends the first packet of a connection again after 1 s; a link that loses two is none."""
_ANSWER = b"y"
_MOST_AT_ONCE = 64


class Answerer:
    """A thread that answers whoever connects, until it is closed. port: 0 where it could not listen; then nobody looks."""

    def __init__(self, address: str):
        self.port = 0
        self._listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        with contextlib.suppress(OSError):
            self._listener.bind((address, 0))
            self._listener.listen(128)
            self.port = self._listener.getsockname()[1]
            threading.Thread(target=self._answer, name="dsjax-links", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        close(self._listener)

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(_ANSWER)


def unreached(members: Iterable[Arrival], seconds: float = SECONDS) -> list[int]:
    """The ids of those that do not answer this process within so many seconds. All are asked at once."""
    asked = [member for member in members if member.port]
    if not asked:
        return []
    with ThreadPoolExecutor(min(len(asked), _MOST_AT_ONCE)) as pool:
        answers = pool.map(lambda member: _answers(member, seconds), asked)
        return [member.process_id for member, answer in zip(asked, answers, strict=True) if not answer]


def _answers(member: Arrival, seconds: float) -> bool:
    try:
        with socket.create_connection((member.address, member.port), timeout=seconds) as connection:
            return connection.recv(1) == _ANSWER
    except OSError:
        return False


def left_out(cut: Mapping[int, Collection[int]]) -> list[int]:
    """The processes to go on without, so that all that are left reach each other: few, and never process 0.

    Again and again the one with most cut links, of several the one with the highest id. cut: of each process those that it does not
    reach. A link that is cut in one direction is cut.
    """
    pairs = {frozenset((one, other)) for one, others in cut.items() for other in others}
    found = []
    while pairs:
        counts = Counter(process for pair in pairs for process in pair if process)
        worst = max(counts, key=lambda process: (counts[process], process))
        found.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return sorted(found)

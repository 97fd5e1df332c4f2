"""`Collectives`: this process's connections to the others over which gloo carries collectives, closed when one of them can never end.

When a process is gone, a collective fails at once only in those devices that wait for that process itself. In a ring the others wait for
one that has failed already and whose connections are open, until the collective's time limit; and JAX waits for all devices of a process.
Tried with four processes of two devices, JAX 0.10.2, a time limit of 20 s: after a death `all_gather` and `psum` end in every survivor
after 20.0 s, and after 0.1 s when each closes its connections. gloo has no call for that, so the process's own sockets are looked up, which
Linux lists in `/proc`; elsewhere, and for other platforms' collectives, nothing is closed and the time limit decides.
"""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Endpoint = tuple[str, int]
Made = TypeVar("Made")
_SOCKETS = "/proc/self/fd"


class Collectives:
    """Belongs to a process; any thread may use it. endpoint: where it listens for the others' connections; None: it is not known."""

    def __init__(self):
        self.endpoint: Endpoint | None = None
        self._others: set[Endpoint] = set()
        self._generation, self._order = -1, ()
        self._seen: set[int] = set()  # connections of earlier generations
        self._of: dict[tuple[int, ...], set[int]] = {}  # by the order of devices in which they were first wanted
        self._beside: dict[int, Callable[[], None]] = {}  # by generation
        self._lock = threading.Lock()

    def made_by(self, make: Callable[[], Made]) -> Made:
        """Call what makes gloo listen, and find out where that is."""
        before = set(_listeners())
        made = make()
        new_listeners = set(_listeners()) - before
        if len(new_listeners) == 1:  # else something else began to listen in the same moment
            self.endpoint = new_listeners.pop()
        return made

    def begin(self, generation: int, order: Iterable[int], endpoints: Iterable[Sequence | None]) -> None:
        """A generation begins: nothing of it is connected yet.

        order: its devices. endpoints: of its processes. gloo keeps a group of devices in one order for ever, and with it connections.
        """
        with self._lock:
            self._others.update(tuple(endpoint) for endpoint in endpoints if endpoint is not None)
            now = {inode for inode, _ in self._connections()}
            self._of.setdefault(self._order, set()).update(now - self._seen)
            self._seen |= now
            self._generation, self._order = generation, tuple(order)

    def cut_with(self, generation: int, cut: Callable[[], None]) -> None:
        """Have a function called too when a generation is cut: beside collectives something else of it waits for other processes."""
        with self._lock:
            self._beside = {generation: cut}

    def cut(self, generation: int) -> int:
        """Close the connections of a generation, if it is the one of now, so that whatever waits in its collectives fails; give how many.

        Those of other orders of the devices stay: they can be formed again.
        """
        with self._lock:
            beside = self._beside.pop(generation, None)
        if beside is not None:
            beside()
        with self._lock:
            if generation != self._generation:
                return 0
            count, again = 0, self._of.get(self._order, set())
            for inode, connection in self._connections():
                if inode not in self._seen or inode in again:
                    with contextlib.suppress(OSError):  # it has gone by itself
                        connection.shutdown(socket.SHUT_RDWR)
                        count += 1
            return count

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Those of gloo, with numbers that are theirs alone."""
        endpoint = self.endpoint
        if endpoint is None:
            return
        for inode, socket_ in _sockets():
            with contextlib.suppress(OSError):
                here, there = socket_.getsockname()[:2], socket_.getpeername()[:2]  # a listener has no peer
                if here == endpoint or there in self._others:
                    yield inode, socket_


def _listeners() -> Iterator[Endpoint]:
    for _, socket_ in _sockets():
        with contextlib.suppress(OSError):
            if socket_.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield socket_.getsockname()[:2]


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """The process's TCP sockets, with their inodes; each is open under a further number while it is looked at."""
    names = os.listdir(_SOCKETS) if os.path.isdir(_SOCKETS) else []
    for name in names:
        try:
            number = os.dup(int(name))
        except OSError:  # it was closed meanwhile
            continue
        status = os.fstat(number)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(number)
            continue
        with socket.socket(fileno=number) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield status.st_ino, connection

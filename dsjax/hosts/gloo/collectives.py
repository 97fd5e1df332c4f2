"""`Collectives`: this process's gloo connections, which it closes when a collective can never finish.

When a process dies, a collective fails at once only on devices that wait for that process itself. In a ring, the other devices wait for a
peer that has failed but keeps its connections open, until the collective times out; and JAX waits for all devices of a process. Measured
with four processes of two devices, JAX 0.10.2 and a 20 s timeout: after a death, `all_gather` and `psum` end in every survivor after
20.0 s, or after 0.1 s if each closes its connections. gloo has no call for that, so this module finds the process's sockets in `/proc`
(Linux). On other systems, and for other platforms' collectives, it closes nothing and the timeout applies.
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
    """gloo connections of this process. Thread-safe. endpoint: gloo's listening address; None if unknown."""

    def __init__(self):
        self.endpoint: Endpoint | None = None
        self._others: set[Endpoint] = set()
        self._epoch = -1
        self._order = ()
        self._seen: set[int] = set()  # inodes of connections of earlier mesh epochs
        self._of: dict[tuple[int, ...], set[int]] = {}  # inodes by the device order that opened them
        self._beside: dict[int, Callable[[], None]] = {}  # by mesh epoch
        self._lock = threading.Lock()

    def made_by(self, make: Callable[[], Made]) -> Made:
        """Call `make`, which makes gloo listen, and record gloo's address."""
        before = set(_listeners())
        result = make()
        new_listeners = set(_listeners()) - before
        if len(new_listeners) == 1:  # otherwise another socket began to listen at the same time
            self.endpoint = new_listeners.pop()
        return result

    def begin(self, epoch: int, order: Iterable[int], endpoints: Iterable[Sequence | None]) -> None:
        """Begin a mesh epoch, which has no connections yet.

        order: its devices. endpoints: of its processes. gloo keeps a group with a given device order, and its connections, for ever.
        """
        with self._lock:
            self._others.update(tuple(endpoint) for endpoint in endpoints if endpoint is not None)
            now = {inode for inode, _ in self._connections()}
            self._of.setdefault(self._order, set()).update(now - self._seen)
            self._seen |= now
            self._epoch = epoch
            self._order = tuple(order)

    def cut_with(self, epoch: int, cut: Callable[[], None]) -> None:
        """Also call `cut` when a mesh epoch is cut, for waits on other processes outside collectives."""
        with self._lock:
            self._beside = {epoch: cut}

    def cut(self, epoch: int) -> int:
        """Close the connections of a mesh epoch, if it is the current one, so that its collectives fail. Return how many were closed.

        Connections of other device orders stay open, because those groups can be used again.
        """
        with self._lock:
            cut_other = self._beside.pop(epoch, None)
        if cut_other is not None:
            cut_other()
        with self._lock:
            if epoch != self._epoch:
                return 0
            count = 0
            again = self._of.get(self._order, set())
            for inode, connection in self._connections():
                if inode not in self._seen or inode in again:
                    with contextlib.suppress(OSError):  # already closed
                        connection.shutdown(socket.SHUT_RDWR)
                        count += 1
            return count

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield gloo's connections with their inodes."""
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
    """Yield the process's TCP sockets with their inodes; each as a duplicate that is closed afterwards."""
    names = os.listdir(_SOCKETS) if os.path.isdir(_SOCKETS) else []
    for name in names:
        try:
            number = os.dup(int(name))
        except OSError:  # closed in the meantime
            continue
        status = os.fstat(number)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(number)
            continue
        with socket.socket(fileno=number) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield status.st_ino, connection

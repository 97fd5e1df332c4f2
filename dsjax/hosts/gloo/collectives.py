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
    """gloo connections of this process. Thread-safe. endpoint: the address where gloo listens in this process; None if unknown."""

    def __init__(self):
        self.endpoint: Endpoint | None = None
        self._others: set[Endpoint] = set()  # the endpoints of all processes so far
        self._epoch = -1
        self._order = ()  # devices of the current mesh epoch
        self._seen: set[int] = set()  # inodes of all connections before the current mesh epoch
        self._of: dict[tuple[int, ...], set[int]] = {}  # device order → inodes of what its mesh epochs opened
        self._beside: dict[int, Callable[[], None]] = {}  # mesh epoch → the argument of `cut_with`
        self._lock = threading.Lock()

    def made_by(self, make: Callable[[], Made]) -> Made:
        """Call `make`, which makes gloo listen on a new socket, and record its address."""
        before = set(_listeners())
        result = make()
        new_listeners = set(_listeners()) - before
        if len(new_listeners) == 1:  # otherwise another socket began to listen at the same time
            self.endpoint = new_listeners.pop()
        return result

    def begin(self, epoch: int, order: Iterable[int], endpoints: Iterable[Sequence | None]) -> None:
        """Begin a mesh epoch, which has opened no connections yet.

        order: ids of its devices. endpoints: `endpoint` of each of its processes. gloo keeps the group of a device order, and the group's
        connections, for ever: a later mesh epoch with that order uses them again."""
        with self._lock:
            self._others.update(tuple(endpoint) for endpoint in endpoints if endpoint is not None)
            inodes = {inode for inode, _ in self._connections()}
            self._of.setdefault(self._order, set()).update(inodes - self._seen)  # of the mesh epoch that ends
            self._seen |= inodes
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
            num_closed = 0
            reused = self._of.get(self._order, set())  # opened in earlier mesh epochs
            for inode, connection in self._connections():
                if inode not in self._seen or inode in reused:
                    with contextlib.suppress(OSError):  # already closed
                        connection.shutdown(socket.SHUT_RDWR)
                        num_closed += 1
            return num_closed

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield gloo's connections with their inodes."""
        endpoint = self.endpoint
        if endpoint is None:
            return
        for inode, socket_ in _sockets():
            with contextlib.suppress(OSError):
                local, remote = socket_.getsockname()[:2], socket_.getpeername()[:2]  # a listener has no peer
                if local == endpoint or remote in self._others:
                    yield inode, socket_


def _listeners() -> Iterator[Endpoint]:
    for _, socket_ in _sockets():
        with contextlib.suppress(OSError):
            if socket_.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield socket_.getsockname()[:2]


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the process's TCP sockets with their inodes; each as a duplicate that is closed afterwards."""
    fds = os.listdir(_SOCKETS) if os.path.isdir(_SOCKETS) else []
    for fd in fds:
        try:
            duplicate = os.dup(int(fd))
        except OSError:  # closed in the meantime
            continue
        status = os.fstat(duplicate)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as socket_:
            if socket_.family in (socket.AF_INET, socket.AF_INET6) and socket_.type == socket.SOCK_STREAM:
                yield status.st_ino, socket_

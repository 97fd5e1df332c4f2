"""Messages of one process to others of a generation, in order, as values of the coordination service's store: the leader's to all others,
and another's to the leader.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsjax.hosts.group import HostGroup

_BLOCK = 64
_LOOK_SECONDS = 2.0


class StreamWriter:
    """The writing side. It belongs to the generation in which it was made, and may be used by several threads."""

    def __init__(self, group: HostGroup, name: str = "stream"):
        self._store, self._folder = group.store, group.key(name)
        self._next = self._deleted = 0
        self._lock = threading.Lock()

    def put(self, message: bytes) -> int:
        """Add a message; give its number."""
        with self._lock:
            number = self._next
            self._store.set(f"{self._folder}/{number // _BLOCK}/{number}", message)
            self._next += 1
            return number

    def forget(self, number: int) -> None:
        """Everybody has read all messages up to this one."""
        with self._lock:
            while (self._deleted + 1) * _BLOCK <= number + 1:
                self._store.delete(f"{self._folder}/{self._deleted}/")
                self._deleted += 1

    def drop(self) -> None:
        """Nobody reads this stream any more."""
        with self._lock:
            self._store.delete(f"{self._folder}/")


class StreamReader:
    """What is written in the generation of now, read by the one thread that calls `next`.

    is_only: nobody else reads it, so what was read is deleted. look: seconds after which a closed one is noticed.
    """

    def __init__(self, group: HostGroup, name: str = "stream", *, is_only: bool = False, look: float = _LOOK_SECONDS):
        self._store, self._folder = group.store, group.key(name)
        self._next, self._is_only, self._look = 0, is_only, look
        self.closed = threading.Event()

    def next(self) -> bytes | None:
        """Wait for the next message; None once this reader is closed.

        Raises:
            ConnectionError: the leader is gone.
        """
        while not self.closed.is_set():
            value = self._store.get(f"{self._folder}/{self._next // _BLOCK}/{self._next}", self._look)
            if value is not None:
                self._next += 1
                if self._is_only and self._next % _BLOCK == 0:
                    self._store.delete(f"{self._folder}/{self._next // _BLOCK - 1}/")
                return value
        return None

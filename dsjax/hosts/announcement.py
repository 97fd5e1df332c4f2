"""`Announcement`: what process 0 says of a generation, and how the others hear of it."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import msgspec

from dsjax.background import contained, start_thread
from dsjax.hosts.wire import JoinRequest

if TYPE_CHECKING:
    from dsjax.hosts.group import HostGroup

_LOOK_SECONDS = 1.0
"""A wait for a key is not longer, so that the thread that waits has ended when the process does."""


class Announcement(msgspec.Struct, frozen=True):
    """A generation begins; or, with `ended`, there is no further one.

    Attributes:
        process_ids: who has devices in its mesh; others of the group wait for the next generation.
        device_ids: of the mesh, row by row.
        wanted: the mesh that was asked for; the one of `options` is smaller while processes are missing.
        options: the engine's options that differ from those the process was started with; `mesh` is one of them.
        reason: for people.
        members: all processes of the group: one that came back answers at another port than before.
        looks: it is no mesh, but asks everybody which others it cannot reach.
        left_out: processes that live and are gone on without, by id: the pid, and why.
        broken: the generation before it, where that has broken: nothing that still waits in its collectives can be done any more.
    """

    number: int
    process_ids: list[int] = []
    device_ids: list[int] = []
    options: dict[str, Any] = {}
    wanted: str = ""
    reason: str = ""
    broken: int | None = None
    members: list[JoinRequest] = []
    looks: bool = False
    left_out: dict[int, tuple[int, str]] = {}
    ended: bool = False


def key(number: int) -> str:
    """Where a generation is announced. It is beside the generations' own keys, for who is in none of them must find it."""
    return f"dsjax/generations/{number}"


class Announcements:
    """All announcements from a generation on, heard by a thread of its own; a process may be busy, or stuck in a collective.

    Attributes:
        latest: the last generation that was announced. why_ended: why there is no further one; None: there may be, or it ends as it should.
    """

    def __init__(self, group: HostGroup, first: int):
        self._group, self._next = group, first
        self._heard: queue.SimpleQueue[Announcement] = queue.SimpleQueue()
        self.latest, self.why_ended = first - 1, None
        self._listeners: list = []
        self._thread = start_thread("announcements", self._listen, name="dsjax-announcements", restarts=True)

    def next(self, seconds: float | None = None) -> Announcement | None:
        """Wait for the latest announcement that was not given yet; None where none comes."""
        try:
            heard = self._heard.get(timeout=seconds)
        except queue.Empty:
            return None
        while not self._heard.empty():  # generations that broke before this process came to them
            heard = self._heard.get()
        return heard

    def listen(self, call) -> None:
        """Have `call()` called at each announcement from now on, in the listening thread, until it is called with `forget`."""
        self._listeners.append(call)
        if not self._heard.empty():
            call()

    def forget(self, call) -> None:
        """Undo `listen`."""
        self._listeners.remove(call)

    def end(self) -> None:
        """Have the one who waits for the next announcement hear that there is none for this process, which leaves."""
        self._heard.put(Announcement(self.latest, ended=True))

    def close(self, seconds: float) -> None:
        """Hear no more; wait so long for the thread, which the group's `leaving` ends."""
        self._thread.join(seconds)

    def _listen(self) -> None:
        while not self._group.leaving:
            try:
                value = self._group.store.get(key(self._next), _LOOK_SECONDS)
            except ConnectionError:
                return  # the group knows
            if value is None:
                continue
            heard = msgspec.msgpack.decode(value, type=Announcement)
            self.why_ended = (heard.ended and heard.reason) or None
            self.latest, self._next = self._next, self._next + 1
            if heard.members:
                self._group.members = heard.members
            if heard.broken is not None:
                with contained("announcements", "A collective that has broken is waited for until its own limit."):
                    self._group.collectives.cut(heard.broken)
            self._heard.put(heard)
            if heard.looks:
                with contained("announcements", "Process 0 hears nothing of this process's links."):
                    self._group.links.tell(heard.number)
            for call in list(self._listeners):
                with contained("announcements"):
                    call()

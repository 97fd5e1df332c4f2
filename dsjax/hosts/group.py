"""`HostGroup`: this process's face of a started group: who is alive, what all agree on, and the leader's stream of messages."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from dsjax.hosts import coordination
from dsjax.hosts.meeting import Arrival, GroupError, meet
from dsjax.hosts.options import HostOptions

Result = TypeVar("Result")

_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_BLOCK = 64
_WAIT_SECONDS = 3600.0


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What a process says to a question: a plain value, or why it cannot go on."""

    value: Any = None
    error: str | None = None


class HostGroup:
    """A group whose processes are all there. `start` forms it; `leave` must be called, or happens when Python ends.

    A thread asks again and again who is alive, which is JAX's own question: a process counts as gone when it has given no sign of life
    for the heartbeat's timeout, whether it died or hangs. Compiling, loading or a long step never counts, for that
    thread goes on meanwhile.

    Attributes:
        members: all processes, in the order of their ids.
        generation: of the group; keys in the store begin with it. It changes when the mesh does.
        on_lost: called once, in a thread of its own, with the error, when a member is gone. Without it the process ends soon after, for
            a collective that waits for that member may never return.
    """

    def __init__(self, options: HostOptions, members: Sequence[Arrival], store: coordination.Store | None = None):
        self.options, self.members = options, list(members)
        self.generation = 0
        self.on_lost: Callable[[GroupError], None] | None = None
        self.error: GroupError | None = None
        self._store = store or coordination.Store()
        self._leaving = False
        self._alone = threading.Event()
        self._told: dict[str, int] = {}
        self._ends: list[Callable[[str | None], None]] = []

    @classmethod
    def start(cls, options: HostOptions, prepare: Callable[[], Mapping[str, Any]]) -> HostGroup:
        """Meet the others and join them; see `meet`. JAX must not have started, and starts with all devices of the group.

        Raises:
            GroupError, UserError: there is no group; as `meet` says.
        """
        members = meet(options, prepare)
        coordination.join(options)
        group = cls(options, members)
        if not group.is_leader:
            coordination.on_abort(group._end_on_abort)
        threading.Thread(target=group._watch, name="dsjax-hosts", daemon=True).start()
        atexit.register(group.leave)
        return group

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0."""
        return self.options.is_leader

    def run(self, stage: str, act: Callable[[], Result]) -> Result:
        """Do something that all processes do; give its result when all have done it.

        Raises:
            GroupError: it failed elsewhere, or somebody is gone. What `act` itself raises is raised here, and told to the others.
        """
        try:
            result = act()
        except BaseException as error:
            self.tell(stage, error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            raise
        self.ask(stage)
        return result

    def tell(self, stage: str, value: Any = None, error: str | None = None) -> None:
        """Say a plain value, or why this process cannot go on, to whoever asks for it."""
        number = self._told[stage] = self._told.get(stage, -1) + 1
        said = msgspec.msgpack.encode(Said(value, error))
        self._store.set(self._key("agree", stage, number, self.options.process_id), said)

    def ask(self, stage: str, value: Any = None) -> list[Any]:
        """Tell all processes a plain value; give everybody's, in the order of their ids. All ask the same questions in the same order.

        Raises:
            GroupError: somebody says that it cannot go on, or is gone.
        """
        self.tell(stage, value)
        values = []
        for member in self.members:
            said = self._hear(stage, member)
            if said.error is not None:
                raise GroupError(f"{member.name}: {said.error}")
            values.append(said.value)
        return values

    def alike(self, stage: str, what: str, value: Any) -> None:
        """Make sure that all have the same value of `what`.

        Raises:
            GroupError: one has another.
        """
        values = self.ask(stage, value)
        for member, found in zip(self.members, values, strict=True):
            if found != values[0]:
                raise GroupError(
                    f"{member.name} has {what} {found}, process 0 has {values[0]}; install all hosts alike"
                )

    def check(self) -> None:
        """Raise the `GroupError` of a member that is gone."""
        if self.error is not None:
            raise self.error

    def lost_by(self, error: BaseException) -> GroupError | None:
        """The member that is gone where that may be why something failed; waits until it would be known. None: nobody is."""
        if self._leaving:
            return None
        deadline = time.monotonic() + self.options.heartbeat_timeout + 2 * _LOOK_SECONDS
        while self.error is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.error

    def at_end(self, tell: Callable[[str | None], None]) -> None:
        """Have `tell(reason)` called when the leader leaves; None: as it should be."""
        self._ends.append(tell)

    def leave(self, reason: str | None = None) -> None:
        """Leave the group; the leader tells the others, and waits until they have gone. reason: why it ends, where that is a fault."""
        if self._leaving:
            return
        self._leaving = True
        try:
            if self.is_leader:
                for tell in self._ends:
                    tell(reason)
                if len(self.members) > 1:
                    self._alone.wait(_LEAVE_SECONDS)
            coordination.leave()
        except Exception as error:  # at the end of a process nothing else is to be done about it
            print(f"dsjax: {error}", file=sys.stderr)

    def _key(self, *parts: object) -> str:
        return "/".join(["dsjax", str(self.generation), *map(str, parts)])

    def _hear(self, stage: str, member: Arrival) -> Said:
        key = self._key("agree", stage, self._told[stage], member.process_id)
        while True:
            found = self._store.get(key, _LOOK_SECONDS)
            if found is not None:
                return msgspec.msgpack.decode(found, type=Said)
            self.check()

    def _watch(self) -> None:
        ids = [member.process_id for member in self.members]
        while True:
            try:
                alive = coordination.live(ids)
            except ConnectionError:
                if not self._leaving:
                    self._lose(self.members[0])
                return
            if alive == {self.options.process_id}:
                self._alone.set()
            if not self._leaving:
                for member in self.members:
                    if member.process_id not in alive:
                        self._lose(member)
            elif not self.is_leader or self._alone.is_set():
                return
            time.sleep(0.05 if self._leaving else min(_LOOK_SECONDS, self.options.heartbeat_timeout / 4))

    def _lose(self, member: Arrival) -> None:
        if self.error is not None:
            return
        self.error = GroupError(gone(member))
        if self.on_lost is not None:
            self.on_lost(self.error)
            return
        time.sleep(_GRACE_SECONDS)  # whoever waits in Python raises it
        if not self._leaving:
            print(f"error: {self.error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _end_on_abort(self) -> None:
        """The last words of a follower that C++ code aborts; Python gets no further chance."""
        text = f"process {self.options.process_id} was aborted; the message above says why"
        try:
            socket.create_connection(self.options.coordinator, timeout=1.0).close()
        except OSError:
            text = gone(self.members[0])
        os.write(2, f"\nerror: {text}\n".encode())
        os._exit(1)


def gone(member: Arrival) -> str:
    """What is said of a member that died or hangs."""
    if member.process_id == 0:
        return f"{member.name} has gone away, and with it the group; start all processes again"
    return f"{member.name} has gone away; its own messages say why. Start all processes again"


class StreamWriter:
    """The leader's messages to all others, in order. It may be used by several threads."""

    def __init__(self, group: HostGroup):
        self._group = group
        self._next = self._deleted = 0
        self._lock = threading.Lock()

    def put(self, message: bytes) -> int:
        """Add a message; give its number."""
        with self._lock:
            number = self._next
            self._group._store.set(self._group._key("stream", number // _BLOCK, number), message)
            self._next += 1
            return number

    def forget(self, number: int) -> None:
        """Everybody has read all messages up to this one."""
        with self._lock:
            while (self._deleted + 1) * _BLOCK <= number + 1:
                self._group._store.delete(self._group._key("stream", self._deleted) + "/")
                self._deleted += 1


class StreamReader:
    """What the leader writes, read by the one thread that calls `next`."""

    def __init__(self, group: HostGroup):
        self._group = group
        self._next = 0

    def next(self) -> bytes:
        """Wait for the next message.

        Raises:
            ConnectionError: the leader is gone.
        """
        while True:
            found = self._group._store.get(self._group._key("stream", self._next // _BLOCK, self._next), _WAIT_SECONDS)
            if found is not None:
                self._next += 1
                return found

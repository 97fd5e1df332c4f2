"""`Door`: process 0's port while the group lives: it sees members go, and lets one that was started again come back."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from dsjax.hosts.meeting import unlike_first
from dsjax.hosts.options import HostOptions
from dsjax.hosts.wire import Arrival, Prepared, Verdict, close, receive, send


class Door:
    """Belongs to a group that has formed. Each connection has a thread, the meeting's or its own.

    Args:
        verdict: what the members were told. first: what process 0 has of what must be alike.
        connections: to the members, by their ids; each is open as long as its process lives.

    Attributes:
        wanted: as of `Verdict`, for one that comes back.
    """

    def __init__(
        self,
        options: HostOptions,
        verdict: Verdict,
        first: Prepared,
        listener: socket.socket,
        connections: dict[int, socket.socket],
    ):
        self._options, self._verdict, self._first = options, verdict, first
        self._listener, self._connections = listener, dict(connections)
        self._members = {member.process_id: member for member in verdict.members}
        self.wanted = ""
        self._lock = threading.Lock()
        self._watched = threading.Event()
        self._on_left: Callable[[Arrival], None] = lambda arrival: None
        self._may_come: Callable[[Arrival], int | None] = lambda arrival: None

    def watch(self, on_left: Callable[[Arrival], None], may_come: Callable[[Arrival], int | None]) -> None:
        """Begin to tell of members.

        on_left: told of each whose connection ends. may_come: waits until one that left may come back under its id, and gives the first
        generation that it may be in; None: the group is ending.
        """
        self._on_left, self._may_come = on_left, may_come
        self._watched.set()

    def left(self, arrival: Arrival, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._lock:
            if self._connections.get(arrival.process_id) is not connection:
                return
            del self._connections[arrival.process_id]
        self._watched.wait()
        self._on_left(arrival)

    def has(self, arrival: Arrival) -> bool:
        """Whether this process is a member, and its connection is open."""
        with self._lock:
            known = self._members.get(arrival.process_id)
            return arrival.process_id in self._connections and known is not None and known.pid == arrival.pid

    def drop(self, process_id: int) -> None:
        """Close a member's connection: it has given no sign of life for too long, and must come in again."""
        with self._lock:
            connection = self._connections.pop(process_id, None)
        if connection is not None:
            close(connection)

    def enter(self, connection: socket.socket, arrival: Arrival) -> None:
        """Somebody comes after the group has formed: let it in, or say why not; then wait until it goes."""
        prepared = receive(connection)  # also of one that cannot come in: it reads an answer only then
        if not isinstance(prepared, Prepared) or prepared.error is not None:
            close(connection)  # it cannot start, and says why itself
            return
        refusal = self._refusal(arrival) or unlike_first(arrival, prepared, self._first)
        generation = self._may_come(arrival) if refusal is None else None
        if refusal is None and generation is None:
            refusal = "process 0 is ending the group; start all processes again"
        if refusal is not None:
            send(connection, Verdict(error=refusal))
            close(connection)
            return
        with self._lock:
            self._members[arrival.process_id] = arrival
            self._connections[arrival.process_id] = connection
            here = [0, *sorted(self._connections)]
        members = [self._members[i] for i in sorted(self._members)]
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            send(connection, Verdict(members, None, self._verdict.service, generation, here, self.wanted))
            connection.recv(1)  # it says nothing more: this returns when it goes away
        self.left(arrival, connection)

    def close(self) -> None:
        """Let nobody in any more."""
        self._watched.set()
        close(self._listener)
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            close(connection)

    def _refusal(self, arrival: Arrival) -> str | None:
        count = self._options.num_processes
        if arrival.num_processes != count:
            return (
                f"{arrival.name} has --num-processes {arrival.num_processes}, process 0 has {count}; give all the same"
            )
        if not 0 < arrival.process_id < count:
            return f"{arrival.name} came, but ids go from 0 to {count - 1}"
        with self._lock:
            if arrival.process_id in self._connections:
                known = self._members[arrival.process_id]
                return (
                    f"{known.name} is in the group, and another on {arrival.host}, pid {arrival.pid}, has its --process-id "
                    f"{arrival.process_id}; give each its own"
                )
        return None

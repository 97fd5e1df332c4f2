"""`JoinListener`: process 0's port while the group lives: it sees members go, and lets one that was started again come back."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from dsjax.hosts.options import HostOptions
from dsjax.hosts.rendezvous import unlike_first
from dsjax.hosts.wire import JoinRequest, JoinResponse, Prepared, close, receive, send


class JoinListener:
    """Belongs to a group that has formed. Each connection has a thread, the rendezvous's or its own.

    Args:
        response: what the members were told. first: what process 0 has of what must be alike.
        connections: to the members, by their ids; each is open as long as its process lives.

    Attributes:
        wanted: as of `JoinResponse`, for one that comes back.
    """

    def __init__(
        self,
        options: HostOptions,
        response: JoinResponse,
        first: Prepared,
        listener: socket.socket,
        connections: dict[int, socket.socket],
    ):
        self._options, self._response, self._first = options, response, first
        self._listener, self._connections = listener, dict(connections)
        self._members = {member.process_id: member for member in response.members}
        self.wanted = ""
        self._lock = threading.Lock()
        self._watched = threading.Event()
        self._on_left: Callable[[JoinRequest], None] = lambda request: None
        self._may_come: Callable[[JoinRequest], int | None] = lambda request: None

    def watch(self, on_left: Callable[[JoinRequest], None], may_come: Callable[[JoinRequest], int | None]) -> None:
        """Begin to tell of members.

        on_left: told of each whose connection ends. may_come: waits until one that left may come back under its id, and gives the first
        generation that it may be in; None: the group is ending.
        """
        self._on_left, self._may_come = on_left, may_come
        self._watched.set()

    def left(self, request: JoinRequest, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._lock:
            if self._connections.get(request.process_id) is not connection:
                return
            del self._connections[request.process_id]
        self._watched.wait()
        self._on_left(request)

    def has(self, request: JoinRequest) -> bool:
        """Whether this process is a member, and its connection is open."""
        with self._lock:
            known = self._members.get(request.process_id)
            return request.process_id in self._connections and known is not None and known.pid == request.pid

    def drop(self, process_id: int) -> None:
        """Close a member's connection: it has given no sign of life for too long, and must come in again."""
        with self._lock:
            connection = self._connections.pop(process_id, None)
        if connection is not None:
            close(connection)

    def enter(self, connection: socket.socket, request: JoinRequest) -> None:
        """Somebody comes after the group has formed: let it in, or say why not; then wait until it goes."""
        prepared = receive(connection)  # also of one that cannot come in: it reads an answer only then
        if not isinstance(prepared, Prepared) or prepared.error is not None:
            close(connection)  # it cannot start, and says why itself
            return
        refusal = self._refusal(request) or unlike_first(request, prepared, self._first)
        generation = self._may_come(request) if refusal is None else None
        if refusal is None and generation is None:
            refusal = "process 0 is ending the group; start all processes again"
        if refusal is not None:
            send(connection, JoinResponse(error=refusal))
            close(connection)
            return
        with self._lock:
            self._members[request.process_id] = request
            self._connections[request.process_id] = connection
            here = [0, *sorted(self._connections)]
        members = [self._members[i] for i in sorted(self._members)]
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            send(connection, JoinResponse(members, None, self._response.service, generation, here, self.wanted))
            connection.recv(1)  # it says nothing more: this returns when it goes away
        self.left(request, connection)

    def close(self) -> None:
        """Let nobody in any more."""
        self._watched.set()
        close(self._listener)
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            close(connection)

    def _refusal(self, request: JoinRequest) -> str | None:
        count = self._options.num_processes
        if request.num_processes != count:
            return (
                f"{request.name} has --num-processes {request.num_processes}, process 0 has {count}; give all the same"
            )
        if not 0 < request.process_id < count:
            return f"{request.name} came, but ids go from 0 to {count - 1}"
        with self._lock:
            if request.process_id in self._connections:
                known = self._members[request.process_id]
                return (
                    f"{known.name} is in the group, and another on {request.host}, pid {request.pid}, has its --process-id "
                    f"{request.process_id}; give each its own"
                )
        return None

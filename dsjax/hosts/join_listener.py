"""`JoinListener`: process 0's port while the group lives: it sees members go, and lets one that was started again come back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec

from dsjax.hosts.options import HostOptions
from dsjax.hosts.rendezvous import unlike_first, why_no_place
from dsjax.hosts.secure_channel import SecureChannel
from dsjax.hosts.secure_listener import SecureListener
from dsjax.hosts.wire import JoinRequest, JoinResponse, Prepared, receive, send


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
        listener: SecureListener,
        connections: dict[int, SecureChannel],
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

    def left(self, request: JoinRequest, channel: SecureChannel) -> None:
        """A connection has ended."""
        with self._lock:
            if self._connections.get(request.process_id) is not channel:
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
            connection.close()

    def enter(self, channel: SecureChannel, request: JoinRequest) -> None:
        """Somebody comes after the group has formed: let it in, or say why not; then wait until it goes."""
        prepared = receive(channel)  # also of one that cannot come in: it reads an answer only then
        if not isinstance(prepared, Prepared) or prepared.error is not None:
            channel.close()  # it cannot start, and says why itself
            return
        refusal = self._refusal(request) or unlike_first(request, prepared, self._first)
        generation = self._may_come(request) if refusal is None else None
        if refusal is None and generation is None:
            refusal = "process 0 is ending the group; start all processes again"
        if refusal is not None:
            send(channel, JoinResponse(error=refusal))
            channel.close()
            return
        with self._lock:
            self._members[request.process_id] = request
            self._connections[request.process_id] = channel
            here = [0, *sorted(self._connections)]
        members = [self._members[i] for i in sorted(self._members)]
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            send(channel, JoinResponse(members, None, self._response.service, generation, here, self.wanted))
            channel.wait_for_end()
        self.left(request, channel)

    def close(self) -> None:
        """Let nobody in any more."""
        self._watched.set()
        self._listener.close()
        with self._lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _refusal(self, request: JoinRequest) -> str | None:
        refusal = why_no_place(request, self._options.num_processes)
        if refusal is not None:
            return refusal
        with self._lock:
            if request.process_id in self._connections:
                known = self._members[request.process_id]
                return (
                    f"{known.name} is in the group, and another on {request.host}, pid {request.pid}, has its --process-id "
                    f"{request.process_id}; give each its own"
                )
        return None

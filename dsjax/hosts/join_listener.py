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
        self._entering: dict[int, tuple[JoinRequest, SecureChannel]] = {}  # wait to come in under an id
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
            return request.process_id in self._connections and known == request

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
        refusal = (
            self._refusal(request) or unlike_first(request, prepared, self._first) or self._claim(request, channel)
        )
        generation = None
        if refusal is None:
            generation = self._may_come(request)
            if generation is None:
                refusal = "process 0 is ending the group; start all processes again"
            if not self._settle_claim(request, channel, is_let_in=refusal is None):
                channel.close()  # it has gone while it waited, and another one waits in its place
                self._on_left(request)
                return
        if refusal is not None:
            send(channel, JoinResponse(error=refusal))
            channel.close()
            return
        with self._lock:
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
            return self._taken(request)

    def _taken(self, request: JoinRequest) -> str | None:
        """Why a process cannot have its id, with the lock held; None: it is free."""
        known, how = None, "is in the group"
        if request.process_id in self._connections:
            known = self._members[request.process_id]
        elif request.process_id in self._entering:
            waiting, channel = self._entering[request.process_id]
            if not channel.has_ended:
                known, how = waiting, "is coming back to the group"
        if known is None:
            return None
        return (
            f"{known.name} {how}, and another on {request.host}, pid {request.pid}, has its --process-id {request.process_id}; "
            "give each its own"
        )

    def _claim(self, request: JoinRequest, channel: SecureChannel) -> str | None:
        """Have one process alone wait to come in under an id; why this one cannot be it."""
        with self._lock:
            refusal = self._taken(request)
            if refusal is None:
                self._entering[request.process_id] = request, channel
            return refusal

    def _settle_claim(self, request: JoinRequest, channel: SecureChannel, *, is_let_in: bool) -> bool:
        """End a wait; whether the id was still this process's, which is a member from now on if it is let in."""
        with self._lock:
            if self._entering.get(request.process_id, (None, None))[1] is not channel:
                return False
            del self._entering[request.process_id]
            if is_let_in:
                self._members[request.process_id] = request
                self._connections[request.process_id] = channel
            return True

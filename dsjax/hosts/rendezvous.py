"""The processes of a group find each other, and agree that they were started alike, before JAX joins them.

JAX's coordination service ends a process with a C++ stack trace when another one is missing, has the same id, or cannot be
reached, and tells no names. So process 0 listens at the coordinator's port itself; the others come there, say what they
are, prepare (a model may have to be downloaded), and get one response, the same for all: who is there, and where JAX's service will be.

The port stays open and the connections stay too (`dsjax/hosts/join_listener.py`): they show at once that a process has died, and
one that was started again comes in by the same way.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from dsjax.background import CLOSED, start_thread
from dsjax.errors import UserError
from dsjax.hosts.options import HostOptions, joined
from dsjax.hosts.wire import (
    MAGIC,
    JoinRequest,
    JoinResponse,
    Prepared,
    close,
    decode,
    encode,
    exactly,
    keep_alive,
    receive,
    send,
)

if TYPE_CHECKING:
    from dsjax.hosts.join_listener import JoinListener

_RETRY_SECONDS = 0.1
_PEEK_SECONDS = 10.0
_LINGER_SECONDS = 3.0


class GroupError(UserError):
    """The group cannot be formed, or has broken."""


@dataclass(frozen=True)
class Rendezvous:
    """The group that a rendezvous has formed.

    Attributes:
        members: in the order of their ids.
        service: `HOST:PORT` at which process 0 starts JAX's coordination service, and the others find it.
        generation: the first one that this process may be in: not 0 where the group had formed before it came. here: then, the ids of
            those that live. wanted: as of `JoinResponse`.
        listener: process 0's. connection: every other one's, to process 0, which sees by it that this process lives.
    """

    members: list[JoinRequest]
    service: str
    generation: int = 0
    here: Sequence[int] = ()
    wanted: str = ""
    listener: JoinListener | None = None
    connection: socket.socket | None = None

    def close(self) -> None:
        """Let nobody in any more."""
        if self.listener is not None:
            self.listener.close()
        if self.connection is not None:
            close(self.connection)


def meet(options: HostOptions, prepare: Callable[[], Mapping[str, Any]], port: int = 0) -> Rendezvous:
    """Meet the other processes.

    prepare: checks what this process can check alone, and gives what must be alike everywhere. It runs while the others come. port: as of
    `JoinRequest`.

    Raises:
        GroupError: somebody is missing, could not prepare, or was started otherwise: in all processes.
        UserError: this process's own, from `prepare`; the others are told.
    """
    return _Host(options, port).meet(prepare) if options.is_leader else _attend(options, prepare, port)


class _Host:
    """Process 0's side: a thread takes connections, one for each reads what comes, and `meet` decides."""

    def __init__(self, options: HostOptions, port: int):
        self._options = options
        self._deadline = time.monotonic() + options.start_timeout
        self._changed = threading.Condition()
        self._requests: dict[int, JoinRequest] = {0: JoinRequest.of(options, port)}
        self._prepared: dict[int, Prepared] = {}
        self._problem: str | None = None
        self._connections: dict[int, socket.socket] = {}
        self._strays: list[socket.socket] = []  # of processes that cannot be in the group, which hear why
        self._join_listener: JoinListener | None = None
        self._listener = _listen(options)

    def meet(self, prepare: Callable[[], Mapping[str, Any]]) -> Rendezvous:
        start_thread("rendezvous", self._accept, name="dsjax-rendezvous", restarts=True)
        failure: UserError | None = None
        error: str | None = None
        try:
            try:
                prepared_here = decode(encode(Prepared(dict(prepare()))))  # as the others' come
            except ValueError as caught:  # a UserError or one of the mesh's, which `sharding` has for itself
                failure, prepared_here = caught, Prepared(error=str(caught))
            self._enter(self._requests[0], prepared_here)
            error = self._wait()
        except BaseException as caught:
            error = f"{self._requests[0].name} ended while the group was forming ({type(caught).__name__})"
            raise
        finally:
            response = self._tell(error)
        if failure is not None:
            raise failure
        if error is not None:
            raise GroupError(error)
        return Rendezvous(response.members, response.service, listener=self._join_listener)

    def _tell(self, error: str | None) -> JoinResponse:
        """Send the response to all that came. Where there is a group, the listener and its connections stay open."""
        from dsjax.hosts.join_listener import JoinListener

        with self._changed:
            service = "" if error else joined(self._options.coordinator[0], _free_port(self._options.address))
            response = JoinResponse([self._requests[i] for i in sorted(self._requests)], error, service)
            if error is None:
                self._join_listener = JoinListener(
                    self._options, response, self._prepared[0], self._listener, self._connections
                )
        if error is not None:
            close(self._listener)
        for connection in (*self._connections.values(), *self._strays):
            with contextlib.suppress(OSError):
                send(connection, response)
            if error is not None:
                close(connection)
        return response

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in CLOSED:
                    return
                raise  # as where there are too many open files
            end = lambda error, connection=connection: close(connection)  # noqa: E731
            start_thread("member connection", self._serve, connection, name="dsjax-member", on_failure=end)

    def _serve(self, connection: socket.socket) -> None:
        """Read what one process says. Strangers, who do not begin as our processes do, are ignored."""
        request = None
        try:
            connection.settimeout(_PEEK_SECONDS)
            connection.sendall(MAGIC)
            if exactly(connection, len(MAGIC)) != MAGIC:
                return
            request = receive(connection)
            connection.settimeout(None)
            keep_alive(connection, self._options.heartbeat_timeout)
            if not isinstance(request, JoinRequest):
                return
            greeted = self._greet(request, connection)
            if self._join_listener is not None and not greeted:
                self._join_listener.enter(connection, request)
            elif greeted:
                prepared = receive(connection)
                self._enter(request, prepared if isinstance(prepared, Prepared) else Prepared(error="spoke nonsense"))
                connection.recv(1)  # it says nothing more: this returns when it goes away
                self._lost(request, connection)
        except (OSError, EOFError, msgspec.MsgspecError):
            if isinstance(request, JoinRequest):
                self._lost(request, connection)

    def _greet(self, request: JoinRequest, connection: socket.socket) -> bool:
        here = self._options.num_processes
        with self._changed:
            if self._join_listener is not None:
                return False
            known = self._requests.get(request.process_id)
            if request.num_processes != here:
                self._fail(
                    f"{request.name} has --num-processes {request.num_processes}, process 0 has {here}; give all the same"
                )
            elif not 0 < request.process_id < here:
                self._fail(f"{request.name} came, but ids go from 0 to {here - 1}")
            elif known is not None:
                self._fail(
                    f"{known.name} and another on {request.host}, pid {request.pid}, both have --process-id "
                    f"{request.process_id}; give each its own"
                )
            else:
                self._requests[request.process_id] = request
                self._connections[request.process_id] = connection
                self._changed.notify_all()
                return True
            self._strays.append(connection)
        return False

    def _enter(self, request: JoinRequest, prepared: Prepared) -> None:
        with self._changed:
            self._prepared[request.process_id] = prepared
            if prepared.error is not None:
                self._fail(f"{request.name}: {prepared.error}")
            self._changed.notify_all()

    def _lost(self, request: JoinRequest, connection: socket.socket) -> None:
        if self._join_listener is not None:
            self._join_listener.left(request, connection)
            return
        with self._changed:
            self._fail(f"{request.name} has gone away while the group was forming; its own messages say why")

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._changed.notify_all()

    def _wait(self) -> str | None:
        """Wait until all have come and prepared, or something is wrong; give what."""
        options = self._options
        with self._changed:
            while self._problem is None and len(self._prepared) < options.num_processes:
                rest = None
                if len(self._requests) < options.num_processes:
                    rest = self._deadline - time.monotonic()
                    if rest <= 0:
                        return _missing(options, self._requests)
                self._changed.wait(rest)
            if self._problem is None:
                return _unlike(self._requests, self._prepared) or _on_loopback(self._requests)
            # Whoever is on the way hears of it too, instead of waiting for a process 0 that has ended.
            self._changed.wait_for(lambda: len(self._requests) == options.num_processes, _LINGER_SECONDS)
            return self._problem


def _missing(options: HostOptions, requests: Mapping[int, JoinRequest]) -> str:
    absent = [str(i) for i in range(options.num_processes) if i not in requests]
    here = ", ".join(f"{i} ({requests[i].host})" for i in sorted(requests))
    return (
        f"process{'es' if len(absent) > 1 else ''} {', '.join(absent)} of {options.num_processes} did not come to "
        f"{options.coordinator_text} within {options.start_timeout} s (--start-timeout); here: {here}. Start all with the same "
        "command and --process-id 0, 1, …"
    )


def _unlike(requests: Mapping[int, JoinRequest], prepared: Mapping[int, Prepared]) -> str | None:
    """The first thing that is not the same everywhere."""
    differences = (unlike_first(requests[i], prepared[i], prepared[0]) for i in sorted(prepared))
    return next(filter(None, differences), None)


def unlike_first(request: JoinRequest, prepared: Prepared, first: Prepared) -> str | None:
    """The first thing that a process has otherwise than process 0; None where they are alike."""
    expected, values = first.alike, prepared.alike
    for name in sorted(expected.keys() | values.keys(), key=lambda name: (list(expected) + [name]).index(name)):
        if expected.get(name) != values.get(name):
            return (
                f"{request.name} has {name} {_shown(values.get(name))}, process 0 has {_shown(expected.get(name))}; "
                "start all processes alike"
            )
    return None


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _on_loopback(requests: Mapping[int, JoinRequest]) -> str | None:
    """A process on another machine cannot reach an address that is the loopback interface's."""
    if len({request.machine for request in requests.values()}) == 1:
        return None
    for _, request in sorted(requests.items()):
        if request.address.startswith("127.") or request.address == "::1":
            return (
                f"{request.name} listens at {request.address}, which other hosts cannot reach; give its own --host-address, "
                "or a --coordinator-address that is not the loopback interface's"
            )
    return None


def _listen(options: HostOptions) -> socket.socket:
    port = options.coordinator[1]
    family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.address, port))
        listener.listen(128)
    except OSError as error:
        close(listener)
        raise GroupError(
            f"--coordinator-address: cannot listen at {options.address} port {port}: {error.strerror}; choose another port"
        ) from error
    return listener


def _free_port(address: str) -> int:
    """A port that is free now, for JAX's service."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _attend(options: HostOptions, prepare: Callable[[], Mapping[str, Any]], port: int) -> Rendezvous:
    """Every other process's side."""
    connection, keeping = _connect(options), False
    try:
        send(connection, JoinRequest.of(options, port))
        try:
            prepared_here = Prepared(dict(prepare()))
        except ValueError as error:
            send(connection, Prepared(error=str(error)))
            raise
        send(connection, prepared_here)
        response = receive(connection)
        keeping = isinstance(response, JoinResponse) and response.error is None
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise GroupError(
            f"process 0 at {options.coordinator_text} has gone away while the group was forming; its own messages say why"
        ) from error
    finally:
        if not keeping:
            close(connection)
    assert isinstance(response, JoinResponse)
    if response.error is not None:
        raise GroupError(response.error)
    return Rendezvous(
        response.members, response.service, response.generation, response.here, response.wanted, connection=connection
    )


def _connect(options: HostOptions) -> socket.socket:
    """Reach process 0, which may start later than this process."""
    deadline = time.monotonic() + options.start_timeout
    while True:
        try:
            connection = socket.create_connection(options.coordinator, timeout=_PEEK_SECONDS)
            try:
                connection.sendall(MAGIC)
                if exactly(connection, len(MAGIC)) == MAGIC:
                    connection.settimeout(None)
                    keep_alive(connection, options.heartbeat_timeout)
                    return connection
            except EOFError:
                pass
            close(connection)
            reason = "what answers there is no dsjax that waits for other processes"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise GroupError(
                f"no process 0 at {options.coordinator_text} within {options.start_timeout} s (--start-timeout): {reason}. "
                "Check --coordinator-address, and that --process-id 0 was started there"
            )
        time.sleep(_RETRY_SECONDS)

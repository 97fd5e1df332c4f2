"""The processes of a group find each other, and agree that they were started alike, before JAX joins them.

JAX's coordination service ends a process with a C++ stack trace when another one is missing, has the same id, or cannot be
reached, and tells no names. So process 0 first listens at the coordinator's port itself; the others come there, say what they
are, prepare (a model may have to be downloaded), and get one verdict, the same for all. Then the port is closed, and JAX's
service takes it over.

A connection carries frames: four little-endian bytes of length, then a message in MessagePack; `MAGIC` comes first in both directions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dsjax.errors import UserError
from dsjax.hosts.options import HostOptions

MAGIC = b"dsjaxmt1"
_MOST_BYTES = 1 << 20
_RETRY_SECONDS = 0.1
_PEEK_SECONDS = 10.0
_LINGER_SECONDS = 3.0


class Arrival(msgspec.Struct, frozen=True, tag="arrival"):
    """What a process says when it comes. machine: equal for processes that reach each other over the loopback interface."""

    process_id: int
    num_processes: int
    host: str
    pid: int
    address: str
    machine: str

    @classmethod
    def of(cls, options: HostOptions) -> Arrival:
        """This process."""
        return cls(
            options.process_id, options.num_processes, socket.gethostname(), os.getpid(), options.address, _machine()
        )

    @property
    def name(self) -> str:
        """For messages."""
        return f"process {self.process_id} ({self.host}, pid {self.pid})"


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """What must be alike in all processes, by name as messages have it; or why this process cannot start."""

    alike: dict[str, Any] = {}
    error: str | None = None


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """Who is in the group, or why there is none."""

    members: list[Arrival] = []
    error: str | None = None


Message = Arrival | Prepared | Verdict
_decoder = msgspec.msgpack.Decoder(Message)


class GroupError(UserError):
    """The group cannot be formed, or has broken."""


def meet(options: HostOptions, prepare: Callable[[], Mapping[str, Any]]) -> list[Arrival]:
    """Meet the other processes; give all members in the order of their ids.

    prepare: checks what this process can check alone, and gives what must be alike everywhere. It runs while the others come.

    Raises:
        GroupError: somebody is missing, could not prepare, or was started otherwise: in all processes.
        UserError: this process's own, from `prepare`; the others are told.
    """
    return _Host(options).meet(prepare) if options.is_leader else _attend(options, prepare)


class _Host:
    """Process 0's side: a thread takes connections, one for each reads what comes, and `meet` decides."""

    def __init__(self, options: HostOptions):
        self._options = options
        self._deadline = time.monotonic() + options.start_timeout
        self._changed = threading.Condition()
        self._arrivals: dict[int, Arrival] = {0: Arrival.of(options)}
        self._prepared: dict[int, Prepared] = {}
        self._problem: str | None = None
        self._connections: list[socket.socket] = []
        self._listener = _listen(options)

    def meet(self, prepare: Callable[[], Mapping[str, Any]]) -> list[Arrival]:
        threading.Thread(target=self._accept, name="dsjax-meeting", daemon=True).start()
        failure: UserError | None = None
        error: str | None = None
        try:
            try:
                own = _decoder.decode(msgspec.msgpack.encode(Prepared(dict(prepare()))))  # as the others' come
            except ValueError as caught:  # a UserError or one of the mesh's, which `sharding` has for itself
                failure, own = caught, Prepared(error=str(caught))
            self._enter(self._arrivals[0], own)
            error = self._wait()
        except BaseException as caught:
            error = f"{self._arrivals[0].name} ended while the group was forming ({type(caught).__name__})"
            raise
        finally:
            _close(self._listener)  # before the others go on to JAX's service, which takes the port over
            verdict = Verdict([self._arrivals[i] for i in sorted(self._arrivals)], error)
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    _send(connection, verdict)
                _close(connection)
        if failure is not None:
            raise failure
        if error is not None:
            raise GroupError(error)
        return verdict.members

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Read what one process says. Strangers, who do not begin as our processes do, are ignored."""
        arrival = None
        try:
            connection.settimeout(_PEEK_SECONDS)
            connection.sendall(MAGIC)
            if _exactly(connection, len(MAGIC)) != MAGIC:
                return
            arrival = _receive(connection)
            connection.settimeout(None)
            _keep_alive(connection, self._options.heartbeat_timeout)
            if not isinstance(arrival, Arrival):
                return
            with self._changed:
                self._connections.append(connection)
            if self._greet(arrival):
                prepared = _receive(connection)
                self._enter(arrival, prepared if isinstance(prepared, Prepared) else Prepared(error="spoke nonsense"))
                connection.recv(1)  # it says nothing more: this returns when it goes away
                self._lost(arrival)
        except (OSError, EOFError, msgspec.MsgspecError):
            if isinstance(arrival, Arrival):
                self._lost(arrival)

    def _greet(self, arrival: Arrival) -> bool:
        here = self._options.num_processes
        with self._changed:
            known = self._arrivals.get(arrival.process_id)
            if arrival.num_processes != here:
                self._fail(
                    f"{arrival.name} has --num-processes {arrival.num_processes}, process 0 has {here}; give all the same"
                )
            elif not 0 < arrival.process_id < here:
                self._fail(f"{arrival.name} came, but ids go from 0 to {here - 1}")
            elif known is not None:
                self._fail(
                    f"{known.name} and another on {arrival.host}, pid {arrival.pid}, both have --process-id "
                    f"{arrival.process_id}; give each its own"
                )
            else:
                self._arrivals[arrival.process_id] = arrival
                self._changed.notify_all()
                return True
        return False

    def _enter(self, arrival: Arrival, prepared: Prepared) -> None:
        with self._changed:
            self._prepared[arrival.process_id] = prepared
            if prepared.error is not None:
                self._fail(f"{arrival.name}: {prepared.error}")
            self._changed.notify_all()

    def _lost(self, arrival: Arrival) -> None:
        with self._changed:
            self._fail(f"{arrival.name} has gone away while the group was forming; its own messages say why")

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._changed.notify_all()

    def _wait(self) -> str | None:
        """Wait until all have come and prepared, or something is wrong; give what."""
        options = self._options
        with self._changed:
            while self._problem is None and len(self._prepared) < options.num_processes:
                rest = None
                if len(self._arrivals) < options.num_processes:
                    rest = self._deadline - time.monotonic()
                    if rest <= 0:
                        return _missing(options, self._arrivals)
                self._changed.wait(rest)
            if self._problem is None:
                return _unlike(self._arrivals, self._prepared) or _on_loopback(self._arrivals)
            # Whoever is on the way hears of it too, instead of waiting for a process 0 that has ended.
            self._changed.wait_for(lambda: len(self._arrivals) == options.num_processes, _LINGER_SECONDS)
            return self._problem


def _missing(options: HostOptions, arrivals: Mapping[int, Arrival]) -> str:
    absent = [str(i) for i in range(options.num_processes) if i not in arrivals]
    here = ", ".join(f"{i} ({arrivals[i].host})" for i in sorted(arrivals))
    return (
        f"process{'es' if len(absent) > 1 else ''} {', '.join(absent)} of {options.num_processes} did not come to "
        f"{options.coordinator_text} within {options.start_timeout} s (--start-timeout); here: {here}. Start all with the same "
        "command and --process-id 0, 1, …"
    )


def _unlike(arrivals: Mapping[int, Arrival], prepared: Mapping[int, Prepared]) -> str | None:
    """The first thing that is not the same everywhere."""
    expected = prepared[0].alike
    for process_id in sorted(prepared):
        found = prepared[process_id].alike
        for name in sorted(expected.keys() | found.keys(), key=lambda name: (list(expected) + [name]).index(name)):
            if expected.get(name) != found.get(name):
                return (
                    f"{arrivals[process_id].name} has {name} {_shown(found.get(name))}, process 0 has "
                    f"{_shown(expected.get(name))}; start all processes alike"
                )
    return None


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _on_loopback(arrivals: Mapping[int, Arrival]) -> str | None:
    """A process on another machine cannot reach an address that is the loopback interface's."""
    if len({arrival.machine for arrival in arrivals.values()}) == 1:
        return None
    for _, arrival in sorted(arrivals.items()):
        if arrival.address.startswith("127.") or arrival.address == "::1":
            return (
                f"{arrival.name} listens at {arrival.address}, which other hosts cannot reach; give its own --host-address, "
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
        _close(listener)
        raise GroupError(
            f"--coordinator-address: cannot listen at {options.address} port {port}: {error.strerror}; choose another port"
        ) from error
    return listener


def _attend(options: HostOptions, prepare: Callable[[], Mapping[str, Any]]) -> list[Arrival]:
    """Every other process's side."""
    connection = _connect(options)
    try:
        _send(connection, Arrival.of(options))
        try:
            own = Prepared(dict(prepare()))
        except ValueError as error:
            _send(connection, Prepared(error=str(error)))
            raise
        _send(connection, own)
        verdict = _receive(connection)
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise GroupError(
            f"process 0 at {options.coordinator_text} has gone away while the group was forming; its own messages say why"
        ) from error
    finally:
        _close(connection)
    assert isinstance(verdict, Verdict)
    if verdict.error is not None:
        raise GroupError(verdict.error)
    return verdict.members


def _connect(options: HostOptions) -> socket.socket:
    """Reach process 0, which may start later than this process."""
    deadline = time.monotonic() + options.start_timeout
    while True:
        try:
            connection = socket.create_connection(options.coordinator, timeout=_PEEK_SECONDS)
            try:
                connection.sendall(MAGIC)
                if _exactly(connection, len(MAGIC)) == MAGIC:
                    connection.settimeout(None)
                    _keep_alive(connection, options.heartbeat_timeout)
                    return connection
            except EOFError:
                pass
            _close(connection)
            reason = "what answers there is not a group that forms: it has formed already, or is no dsjax"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise GroupError(
                f"no process 0 at {options.coordinator_text} within {options.start_timeout} s (--start-timeout): {reason}. "
                "Check --coordinator-address, and that --process-id 0 was started there"
            )
        time.sleep(_RETRY_SECONDS)


def _send(connection: socket.socket, message: Message) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def _receive(connection: socket.socket) -> Message:
    length = int.from_bytes(_exactly(connection, 4), "little")
    if length > _MOST_BYTES:
        raise msgspec.DecodeError(f"a message of {length} bytes")
    return _decoder.decode(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _keep_alive(connection: socket.socket, seconds: int) -> None:
    """Have the kernel notice that the other host is gone while both sides are silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", max(1, seconds // 2)), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
    connection.close()


def _machine() -> str:
    """The same for processes that share a loopback interface: this boot of this kernel, and the network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()

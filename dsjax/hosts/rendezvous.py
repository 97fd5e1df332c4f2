"""The processes of a group find each other, and agree that they were started alike, before JAX joins them.

JAX's coordination service ends a process with a C++ stack trace when another one is missing, has the same id, or cannot be
reached, and tells no names. So process 0 listens at the coordinator's port itself; the others come there, say what they
are, prepare (a model may have to be downloaded), and get one response, the same for all: who is there, and where JAX's service will be.

The port stays open and the connections stay too (`dsjax/hosts/join_listener.py`): they show at once that a process has died, and
one that was started again comes in by the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from dsjax.background import note_failure
from dsjax.errors import UserError
from dsjax.messaging.credentials import Credentials
from dsjax.hosts.options import HostOptions, joined, own_address
from dsjax.hosts.secure_channel import NotAMemberError, RefusedError, SecureChannel, closed_on_failure, connect
from dsjax.hosts.secure_listener import MOST_CONNECTIONS, SecureListener, counted
from dsjax.hosts.wire import JoinRequest, JoinResponse, Prepared, decode, encode, receive, send

if TYPE_CHECKING:
    from dsjax.hosts.join_listener import JoinListener

_log = logging.getLogger(__name__)

_SERVICE = "rendezvous"
_RETRY_SECONDS = 0.1
_PEEK_SECONDS = 10.0
_LINGER_SECONDS = 3.0
_MOST_REFUSALS = 16
_FIRST_REPORT_SECONDS, _REPORT_SECONDS = 2.0, 30.0
"""Seconds until process 0 first reports whom it waits for, and between two reports."""


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
    connection: SecureChannel | None = None

    def close(self) -> None:
        """Let nobody in any more."""
        if self.listener is not None:
            self.listener.close()
        if self.connection is not None:
            self.connection.close()


def meet(
    options: HostOptions,
    prepare: Callable[[], Mapping[str, Any]],
    port: int = 0,
    credentials: Credentials | None = None,
) -> Rendezvous:
    """Meet the other processes.

    A process that belongs to the deployment, and cannot be in this group as it was started, is refused alone, and the group goes on
    forming; process 0 logs it, and names it where the group does not form.

    prepare: checks what this process can check alone, and gives what must be alike everywhere. It runs while the others come. port: as of
    `JoinRequest`. credentials: of the deployment; None: as the options have them.

    Raises:
        GroupError: somebody is missing, could not prepare, or was started otherwise: in all processes.
        UserError: this process's own, from `prepare`; the others are told.
    """
    credentials = credentials or options.read_credentials()
    if options.is_leader:
        return _Host(options, port, credentials).meet(prepare)
    return _attend(options, prepare, port, credentials)


def located(options: HostOptions) -> HostOptions:
    """Wait until the coordinator's name is known, where it was not when options were read, and find this host's address on the way there.

    Raises:
        GroupError: it is not known within the time to start.
    """
    deadline = time.monotonic() + options.start_timeout
    while not options.address:
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise GroupError(
                f"the name of process 0, {options.coordinator[0]!r}, is not known to this host after {options.start_timeout} s "
                "(--start-timeout); check --coordinator-address"
            )
        time.sleep(_RETRY_SECONDS)
        options = dataclasses.replace(options, address=own_address(options.coordinator, options.process_id, None))
    return options


class _Host:
    """Process 0's side: a thread takes connections, one for each reads what comes, and `meet` decides."""

    def __init__(self, options: HostOptions, port: int, credentials: Credentials):
        self._options = options
        self._deadline = time.monotonic() + options.start_timeout
        self._changed = threading.Condition()
        self._requests: dict[int, JoinRequest] = {0: JoinRequest.of(options, port)}
        self._prepared: dict[int, Prepared] = {}
        self._problem: str | None = None
        self._channels: dict[int, SecureChannel] = {}
        self._refusals: dict[str, None] = {}  # in the order in which they came
        self._join_listener: JoinListener | None = None
        self._listener = SecureListener(
            _bound(options),
            credentials,
            {_SERVICE: self._serve},
            "dsjax-rendezvous",
            most_connections=max(MOST_CONNECTIONS, 2 * options.num_processes),
        )

    def meet(self, prepare: Callable[[], Mapping[str, Any]]) -> Rendezvous:
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
                    self._options, response, self._prepared[0], self._listener, self._channels
                )
        if error is not None:
            self._listener.close()
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                send(channel, response)
            if error is not None:
                channel.close()
        return response

    def _serve(self, channel: SecureChannel) -> None:
        """Read what one process of the deployment says."""
        request = None
        try:
            channel.settimeout(_PEEK_SECONDS)
            request = receive(channel)
            channel.settimeout(None)
            channel.keep_alive(self._options.heartbeat_timeout)
            if not isinstance(request, JoinRequest):
                channel.close()
                return
            refusal = self._greet(request, channel)
            if self._join_listener is not None and self._channels.get(request.process_id) is not channel:
                self._join_listener.enter(channel, request)
            elif refusal is not None:
                self._refuse(refusal, channel)
            else:
                prepared = receive(channel)
                self._enter(request, prepared if isinstance(prepared, Prepared) else Prepared(error="spoke nonsense"))
                channel.wait_for_end()
                self._lost(request, channel)
        except Exception as error:
            if not isinstance(error, (OSError, EOFError, msgspec.MsgspecError)):
                note_failure("connection", error, "The process must come again.")
            channel.close()
            if isinstance(request, JoinRequest):
                self._lost(request, channel)

    def _greet(self, request: JoinRequest, channel: SecureChannel) -> str | None:
        """Take a process into the group that is forming, or say why it cannot be in it. Once the group has formed, do nothing."""
        here = self._options.num_processes
        with self._changed:
            if self._join_listener is not None:
                return None
            known = self._requests.get(request.process_id)
            refusal = why_no_place(request, here)
            if refusal is None and known is not None:
                refusal = (
                    f"{known.name} and another on {request.host}, pid {request.pid}, both have --process-id "
                    f"{request.process_id}; give each its own"
                )
            if refusal is None:
                self._requests[request.process_id] = request
                self._channels[request.process_id] = channel
            else:
                if len(self._refusals) < _MOST_REFUSALS:
                    self._refusals[refusal] = None
                _log.warning("A process was refused, and the group goes on forming: %s", refusal)
            self._changed.notify_all()
            return refusal

    def _refuse(self, refusal: str, channel: SecureChannel) -> None:
        """Tell a process why it cannot be in the group. It reads an answer only when it has prepared."""
        receive(channel)
        send(channel, JoinResponse(error=refusal))
        channel.close()

    def _enter(self, request: JoinRequest, prepared: Prepared) -> None:
        with self._changed:
            self._prepared[request.process_id] = prepared
            if prepared.error is not None:
                self._fail(f"{request.name}: {prepared.error}")
            self._changed.notify_all()

    def _lost(self, request: JoinRequest, channel: SecureChannel) -> None:
        if self._join_listener is not None:
            self._join_listener.left(request, channel)
            return
        with self._changed:
            if self._channels.get(request.process_id) is channel:
                self._fail(f"{request.name} has gone away while the group was forming; its own messages say why")

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._changed.notify_all()

    def _wait(self) -> str | None:
        """Wait until all have come and prepared, or something is wrong; give what."""
        options = self._options
        report = time.monotonic() + _FIRST_REPORT_SECONDS
        with self._changed:
            while self._problem is None and len(self._prepared) < options.num_processes:
                now = time.monotonic()
                if len(self._requests) < options.num_processes and now >= self._deadline:
                    return _missing(options, self._requests) + self._others()
                if now >= report:
                    _log.warning("%s", _waited_for(options, self._requests, self._prepared))
                    report = now + _REPORT_SECONDS
                self._changed.wait(min(report, self._deadline if now < self._deadline else report) - now)
            if self._problem is None:
                return _unlike(self._requests, self._prepared) or _on_loopback(self._requests)
            # Whoever is on the way hears of it too, instead of waiting for a process 0 that has ended.
            self._changed.wait_for(lambda: len(self._requests) == options.num_processes, _LINGER_SECONDS)
            return self._problem

    def _others(self) -> str:
        """Who came and was not let in, for the message that somebody is missing."""
        lines = [f". Refused: {refusal}" for refusal in self._refusals]
        if strangers := self._listener.turned_away:
            lines.append(f". Connections that were turned away: {counted(strangers)}")
        return "".join(lines)


def _waited_for(options: HostOptions, requests: Mapping[int, JoinRequest], prepared: Mapping[int, Prepared]) -> str:
    """Whom process 0 waits for, and who has come."""
    absent = [i for i in range(options.num_processes) if i not in requests]
    if not absent:
        slow = ", ".join(requests[i].name for i in sorted(requests) if i not in prepared)
        return f"All {options.num_processes} processes have come. Waiting until these have checked their options and model: {slow}"
    here = ", ".join(f"{i} ({requests[i].host})" for i in sorted(requests))
    return (
        f"Waiting at {options.coordinator_text} for process{'es' if len(absent) > 1 else ''} {', '.join(map(str, absent))} of "
        f"{options.num_processes}; here: {here}"
    )


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


def why_no_place(request: JoinRequest, num_processes: int) -> str | None:
    """Why a group of so many processes has no place for one that was started otherwise; None: it has."""
    if request.num_processes != num_processes:
        return f"{request.name} has --num-processes {request.num_processes}, process 0 has {num_processes}; give all the same"
    if not 0 < request.process_id < num_processes:
        return f"{request.name} came, but ids go from 0 to {num_processes - 1}"
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


def _bound(options: HostOptions) -> socket.socket:
    """A socket at the coordinator's port."""
    port = options.coordinator[1]
    family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise GroupError(
            f"--coordinator-address: cannot listen at {options.address} port {port}: {error.strerror}; choose another port"
        ) from error
    return listener


def _free_port(address: str) -> int:
    """A port that is free now, for JAX's service."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _attend(
    options: HostOptions, prepare: Callable[[], Mapping[str, Any]], port: int, credentials: Credentials
) -> Rendezvous:
    """Every other process's side."""
    channel, keeping = _connect(options, credentials), False
    try:
        send(channel, JoinRequest.of(options, port))
        try:
            prepared_here = Prepared(dict(prepare()))
        except ValueError as error:
            send(channel, Prepared(error=str(error)))
            raise
        send(channel, prepared_here)
        response = receive(channel)
        keeping = isinstance(response, JoinResponse) and response.error is None
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise GroupError(
            f"process 0 at {options.coordinator_text} has gone away while the group was forming; its own messages say why"
        ) from error
    finally:
        if not keeping:
            channel.close()
    assert isinstance(response, JoinResponse)
    if response.error is not None:
        raise GroupError(response.error)
    return Rendezvous(
        response.members, response.service, response.generation, response.here, response.wanted, connection=channel
    )


def _connect(options: HostOptions, credentials: Credentials) -> SecureChannel:
    """Reach process 0, which may start later than this process."""
    deadline = time.monotonic() + options.start_timeout
    while True:
        try:
            with closed_on_failure(connect(options.coordinator, _SERVICE, credentials, _PEEK_SECONDS)) as channel:
                channel.keep_alive(options.heartbeat_timeout)
            return channel
        except (NotAMemberError, RefusedError) as error:
            raise GroupError(f"no group at {options.coordinator_text}: {error}") from error
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise GroupError(
                f"no process 0 at {options.coordinator_text} within {options.start_timeout} s (--start-timeout): {reason}. "
                "Check --coordinator-address, and that --process-id 0 was started there"
            )
        time.sleep(_RETRY_SECONDS)

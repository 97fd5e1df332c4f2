"""Rendezvous: the processes of a group find each other and check that they were started alike, before JAX connects them.

JAX's coordination service ends a process with a C++ stack trace if another one is missing, has the same id or is unreachable. Therefore
process 0 listens on the coordinator's port first. The others connect, identify themselves, prepare (which may download a model), and all
get the same response: the members and the address of JAX's service.

The `Door` stays open while the group lives: its connections detect dead processes, and restarted processes rejoin through it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dsjax.addresses import join_address
from dsjax.background import start_thread
from dsjax.errors import UserError
from dsjax.hosts import coordination
from dsjax.hosts.membership import GroupError, Membership
from dsjax.hosts.options import HostOptions, own_address
from dsjax.hosts.wire import (
    JoinRequest,
    JoinResponse,
    Prepared,
    first_mismatch,
    id_error,
    loopback_error,
    mismatch,
    timeout_message,
    waiting_message,
)
from dsjax.messaging import Endpoint, NotAMemberError, Peer, PeerLostError, RefusedError, Request
from dsjax.messaging.endpoint import counted

_log = logging.getLogger(__name__)

_JOIN, _PREPARED, READY = "join", "prepared", "ready"
SERVICES = (_JOIN, _PREPARED, READY, "gather", "leave", "log")
"""Services of process 0. Requests for them wait while process 0 still sets up the group."""
_RETRY_SECONDS = 0.1
_CONNECT_SECONDS = 10.0
_LINGER_SECONDS = 3.0  # for late processes, after an error
_MOST_REFUSALS = 16
_FIRST_REPORT_SECONDS, _REPORT_SECONDS = 2.0, 30.0
"""Seconds until process 0 first reports the missing processes, and between two reports."""


def open_endpoint(options: HostOptions) -> Endpoint:
    """Open this process's endpoint, in process 0 on the coordinator's port; raise `GroupError` or `UserError` if that fails."""
    port = options.coordinator[1] if options.is_leader else 0
    try:
        holds = SERVICES if options.is_leader else ()
        return Endpoint(options.address, options.credentials, port=port, silence=options.heartbeat_timeout, holds=holds)
    except OSError as error:
        advice = "choose another port" if options.is_leader else "give another --host-address"
        flag = "--coordinator-address" if options.is_leader else "--host-address"
        raise GroupError(
            f"{flag}: cannot listen at {options.address} port {port}: {error.strerror}; {advice}"
        ) from error


def with_own_address(options: HostOptions) -> HostOptions:
    """Wait until the coordinator's name resolves, and set this host's address on the route to it; raise `GroupError` on timeout."""
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


@dataclasses.dataclass(eq=False)
class _Caller:
    """A connected process."""

    member: JoinRequest
    join: Request  # its request to join, answered when it is admitted or refused
    prepared: Prepared | None = None  # None until it has prepared
    is_admitted: bool = False

    @property
    def peer(self) -> Peer:
        """Connection to the process, open as long as it lives."""
        return self.join.peer


class Door:
    """Process 0's side of the rendezvous: it admits processes while the group forms, and restarted ones while the group lives.

    A process whose id or `--num-processes` does not fit is refused alone, and the group continues to form. If no group forms, process 0's
    error names that process.

    log: `HOST:PORT` of the broadcast log. wanted: the last requested mesh, for a process that rejoins. service: JAX's coordination service.
    """

    def __init__(self, options: HostOptions, endpoint: Endpoint, log: str):
        self._options, self._endpoint, self._log_address = options, endpoint, log
        self._deadline = time.monotonic() + options.start_timeout
        own = JoinRequest.of(options, endpoint.port)
        self._membership = Membership(0, [own])
        self._changed = self._membership.changed  # guards this object's state
        self._callers: dict[int, _Caller] = {}
        self._own_member = own
        self._own_prepared = Prepared()
        self._is_prepared = self._has_formed = self.is_closing = False
        self._problem: str | None = None  # the first error
        self._refusals: dict[str, None] = {}  # reasons, in order of arrival
        self.service: Any = None
        self.wanted = self._service_address = ""
        self._on_left: Callable[[JoinRequest], object] = lambda member: None
        self._on_return: Callable[[], object] = lambda: None
        for name, handler, kind in (
            (_JOIN, self._join, JoinRequest),
            (_PREPARED, self._prepare, Prepared),
            (READY, self._ready, None),
        ):
            endpoint.serve(name, handler, roles=("member",), kind=kind)

    def meet(self, prepare: Callable[[], Mapping[str, Any]]) -> JoinResponse:
        """Form the group.

        prepare: runs process 0's local checks while the others connect. Returns the values that must be equal in all processes.

        Raises:
            GroupError: in all processes, if one is missing, could not prepare or has other values. UserError: from `prepare`.
        """
        own_failure: UserError | None = None
        problem: str | None = None
        try:
            try:
                prepared = Prepared(dict(prepare()))
            except ValueError as caught:  # a UserError, or an error of the mesh, which `sharding` defines itself
                own_failure = caught
                prepared = Prepared(error=str(caught))
            with self._changed:
                self._own_prepared = msgspec.msgpack.decode(  # like values that arrive by message
                    msgspec.msgpack.encode(prepared), type=Prepared
                )
                self._is_prepared = True
                if prepared.error is not None:
                    self._fail(f"{self._own_member.name}: {prepared.error}")
            problem = self._wait_for_all()
            if problem is None:
                self.service, self._service_address = coordination.start_service(self._options)
        except BaseException as caught:
            problem = f"{self._own_member.name} ended while the group was forming ({type(caught).__name__})"
            raise
        finally:
            response, problem = self._answer_all(problem)  # so that no process waits in vain
        if problem is not None and self.service is not None:
            self.service.shutdown()
        if own_failure is not None:
            raise own_failure
        if problem is not None:
            raise GroupError(problem)
        return response

    def open(
        self, membership: Membership, on_left: Callable[[JoinRequest], object], on_return: Callable[[], object]
    ) -> None:
        """From now on, report lost members of the formed group and let restarted processes rejoin.

        on_left: called with a member whose connection has ended. on_return: called when a process has rejoined or failed to.
        """
        with self._changed:
            self._membership, self._on_left, self._on_return = membership, on_left, on_return
            connected = [caller.member for caller in self._callers.values() if caller.is_admitted]
            disconnected = [member for member in membership.members[1:] if member not in connected]
        for member in disconnected:
            on_left(member)

    def member_of(self, peer: Peer) -> JoinRequest | None:
        """Return the member of a connection; None if there is no such process or it is still rejoining."""
        caller = self._caller_of(peer)
        return caller.member if caller is not None and caller.is_admitted else None

    def peer_of(self, process_id: int) -> Peer | None:
        """Return the connection to a member, or None if it has ended."""
        caller = self._callers.get(process_id)
        return None if caller is None or not caller.is_admitted else caller.peer

    def drop(self, process_id: int) -> None:
        """Close the connection to a process, which must then rejoin."""
        caller = self._callers.get(process_id)
        if caller is not None:
            caller.peer.close()

    def wait_until_alone(self, seconds: float) -> None:
        """Wait until all other processes have disconnected."""
        with self._changed:
            self._changed.wait_for(lambda: not self._callers, seconds)

    # Called in the messaging thread:

    def _caller_of(self, peer: Peer) -> _Caller | None:
        return next((caller for caller in self._callers.values() if caller.peer is peer), None)

    def _join(self, request: Request) -> None:
        """Register a process or refuse it. If the group has formed, the process is rejoining."""
        member: JoinRequest = request.body
        caller = _Caller(member, request)
        with self._changed:
            refusal = id_error(member, self._options.num_processes) or self._why_id_is_taken(member)
            if self.is_closing:
                refusal = self._problem or "process 0 is ending the group; start all processes again"
            if refusal is None:
                self._callers[member.process_id] = caller
            elif not self._has_formed:
                if len(self._refusals) < _MOST_REFUSALS:
                    self._refusals[refusal] = None
                _log.warning("A process was refused, and the group goes on forming: %s", refusal)
            self._changed.notify_all()
        if refusal is not None:
            request.refuse(refusal)
        else:
            request.peer.on_lost(lambda: self._on_disconnect(caller))

    def _why_id_is_taken(self, member: JoinRequest) -> str | None:
        """Return why a process cannot have its id: another process has it. Return None if none does."""
        holder = self._callers.get(member.process_id)
        if holder is not None and self._endpoint.has_disconnected(holder.peer):  # its loss is not handled yet
            self._on_disconnect(holder)
            holder = self._callers.get(member.process_id)
        if holder is None:
            return None
        other = f"another on {member.host}, pid {member.pid}"
        if not self._has_formed:
            return f"{holder.member.name} and {other}, both have --process-id {member.process_id}; give each its own"
        state = "is in the group" if holder.is_admitted else "is coming back to the group"
        return f"{holder.member.name} {state}, and {other}, has its --process-id {member.process_id}; give each its own"

    def _prepare(self, request: Request) -> None:
        """Record whether a process could prepare. If the group has formed, let the process rejoin."""
        caller = self._caller_of(request.peer)
        if caller is None or caller.prepared is not None:
            return
        with self._changed:
            caller.prepared = request.body
            self._changed.notify_all()
            if not self._has_formed:
                if caller.prepared.error is not None:
                    self._fail(f"{caller.member.name}: {caller.prepared.error}")
                return
        if caller.prepared.error is not None:
            return  # it cannot start and logs the reason itself
        refusal = mismatch(caller.member, caller.prepared, self._own_prepared)
        if refusal is not None:
            caller.join.refuse(refusal)
            caller.peer.close()
            return
        start_thread(
            "welcome", self._welcome, caller, name="dsjax-welcome", on_failure=lambda error: caller.peer.close()
        )

    def _ready(self, request: Request) -> None:
        """Admit a rejoining process: it has joined JAX and its programs are ready, so it will not delay the next mesh epoch."""
        caller = self._caller_of(request.peer)
        if caller is not None and self._has_formed and not caller.is_admitted:
            caller.is_admitted = True
            self._membership.replace(caller.member)
            self._notify_return()

    def _on_disconnect(self, caller: _Caller) -> None:
        """Handle the end of the connection to a process."""
        with self._changed:
            if self._callers.get(caller.member.process_id) is not caller:
                return
            if not self._has_formed:
                self._fail(f"{caller.member.name} has gone away while the group was forming; its own messages say why")
                return
            del self._callers[caller.member.process_id]
            self._changed.notify_all()
        if caller.is_admitted:
            self._on_left(caller.member)
        else:
            self._notify_return()

    def _notify_return(self) -> None:
        """Call `on_return`, unless other processes are about to rejoin, so that the mesh changes once for all of them.

        Do not wait for processes that have not prepared, which may still be downloading the model.
        """
        if all(caller.is_admitted or caller.prepared is None for caller in self._callers.values()):
            self._on_return()

    # Called in other threads:

    def _welcome(self, caller: _Caller) -> None:
        """Wait until JAX has forgotten the previous process with this id, then let the new one join."""
        coordination.wait_until_forgotten(caller.member.process_id)
        with self._changed:
            membership = self._membership
            live_ids = [0, *sorted(process_id for process_id, other in self._callers.items() if other.is_admitted)]
            members = list(membership.members)
            epoch = membership.epoch + 1
        caller.join.reply(JoinResponse(members, self._service_address, self._log_address, epoch, live_ids, self.wanted))

    def _answer_all(self, error: str | None) -> tuple[JoinResponse, str | None]:
        """Answer all connected processes with the group or the error. Return both; a process lost at the last moment is an error too."""
        with self._changed:
            error = error or self._problem
            callers = [self._callers[number] for number in sorted(self._callers)]
            response = JoinResponse(
                [self._own_member, *(caller.member for caller in callers)], self._service_address, self._log_address
            )
            self._has_formed = error is None
            self.is_closing = error is not None
            self._problem = self._problem or error
            for caller in callers:
                caller.is_admitted = error is None
                if error is None:
                    caller.join.reply(response)
                else:
                    caller.join.refuse(error)
        return response, error

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._changed.notify_all()

    def _wait_for_all(self) -> str | None:
        """Wait until all processes have connected and prepared. Return the error, if any."""
        options = self._options
        next_report = time.monotonic() + _FIRST_REPORT_SECONDS
        with self._changed:
            while self._problem is None and len(self._all_prepared) < options.num_processes:
                now = time.monotonic()
                requests = self._requests
                if len(requests) < options.num_processes and now >= self._deadline:
                    return timeout_message(options, requests) + self._describe_refused()
                if now >= next_report:
                    _log.warning("%s", waiting_message(options, requests, self._all_prepared))
                    next_report = now + _REPORT_SECONDS
                self._changed.wait(min(next_report, self._deadline if now < self._deadline else next_report) - now)
            if self._problem is None:
                return first_mismatch(self._requests, self._all_prepared) or loopback_error(self._requests)
            # Linger, so that late processes get the error too instead of waiting for a process 0 that has ended.
            self._changed.wait_for(lambda: len(self._requests) == options.num_processes, _LINGER_SECONDS)
            return self._problem

    @property
    def _requests(self) -> dict[int, JoinRequest]:
        return {0: self._own_member} | {number: caller.member for number, caller in self._callers.items()}

    @property
    def _all_prepared(self) -> dict[int, Prepared]:
        prepared = {number: caller.prepared for number, caller in self._callers.items() if caller.prepared is not None}
        return ({0: self._own_prepared} if self._is_prepared else {}) | prepared

    def _describe_refused(self) -> str:
        """List refused processes and connections, for the error about missing processes."""
        lines = [f". Refused: {refusal}" for refusal in self._refusals]
        if strangers := self._endpoint.turned_away:
            lines.append(f". Connections that were turned away: {counted(strangers)}")
        return "".join(lines)


def join_leader(
    options: HostOptions, endpoint: Endpoint, prepare: Callable[[], Mapping[str, Any]]
) -> tuple[JoinResponse, Peer]:
    """Join the group at process 0. Return the group and the connection. prepare: as in `Door.meet`, for this process.

    Raises:
        GroupError: see `Door.meet`. UserError: from this process's `prepare`; also reported to the other processes.
    """
    leader = _connect(options, endpoint)
    pending_response = leader.request(_JOIN, JoinRequest.of(options, endpoint.port), kind=JoinResponse)
    try:
        try:
            prepared = Prepared(dict(prepare()))
        except ValueError as error:
            leader.send(_PREPARED, Prepared(error=str(error)))
            raise
        leader.send(_PREPARED, prepared)
        return pending_response.result(), leader
    except RefusedError as error:
        raise GroupError(str(error)) from error
    except PeerLostError as error:
        raise GroupError(
            f"process 0 at {options.coordinator_text} has gone away while the group was forming; its own messages say why"
        ) from error


def _connect(options: HostOptions, endpoint: Endpoint) -> Peer:
    """Connect to process 0, which may start later than this process."""
    deadline = time.monotonic() + options.start_timeout
    while True:
        try:
            return endpoint.connect(join_address(*options.coordinator), "member", _CONNECT_SECONDS)
        except NotAMemberError as error:
            raise GroupError(f"no group at {options.coordinator_text}: {error}") from error
        except PeerLostError as error:
            reason = str(error)
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise GroupError(
                f"no process 0 at {options.coordinator_text} within {options.start_timeout} s (--start-timeout): {reason}. "
                "Check --coordinator-address, and that --process-id 0 was started there"
            )
        time.sleep(_RETRY_SECONDS)

"""`HostGroup`: this process's membership in a started group: connections, command log and mesh epochs."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dsjax.addresses import join_address
from dsjax.background import contained
from dsjax.hosts import coordination
from dsjax.hosts.agreement import Agreement
from dsjax.hosts.gloo.collectives import Collectives
from dsjax.hosts.links import Links
from dsjax.hosts.membership import GroupError, Membership
from dsjax.hosts.options import HostOptions
from dsjax.hosts.rendezvous import READY, Door, join_leader, open_endpoint, with_own_address
from dsjax.hosts.wire import Announcement, JoinRequest, JoinResponse
from dsjax.messaging import Endpoint, Link, NotAMemberError, Peer, PeerLostError, Request
from dsjax.messaging.broadcast import BroadcastLog, LogReader

__all__ = ["GroupError", "HostGroup"]

EpochMessage = bytes | Announcement
"""A message of a mesh epoch: a command, or the announcement that ends it."""

_LEAVE = "leave"
_ANNOUNCEMENT, _COMMAND = b"a", b"c"
_DETECTION_SECONDS = 1.0
_LEAVE_SECONDS = 10.0
_GRACE_SECONDS = 3.0
"""Seconds in which waiting Python threads can report a loss before this process ends. JAX aborts a process three seconds later."""
_LEAVE_BATCH_SECONDS = 0.5
"""Requests to leave that arrive within so many seconds share one mesh change."""


class HostGroup(Membership):
    """A complete group of processes, as seen by this one. `start` joins it; `leave` leaves it, and also runs when Python exits.

    A process is lost when its connection to process 0 ends or is silent for the heartbeat timeout; compiling, loading or a long
    step never counts as silence. Process 0 then announces a new mesh epoch, for which the others wait. If process 0 is lost, all end.

    Args:
        door, log: in process 0, admits the other processes, and broadcasts announcements and commands to them.
        leader: in the other processes, the connection to process 0.
        response: process 0's response to all processes, or to this process alone if the group had already formed.

    Raises:
        GroupError: process 0 is already lost.

    Attributes:
        on_change: in process 0: called in another thread when a member is lost (with the error), has returned or asks to leave (None).
        has_ended: whether process 0 has announced the end of the group.
        agreement: all-gather over the processes of the mesh epoch.
        collectives: this process's connections for collectives.
        links: the other processes that this one reaches, and the state of the links to them.
    """

    def __init__(
        self,
        options: HostOptions,
        response: JoinResponse,
        endpoint: Endpoint,
        *,
        door: Door | None = None,
        log: BroadcastLog | None = None,
        leader: Peer | None = None,
    ):
        super().__init__(options.process_id, response.members)
        self.options, self.endpoint, self.leader = options, endpoint, leader
        endpoint.is_shared = True
        self.epoch = response.epoch
        self.wanted = response.wanted
        self._response = response
        self._door, self._log = door, log
        self.on_change: Callable[[GroupError | None], None] | None = None
        self.on_end: Callable[[], object] = lambda: None
        self.agreement = Agreement(self, endpoint, leader, door.member_of if door is not None else lambda peer: None)
        self.collectives = Collectives()
        peer_of = door.peer_of if door is not None else lambda process_id: None
        self.links = Links(self, endpoint, self.collectives.cut, peer_of)
        self._inboxes: dict[int, queue.SimpleQueue[EpochMessage]] = {}
        if response.epoch == 0:
            self._inboxes[0] = queue.SimpleQueue()  # all processes are in the first mesh epoch
        self._announced: queue.SimpleQueue[Announcement] = queue.SimpleQueue()
        self._latest_epoch = response.epoch - 1
        self._why_ended = None
        self.has_ended = False
        self._leave_requests: dict[JoinRequest, Request] = {}
        self._leave_timer: threading.Timer | None = None
        if door is not None:
            endpoint.serve(_LEAVE, self._receive_leave_request, roles=("member",), kind=None)
            door.open(self, self._on_disconnect, self._notify_change)
        else:
            on_log_failure = lambda error: self._on_disconnect(self.members[0])  # noqa: E731
            name = JoinRequest.of(options, endpoint.port).identity.encode()
            try:
                self._reader = LogReader(endpoint, leader, response.log, name, self._receive_entry, on_log_failure)
            except BaseException as error:
                self.leaving = True  # the caller gets this error
                if isinstance(error, PeerLostError):
                    raise GroupError(f"the group of {self.members[0].name} cannot be followed: {error}") from error
                raise
            leader.on_lost(lambda: self._on_disconnect(self.members[0]))

    @classmethod
    def start(cls, options: HostOptions, prepare: Callable[[], Mapping[str, Any]]) -> HostGroup:
        """Join the other processes (see `Door.meet`). JAX must not have started.

        A process that rejoins a group, with the id of a lost process, is in no mesh epoch until one is announced that includes it.

        Raises:
            GroupError, UserError: no group forms (see `Door.meet`), or the link between two of its processes is broken.
        """
        options = with_own_address(options)
        with contextlib.ExitStack() as on_failure:  # closes the port
            endpoint = open_endpoint(options)
            on_failure.callback(endpoint.close, linger=1.0)
            if options.is_leader:
                log = BroadcastLog(endpoint)
                door = Door(options, endpoint, log.address)
                group = cls(options, door.meet(prepare), endpoint, door=door, log=log)
            else:
                response, leader = join_leader(options, endpoint, prepare)
                group = cls(options, response, endpoint, leader=leader)
            on_failure.callback(setattr, group, "leaving", True)  # a failed start has lost no member
            group._join()
            on_failure.pop_all()
        return group

    def _join(self) -> None:
        """Start JAX with the devices of the group."""
        options, response = self.options, self._response
        if response.epoch > 0:
            self.links.check(response.live_ids)
        if not self.is_leader:
            coordination.delay_aborts()
        service = self._door.service if self._door is not None else None
        coordination.join(options, response.service, self.collectives, service)
        if options.link_monitor_interval:
            self.links.watch(options.link_monitor_interval)
        atexit.register(self.leave)
        if response.epoch == 0:
            self.agreement.run("links", lambda: self.links.check([member.process_id for member in self.members]))

    # Mesh epochs.

    def announce(self, announcement: Announcement) -> None:
        """Begin a mesh epoch and announce it to all other processes (process 0 only)."""
        if self._door is not None:
            self._door.wanted = announcement.wanted
        self.enter(announcement.number, announcement.process_ids)
        self.agreement.begin_epoch()
        announcement = msgspec.structs.replace(announcement, members=self.members, live_ids=self.live_ids)
        self._log.append(announcement.number, _ANNOUNCEMENT + msgspec.msgpack.encode(announcement))

    def begin(self, announcement: Announcement) -> None:
        """Enter a mesh epoch that process 0 has announced."""
        with self.changed:
            self._inboxes = {number: inbox for number, inbox in self._inboxes.items() if number >= announcement.number}
        self.enter(announcement.number, announcement.process_ids, announcement.live_ids)
        self.agreement.begin_epoch()

    def command(self, epoch: int, data: bytes) -> None:
        """Send a command to all other processes of a mesh epoch, in order (process 0 only)."""
        self._log.append(epoch, _COMMAND + data)

    def commands(self, number: int) -> queue.SimpleQueue[EpochMessage]:
        """Return the queue of process 0's commands to a mesh epoch that has begun."""
        with self.changed:
            return self._inboxes[number]

    def next_announcement(self, seconds: float | None = None) -> Announcement | None:
        """Wait for the latest announcement that was not yet returned; return None on timeout."""
        try:
            announcement = self._announced.get(timeout=seconds)
        except queue.Empty:
            return None
        while not self._announced.empty():  # skip epochs that failed before this process reached them
            announcement = self._announced.get()
        return announcement

    @property
    def is_superseded(self) -> bool:
        """Whether a newer mesh epoch than the current one was announced."""
        return self._latest_epoch > self.epoch

    def connect(self, device_ids: Sequence[int]) -> None:
        """Exchange the endpoints for collectives with all processes of the mesh epoch. device_ids: of its mesh, in order."""
        endpoints = self.agreement.all_gather("collectives", self.collectives.endpoint)
        self.collectives.begin(self.epoch, device_ids, endpoints)

    def link_to(self, process_id: int, listener: tuple[str, bytes], name: str, *, encrypted: bool = False) -> Link:
        """Connect to a `LinkListener` of another process. listener: its address and ticket. name, encrypted: see `Link`.

        Raises:
            GroupError: a process of the mesh epoch is gone, or the listener cannot be reached.
        """
        address, ticket = listener
        try:
            return Link(self.endpoint, address, ticket, name, encrypted=encrypted)
        except (PeerLostError, NotAMemberError) as error:
            self.check(error)
            raise GroupError(
                f"{self.member(process_id).name} cannot be reached at {address}, where it takes what this process sends ({error}); see "
                "that hosts let each other in at every port"
            ) from error

    def check_epoch(self, number: int, doing: str) -> None:
        """Raise a `GroupError` if a mesh epoch has failed or has been superseded. doing: what the caller does, for the message."""
        self.check()
        if 0 in self.lost:
            raise self.lost[0]
        if self._why_ended is not None:
            raise GroupError(f"process 0 has ended the group: {self._why_ended}; its own messages say more")
        if self._latest_epoch > number or self.epoch != number:
            raise GroupError(f"mesh epoch {number} was abandoned while {doing}")

    def _receive_entry(self, epoch: int, body: bytes) -> None:
        """Handle a command or an announcement from process 0's log, in the messaging thread."""
        if body[:1] == _COMMAND:
            with self.changed:
                inbox = self._inboxes.get(epoch)
            if inbox is not None:
                inbox.put(body[1:])
            return
        announcement = msgspec.msgpack.decode(body[1:], type=Announcement)
        if announcement.ended:
            self.has_ended = True
            self._why_ended = announcement.reason or None
        else:
            self._latest_epoch = announcement.number
        if announcement.members:
            self.members = announcement.members
        if announcement.broken is not None:
            with contained("messaging", "A collective that has broken is waited for until its own limit."):
                self.collectives.cut(announcement.broken)
        with self.changed:
            for inbox in self._inboxes.values():
                inbox.put(announcement)
            if self._own_id in announcement.process_ids:
                self._inboxes[announcement.number] = queue.SimpleQueue()
        self._announced.put(announcement)  # last, because the receiver then calls `commands`
        if announcement.ended:
            self.on_end()

    # Lost, leaving and returning members.

    def replace(self, member: JoinRequest) -> None:
        """Accept a process that has rejoined with the id of a lost process, and end the exclusion that the lost one may have had."""
        super().replace(member)
        self.links.left_out.pop(member.process_id, None)

    def find_loss(self, seconds: float | None = None) -> GroupError | None:
        """Return the error of the first lost member; None if no member is lost.

        seconds: how long to wait for a loss to be detected. None: long enough to detect that a process hangs.
        """
        if self.leaving:
            return None
        seconds = self.options.heartbeat_timeout + 2 * _DETECTION_SECONDS if seconds is None else seconds
        deadline = time.monotonic() + seconds
        with self.changed:
            while True:
                try:
                    self.check()
                except GroupError as error:
                    return error
                if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                    return None

    def lose(self, member: JoinRequest, error: GroupError | None = None) -> GroupError | None:
        """Record that a member is lost and continue without it. If this process cannot continue, end it."""
        error = super().lose(member, error)
        if error is None or self.leaving:
            return error
        if any(present_member.process_id == member.process_id for present_member in self.present):
            self.agreement.fail_pending(error)
            # A thread may be waiting in a collective for that process, or for another process that is.
            with contained("messaging", "A collective without that process is waited for until its own limit."):
                self.collectives.cut(self.epoch)
        if self._door is not None:
            self._door.drop(member.process_id)
        if self.on_change is not None:
            self.on_change(error)
            return error
        # Without that member nothing continues, and a thread of this process may wait for it in a collective forever.
        threading.Thread(target=self._end_process, args=[error], name="dsjax-last-words", daemon=True).start()
        return error

    def _end_process(self, error: GroupError) -> None:
        """Report why this process cannot continue and end it, unless a waiting Python thread gets the error first and leaves."""
        if not self.is_leader:
            with contextlib.suppress(OSError, ValueError):
                self.endpoint.connect(join_address(*self.options.coordinator), "member", 1.0)  # fails if it is lost
                error = self.lost[0] = GroupError(
                    "process 0 lives, and goes on without this process, which it did not hear from for too long; "
                    "start this process again"
                )
        time.sleep(_GRACE_SECONDS)
        if not self.leaving:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _on_disconnect(self, member: JoinRequest) -> None:
        """Handle the end of a member's connection, in the messaging thread."""
        if not self.leaving:
            self.lose(member)

    def _notify_change(self) -> None:
        if self.on_change is not None and not self.leaving:
            self.on_change(None)

    def report_ready(self) -> None:
        """Report that this returning process can join the next mesh epoch."""
        self.leader.send(READY)

    def request_leave(self) -> bool:
        """Ask to leave. Return whether this process may go now; else it goes at the next mesh epoch. `RefusedError`: it must stay."""
        return self.leader.request(_LEAVE, kind=bool).result()

    def excuse(self, member: JoinRequest) -> None:
        """Drop a member from further mesh epochs, and answer its request to leave: whether it may go before the next one."""
        super().excuse(member)
        self._take_leave_request(member).reply(member not in self.present)

    def refuse_leave(self, member: JoinRequest, reason: str) -> None:
        """Refuse a member's request to leave. reason: why it is needed."""
        self._take_leave_request(member).refuse(reason)

    def _take_leave_request(self, member: JoinRequest) -> Request:
        with self.changed:
            return self._leave_requests.pop(member)

    def _receive_leave_request(self, request: Request) -> None:
        member = self._door.member_of(request.peer)
        if member is None:
            request.reply(True)
            return
        with self.changed:
            earlier_request = self._leave_requests.get(member)
            self._leave_requests[member] = request
            if earlier_request is None:
                self.ask_to_leave(member)
        if earlier_request is not None:
            earlier_request.refuse("it has asked again")
            return
        if self._leave_timer is not None:
            self._leave_timer.cancel()
        self._leave_timer = threading.Timer(_LEAVE_BATCH_SECONDS, self._notify_change)
        self._leave_timer.daemon = True
        self._leave_timer.start()

    # The end.

    def end(self, reason: str | None = None) -> None:
        """Announce the end of the group to the other processes (process 0 only). reason: the fault that ended it, if any."""
        if self._log is not None and not self.has_ended:
            self.has_ended = True
            announcement = Announcement(self.epoch + 1, reason=reason or "", ended=True)
            self._log.append(announcement.number, _ANNOUNCEMENT + msgspec.msgpack.encode(announcement))

    def end_locally(self) -> None:
        """End the wait for the next announcement in this process, which leaves."""
        self._announced.put(Announcement(self._latest_epoch, ended=True))

    def leave(self, reason: str | None = None) -> None:
        """Leave the group. The leader tells the others and waits until they have gone. reason: the fault that ended the group, if any."""
        if self.leaving:
            return
        self.leaving = True
        try:
            with contextlib.ExitStack() as closing:
                closing.callback(self.endpoint.close, linger=1.0)
                closing.callback(self.links.close)
                if self._door is not None:
                    self._door.is_closing = True
                    self.end(reason)
                    self._door.wait_until_alone(_LEAVE_SECONDS)
                if 0 not in self.lost:
                    coordination.leave()
        except Exception as error:  # the process is ending, so only report it
            print(f"dsjax: {error}", file=sys.stderr)

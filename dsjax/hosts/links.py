"""Check which processes of a group can reach each other, and choose which to exclude if two cannot.

Heartbeats go to process 0 only, so a broken link between two other processes shows only as a collective that never ends. Therefore all
processes check each other at the start, a process checks before it rejoins, and all check when a collective fails although every process is
alive. A process is reachable if its endpoint answers a `ping`; a hung process accepts connections but does not answer.

For `/metrics` each process also keeps a control connection to every other one and pings over it every few seconds; the kernel measures
round trips and counts retransmitted segments. `dsjax bench network` measures bandwidth.
"""

import contextlib
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from dsjax.addresses import join_address
from dsjax.background import contained, start_thread
from dsjax.errors import UserError
from dsjax.hosts.membership import GroupError, Membership
from dsjax.hosts.wire import Announcement, JoinRequest
from dsjax.messaging import Endpoint, Peer, PeerLostError, RefusedError, Request
from dsjax.messaging.endpoint import PING

_SERVICE = "look"
SECONDS = 3.0
"""Ping timeout in seconds. TCP retransmits a connection's first packet after 1 s; a link that loses two such packets counts as broken."""
_GRACE_SECONDS = 5.0
_MOST_AT_ONCE = 64
_PROBES, _PROBE_SECONDS = 5, 1.0
"""Pings per probe, and the timeout of each in seconds. TCP retransmits a lost packet after 0.2 s."""
_RTT, _RETRANSMITTED, _SEGMENTS = 68, 100, 136
"""Offsets in Linux's `struct tcp_info`: smoothed round trip in microseconds, segments retransmitted, segments sent."""


class LinkCheck(msgspec.Struct, frozen=True, array_like=True):
    """Request of process 0."""

    broken: int  # mesh epoch whose collectives are abandoned
    members: list[JoinRequest]  # processes to ping


@dataclass
class LinkState:
    """State of a link to another process. None: not measured yet, or not available on this system."""

    round_trip: float | None = None  # seconds between a packet and its acknowledgement, smoothed by the kernel
    # shortest ping time of the last probe, in seconds, including Python overhead on both sides
    answer: float | None = None
    probes: int = 0  # number of probes of the link
    unanswered: int = 0  # probes without an answer
    segments: int = 0  # TCP segments sent
    retransmitted: int = 0  # TCP segments sent again; ÷ `segments` is the packet loss rate


class Links:
    """Which peers a process can reach. Process 0 also decides which peers to exclude (`left_out`, see `Announcement`).

    cut: called to end the collectives of a mesh epoch. peer_of: returns process 0's connection to a member.

    states: state of each watched link, by process id.
    """

    def __init__(
        self,
        membership: Membership,
        endpoint: Endpoint,
        cut: Callable[[int], object],
        peer_of: Callable[[int], Peer | None] = lambda process_id: None,
    ):
        self._membership, self._endpoint, self._cut, self._peer_of = membership, endpoint, cut, peer_of
        self.left_out: dict[int, tuple[int, str]] = {}
        self.states: dict[int, LinkState] = {}
        # Per watched process: the connection, and the segments sent and retransmitted on it at the last probe.
        self._watched: dict[JoinRequest, tuple[Peer, int, int]] = {}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dsjax-links")
        endpoint.serve(_SERVICE, self._answer_check, roles=("listener",), kind=LinkCheck)

    def check_all(self, broken: int) -> tuple[GroupError | None, bool]:
        """In process 0: ask all processes which peers they cannot reach, and exclude some so that the others all reach each other.

        Return the error of the last exclusion, if any, and whether all answered. broken: mesh epoch whose collectives are abandoned.
        """
        members = self._membership.live
        question = LinkCheck(broken, list(members))
        peers = {member.process_id: self._peer_of(member.process_id) for member in members[1:]}
        replies = {one: peer.request(_SERVICE, question, kind=list[int]) for one, peer in peers.items() if peer}
        deadline = time.monotonic() + SECONDS + _GRACE_SECONDS
        missing = {0: self.unreached(members)}
        for process_id, reply in replies.items():
            with contextlib.suppress(TimeoutError, PeerLostError, RefusedError, RuntimeError):
                missing[process_id] = reply.result(max(0.0, deadline - time.monotonic()))
        # Ignore links to processes that have not answered: they may only hang, and heartbeats decide whether they are gone.
        missing = {one: [other for other in others if other in missing] for one, others in missing.items()}
        error = None
        for process_id in left_out(missing):
            error = self._leave_out(process_id, missing)
        return error, len(missing) == len(members)

    def why_left_out(self, announcement: Announcement) -> str | None:
        """Return why this process is excluded, or None if it is not."""
        pid, reason = announcement.left_out.get(self._membership.me.process_id, (0, ""))
        return reason if pid == os.getpid() else None

    def check(self, process_ids: Sequence[int]) -> None:
        """Raise `GroupError` if this process cannot reach one of these processes."""
        members = [member for member in self._membership.members if member.process_id in process_ids]
        missing = set(self.unreached(members))
        if missing:
            names = _named([member for member in members if member.process_id in missing])
            raise GroupError(
                f"process {self._membership.me.process_id} cannot reach {names} within {SECONDS:g} s; check the network between these "
                "hosts and their firewalls (any TCP port), then start it again"
            )

    def unreached(self, members: Iterable[JoinRequest], seconds: float = SECONDS) -> list[int]:
        """Return the ids of the other members that do not answer a ping within `seconds`. All are pinged in parallel."""
        members = [member for member in members if member.process_id != self._membership.me.process_id]
        if not members:
            return []

        def answers(member: JoinRequest) -> bool:
            try:
                self._endpoint.ping(join_address(member.address, member.port), "member", seconds)
            except (OSError, UserError):
                return False
            return True

        with ThreadPoolExecutor(min(len(members), _MOST_AT_ONCE)) as pool:
            answered = list(pool.map(answers, members))
        return [member.process_id for member, answer in zip(members, answered, strict=True) if not answer]

    def watch(self, interval: float) -> None:
        """Probe the links to all present processes at this interval in seconds, in a thread, until `close`."""

        def probe_all() -> None:
            while not self._closed.wait(interval):
                self.probe([member for member in self._membership.present if member != self._membership.me])

        start_thread("link monitor", probe_all, name="dsjax-link-monitor", restarts=True)

    def probe(self, members: Sequence[JoinRequest]) -> None:
        """Probe the links to these members, one after another, and forget all other links."""
        for member in [one for one in self._watched if one not in members]:
            self._drop(member)
        self.states = {one.process_id: self.states.get(one.process_id, LinkState()) for one in members}
        for member in members:
            if self._closed.is_set():
                return
            state = self.states[member.process_id]
            state.probes += 1
            try:
                self._probe(member, state)
            except (OSError, TimeoutError, UserError):
                state.unanswered += 1
                self._drop(member)

    def close(self) -> None:
        """Stop answering process 0, and stop watching links."""
        self._closed.set()
        for member in list(self._watched):
            self._drop(member)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _probe(self, member: JoinRequest, state: LinkState) -> None:
        if member not in self._watched:
            address = join_address(member.address, member.port)
            self._watched[member] = self._endpoint.connect(address, "member", _PROBE_SECONDS), 0, 0
        peer, segments, retransmitted = self._watched[member]
        state.answer = min(_answer_seconds(peer) for _ in range(_PROBES))
        info = peer.tcp_info()
        if len(info) >= _SEGMENTS + 4:
            offsets = _RTT, _RETRANSMITTED, _SEGMENTS
            micros, retransmitted_now, sent = (struct.unpack_from("=I", info, offset)[0] for offset in offsets)
            state.round_trip = micros * 1e-6
            state.segments += sent - segments
            state.retransmitted += retransmitted_now - retransmitted
            self._watched[member] = peer, sent, retransmitted_now

    def _drop(self, member: JoinRequest) -> None:
        watched = self._watched.pop(member, None)  # `close` may have dropped it from another thread
        if watched is not None:
            watched[0].close()

    def _answer_check(self, request: Request) -> None:
        """End the broken collectives, ping the members and reply to process 0."""
        check: LinkCheck = request.body
        with contained("messaging", "A collective that has broken is waited for until its own limit."):
            self._cut(check.broken)
        self._pool.submit(lambda: request.reply(self.unreached(check.members)))

    def _leave_out(self, process_id: int, cut: Mapping[int, Sequence[int]]) -> GroupError:
        names = {member.process_id: member for member in self._membership.members}
        member = names[process_id]
        others = sorted({*cut.get(process_id, ()), *(one for one, lost in cut.items() if process_id in lost)})
        error = GroupError(
            f"the link between {member.name} and {_named([names[i] for i in others])} is cut, though they live; {member.name} is left "
            "out, and can come back when the link works"
        )
        self.left_out[process_id] = member.pid, str(error)
        self._membership.lose(member, error)
        return error


def _answer_seconds(peer: Peer) -> float:
    begun = time.perf_counter()
    peer.request(PING).result(_PROBE_SECONDS)
    return time.perf_counter() - begun


def left_out(cut: Mapping[int, Collection[int]]) -> list[int]:
    """Return a small set of processes to exclude so that all remaining ones reach each other. Never excludes process 0.

    Greedily picks the process with the most broken links; on a tie, the one with the highest id. cut: for each process, the processes
    that it cannot reach. A link that fails in one direction counts as broken.
    """
    pairs = {frozenset((one, other)) for one, others in cut.items() for other in others}
    excluded = []
    while pairs:
        counts = Counter(process for pair in pairs for process in pair if process)  # broken links; process 0 stays
        worst = max(counts, key=lambda process: (counts[process], process))
        excluded.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return sorted(excluded)


def _named(members: Sequence[JoinRequest]) -> str:
    return " and ".join(f"{member.name} at {member.address}" for member in members)

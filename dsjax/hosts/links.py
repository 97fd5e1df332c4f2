"""Whether the processes of a group reach each other, and which of them to go on without where two do not.

Heartbeats go to process 0 alone, so a link that is cut between two others shows only in a collective that never ends. So all look at all
at the start, a process looks before it comes back, and all look when a collective has failed although every process lives. A process is
reached when its endpoint answers a `ping`: one that hangs accepts a connection, and says nothing.

For `/metrics` each process also keeps a control connection to every other one, and pings over it every few seconds; the kernel counts round
trip and retransmitted segments. `dsjax bench network` measures bandwidth.
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
"""In which a process must have answered. TCP sends the first packet of a connection again after 1 s; a link that loses two is none."""
_GRACE_SECONDS = 5.0
_MOST_AT_ONCE = 64
_PROBES, _PROBE_SECONDS = 5, 1.0
"""Pings of a probe, and the seconds in which each must be answered. TCP sends a lost packet again after 0.2 s."""
_RTT, _RETRANSMITTED, _SEGMENTS = 68, 100, 136
"""Where `struct tcp_info` of Linux has the smoothed round trip in microseconds, and how many segments were sent again and in all."""


class Look(msgspec.Struct, frozen=True, array_like=True):
    """Process 0's question. broken: the generation whose collectives nobody waits in any more. members: to be looked at."""

    broken: int
    members: list[JoinRequest]


@dataclass
class LinkState:
    """What is known of a link to another process. None: nothing yet, or this system does not tell.

    Attributes:
        round_trip: seconds between a packet and its acknowledgement, smoothed by the kernel.
        answer: seconds until the other process answered, the shortest of the last probe's pings. It includes the Python of both sides.
        probes: how often the link was probed. unanswered: probes without an answer.
        segments, retransmitted: TCP segments sent, and those of them sent again; their quotient is the share of packets that were lost.
    """

    round_trip: float | None = None
    answer: float | None = None
    probes: int = 0
    unanswered: int = 0
    segments: int = 0
    retransmitted: int = 0


class Links:
    """Which peers a process can reach. Process 0 also decides which peers to exclude (`left_out`, see `Announcement`).

    cut: ends the collectives of a generation. peer_of: gives process 0's connection to a member.

    states: what is known of each watched link, by process id.
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
        # The connection to each watched process, and how many segments it had sent, and sent again, at the last probe.
        self._watched: dict[JoinRequest, tuple[Peer, int, int]] = {}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dsjax-links")
        endpoint.serve(_SERVICE, self._answer, roles=("listener",), kind=Look)

    def look(self, broken: int) -> tuple[GroupError | None, bool]:
        """Process 0's: ask everybody whom they cannot reach, and leave out whom it takes. Give why, and whether all have answered.

        broken: the generation in whose collectives nobody waits any more.
        """
        asked = self._membership.live
        question = Look(broken, list(asked))
        peers = {member.process_id: self._peer_of(member.process_id) for member in asked[1:]}
        replies = {one: peer.request(_SERVICE, question, kind=list[int]) for one, peer in peers.items() if peer}
        deadline, cut = time.monotonic() + SECONDS + _GRACE_SECONDS, {0: self.unreached(asked)}
        for process_id, reply in replies.items():
            with contextlib.suppress(TimeoutError, PeerLostError, RefusedError, RuntimeError):
                cut[process_id] = reply.result(max(0.0, deadline - time.monotonic()))
        # Whoever has said nothing may only hang; whether it is gone is for heartbeats to say.
        cut = {one: [other for other in others if other in cut] for one, others in cut.items()}
        error = None
        for process_id in left_out(cut):
            error = self._leave_out(process_id, cut)
        return error, len(cut) == len(asked)

    def why_left_out(self, news: Announcement) -> str | None:
        """Why this process is gone on without; None: it is not."""
        pid, reason = news.left_out.get(self._membership.me.process_id, (0, ""))
        return reason if pid == os.getpid() else None

    def check(self, process_ids: Sequence[int]) -> None:
        """Make sure that this process reaches these; a `GroupError` where it does not."""
        asked = [member for member in self._membership.members if member.process_id in process_ids]
        missing = set(self.unreached(asked))
        if missing:
            names = _named([member for member in asked if member.process_id in missing])
            raise GroupError(
                f"process {self._membership.me.process_id} cannot reach {names} within {SECONDS:g} s; check the network between these "
                "hosts and their firewalls (any TCP port), then start it again"
            )

    def unreached(self, members: Iterable[JoinRequest], seconds: float = SECONDS) -> list[int]:
        """Return the ids of the other members that do not answer a ping within so many seconds. All are asked at once."""
        asked = [member for member in members if member.process_id != self._membership.me.process_id]
        if not asked:
            return []

        def answers(member: JoinRequest) -> bool:
            try:
                self._endpoint.ping(join_address(member.address, member.port), "member", seconds)
            except (OSError, UserError):
                return False
            return True

        with ThreadPoolExecutor(min(len(asked), _MOST_AT_ONCE)) as pool:
            answered = list(pool.map(answers, asked))
        return [member.process_id for member, answer in zip(asked, answered, strict=True) if not answer]

    def watch(self, interval: float) -> None:
        """Probe the links to all present processes at this interval in seconds, in a thread, until `close`."""

        def look() -> None:
            while not self._closed.wait(interval):
                self.probe([member for member in self._membership.present if member != self._membership.me])

        start_thread("link monitor", look, name="dsjax-link-monitor", restarts=True)

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
            micros, again, sent = (struct.unpack_from("=I", info, at)[0] for at in (_RTT, _RETRANSMITTED, _SEGMENTS))
            state.round_trip = micros * 1e-6
            state.segments += sent - segments
            state.retransmitted += again - retransmitted
            self._watched[member] = peer, sent, again

    def _drop(self, member: JoinRequest) -> None:
        watched = self._watched.pop(member, None)  # `close` drops it in another thread
        if watched is not None:
            watched[0].close()

    def _answer(self, request: Request) -> None:
        """Answer process 0."""
        look: Look = request.body
        with contained("messaging", "A collective that has broken is waited for until its own limit."):
            self._cut(look.broken)
        self._pool.submit(lambda: request.reply(self.unreached(look.members)))

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
    """The processes to go on without, so that all that are left reach each other: few, and never process 0.

    It is the one with most cut links, of several the one with the highest id, again and again. cut: of each process those that it does not
    reach. A link that is cut in one direction is cut.
    """
    pairs = {frozenset((one, other)) for one, others in cut.items() for other in others}
    least_reached = []
    while pairs:
        counts = Counter(process for pair in pairs for process in pair if process)
        worst = max(counts, key=lambda process: (counts[process], process))
        least_reached.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return sorted(least_reached)


def _named(members: Sequence[JoinRequest]) -> str:
    return " and ".join(f"{member.name} at {member.address}" for member in members)

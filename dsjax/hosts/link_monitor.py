"""`LinkMonitor`: round trip and retransmissions of the links to a group's other processes.

Each process keeps a control connection to every other one, and pings over it every few seconds; the kernel counts round trip and
retransmitted segments. `dsjax bench network` measures bandwidth.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsjax.addresses import join_address
from dsjax.background import start_thread
from dsjax.errors import UserError
from dsjax.hosts.membership import Membership
from dsjax.hosts.wire import JoinRequest
from dsjax.messaging import Endpoint, Peer
from dsjax.messaging.endpoint import PING

_PROBES = 5
_SECONDS = 1.0
"""In which an answer must have come; TCP sends a lost packet again after 0.2 s."""
_RTT, _RETRANSMITTED, _SEGMENTS = 68, 100, 136
"""Where `struct tcp_info` of Linux has the smoothed round trip in microseconds, and how many segments were sent again and in all."""


class KernelCounts(NamedTuple):
    """What Linux knows of a connection: seconds of a round trip; segments sent, and of those sent again."""

    round_trip: float
    segments: int
    retransmitted: int


@dataclass
class LinkState:
    """A link to another process, as far as it was seen. None: not yet, or not on this system.

    Attributes:
        round_trip: seconds between a packet and its acknowledgement, smoothed by the kernel.
        answer: seconds until the other process answered, the least of the last look: with both sides' Python.
        probes, unanswered: looks; those without an answer.
        segments, retransmitted: of the connection; the second ÷ the first is the share of packets that were lost.
    """

    round_trip: float | None = None
    answer: float | None = None
    probes: int = 0
    unanswered: int = 0
    segments: int = 0
    retransmitted: int = 0


class LinkMonitor:
    """Looks at the links of a group's present processes in a thread, until it is closed.

    interval: seconds between two looks. links: process id to the state of the link to it.
    """

    def __init__(self, membership: Membership, endpoint: Endpoint, interval: float):
        self._membership, self._endpoint, self._interval = membership, endpoint, interval
        self.links: dict[int, LinkState] = {}
        self._peers: dict[JoinRequest, tuple[Peer, KernelCounts | None]] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin."""
        start_thread("link monitor", self._watch, name="dsjax-link-monitor", restarts=True)

    def close(self) -> None:
        """Look no more, and end the connections."""
        self._closed.set()
        for member in list(self._peers):
            self._drop(member)

    def _watch(self) -> None:
        while not self._closed.wait(self._interval):
            self.look([member for member in self._membership.present if member != self._membership.me])

    def look(self, members: Sequence[JoinRequest]) -> None:
        """Probe the links to these, one after another, and forget all others."""
        for member in [one for one in self._peers if one not in members]:
            self._drop(member)
        self.links = {one.process_id: self.links.get(one.process_id, LinkState()) for one in members}
        for member in members:
            if self._closed.is_set():
                return
            state = self.links[member.process_id]
            state.probes += 1
            try:
                self._probe(member, state)
            except (OSError, TimeoutError, UserError):
                state.unanswered += 1
                self._drop(member)

    def _probe(self, member: JoinRequest, state: LinkState) -> None:
        if member not in self._peers:
            peer = self._endpoint.connect(join_address(member.address, member.port), "member", _SECONDS)
            self._peers[member] = peer, kernel_counts(peer)
        peer, before = self._peers[member]
        state.answer = min(_answer_seconds(peer) for _ in range(_PROBES))
        after = kernel_counts(peer)
        if before is not None and after is not None:
            state.round_trip = after.round_trip
            state.segments += after.segments - before.segments
            state.retransmitted += after.retransmitted - before.retransmitted
        self._peers[member] = peer, after

    def _drop(self, member: JoinRequest) -> None:
        peer, _ = self._peers.pop(member, (None, None))
        if peer is not None:
            peer.close()


def _answer_seconds(peer: Peer) -> float:
    begun = time.perf_counter()
    peer.request(PING).result(_SECONDS)
    return time.perf_counter() - begun


def kernel_counts(peer: Peer) -> KernelCounts | None:
    """What the kernel knows of a connection; None where it is not Linux, or an old one."""
    info = peer.tcp_info()
    if len(info) < _SEGMENTS + 4:
        return None
    micros, retransmitted, segments = (
        struct.unpack_from("=I", info, at)[0] for at in (_RTT, _RETRANSMITTED, _SEGMENTS)
    )
    return KernelCounts(micros * 1e-6, segments, retransmitted)

"""`AttentionProcesses`: the processes that share an attention side's mesh, with a barrier at each layer.

If an expert process dies, some attention processes may have its results and others not. In a mesh collective, the former would wait for
the latter until the time limit breaks the mesh epoch. So all processes wait here first, without a limit.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

from dsjax.engine.afd.expert_link import ExpertLink
from dsjax.hosts.group import HostGroup
from dsjax.messaging import Endpoint, Link, LinkListener, PeerLostError
from dsjax.messaging.link import LinkLostError

_WORD = struct.Struct("<QQ")
"""Index of the wait, and the number that the process sends."""


class AttentionProcesses:
    """This process of an attention side, with links to and from each other process of its mesh epoch.

    All processes create it at the same point, call `meet` before the first step, then `tell` and `wait` in the same order. A single
    process never waits.

    Args:
        name: the side's name; all processes use the one that process 0 gives. group: None if this process is alone.

    Attributes:
        number, count: index of this process, and number of the side's processes. leads: whether this process leads the side.
    """

    def __init__(self, endpoint: Endpoint, name: bytes, group: HostGroup | None = None):
        self.endpoint, self._group = endpoint, group
        self.name, self.generation, self.leads, own, ids = name, 0, True, 0, [0]
        if group is not None:
            own, ids = group.options.process_id, [member.process_id for member in group.present]
            self.name, self.generation = group.agreement.all_gather("attention side", name)[0], group.epoch
            self.leads = group.is_leader
        self.number, self.count = ids.index(own), len(ids)
        self._words = {str(one): deque[tuple[int, int]]() for one in ids if one != own}  # received early
        self._links: dict[str, Link] = {}
        self._listener: LinkListener | None = None
        self._wait = 0
        self._to_experts: set[ExpertLink] = set()
        self._is_abandoned = False

    def meet(self) -> None:
        """Connect to the other processes.

        Raises:
            GroupError: another process is gone or unreachable.
        """
        if not self._words:
            return
        agreement, self._listener = self._group.agreement, LinkListener(self.endpoint, list(self._words))
        listeners = agreement.all_gather("attention processes", (self._listener.address, self._listener.ticket))
        agreement.run("attention connections", lambda: self._connect(listeners))
        if self._is_abandoned:
            self.abandon()

    def tell(self, number: int) -> None:
        """Tell the other processes that this one has its results, and send a number.

        Raises:
            RuntimeError: another process is gone, or its step has failed.
        """
        for name, link in self._links.items():
            try:
                link.send(_WORD.pack(self._wait, number))
            except PeerLostError as error:
                raise _gone(name) from error

    def wait(self, number: int) -> int:
        """Wait until all other processes have called `tell`; return the greatest number, including `number`. Errors as in `tell`."""
        while silent := [name for name, words in self._words.items() if not words]:
            try:
                message = self._listener.receive()
                self._words[message.sender].append(_WORD.unpack(message.header))
            except (PeerLostError, struct.error) as error:
                raise _gone(error.name if isinstance(error, LinkLostError) else silent[0]) from error
        for name, words in self._words.items():
            place, theirs = words.popleft()
            if place != self._wait:
                raise RuntimeError(
                    f"process {name} of the attention side waits at its layer {place}, and this process at {self._wait}"
                )
            number = max(number, theirs)
        self._wait += 1
        return number

    def add(self, link: ExpertLink) -> None:
        """Register a link to an expert process. `abandon` and `close` also end it."""
        self._to_experts.add(link)
        if self._is_abandoned:
            link.give_up()

    def remove(self, link: ExpertLink) -> None:
        """Close a registered link."""
        self._to_experts.discard(link)
        link.close()

    def give_up(self) -> None:
        """Leave. Once the links have ended, other processes do not wait for this one, and the experts compute without its rows."""
        if self._words:
            self.abandon()

    def abandon(self) -> None:
        """End all waiting because this mesh epoch of the attention side has failed. Thread-safe."""
        self._is_abandoned = True
        for one in filter(None, [*self._links.values(), self._listener]):
            one.close()  # also ends a thread's wait
        for link in list(self._to_experts):
            link.give_up()

    def close(self) -> None:
        """Close all links, which also ends the wait of other processes for this one."""
        self.abandon()
        for link in list(self._to_experts):
            self.remove(link)
        self.endpoint.release()

    def _connect(self, listeners: Sequence[tuple[str, bytes]]) -> None:
        own = str(self._group.options.process_id)
        for member, listener in zip(self._group.present, listeners, strict=True):
            if str(member.process_id) != own:
                self._links[str(member.process_id)] = self._group.link_to(member.process_id, listener, own)


def _gone(name: str) -> RuntimeError:
    return RuntimeError(
        f"process {name} of the attention side was waited for at a layer, and has gone or could not compute it"
    )

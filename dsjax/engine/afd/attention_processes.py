"""`AttentionProcesses`: the processes that share the mesh of an attention side, and a barrier for them at each layer.

When a process with experts dies, some attention processes may have their answers and others not. In a collective of the mesh the former
would wait for the latter until its time limit breaks the generation; so all wait here first, without a limit.
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
"""Which wait it is for, and the number that the process tells."""


class AttentionProcesses:
    """This process of an attention side, with links to and from each other process of its generation.

    All processes create it at the same point, `meet` before the first step, then `tell` and `wait` in the same order. A process that is
    alone waits for nobody.

    Args:
        name: of the side; all use the name that process 0 gives. group: None if this process is alone.

    Attributes:
        number, count: which of the side's processes this is, and how many there are. leads: whether it speaks for all.
    """

    def __init__(self, endpoint: Endpoint, name: bytes, group: HostGroup | None = None):
        self.endpoint, self._group = endpoint, group
        self.name, self.generation, self.leads, own, ids = name, 0, True, 0, [0]
        if group is not None:
            own, ids = group.options.process_id, [member.process_id for member in group.present]
            self.name, self.generation = group.agreement.ask("attention side", name)[0], group.generation
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
            GroupError: one of them is gone, or cannot be reached.
        """
        if not self._words:
            return
        agreement, self._listener = self._group.agreement, LinkListener(self.endpoint, list(self._words))
        listeners = agreement.ask("attention processes", (self._listener.address, self._listener.ticket))
        agreement.run("attention connections", lambda: self._connect(listeners))
        if self._is_abandoned:
            self.abandon()

    def tell(self, number: int) -> None:
        """Tell the others that this process has its answers, and a number.

        Raises:
            RuntimeError: another process is gone, or its step has failed.
        """
        for name, link in self._links.items():
            try:
                link.send(_WORD.pack(self._wait, number))
            except PeerLostError as error:
                raise _gone(name) from error

    def wait(self, number: int) -> int:
        """Wait until all others have told, and return the greatest number, `number` included. Raises what `tell` raises."""
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
        """Register a link to a process with experts: `abandon` and `close` end it too."""
        self._to_experts.add(link)
        if self._is_abandoned:
            link.give_up()

    def remove(self, link: ExpertLink) -> None:
        """Close a registered link."""
        self._to_experts.discard(link)
        link.close()

    def give_up(self) -> None:
        """Leave: once the links have ended, other processes do not wait for this one, and the experts compute without its rows."""
        if self._words:
            self.abandon()

    def abandon(self) -> None:
        """End all waiting, because this generation of the attention side has broken. Any thread may call it."""
        self._is_abandoned = True
        for one in filter(None, [*self._links.values(), self._listener]):
            one.close()  # ends the wait of a thread too
        for link in list(self._to_experts):
            link.give_up()

    def close(self) -> None:
        """End all links. Other processes that wait for this one notice."""
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

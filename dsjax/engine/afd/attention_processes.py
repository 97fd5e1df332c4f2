"""``AttentionProcesses``: a barrier at each layer for the processes that share the mesh of an attention side.

Where a process with experts dies, some attention processes have their answers and others not. A collective of the mesh has a time limit,
after which the generation breaks; so all wait here, without a limit, until all have their answers.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence

from dsjax.hosts.group import GroupError, HostGroup
from dsjax.messaging import Link, LinkListener, PeerLostError
from dsjax.messaging.link import LinkLostError

_LOOK_SECONDS = 0.2
_WORD = struct.Struct("<QQ")
"""Number of the wait, and a number."""


class AttentionProcesses:
    """A link to each other process of a generation, and one from each. All make it at the same place, and ``tell`` and ``wait`` in order.

    leads: whether this process is the one that speaks for all.

    Raises:
        GroupError: another process is gone, or could not be reached.
    """

    def __init__(self, group: HostGroup):
        self._group, self.leads = group, group.is_leader
        others = {str(one.process_id): one for one in group.present if one.process_id != group.options.process_id}
        self._words = {name: deque[tuple[int, int]]() for name in others}  # heard, and not waited for yet
        self._links: dict[str, Link] = {}
        self._number = 0
        self._listener = LinkListener(group.endpoint, list(others))
        try:
            told = group.agreement.ask("attention processes", [self._listener.address, self._listener.ticket])
            group.agreement.run("attention connections", lambda: self._connect(told))
        except BaseException:
            self.close()
            raise

    def tell(self, number: int) -> None:
        """Say that this process has its answers, and a number; a `RuntimeError` where another one is gone, or its step has failed."""
        for name, link in self._links.items():
            try:
                link.send(_WORD.pack(self._number, number))
            except PeerLostError as error:
                raise _gone(name) from error

    def wait(self, number: int) -> int:
        """Wait until all others have told, and give the greatest number, ``number`` included; errors as of ``tell``."""
        while silent := [name for name, words in self._words.items() if not words]:
            try:
                message = self._listener.receive()
                self._words[message.sender].append(_WORD.unpack(message.header))
            except (PeerLostError, struct.error) as error:
                raise _gone(error.name if isinstance(error, LinkLostError) else silent[0]) from error
        for name, words in self._words.items():
            place, theirs = words.popleft()
            if place != self._number:
                raise RuntimeError(
                    f"process {name} of the attention side waits at its layer {place}, and this process at {self._number}"
                )
            number = max(number, theirs)
        self._number += 1
        return number

    def close(self) -> None:
        """End the links, also under a thread that waits; other processes that wait for this one hear of it."""
        for one in [*self._links.values(), self._listener]:
            one.close()

    def _connect(self, told: Sequence[tuple[str, bytes]]) -> None:
        """Connect to the others, and wait for a word of each."""
        own, end = str(self._group.options.process_id), time.monotonic() + self._group.options.start_timeout
        try:
            for member, (address, ticket) in zip(self._group.present, told, strict=True):
                if str(member.process_id) != own:
                    link = self._links[str(member.process_id)] = Link(self._group.endpoint, address, ticket, own)
                    link.send(_WORD.pack(0, 0))
            while missing := sorted(name for name, words in self._words.items() if not words):
                message = self._listener.receive(_LOOK_SECONDS)
                if message is not None:
                    self._words[message.sender].append(_WORD.unpack(message.header))
                    continue
                self._group.check()
                if time.monotonic() > end:
                    raise GroupError(f"processes {missing} of the attention side do not connect to {own}")
            for words in self._words.values():
                words.popleft()
        except PeerLostError as error:
            self._group.check(error)
            raise GroupError(f"another process of the attention side is gone: {error}") from error


def _gone(name: str) -> RuntimeError:
    return RuntimeError(
        f"process {name} of the attention side was waited for at a layer, and has gone or could not compute it"
    )

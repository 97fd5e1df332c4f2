"""`Leavers`: processes that were told to end, and ask process 0 to go on without them before they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dsjax.hosts.rendezvous import JoinRequest

if TYPE_CHECKING:
    from dsjax.hosts.group import HostGroup

_ASKED = "dsjax/leaving/"


class Leavers:
    """Both ends of the question: a follower's `ask` and `answer`, and all else of process 0.

    Attributes:
        excused: processes that have asked, and that no further generation counts on.
        needs_all: whether nobody is spared any more, because the group ends when what runs is done.
    """

    def __init__(self, group: HostGroup):
        self._group = group
        self.excused: set[JoinRequest] = set()
        self.needs_all = False
        self._undecided: list[JoinRequest] = []
        self._asked_lately = False

    # Of one that leaves.

    def ask(self) -> None:
        """Ask process 0 to go on without this process. Its answer is a generation without it, or what `answer` gives."""
        me = self._group.me
        self._group.store.set(f"{_ASKED}{me.identity}", msgspec.msgpack.encode(me))

    def answer(self, seconds: float) -> str | None:
        """Wait for process 0's word: why this process cannot be spared; empty: it has no part, and may go. None where there is no word."""
        key = _answer_key(self._group.me)
        said = self._group.store.get(key, seconds)
        if said is not None:
            self._group.store.delete(key)
        return None if said is None else said.decode()

    # Of process 0.

    def __bool__(self) -> bool:
        """Whether a process has asked to leave, and was not decided on."""
        return bool(self._undecided)

    def take(self) -> list[JoinRequest]:
        """Take those that have asked to leave, each once; it is `excuse` or `keep` that follows."""
        with self._group.membership:
            leavers, self._undecided = self._undecided, []
        return leavers

    def excuse(self, member: JoinRequest) -> None:
        """Count on a process no more. It goes when a generation without it has begun, or now if it has no part in this one."""
        with self._group.membership:
            self.excused.add(member)
            self._group.ended.add(member.process_id)
        if member not in self._group.present:
            self._group.store.set(_answer_key(member), b"")

    def keep(self, member: JoinRequest, reason: str) -> None:
        """Tell a process that has asked to leave why it cannot be spared."""
        self._group.store.set(_answer_key(member), reason.encode())

    def hear(self) -> None:
        """Look who has asked to leave. The engine is told when nobody has since the last time, so that many at once make one change."""
        asked = self._group.store.list(_ASKED)
        for key, value in asked:
            self._group.store.delete(key)
            with self._group.membership:
                self._undecided.append(msgspec.msgpack.decode(value, type=JoinRequest))
        lately, self._asked_lately = self._asked_lately, bool(asked)
        if lately and not asked and self._group.on_change is not None:
            self._group.on_change(None)

    def welcome(self, member: JoinRequest) -> None:
        """Count on a process that has come back, and on no other one under its id that has left. Within the membership's lock."""
        self.excused = {one for one in self.excused if one.process_id != member.process_id} | (self.excused & {member})


def _answer_key(member: JoinRequest) -> str:
    return f"dsjax/leaving-answers/{member.identity}"

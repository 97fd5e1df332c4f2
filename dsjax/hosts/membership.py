"""`Membership`: who is in a group, as this process knows it: members, the mesh epoch of now, who is lost, who leaves. No sockets."""

import threading
from collections.abc import Sequence

from dsjax.errors import UserError
from dsjax.hosts.wire import JoinRequest


class GroupError(UserError):
    """The group cannot be formed, or has broken."""


class Membership:
    """Any thread may use it.

    own: id of this process. members: all processes of the group.

    Attributes:
        members: all processes, in the order of their ids, as they came last. present: those of the generation of now.
        generation: number of the mesh epoch of now.
        lost: members that are gone, with what is said of them. live_ids: ids of those that can be in the next generation.
        changed: the lock around all this, notified when some of it changes.
        excused: members that have asked to leave, and that no further generation counts on.
        needs_all: whether nobody is spared any more, because the group ends when what runs is done.
        leaving: whether this process is leaving.
    """

    def __init__(self, own: int, members: Sequence[JoinRequest]):
        self._own = own
        self.members, self.present, self.generation = list(members), list(members), 0
        self.lost: dict[int, GroupError] = {}
        self.changed = threading.Condition(threading.RLock())
        self.excused: set[JoinRequest] = set()
        self.needs_all = self.leaving = False
        self._told_live: set[int] | None = None
        self._ended: set[int] = set()
        self._asked_to_leave: list[JoinRequest] = []

    @property
    def me(self) -> JoinRequest:
        """This process, as the others know it."""
        return self.member(self._own)

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0."""
        return self._own == 0

    @property
    def is_present(self) -> bool:
        """Whether this process has a part in the generation of now."""
        return any(member.process_id == self._own for member in self.present)

    @property
    def live(self) -> list[JoinRequest]:
        """The members that can be in the next generation; outside process 0, as process 0 has said last."""
        told = self._told_live
        return [
            member
            for member in self.members
            if member.process_id not in self.lost
            and member not in self.excused
            and (told is None or member.process_id in told)
        ]

    @property
    def live_ids(self) -> list[int]:
        """The ids of `live`."""
        return [member.process_id for member in self.live]

    @property
    def leavers(self) -> bool:
        """Whether a process has asked to leave, and was not decided on."""
        return bool(self._asked_to_leave)

    def member(self, process_id: int) -> JoinRequest:
        """The member with an id."""
        return next(member for member in self.members if member.process_id == process_id)

    def loss_of(self, member: JoinRequest) -> GroupError | None:
        """Why a member is gone; None: it is not known to be. Another one may have its id by now."""
        with self.changed:
            error = self.lost.get(member.process_id)
            return error or (None if member in self.members else GroupError(gone(member)))

    def check(self, failure: BaseException | None = None) -> None:
        """Raise the `GroupError` of a member of this generation that is gone, from `failure`."""
        for member in self.present:
            error = self.loss_of(member)
            if error is not None:
                raise error from failure

    def enter(self, number: int, process_ids: Sequence[int], live_ids: Sequence[int] | None = None) -> None:
        """Be in a generation of these processes. live_ids: in all but process 0, who can be in the next one."""
        with self.changed:
            self.generation = number
            self.present = [member for member in self.members if member.process_id in process_ids]
            self._told_live = None if live_ids is None else set(live_ids)
            self.changed.notify_all()

    def lose(self, member: JoinRequest, error: GroupError | None = None) -> GroupError | None:
        """Enter that a member is gone; None: that is known, or another process has its id by now."""
        with self.changed:
            if member.process_id in self.lost or member not in self.members:
                return None
            error = self.lost[member.process_id] = error or GroupError(gone(member))
            self._ended.add(member.process_id)
            self.changed.notify_all()
            return error

    def replace(self, member: JoinRequest) -> None:
        """Count on a process that has come back in the place of the one that had its id."""
        with self.changed:
            self.members = [member if each.process_id == member.process_id else each for each in self.members]
            self.lost.pop(member.process_id, None)
            self.excused = {one for one in self.excused if one.process_id != member.process_id}
            self.changed.notify_all()

    def take_ended(self) -> set[int]:
        """The ids of processes that have gone or leave since this was asked last."""
        with self.changed:
            ended, self._ended = self._ended, set()
        return ended

    def ask_to_leave(self, member: JoinRequest) -> None:
        """Enter that a member wants to leave; `take_leavers`, and then `excuse` or a refusal, follow."""
        with self.changed:
            self._asked_to_leave.append(member)

    def take_leavers(self) -> list[JoinRequest]:
        """Take those that have asked to leave, each once."""
        with self.changed:
            leavers, self._asked_to_leave = self._asked_to_leave, []
        return leavers

    def excuse(self, member: JoinRequest) -> None:
        """Count on a member no more. It goes when a generation without it has begun."""
        with self.changed:
            self.excused.add(member)
            self._ended.add(member.process_id)


def gone(member: JoinRequest) -> str:
    """What is said of a member that died or hangs."""
    if member.process_id == 0:
        return f"{member.name} has gone away, and with it the group; start all processes again"
    return f"{member.name} has gone away; its own messages say why"

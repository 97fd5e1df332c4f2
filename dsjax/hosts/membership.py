"""`Membership`: this process's view of the group: members, current mesh epoch, lost and leaving processes. No sockets."""

import threading
from collections.abc import Sequence

from dsjax.errors import UserError
from dsjax.hosts.wire import JoinRequest


class GroupError(UserError):
    """The group cannot be formed or has failed."""


class Membership:
    """Members of the group and their states. Thread-safe.

    own_id: id of this process. members: all processes of the group.

    Attributes:
        members: all processes by id, each in its latest incarnation.
        present: members of the current mesh epoch.
        epoch: number of the current mesh epoch.
        lost: errors of the members that are gone, by id.
        live_ids: ids of members that can join the next mesh epoch.
        changed: condition that guards this state; notified on changes.
        excused: members that asked to leave and will be in no further mesh epoch.
        needs_all: whether no member may leave any more, because the group ends after the running work.
        leaving: whether this process is leaving.
    """

    def __init__(self, own_id: int, members: Sequence[JoinRequest]):
        self._own_id = own_id
        self.members = list(members)
        self.present = list(members)
        self.epoch = 0
        self.lost: dict[int, GroupError] = {}
        self.changed = threading.Condition(threading.RLock())
        self.excused: set[JoinRequest] = set()
        self.needs_all = self.leaving = False
        self._announced_live: set[int] | None = None
        self._ended: set[int] = set()
        self._undecided_leavers: list[JoinRequest] = []

    @property
    def me(self) -> JoinRequest:
        """This process's own member."""
        return self.member(self._own_id)

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0."""
        return self._own_id == 0

    @property
    def is_present(self) -> bool:
        """Whether this process is in the current mesh epoch."""
        return any(member.process_id == self._own_id for member in self.present)

    @property
    def live(self) -> list[JoinRequest]:
        """Members that can join the next mesh epoch; outside process 0, as process 0 last announced."""
        announced = self._announced_live
        return [
            member
            for member in self.members
            if member.process_id not in self.lost
            and member not in self.excused
            and (announced is None or member.process_id in announced)
        ]

    @property
    def live_ids(self) -> list[int]:
        """IDs of the `live` members."""
        return [member.process_id for member in self.live]

    @property
    def has_leave_requests(self) -> bool:
        """Whether a request to leave is undecided."""
        return bool(self._undecided_leavers)

    def member(self, process_id: int) -> JoinRequest:
        """Return the member with this id."""
        return next(member for member in self.members if member.process_id == process_id)

    def loss_of(self, member: JoinRequest) -> GroupError | None:
        """Return why a member is gone, or None if it is not known to be. A replaced member counts as gone."""
        with self.changed:
            error = self.lost.get(member.process_id)
            return error or (None if member in self.members else GroupError(loss_message(member)))

    def check(self, failure: BaseException | None = None) -> None:
        """Raise the `GroupError` of the first lost member of this mesh epoch, with `failure` as its cause."""
        for member in self.present:
            error = self.loss_of(member)
            if error is not None:
                raise error from failure

    def enter(self, number: int, process_ids: Sequence[int], live_ids: Sequence[int] | None = None) -> None:
        """Enter a mesh epoch of these processes. live_ids: ids that can join the next one; not given in process 0."""
        with self.changed:
            self.epoch = number
            self.present = [member for member in self.members if member.process_id in process_ids]
            self._announced_live = None if live_ids is None else set(live_ids)
            self.changed.notify_all()

    def lose(self, member: JoinRequest, error: GroupError | None = None) -> GroupError | None:
        """Record that a member is gone. Return its error, or None if that is already known or the member was replaced."""
        with self.changed:
            if member.process_id in self.lost or member not in self.members:
                return None
            error = self.lost[member.process_id] = error or GroupError(loss_message(member))
            self._ended.add(member.process_id)
            self.changed.notify_all()
            return error

    def replace(self, member: JoinRequest) -> None:
        """Replace the member with this id by a process that has rejoined."""
        with self.changed:
            self.members = [member if old.process_id == member.process_id else old for old in self.members]
            self.lost.pop(member.process_id, None)
            self.excused = {left for left in self.excused if left.process_id != member.process_id}
            self.changed.notify_all()

    def take_ended(self) -> set[int]:
        """Return the ids of processes lost or excused since the last call."""
        with self.changed:
            ended = self._ended
            self._ended = set()
        return ended

    def ask_to_leave(self, member: JoinRequest) -> None:
        """Record a member's request to leave; `take_leave_requests` returns it, then `excuse` or a refusal decides it."""
        with self.changed:
            self._undecided_leavers.append(member)

    def take_leave_requests(self) -> list[JoinRequest]:
        """Return the requests to leave since the last call."""
        with self.changed:
            leavers = self._undecided_leavers
            self._undecided_leavers = []
        return leavers

    def excuse(self, member: JoinRequest) -> None:
        """Drop a member from further mesh epochs. It exits when an epoch without it has begun."""
        with self.changed:
            self.excused.add(member)
            self._ended.add(member.process_id)


def loss_message(member: JoinRequest) -> str:
    """Return the error message for a member that died or hangs."""
    if member.process_id == 0:
        return f"{member.name} has gone away, and with it the group; start all processes again"
    return f"{member.name} has gone away; its own messages say why"

"""`Agreement`: all-gather of plain values over the processes of a mesh epoch, through process 0."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import msgspec

from dsjax.hosts.membership import GroupError, Membership, loss_message
from dsjax.hosts.wire import JoinRequest
from dsjax.messaging import Endpoint, Peer, PeerLostError, RefusedError, Request

Result = TypeVar("Result")

_SERVICE = "gather"


class Contribution(msgspec.Struct, frozen=True, array_like=True):
    """One process's part of the `number`-th all-gather of this name in a mesh epoch: a plain value, or why it cannot continue."""

    epoch: int
    name: str
    number: int
    value: Any = None
    error: str | None = None


class _Waiter(NamedTuple):
    """The callbacks of a process that waits for the result of an all-gather."""

    reply: Callable[[list[Any]], object]
    refuse: Callable[[str], object]


class _Gather:
    """Values of one all-gather so far, by process id, and the processes that wait for the result."""

    def __init__(self):
        self.values: dict[int, Any] = {}
        self.error: str | None = None
        self.waiters: list[_Waiter] = []

    def answer(self, process_ids: list[int]) -> None:
        """Answer all waiters if the all-gather has failed, or has the values of all these processes."""
        if self.error is None and not self.values.keys() >= set(process_ids):
            return
        waiters = self.waiters
        self.waiters = []
        for waiter in waiters:
            if self.error is None:
                waiter.reply([self.values[process_id] for process_id in process_ids])
            else:
                waiter.refuse(self.error)


class Agreement:
    """All-gathers over the processes of a mesh epoch. Each process calls the same ones in the same order.

    leader: the connection to process 0; None in process 0. member_of: in process 0, maps a peer to its member.
    """

    def __init__(
        self,
        membership: Membership,
        endpoint: Endpoint,
        leader: Peer | None,
        member_of: Callable[[Peer], JoinRequest | None] = lambda peer: None,
    ):
        self._membership, self._leader, self._member_of = membership, leader, member_of
        self._numbers: dict[str, itertools.count] = defaultdict(itertools.count)
        self._gathers: dict[tuple[str, int], _Gather] = defaultdict(_Gather)
        if leader is None:
            endpoint.serve(_SERVICE, self._receive, roles=("member",), kind=Contribution)

    def begin_epoch(self) -> None:
        """Begin a mesh epoch: fail the pending all-gathers of the previous one and restart the numbering."""
        with self._membership.changed:
            self._numbers.clear()
            gathers = self._gathers
            self._gathers = defaultdict(_Gather)
        self._fail(gathers.values(), "another generation has begun")

    def fail_pending(self, error: GroupError) -> None:
        """Fail all pending all-gathers of the mesh epoch because a member is gone."""
        with self._membership.changed:
            gathers = list(self._gathers.values())
        self._fail(gathers, str(error))

    def contribute(self, name: str, value: Any = None, error: str | None = None) -> Future[list[Any]]:
        """Contribute a plain value, or why this process cannot continue, without waiting. The future's result is everyone's values."""
        contribution = Contribution(self._membership.epoch, name, next(self._numbers[name]), value, error)
        if self._leader is not None:
            return self._leader.request(_SERVICE, contribution, kind=list[Any])
        values: Future[list[Any]] = Future()
        waiter = _Waiter(values.set_result, lambda reason: values.set_exception(RefusedError(reason)))
        encoded = msgspec.msgpack.encode(contribution)
        self._add(0, msgspec.msgpack.decode(encoded, type=Contribution), waiter)  # like values that arrive by message
        return values

    def all_gather(self, name: str, value: Any = None) -> list[Any]:
        """Return the plain values of all processes, by process id; raise `GroupError` if a process is gone or cannot continue."""
        try:
            return self.contribute(name, value).result()
        except RefusedError as error:
            raise GroupError(str(error)) from error
        except PeerLostError as error:
            raise GroupError(loss_message(self._membership.members[0])) from error

    def run(self, name: str, act: Callable[[], Result]) -> Result:
        """Call `act`, as all present processes do. Return its result when all have finished.

        Raises:
            GroupError: it failed in another process, or a process is gone. Others: errors of `act`, also reported to the other processes.
        """
        try:
            result = act()
        except BaseException as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.contribute(name, error=reason)
            raise
        self.all_gather(name)
        return result

    def check_equal(self, name: str, value: Any) -> None:
        """Check that all processes have the same value of `name`; raise `GroupError` if one differs."""
        values = self.all_gather(name, value)
        for member, members_value in zip(self._membership.present, values, strict=True):
            if members_value != values[0]:
                raise GroupError(
                    f"{member.name} has {name} {members_value}, process 0 has {values[0]}; install all hosts alike"
                )

    def _receive(self, request: Request) -> None:
        member = self._member_of(request.peer)
        if member is None:
            request.refuse("this process is not in the group")
        else:
            self._add(member.process_id, request.body, _Waiter(request.reply, request.refuse))

    def _add(self, process_id: int, contribution: Contribution, waiter: _Waiter) -> None:
        """Add a contribution to its all-gather, and answer the waiting processes if it was the last one."""
        membership = self._membership
        with membership.changed:
            if contribution.epoch != membership.epoch:
                waiter.refuse(f"mesh epoch {contribution.epoch} was abandoned")
                return
            key = contribution.name, contribution.number
            gather = self._gathers[key]
            present = membership.present
            gather.values[process_id] = contribution.value
            gather.waiters.append(waiter)
            if contribution.error is not None and gather.error is None:
                gather.error = f"{membership.member(process_id).name}: {contribution.error}"
            for member in present:
                if gather.error is None and (error := membership.loss_of(member)) is not None:
                    gather.error = str(error)
            gather.answer([member.process_id for member in present])
            if not gather.waiters and len(gather.values) == len(present):
                del self._gathers[key]

    @staticmethod
    def _fail(gathers: Iterable[_Gather], error: str) -> None:
        for gather in gathers:
            gather.error = gather.error or error
            gather.answer([])

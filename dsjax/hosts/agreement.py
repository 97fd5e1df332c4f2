"""`Agreement`: all-gather of plain values over the processes of a mesh epoch (`generation`), through process 0."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from dsjax.hosts.membership import GroupError, Membership, gone
from dsjax.hosts.wire import JoinRequest
from dsjax.messaging import Endpoint, Peer, PeerLostError, RefusedError, Request

Result = TypeVar("Result")

_SERVICE = "gather"


class Said(msgspec.Struct, frozen=True, array_like=True):
    """One process's contribution to the `number`-th all-gather named `stage` in a mesh epoch: a plain value, or why it cannot continue."""

    generation: int
    stage: str
    number: int
    value: Any = None
    error: str | None = None


class _Gather:
    """Contributions to one all-gather so far, and the callbacks that wait for the result."""

    def __init__(self):
        self.said: dict[int, Any] = {}
        self.error: str | None = None
        self.waiting: list[tuple[Callable[[Any], object], Callable[[str], object]]] = []

    def settle(self, present: list[int]) -> None:
        if self.error is None and not self.said.keys() >= set(present):
            return
        waiting, self.waiting = self.waiting, []
        for reply, refuse in waiting:
            if self.error is not None:
                refuse(self.error)
            else:
                reply([self.said[process_id] for process_id in present])


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
            endpoint.serve(_SERVICE, self._hear, roles=("member",), kind=Said)

    def begin(self) -> None:
        """Begin a mesh epoch: fail the pending all-gathers of the previous one and restart the numbering."""
        with self._membership.changed:
            self._numbers.clear()
            gathers, self._gathers = self._gathers, defaultdict(_Gather)
        self._fail(gathers.values(), "another generation has begun")

    def lose(self, error: GroupError) -> None:
        """Fail all pending all-gathers of the mesh epoch because a member is gone."""
        with self._membership.changed:
            gathers = list(self._gathers.values())
        self._fail(gathers, str(error))

    def tell(self, stage: str, value: Any = None, error: str | None = None) -> Future[list[Any]]:
        """Contribute a plain value, or why this process cannot continue. The future's result is everyone's values."""
        said = Said(self._membership.generation, stage, next(self._numbers[stage]), value, error)
        if self._leader is not None:
            return self._leader.request(_SERVICE, said, kind=list[Any])
        answer: Future[list[Any]] = Future()
        said = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Said)  # like values that arrive by message
        self._enter(0, said, answer.set_result, lambda reason: answer.set_exception(RefusedError(reason)))
        return answer

    def ask(self, stage: str, value: Any = None) -> list[Any]:
        """All-gather a plain value. Return the values by process id; raise `GroupError` if a process is gone or cannot continue."""
        try:
            return self.tell(stage, value).result()
        except RefusedError as error:
            raise GroupError(str(error)) from error
        except PeerLostError as error:
            raise GroupError(gone(self._membership.members[0])) from error

    def run(self, stage: str, act: Callable[[], Result]) -> Result:
        """Call `act`, as all present processes do. Return its result when all have finished.

        Raises:
            GroupError: it failed in another process, or a process is gone. Others: errors of `act`, also reported to the other processes.
        """
        try:
            result = act()
        except BaseException as error:
            self.tell(stage, error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            raise
        self.ask(stage)
        return result

    def alike(self, stage: str, what: str, value: Any) -> None:
        """Check that all processes have the same value of `what`; raise `GroupError` if one differs."""
        values = self.ask(stage, value)
        for member, members_value in zip(self._membership.present, values, strict=True):
            if members_value != values[0]:
                raise GroupError(
                    f"{member.name} has {what} {members_value}, process 0 has {values[0]}; install all hosts alike"
                )

    def _hear(self, request: Request) -> None:
        member = self._member_of(request.peer)
        if member is None:
            request.refuse("this process is not in the group")
        else:
            self._enter(member.process_id, request.body, request.reply, request.refuse)

    def _enter(
        self, process_id: int, said: Said, reply: Callable[[Any], object], refuse: Callable[[str], object]
    ) -> None:
        membership = self._membership
        with membership.changed:
            if said.generation != membership.generation:
                refuse(f"generation {said.generation} was given up")
                return
            gather = self._gathers[said.stage, said.number]
            gather.said[process_id] = said.value
            gather.waiting.append((reply, refuse))
            if said.error is not None and gather.error is None:
                gather.error = f"{membership.member(process_id).name}: {said.error}"
            for member in membership.present:
                if gather.error is None and (error := membership.loss_of(member)) is not None:
                    gather.error = str(error)
            gather.settle([member.process_id for member in membership.present])
            if not gather.waiting and len(gather.said) == len(membership.present):
                del self._gathers[said.stage, said.number]

    @staticmethod
    def _fail(gathers: Any, error: str) -> None:
        for gather in gathers:
            gather.error = gather.error or error
            gather.settle([])

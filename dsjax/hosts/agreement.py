"""`Agreement`: what all processes of a generation say to each other's questions, which process 0 gathers."""

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
    """What a process says to the `number`-th question of a name in a generation: a plain value, or why it cannot go on."""

    generation: int
    stage: str
    number: int
    value: Any = None
    error: str | None = None


class _Gather:
    """What was said to a question so far, and who waits for all of it."""

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
    """Questions of one process to all that are in its generation. Each process asks the same ones in the same order.

    leader: the connection to process 0; None: this is process 0. member_of: there, gives the member that has connected.
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
        """A generation has begun: whoever waits for an answer of the one before gives up, and questions are new."""
        with self._membership.changed:
            self._numbers.clear()
            gathers, self._gathers = self._gathers, defaultdict(_Gather)
        self._fail(gathers.values(), "another generation has begun")

    def lose(self, error: GroupError) -> None:
        """A member of the generation is gone: nothing that is asked in it has an answer any more."""
        with self._membership.changed:
            gathers = list(self._gathers.values())
        self._fail(gathers, str(error))

    def tell(self, stage: str, value: Any = None, error: str | None = None) -> Future[list[Any]]:
        """Say a plain value, or why this process cannot go on. The result is what all say."""
        said = Said(self._membership.generation, stage, next(self._numbers[stage]), value, error)
        if self._leader is not None:
            return self._leader.request(_SERVICE, said, kind=list[Any])
        answer: Future[list[Any]] = Future()
        said = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Said)  # as the others' come
        self._enter(0, said, answer.set_result, lambda reason: answer.set_exception(RefusedError(reason)))
        return answer

    def ask(self, stage: str, value: Any = None) -> list[Any]:
        """Tell all present processes a plain value; give everybody's, by id; a `GroupError` where somebody is gone or cannot go on."""
        try:
            return self.tell(stage, value).result()
        except RefusedError as error:
            raise GroupError(str(error)) from error
        except PeerLostError as error:
            raise GroupError(gone(self._membership.members[0])) from error

    def run(self, stage: str, act: Callable[[], Result]) -> Result:
        """Do something that all present processes do. Return its result when all have done it.

        Raises:
            GroupError: it failed in another process, or a process is gone. Others: those of `act`, which the others are told.
        """
        try:
            result = act()
        except BaseException as error:
            self.tell(stage, error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            raise
        self.ask(stage)
        return result

    def alike(self, stage: str, what: str, value: Any) -> None:
        """Make sure that all have the same value of `what`; a `GroupError` where one has another."""
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

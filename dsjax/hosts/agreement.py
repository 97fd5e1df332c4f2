"""`Agreement`: what all processes of a generation say to each other's questions, over the coordination service's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dsjax.hosts.rendezvous import GroupError, JoinRequest

if TYPE_CHECKING:
    from dsjax.hosts.group import HostGroup

Result = TypeVar("Result")

_LOOK_SECONDS = 1.0


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What a process says to a question: a plain value, or why it cannot go on."""

    value: Any = None
    error: str | None = None


class Agreement:
    """Questions of one process to all that are in its generation. Each process asks the same ones in the same order."""

    def __init__(self, group: HostGroup):
        self._group = group
        self._told: dict[str, int] = {}

    def begin(self) -> None:
        """Forget what was said: a generation has begun, and its questions are new."""
        self._told = {}

    def run(self, stage: str, act: Callable[[], Result]) -> Result:
        """Do something that all present processes do. Return its result when all have done it.

        Raises:
            GroupError: it failed in another process, or a process is gone. An error of `act` is raised here, and told to the others.
        """
        try:
            result = act()
        except BaseException as error:
            self.tell(stage, error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            raise
        self.ask(stage)
        return result

    def tell(self, stage: str, value: Any = None, error: str | None = None) -> None:
        """Say a plain value, or why this process cannot go on, to whoever asks for it."""
        number = self._told[stage] = self._told.get(stage, -1) + 1
        group = self._group
        said = msgspec.msgpack.encode(Said(value, error))
        group.store.set(group.key("agree", stage, number, group.options.process_id), said)

    def ask(self, stage: str, value: Any = None) -> list[Any]:
        """Tell all present processes a plain value; give everybody's, in the order of their ids. All ask the same in the same order.

        Raises:
            GroupError: somebody says that it cannot go on, or is gone; or, not in process 0, another generation has begun.
        """
        self.tell(stage, value)
        values = []
        for member in self._group.present:
            said = self._hear(stage, member)
            if said.error is not None:
                raise GroupError(f"{member.name}: {said.error}")
            values.append(said.value)
        return values

    def alike(self, stage: str, what: str, value: Any) -> None:
        """Make sure that all have the same value of `what`.

        Raises:
            GroupError: one has another.
        """
        values = self.ask(stage, value)
        for member, members_value in zip(self._group.present, values, strict=True):
            if members_value != values[0]:
                raise GroupError(
                    f"{member.name} has {what} {members_value}, process 0 has {values[0]}; install all hosts alike"
                )

    def _hear(self, stage: str, member: JoinRequest) -> Said:
        group = self._group
        generation = group.generation
        key = group.key("agree", stage, self._told[stage], member.process_id)
        while True:
            value = group.store.get(key, _LOOK_SECONDS)
            if value is not None:
                return msgspec.msgpack.decode(value, type=Said)
            group.check_generation(generation, f"{member.name} was waited for")

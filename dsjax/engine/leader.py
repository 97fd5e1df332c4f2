"""`LeaderExecutor`: process 0's executor in a group of processes. What it is told, all others are told too, in the same order."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from dsjax.engine.commands import Command, Flush, Score, Step
from dsjax.engine.executor import Executor, ExecutorAround, Progress
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.stream import StreamWriter


class Launch(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """Carry out a command, once `collected` results have been collected, counted from the start."""

    collected: int
    command: Command


class Record(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """From the next launch on, bring the experts' counts to the host, or do not: that takes a program of its own."""

    on: bool


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag="warm up"):
    """Compile every program."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Nothing more will come. reason: None where that is as it should be."""

    reason: str | None = None


Message = Launch | Record | WarmUp | End

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """A message of the stream.

    Raises:
        msgspec.ValidationError: these bytes are none.
    """
    return _decoder.decode(data)


def is_collected(command: Command) -> bool:
    """Whether a command's result is collected, in its turn."""
    return isinstance(command, Step | Score | Flush)


class LeaderExecutor(ExecutorAround):
    """An executor that writes down each command for the other processes of a generation, and then carries it out itself.

    What fails because a process is known to have gone away is a `GroupError` that names it. Nothing more is to be launched then: who
    survives goes on in another generation, with another executor.

    Attributes:
        collected: how many results have been collected.
    """

    def __init__(self, inner: Executor, group: HostGroup):
        super().__init__(inner)
        self.group = group
        self._stream = StreamWriter(group)
        self.collected = 0
        self._numbers: deque[int] = deque()
        group.at_end(lambda reason: self._put(End(reason)))

    def launch(self, command: Command) -> Any:
        """Tell the others, and launch a command."""
        self.group.check()
        number = self._put(Launch(self.collected, command))
        if is_collected(command):
            self._numbers.append(number)
        try:
            return self._inner(self.inner.launch, command)
        except (GroupError, RuntimeError):
            raise  # it cannot be survived in this generation; whoever calls knows whether there is a next one
        except BaseException as error:
            # The others carry it out, and this process has not: nothing that comes after would be the same there.
            self.group.leave(f"a command could not be launched ({type(error).__name__})")
            raise

    def wait(self, pending: Any) -> None:
        """As the inner executor."""
        self._inner(self.inner.wait, pending)

    def collect(self, pending: Any) -> Any:
        """As the inner executor. What all have done by then is deleted from the stream."""
        results = self._inner(self.inner.collect, pending)
        if is_collected(pending.command):
            self.collected += 1
            number = self._numbers.popleft()
            if not isinstance(pending.command, Flush):  # which gathers nothing: somebody may not have read it yet
                self._stream.forget(number)
        return results

    def set_recording(self, on: bool) -> None:
        """Whether the experts' load is recorded from the next step on, for which all processes run a program more."""
        self._put(Record(on))
        self.inner.set_recording(on)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Have all processes compile every program, each its own; wait until all have.

        Raises:
            GroupError: another process could not. What `progress` raises ends this warm-up, and the others' when the group ends.
        """
        self._put(WarmUp())
        self.inner.warm_up(progress)
        self.group.ask("warm-up")

    def retire(self) -> None:
        """This generation is over: its stream is read no more."""
        self._stream.drop()

    def shutdown(self) -> None:
        """End the others, and give back what the inner executor holds."""
        self._put(End())
        self.inner.shutdown()
        self.group.leave()

    def _put(self, message: Message) -> int:
        return self._stream.put(_encoder.encode(message))

    def _inner(self, method: Any, argument: Any) -> Any:
        try:
            return method(argument)
        except (
            RuntimeError
        ) as error:  # a collective that lost its other side, as may be known by now or soon (`Generations.after`)
            self.group.check(error)
            raise


__all__ = ["End", "GroupError", "Launch", "LeaderExecutor", "Record", "WarmUp", "decode", "is_collected"]

"""`LeaderExecutor`: process 0's executor in a group of processes. What it is told, all others are told too, in the same order."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dsjax.engine.contract.commands import Command, Flush, Score, Step
from dsjax.engine.contract.executor import Executor, ExecutorWrapper, ExpertCounts, Kind, Progress
from dsjax.engine.transfer.messages import ChunkPort, Pull, PulledChunk
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.messaging import Request


class LaunchMessage(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """Carry out a command, once `collected` results have been collected, counted from the start."""

    collected: int
    command: Command


class Record(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """From the next launch on, bring the experts' counts to the host, or do not: that takes a program of its own."""

    on: bool


class ReadRecord(msgspec.Struct, frozen=True, array_like=True, tag="read record"):
    """Read the experts' counts, once `collected` results have been collected: a process may have to tell process 0 its own."""

    collected: int


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag="warm up"):
    """Compile every program."""


Message = LaunchMessage | Record | ReadRecord | WarmUp

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Read a message of the stream; a `msgspec.ValidationError` where these bytes are none."""
    return _decoder.decode(data)


def is_collected(command: Command) -> bool:
    """Say whether a command's result is collected, in its turn."""
    return isinstance(command, Step | Score | Flush)


PULLED = "pulled"
"""The service of process 0 that is told what has come of the chunks that another process pulls."""


class Pulled(msgspec.Struct, frozen=True, array_like=True):
    """What has come of a chunk in a process, in a generation."""

    generation: int
    chunk: PulledChunk


class Landings:
    """What has come of chunks that several processes pull, each for its own devices of a rank: reported when all have said it.

    processes: of each rank, those that have devices of it.
    """

    def __init__(self, processes: Sequence[Sequence[int]], report: Callable[[PulledChunk], None]):
        self._processes, self._report = processes, report
        self._heard: dict[tuple[int, int, int], list[bool]] = {}
        self._lock = threading.Lock()

    def enter(self, chunk: PulledChunk) -> None:
        """Enter that one process has pulled a chunk, or could not. Any thread may call it."""
        key = chunk.rank, chunk.link, chunk.number
        with self._lock:
            heard = self._heard.setdefault(key, [])
            heard.append(chunk.ok)
            if len(heard) < len(self._processes[chunk.rank]):
                return
            del self._heard[key]
        self._report(chunk._replace(ok=all(heard)))


class LeaderExecutor(ExecutorWrapper):
    """An executor that tells the other processes of a generation each command, and then carries it out itself.

    collected: results that have been collected, or given up for one behind them. After a `GroupError` nothing more is to be launched.
    """

    def __init__(self, inner: Executor, group: HostGroup):
        super().__init__(inner)
        self.group = group
        self._generation = group.generation
        self.collected = self._launched = 0  # of commands whose results are collected
        self._places: dict[Any, int] = {}  # of results still to be collected: which of all each is, from 1 on

    def launch(self, command: Command) -> Any:
        """Tell the others, and launch a command."""
        self.group.check()
        self._put(LaunchMessage(self.collected, command))
        try:
            pending = self._inner(self.inner.launch, command)
            if is_collected(command):
                self._launched += 1
                self._places[pending] = self._launched
            return pending
        except (GroupError, RuntimeError):
            raise  # it cannot be survived in this generation; whoever calls knows whether there is a next one
        except BaseException as error:
            # The others carry it out, and this process has not: nothing that comes after would be the same there.
            self.group.leave(f"a command could not be launched ({type(error).__name__})")
            raise

    def wait(self, pending: Any) -> None:
        """Wait until a launched command is done here."""
        self._inner(self.inner.wait, pending)

    def collect(self, pending: Any) -> Any:
        """Give what came of a command."""
        results = self._inner(self.inner.collect, pending)
        # After an interrupt (Ctrl-C) a result may be collected once more, or never: the others collect each once, in order.
        self.collected = max(self.collected, self._places.get(pending, 0))
        self._places = {one: place for one, place in self._places.items() if place > self.collected}
        return results

    def set_recording(self, on: bool) -> None:
        """Record the experts' load from the next step on, or do not, for which all processes run a program more."""
        self.inner.set_recording(on)  # first, as it may refuse
        self._put(Record(on))

    def expert_counts(self) -> ExpertCounts | None:
        """What all processes recorded since recording began; None while it is off."""
        if not self.inner.recording:
            return None
        self.group.check()
        self._put(ReadRecord(self.collected))
        return self._inner(self.inner.expert_counts)

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Give what the inner executor offers; what all processes report of the chunks that they pull is put together."""
        port = self.inner.extension(kind)
        return _LeaderPort(port, self.group) if kind is ChunkPort and port is not None else port

    def warm_up(self, progress: Progress | None = None, lazily: bool = False) -> None:
        """Have all processes compile every program; a `GroupError` where another process could not."""
        self._put(WarmUp())
        self.inner.warm_up(progress)
        self.group.agreement.ask("warm-up")

    def shutdown(self) -> None:
        """Tell the others that this is the end, if they have not been told yet, and give back what the inner executor holds."""
        self.group.end()
        self.inner.shutdown()
        self.group.leave()

    def _put(self, message: Message) -> None:
        self.group.command(self._generation, _encoder.encode(message))

    def _inner(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except RuntimeError as error:
            # A collective has lost its other side, as may be known soon (`Generations.after`).
            self.group.check(error)
            raise


class _LeaderPort:
    """The way to other engines of an executor that leads other processes. What it does not do otherwise, the inner port does."""

    def __init__(self, port: ChunkPort, group: HostGroup):
        self._port, self._group, self._generation = port, group, group.generation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def pull_chunks(self, pull: Pull, report: Callable[[PulledChunk], None]) -> None:
        """Report a chunk when every process with devices of its rank has said what came of it there."""
        landings = Landings(self._port.processes_of_ranks, report)

        def hear(request: Request) -> None:  # in the messaging thread
            if request.body.generation == self._generation:
                landings.enter(request.body.chunk)

        self._port.pull_chunks(pull, landings.enter)
        self._group.endpoint.serve(PULLED, hear, roles=("member",), kind=Pulled)

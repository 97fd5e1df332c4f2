"""`LeaderExecutor`: process 0's executor in a group of processes. What it is told, all others are told too, in the same order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from dsjax.background import contained, start_thread
from dsjax.engine.contract.commands import Command, Flush, Score, Step
from dsjax.engine.contract.executor import Executor, ExecutorWrapper, ExpertCounts, Kind, Progress
from dsjax.engine.transfer.messages import ChunkPort, Pull, PulledChunk
from dsjax.hosts.group import GroupError, HostGroup
from dsjax.hosts.stream import StreamReader, StreamWriter

_LOOK_SECONDS = 0.5
_JOIN_SECONDS = 2.0


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


class EndMessage(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Nothing more will come. reason: None where that is as it should be."""

    reason: str | None = None


Message = LaunchMessage | Record | ReadRecord | WarmUp | EndMessage

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Read a message of the stream.

    Raises:
        msgspec.ValidationError: these bytes are none.
    """
    return _decoder.decode(data)


def is_collected(command: Command) -> bool:
    """Say whether a command's result is collected, in its turn."""
    return isinstance(command, Step | Score | Flush)


def pulled_stream(process_id: int) -> str:
    """Give the name of the stream in which a process tells the leader what has come of the chunks that it pulls."""
    return f"pulled/{process_id}"


class Landings:
    """What has come of chunks that several processes pull, each for its own devices of a rank: reported when all of them have said it.

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
    """An executor that writes down each command for the other processes of a generation, and then carries it out itself.

    What fails because a process is known to have gone away is a `GroupError` that names it. Nothing more is to be launched then: who
    survives goes on in another generation, with another executor.

    Attributes:
        collected: how many results have been collected, or have been given up for one behind them.
    """

    def __init__(self, inner: Executor, group: HostGroup):
        super().__init__(inner)
        self.group = group
        self._stream = StreamWriter(group)
        self.collected = self._launched = 0  # of commands whose results are collected
        # Those whose results are still to be collected: which of all of them each is, from 1 on, and its number in the stream.
        self._places: dict[Any, tuple[int, int]] = {}
        self._readers: list[tuple[StreamReader, threading.Thread]] = []
        group.at_end(lambda reason: self._put(EndMessage(reason)))

    def launch(self, command: Command) -> Any:
        """Tell the others, and launch a command."""
        self.group.check()
        number = self._put(LaunchMessage(self.collected, command))
        try:
            pending = self._inner(self.inner.launch, command)
            if is_collected(command):
                self._launched += 1
                self._places[pending] = self._launched, number
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
        """Give what came of a command. What all have done by then is deleted from the stream."""
        results = self._inner(self.inner.collect, pending)
        # After an interrupt (Ctrl-C) a result may be collected once more, or never: the others collect each once, in order.
        place, number = self._places.get(pending, (0, None))
        if number is not None:
            self.collected = max(self.collected, place)
            if not isinstance(pending.command, Flush):  # which gathers nothing: somebody may not have read it yet
                self._stream.forget(number)
            self._places = {one: places for one, places in self._places.items() if places[0] > self.collected}
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
        """Give what the inner executor offers. Chunks are pulled by all processes, so what is reported of them is put together."""
        port = self.inner.extension(kind)
        return _LeaderPort(port, self) if kind is ChunkPort and port is not None else port

    def listen(self, landings: Landings, process_ids: Iterable[int]) -> None:
        """Hear what these processes have pulled, each in a thread."""
        for process_id in sorted(set(process_ids) - {self.group.options.process_id}):
            reader = StreamReader(self.group, pulled_stream(process_id), is_only=True, look=_LOOK_SECONDS)
            thread = start_thread(
                "chunk reports", _read_pulled, reader, landings, name="dsjax-pulled-elsewhere", restarts=True
            )
            self._readers.append((reader, thread))

    def warm_up(self, progress: Progress | None = None) -> None:
        """Have all processes compile every program, each its own; wait until all have.

        Raises:
            GroupError: another process could not. What `progress` raises ends this warm-up, and the others' when the group ends.
        """
        self._put(WarmUp())
        self.inner.warm_up(progress)
        self.group.agreement.ask("warm-up")

    def retire(self) -> None:
        """End this generation, whose stream is read no more."""
        self._stream.drop()
        for reader, _ in self._readers:
            reader.closed.set()

    def shutdown(self) -> None:
        """Tell the others that this is the end, if they have not been told yet, and give back what the inner executor holds."""
        if not self.group.leaving:
            self._put(EndMessage())
        for reader, _ in self._readers:
            reader.closed.set()
        for _, thread in self._readers:  # what waits in C++ when Python ends aborts the process
            thread.join(_JOIN_SECONDS)
        self.inner.shutdown()
        self.group.leave()

    def _put(self, message: Message) -> int:
        return self._stream.put(_encoder.encode(message))

    def _inner(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except (
            RuntimeError
        ) as error:  # a collective that lost its other side, as may be known soon (`Generations.after`)
            self.group.check(error)
            raise


class _LeaderPort:
    """The way to other engines of an executor that leads other processes. What it does not do otherwise, the inner port does."""

    def __init__(self, port: ChunkPort, leader: LeaderExecutor):
        self._port, self._leader = port, leader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def pull_chunks(self, pull: Pull, report: Callable[[PulledChunk], None]) -> None:
        """Report a chunk when every process with devices of its rank has said what came of it there."""
        processes = self._port.processes_of_ranks
        landings = Landings(processes, report)
        self._port.pull_chunks(pull, landings.enter)
        self._leader.listen(landings, itertools.chain.from_iterable(processes))


def _read_pulled(reader: StreamReader, landings: Landings) -> None:
    try:
        while (data := reader.next()) is not None:
            with contained("chunk reports", "The request that waits for the chunk goes on when its time is over."):
                if not reader.closed.is_set():
                    landings.enter(msgspec.msgpack.decode(data, type=PulledChunk))
    except ConnectionError:  # the group knows
        return

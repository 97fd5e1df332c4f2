"""`LeaderExecutor`: process 0's executor in a group of processes. Broadcasts each command to all others, in the same order."""

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
    """Execute a command once `collected` results have been collected since the start of the mesh epoch, as on process 0."""

    collected: int
    command: Command


class Record(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """Turn on or off the copying of the experts' counts to the host, from the next launch on. It needs a separate program."""

    on: bool


class ReadRecord(msgspec.Struct, frozen=True, array_like=True, tag="read record"):
    """Read the experts' counts, `collected` as in `LaunchMessage`. A process may have to send its counts to process 0."""

    collected: int


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag="warm up"):
    """Compile every program."""


Message = LaunchMessage | Record | ReadRecord | WarmUp

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Decode a message of the broadcast log. Raises a `msgspec.ValidationError` for invalid bytes."""
    return _decoder.decode(data)


def is_collected(command: Command) -> bool:
    """Whether a command has a result, to be collected in order."""
    return isinstance(command, Step | Score | Flush)


PULLED = "pulled"
"""Service of process 0 that receives the outcomes of chunks pulled by other processes."""


class Pulled(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a chunk pulled by one process, in a mesh epoch (generation)."""

    generation: int
    chunk: PulledChunk


class Landings:
    """Combines the pulls of a chunk by all processes of its DP rank (`processes[rank]`): reports it once all have; ok if all succeeded."""

    def __init__(self, processes: Sequence[Sequence[int]], report: Callable[[PulledChunk], None]):
        self._processes_of_rank, self._report = processes, report
        self._heard: dict[tuple[int, int, int], list[bool]] = {}  # whether each pull succeeded
        self._lock = threading.Lock()

    def enter(self, chunk: PulledChunk) -> None:
        """Enter the result of one process's pull. Thread-safe."""
        key = chunk.rank, chunk.link, chunk.number
        with self._lock:
            pulls = self._heard.setdefault(key, [])
            pulls.append(chunk.ok)
            if len(pulls) < len(self._processes_of_rank[chunk.rank]):
                return
            del self._heard[key]
        self._report(chunk._replace(ok=all(pulls)))


class LeaderExecutor(ExecutorWrapper):
    """An executor that broadcasts each command to the other processes of its mesh epoch, and then executes it itself.

    collected: number of results collected, or skipped for a later one. After a `GroupError`, launch nothing more.
    """

    def __init__(self, inner: Executor, group: HostGroup):
        super().__init__(inner)
        self.group = group
        self._epoch = group.epoch
        self.collected = self._launched = 0  # numbers of commands for which `is_collected`
        self._places: dict[Any, int] = {}  # of each result not collected yet, its number from 1 on

    def launch(self, command: Command) -> Any:
        """Broadcast and launch a command."""
        self.group.check()
        self._put(LaunchMessage(self.collected, command))
        try:
            pending = self._inner(self.inner.launch, command)
            if is_collected(command):
                self._launched += 1
                self._places[pending] = self._launched
            return pending
        except (GroupError, RuntimeError):
            raise  # fatal for this mesh epoch; the caller knows whether another one follows
        except BaseException as error:
            # The others execute the command and this process has not, so their states differ from now on.
            self.group.leave(f"a command could not be launched ({type(error).__name__})")
            raise

    def wait(self, pending: Any) -> None:
        """Wait until a launched command is done in this process."""
        self._inner(self.inner.wait, pending)

    def collect(self, pending: Any) -> Any:
        """Return the result of a command."""
        results = self._inner(self.inner.collect, pending)
        # After an interrupt (Ctrl-C) a result may be collected again or never here. The others collect each once, in order.
        self.collected = max(self.collected, self._places.get(pending, 0))
        self._places = {other: number for other, number in self._places.items() if number > self.collected}
        return results

    def set_recording(self, on: bool) -> None:
        """Turn recording of the experts' load on or off from the next step on. All processes run an additional program for it."""
        self.inner.set_recording(on)  # first, because it may raise
        self._put(Record(on))

    def expert_counts(self) -> ExpertCounts | None:
        """Return the counts of all processes since recording began; None while it is off."""
        if not self.inner.recording:
            return None
        self.group.check()
        self._put(ReadRecord(self.collected))
        return self._inner(self.inner.expert_counts)

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Return the inner executor's extension. Its `ChunkPort` is wrapped to join all processes' reports of pulled chunks."""
        port = self.inner.extension(kind)
        return _LeaderPort(port, self.group) if kind is ChunkPort and port is not None else port

    def warm_up(self, progress: Progress | None = None, lazily: bool = False) -> None:
        """Make all processes compile every program. Raises a `GroupError` if another process fails."""
        self._put(WarmUp())
        self.inner.warm_up(progress)
        self.group.agreement.all_gather("warm-up")

    def shutdown(self) -> None:
        """Tell the other processes to end, unless already done, and shut down the inner executor."""
        self.group.end()
        self.inner.shutdown()
        self.group.leave()

    def _put(self, message: Message) -> None:
        self.group.command(self._epoch, _encoder.encode(message))

    def _inner(self, method: Any, *arguments: Any) -> Any:
        """Call the inner executor. If it fails because a process is lost, raise that as a `GroupError`."""
        try:
            return method(*arguments)
        except RuntimeError as error:
            # A collective may have lost its peer; the group may learn of it soon (`Generations.after`).
            self.group.check(error)
            raise


class _LeaderPort:
    """The `ChunkPort` of an executor that leads other processes. Delegates everything but `pull_chunks` to the inner port."""

    def __init__(self, port: ChunkPort, group: HostGroup):
        self._port = port
        self._group = group
        self._epoch = group.epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def pull_chunks(self, pull: Pull, report: Callable[[PulledChunk], None]) -> None:
        """Pull chunks. Report each one when every process with devices of its rank has reported it."""
        landings = Landings(self._port.processes_of_ranks, report)

        def hear(request: Request) -> None:  # in the messaging thread
            if request.body.generation == self._epoch:
                landings.enter(request.body.chunk)

        self._port.pull_chunks(pull, landings.enter)
        self._group.endpoint.serve(PULLED, hear, roles=("member",), kind=Pulled)

"""Recording of an engine's command stream in a file: `dsjax serve --record-steps FILE`; `StepRecording` reads it.

The file has eight bytes of `MAGIC`, then frames: the length of a message as four little-endian bytes, and the message in MessagePack. The
first message is the `Header`. Then follow, in the order of the engine's thread, a `Launched` for every command and a `Collected` for
every fetched result. If a step was in flight when another one was launched, its `Collected` comes after the other's `Launched`, so a
replay in file order has the same commands in flight together. The last message is a `RecordingEnd`. A file without one, or that ends
inside a frame, comes from a killed process and can be read up to that point.

The file holds token ids of prompts and outputs, and is as confidential as they are: it is created with mode 0600.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from dsjax.engine.contract.commands import VERSION, Command, Flush, Score, Step
from dsjax.engine.contract.executor import Executor, ExecutorLimits, ExecutorWrapper, RankResults, RowResult
from dsjax.errors import UserError
from dsjax.versions import installed_version

MAGIC = b"dsjaxstp"
FORMAT = 1
"""Version of the frames; the commands in them have a separate `VERSION`."""
DEFAULT_BYTES = 256 * 2**20

_log = logging.getLogger(__name__)


class RecordError(UserError):
    """A recording that cannot be written, read or replayed."""


class Header(msgspec.Struct, frozen=True, tag="header"):
    """The engine that computed the commands."""

    format: int  # `FORMAT`
    commands: int  # `VERSION` of `dsjax.engine.contract.commands`
    dsjax: str
    jax: str
    platform: str  # of JAX: `cpu`, `gpu` or `tpu`
    device_kind: str
    fingerprint: str  # of the checkpoint
    options: dict[str, Any]  # options of `EngineArgs` that change an executor's computation
    limits: dict[str, int]  # the executor's actual limits
    began: float  # seconds since 1970


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Result of a row: its tokens, whether its logits were finite, and the error if it failed with finite logits."""

    token_ids: list[int] = []
    finite: bool = True
    error: str | None = None


RowOutcome = int | Outcome | None
"""The token of a row with exactly one, the usual case; None: no token and no failure; else an `Outcome`."""


class RankOutcomes(msgspec.Struct, frozen=True, array_like=True):
    """One rank's rows, in the order of its `RankStep`."""

    decodes: list[RowOutcome]
    prefills: list[RowOutcome]


class Launched(msgspec.Struct, frozen=True, array_like=True, tag="launched"):
    """A command was launched."""

    number: int  # of the command, from 0
    time: float  # seconds since the start of the recording
    command: Command


class Collected(msgspec.Struct, frozen=True, array_like=True, tag="collected"):
    """Result of command `number`."""

    number: int
    done: float  # seconds since the start of the recording
    ranks: list[RankOutcomes] = []  # for a `Step`
    greedy: list[int] = []  # for a `Score`: the most probable next token at each position
    finite: bool = True  # for a `Score`: whether all logits were finite. Logits are not kept


class RecordingEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Regular end of a recording."""

    reason: str  # `shutdown`, or why the recording stopped early


Frame = Launched | Collected | RecordingEnd

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_END_ROOM = 128


def describe_recording(options: dict[str, Any], limits: ExecutorLimits, fingerprint: str, device: Any) -> Header:
    """Return the header of a recording that starts now. device: a JAX device."""
    sizes = {name: int(size) for name, size in dataclasses.asdict(limits).items()}
    versions = FORMAT, VERSION, installed_version("dsjax"), installed_version("jax")
    return Header(*versions, device.platform, device.device_kind, fingerprint, options, sizes, time.time())


def check_writable(path: str | Path) -> None:
    """Raise a `RecordError` if the file exists or its folder is not writable. Called before anything expensive."""
    path = Path(path)
    if path.exists():
        raise RecordError(f"--record-steps: {path} exists; give another name, or remove it if it is not needed")
    if not os.access(path.parent, os.W_OK):
        raise RecordError(f"--record-steps: {path.parent} is no folder that can be written; give another one")


class StepFile:
    """A recording being written. A frame that would exceed `max_bytes` ends the recording; serving continues.

    Every frame is one unbuffered write, so that a killed process loses none.

    Raises:
        RecordError: the file exists or cannot be created.
    """

    def __init__(self, path: str | Path, first: Header, max_bytes: int = DEFAULT_BYTES):
        check_writable(path)
        message = MAGIC + _frame(first)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise RecordError(f"--record-steps: {path} cannot be created: {error.strerror}") from error
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._used = 0
        self._number = 0
        self._file: IO[bytes] | None = os.fdopen(descriptor, "wb", buffering=0)
        self._put(message)

    @property
    def is_open(self) -> bool:
        """Whether the recording is still being written."""
        return self._file is not None

    def write(self, frame: Launched | Collected) -> None:
        """Append a frame, or end the recording if the frame does not fit."""
        if self._file is None:
            return
        message = _frame(frame)
        if self._used + len(message) + _END_ROOM > self._max_bytes:
            _log.warning(
                "The recording of steps %s has reached its bound of %d bytes and ends here; serving goes on.",
                self.path,
                self._max_bytes,
            )
            self.close("the bound was reached")
            return
        self._put(message)

    def close(self, reason: str) -> None:
        """End the recording. No-op if it has already ended."""
        if self._file is None:
            return
        self._put(_frame(RecordingEnd(reason)))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, message: bytes) -> None:
        view = memoryview(message)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            _log.warning(
                "The recording of steps %s ends: it cannot be written (%s). Serving goes on.", self.path, error.strerror
            )
            self._file.close()
            self._file = None
        self._used += len(message)


class RecordingExecutor(ExecutorWrapper):
    """An executor that records its commands and their results. The recording starts with a `Flush` of the cache."""

    def __init__(self, inner: Executor, file: StepFile):
        super().__init__(inner)
        self.file = file
        self._began = time.monotonic()
        self._next = 0
        self.collect(self.launch(Flush()))

    def launch(self, command: Command) -> Any:
        """Launch a command, and record it while the device computes. A command that fails to launch is recorded too."""
        number = self._next
        now = self._now()
        self._next += 1
        try:
            return _Numbered(number, command, self.inner.launch(command))
        finally:
            self.file.write(Launched(number, now, command))

    def wait(self, pending: Any) -> None:
        """Wait for a command, and note the time."""
        self.inner.wait(pending.inner)
        if pending.done is None:
            pending.done = self._now()

    def collect(self, pending: Any) -> Any:
        """Return the results of a command, and record them."""
        self.wait(pending)
        results = self.inner.collect(pending.inner)
        if self.file.is_open:
            self.file.write(collected(pending.number, pending.done, pending.command, results))
        return results

    def shutdown(self) -> None:
        """End the recording, and shut down the inner executor."""
        self.file.close("shutdown")
        self.inner.shutdown()

    def _now(self) -> float:
        return time.monotonic() - self._began


@dataclasses.dataclass(eq=False, slots=True)
class _Numbered:
    """A launched command with its number in the recording."""

    number: int
    command: Command
    inner: Any
    done: float | None = None


def collected(number: int, done: float, command: Command, results: Any) -> Collected:
    """Return the recorded part of a command's results. results: from `Executor.collect`."""
    if isinstance(command, Step):
        return Collected(number, done, [_rank(rank_results) for rank_results in results])
    if isinstance(command, Score):
        finite = bool((abs(results) < float("inf")).all())
        return Collected(number, done, [], results.argmax(-1).tolist() if finite else [], finite)
    return Collected(number, done)


def _rank(results: RankResults) -> RankOutcomes:
    return RankOutcomes(*(_rows(rows) for rows in results))


def _rows(results: list[RowResult]) -> list[RowOutcome]:
    # Runs for every request in every step; nearly all of them have made one token.
    return [
        tokens[0]
        if len(tokens := result.token_ids) == 1 and result.finite and result.error is None
        else _unusual(result)
        for result in results
    ]


def _unusual(result: RowResult) -> RowOutcome:
    if not result.token_ids and not result.failed:
        return None
    return Outcome(list(result.token_ids), result.finite, result.error)


def _frame(message: msgspec.Struct) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "little") + data


class StepRecording:
    """A recording. Each iteration over it yields the frames from the first.

    Raises:
        RecordError: the file is not a recording, or has another format or command version.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise RecordError(
                        f"{self.path} is no recording of steps (dsjax serve --record-steps FILE makes one)"
                    )
                first = _read(file)
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error.strerror}") from error
        if first is None:
            raise RecordError(f"{self.path} ends inside its header, so nothing of it can be replayed")
        self._start = len(MAGIC) + 4 + len(first)
        self.header = self._checked(first)

    def __iter__(self) -> Iterator[Frame]:
        with self.path.open("rb") as file:
            file.seek(self._start)
            while (message := _read(file)) is not None:
                try:
                    yield _frames.decode(message)
                except msgspec.DecodeError as error:
                    raise RecordError(f"{self.path} is damaged before byte {file.tell():,}: {error}") from None

    def _checked(self, first: bytes) -> Header:
        try:
            header = msgspec.msgpack.decode(first)
            if (header["format"], header["commands"]) != (FORMAT, VERSION):
                raise RecordError(
                    f"{self.path} has format {header['format']} with commands of version {header['commands']}, written by dsjax "
                    f"{header.get('dsjax')}; this dsjax reads format {FORMAT} with commands of version {VERSION}. "
                    "Replay it with the dsjax that wrote it."
                )
            return msgspec.msgpack.decode(first, type=Header)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise RecordError(f"{self.path} has a header that cannot be read: {error}") from None


def _read(file: IO[bytes]) -> bytes | None:
    """Return the next message; None at the end of the file, even inside a frame."""
    prefix = file.read(4)
    size = int.from_bytes(prefix, "little")
    message = file.read(size)
    return message if len(prefix) == 4 and len(message) == size else None

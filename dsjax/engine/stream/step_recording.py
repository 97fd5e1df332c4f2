"""`StepRecording` reads what `dsjax serve --record-steps FILE` has written; `step_record.py` has the format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from dsjax.engine.contract.commands import VERSION
from dsjax.engine.stream.step_record import FORMAT, MAGIC, Frame, Header, RecordError

_frames = msgspec.msgpack.Decoder(Frame)


class StepRecording:
    """A recording. Iterating gives its frames, each time from the first.

    Raises:
        RecordError: not a recording, or one of another format or version of the commands.
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
            said = msgspec.msgpack.decode(first)
            if (said["format"], said["commands"]) != (FORMAT, VERSION):
                raise RecordError(
                    f"{self.path} has format {said['format']} with commands of version {said['commands']}, written by dsjax "
                    f"{said.get('dsjax')}; this dsjax reads format {FORMAT} with commands of version {VERSION}. "
                    "Replay it with the dsjax that wrote it."
                )
            return msgspec.msgpack.decode(first, type=Header)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise RecordError(f"{self.path} has a header that cannot be read: {error}") from None


def _read(file: IO[bytes]) -> bytes | None:
    """The next message; None at the end, also where that is inside a frame."""
    prefix = file.read(4)
    size = int.from_bytes(prefix, "little")
    message = file.read(size)
    return message if len(prefix) == 4 and len(message) == size else None

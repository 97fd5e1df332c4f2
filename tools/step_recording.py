"""`StepRecording`: what `dsjax serve --record-steps FILE` has written, read back. `dsjax/engine/stream/step_record.py` has the format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from dsjax.engine.contract.commands import VERSION
from dsjax.engine.stream.step_record import FORMAT, MAGIC, Frame, Header, RecordError

_frames = msgspec.msgpack.Decoder(Frame)
_header = msgspec.msgpack.Decoder(Header)


class StepRecording:
    """A recording that is read. Iterating gives its frames, each time from the first.

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
            versions = msgspec.msgpack.decode(first)
            found_versions = (versions["format"], versions["commands"])
            if found_versions != (FORMAT, VERSION):
                raise RecordError(
                    f"{self.path} has format {found_versions[0]} with commands of version {found_versions[1]}, written by dsjax "
                    f"{versions.get('dsjax')}; this dsjax reads format {FORMAT} with commands of version {VERSION}. "
                    "Replay it with the dsjax that wrote it."
                )
            return _header.decode(first)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise RecordError(f"{self.path} has a header that cannot be read: {error}") from None


def _read(file: IO[bytes]) -> bytes | None:
    """The next message; None at the end, also where that is inside a frame."""
    prefix = file.read(4)
    size = int.from_bytes(prefix, "little")
    message = file.read(size) if len(prefix) == 4 else b""
    return message if len(prefix) == 4 and len(message) == size else None

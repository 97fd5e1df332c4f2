"""`PageFiles`: pages of the cache as files of one folder, which outlive the process that wrote them.

`PATH/SPACE/xy/NAME.page` holds one page: `NAME` is the page's name in hexadecimal, `xy` its first two digits, and `SPACE` stands for all
else that the page's values depend on (`space.json` beside the pages says what). A file has a header of `HEADER.size` bytes, then the
page's arrays in the order of their names, their values in C order, little-endian. The header holds the format, the space, the
name, the length of what follows and its CRC-32. A file is written under another name and renamed when it is whole; what is not whole,
or not what its name says, is never read.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dsjax.errors import UserError

MAGIC = b"dsjaxpg1"
HEADER = struct.Struct("<8s32s32sQI44x")
"""Format, space, name, bytes that follow, their CRC-32."""
BLOCK = 4096
"""Files take whole blocks of so many bytes of a disk."""

_NAME = re.compile("[0-9a-f]{64}")
_SUFFIX, _TEMPORARY = ".page", ".writing"

Page = Mapping[str, np.ndarray]
"""A page's arrays by their names, of all shards together."""


class PageFileError(Exception):
    """A file that is not what its name says."""


class Listing(NamedTuple):
    """What lies in a folder.

    Attributes:
        names: of this space, least recently used first. others: (last used, path, bytes) of other spaces' pages, likewise.
        seconds: that it took.
    """

    names: list[bytes]
    others: list[tuple[float, str, int]]
    seconds: float


def lock_folder(path: str | Path) -> IO[bytes]:
    """Make the folder if it is not there, and take its lock; it is given back when the file is closed, or the process ends.

    Raises:
        UserError: it cannot be made or written, or another process has it.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / "lock").open("a+b")
    except OSError as error:
        raise UserError(
            f"--disk-cache: {path} cannot be used as a folder for pages: {error.strerror}; give one that can be written"
        ) from error
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        file.close()
        raise UserError("--disk-cache needs a system with file locks (flock), which this one has not") from None
    except OSError:
        file.seek(0)
        owner = file.read(32).decode(errors="replace").strip() or "unknown"
        file.close()
        raise UserError(
            f"--disk-cache: {path} is in use by another engine (process {owner}); give each engine a folder of its own, or end that one"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    file.flush()
    return file


class PageFiles:
    """The files of one space.

    Args:
        folder: locked by this process.
        space: everything that pages' values depend on beside the tokens, as JSON.
        shapes: of a page's arrays, by their names; and their dtypes.
    """

    def __init__(
        self, folder: str | Path, space: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    ):
        arrays = {name: [list(shape), str(dtype)] for name, (shape, dtype) in sorted(shapes.items())}
        described = json.dumps({**space, "arrays": arrays}, sort_keys=True, separators=(",", ":"))
        self._space = hashlib.sha256(described.encode()).digest()
        self._shapes = dict(sorted(shapes.items()))
        self._content = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
        self.root = Path(folder)
        self.folder = self.root / self._space.hex()[:16]
        self.folder.mkdir(mode=0o700, exist_ok=True)  # prompts can be guessed from pages
        (self.folder / "space.json").write_text(described + "\n", encoding="utf-8")

    @property
    def page_bytes(self) -> int:
        """Bytes that a page takes on the disk."""
        return bytes_on_disk(self._content)

    def write(self, name: bytes, page: Page) -> None:
        """Write a page; it is there whole, or not at all.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        path = self._path(name)
        temporary = path.with_suffix(_TEMPORARY)
        parts = [_bytes(np.ascontiguousarray(page[key])) for key in self._shapes]
        try:
            try:
                file = temporary.open("wb")
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = temporary.open("wb")
            with file:
                file.writelines((HEADER.pack(MAGIC, self._space, name, self._content, _checksum(parts)), *parts))
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def read(self, name: bytes) -> dict[str, np.ndarray]:
        """Read a page's arrays.

        Raises:
            OSError: it is not there, or cannot be read.
            PageFileError: it is torn, damaged or another page.
        """
        path = self._path(name)
        page = {key: np.empty(shape, dtype) for key, (shape, dtype) in self._shapes.items()}
        parts = [_bytes(array) for array in page.values()]
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != HEADER.size + self._content:
                raise PageFileError(f"{path} is torn")
            header = bytearray(HEADER.size)
            for part in (memoryview(header), *parts):
                if file.readinto(part) < len(part):
                    raise PageFileError(f"{path} is torn")
        if bytes(header) != HEADER.pack(MAGIC, self._space, name, self._content, _checksum(parts)):
            raise PageFileError(f"{path} is damaged, or of another page")
        with contextlib.suppress(OSError):  # a disk that cannot be written any more can still be read
            os.utime(path)
        return page

    def delete(self, name: bytes) -> bool:
        """Delete a page, and say whether it was there."""
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def delete_all(self) -> None:
        """Delete every page of this space."""
        for entry in _files(str(self.folder)):
            os.unlink(entry.path)

    def list(self) -> Listing:
        """List all pages of the folder, of this space and others. What was not written to its end is deleted."""
        began = time.monotonic()
        named: list[tuple[float, bytes]] = []
        others: list[tuple[float, str, int]] = []
        mine = str(self.folder) + os.sep
        for entry in _files(str(self.root)):
            stat = entry.stat(follow_symlinks=False)
            stem, suffix = os.path.splitext(entry.name)
            if suffix == _TEMPORARY:
                os.unlink(entry.path)
            elif not entry.path.startswith(mine):
                others.append((stat.st_mtime, entry.path, -(-stat.st_size // BLOCK) * BLOCK))
            elif stat.st_size == HEADER.size + self._content and _NAME.fullmatch(stem):
                named.append((stat.st_mtime, bytes.fromhex(stem)))
            else:
                os.unlink(entry.path)
        return Listing([name for _, name in sorted(named)], sorted(others), time.monotonic() - began)

    def _path(self, name: bytes) -> Path:
        digits = name.hex()
        return self.folder / digits[:2] / (digits + _SUFFIX)


def bytes_on_disk(content: int) -> int:
    """Count the bytes that a page takes on the disk: its header too, in whole blocks."""
    return -(-(HEADER.size + content) // BLOCK) * BLOCK


def _files(folder: str) -> Iterator[os.DirEntry]:
    """List pages and what was to become one, in folders of folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.name.endswith((_SUFFIX, _TEMPORARY)):
                yield entry


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _checksum(parts: list[memoryview]) -> int:
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), parts, 0)

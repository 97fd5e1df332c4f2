"""The folder of `--disk-cache`: `PageFolder`, in which only our own files are written, counted or deleted, and `PageFiles` of one space.

::

    PATH/dsjax-pages              the mark; who finds it knows that pages may be deleted here
    PATH/lock                     held by the engine that has the folder
    PATH/SPACE/space.json         SPACE is the beginning of this file's SHA-256, as 16 hexadecimal digits
    PATH/SPACE/xy/NAME.page       a page; NAME is 64 hexadecimal digits, the first two of them xy
    PATH/SPACE/xy/NAME.writing    what is to become one

A page's header holds the format, the space, the name, the length of what follows and its CRC-32; then come the page's arrays in the order
of their names, in C order, little-endian. A file is renamed to its name when it is whole; what is not whole, or not what its name says, is
never read.

All else in the folder is somebody else's. Whoever can write here decides what is answered, since the checksum in a page's header is no
protection against somebody who computes it: hence an `OwnedFolder`.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsjax.errors import UserError
from dsjax.owned_folder import OwnedFolder, is_trusted, open_file, try_lock, write_whole

MARK = "dsjax-pages"
_MARK_TEXT = b"This folder holds pages of dsjax's --disk-cache, which deletes them when it needs their room.\n"
_LOCK, _SPACE_FILE = "lock", "space.json"
_LOST_AND_FOUND = "lost+found"
"""A file system has this folder from its beginning."""
_MOST_SPACE_BYTES = 1 << 20

_SPACE = re.compile("[0-9a-f]{16}")
_DIGITS = re.compile("[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{64})\.(page|writing)")

MAGIC = b"dsjaxpg1"
HEADER = struct.Struct("<8s32s32sQI44x")
"""Format, space, name, bytes that follow, their CRC-32."""
BLOCK = 4096
"""Files take whole blocks of so many bytes of a disk."""


class Entry(NamedTuple):
    """A file of our own form. path: below the folder. name: of the page, in hexadecimal. is_whole: it is not a page half written."""

    path: str
    name: str
    is_whole: bool
    size: int
    used: float


class PageFolder(OwnedFolder):
    """A folder for pages, open until `close`; whoever replaces its path by another folder meanwhile changes nothing.

    Raises:
        UserError: it cannot be made or opened, is somebody else's, or holds files that are not ours.
    """

    def __init__(self, path: str | Path):
        self.path, self._lock = Path(path), None
        try:
            super().__init__(self.path)
            self._recognise()
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        """Give the folder and its lock back. What another thread still does here goes on, and what it begins is an `OSError`."""
        if self._lock is not None:
            self._lock()
        super().close()

    def lock(self) -> "PageFolder":
        """Take the lock until `close` or the process's end, and give the folder; a `UserError` where another process has it."""
        try:
            with self.opened() as root:
                try:
                    file = try_lock(_LOCK, root)
                except BlockingIOError:
                    owner = (_content(_LOCK, root) or b"").decode(errors="replace").strip() or "unknown"
                    raise UserError(
                        f"--disk-cache: {self.path} is in use by another engine (process {owner}); give each engine a folder of its "
                        "own, or end that one"
                    ) from None
        except OSError as error:
            raise self._unusable(error) from error
        self._lock = weakref.finalize(self, os.close, file)
        with contextlib.suppress(OSError):  # the number is for people; on a full disk the lock holds without it
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
        return self

    def make_space(self, space: str, described: bytes) -> None:
        """Make the folder of a space, with the file that says what it is."""
        with self.opened(space, make=True) as folder:
            if _content(_SPACE_FILE, folder) != described:
                write_whole(folder, _SPACE_FILE, _SPACE_FILE + ".writing", [described])

    def spaces(self) -> list[str]:
        """List the folders of spaces: those whose name is the beginning of the hash of what their `space.json` says."""
        with self.opened() as root:
            named = [name for name in os.listdir(root) if _SPACE.fullmatch(name)]
        return [name for name in named if self._is_space(name)]

    def files(self, space: str) -> Iterator[Entry]:
        """List pages, and what was to become one, of a space."""
        with self.opened(space) as folder:
            for digits in os.listdir(folder):
                if _DIGITS.fullmatch(digits):
                    with contextlib.suppress(OSError):  # a link, a file, or somebody else's
                        yield from self._files(space, digits)

    def delete(self, path: str) -> bool:
        """Delete a file of our own form, by its path below the folder, and say whether it was there."""
        *folders, name = path.split("/")
        try:
            with self.opened(*folders) as folder:
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    def _files(self, space: str, digits: str) -> Iterator[Entry]:
        with self.opened(space, digits) as folder, os.scandir(folder) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if not match or not entry.name.startswith(digits):
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and is_trusted(status):
                    path = f"{space}/{digits}/{entry.name}"
                    yield Entry(path, match[1], match[2] == "page", status.st_size, status.st_mtime)

    def _is_space(self, name: str) -> bool:
        try:
            with self.opened(name) as folder:
                described = _content(_SPACE_FILE, folder)
        except OSError:
            return False
        return described is not None and space_name(described) == name

    def _recognise(self) -> None:
        """Make sure that this folder is ours, and make an empty one ours."""
        with self.opened() as root:
            names = set(os.listdir(root)) - {_LOST_AND_FOUND}
            if _content(MARK, root) is not None:
                return
            if not names:
                file = os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=root)
                with contextlib.suppress(OSError):  # its name is enough
                    os.write(file, _MARK_TEXT)
                os.close(file)
                return
        others = sorted(names)
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise UserError(
            f"--disk-cache: {self.path} holds files that are not dsjax's ({shown}), and nothing of them is touched; "
            "give a folder that is empty or does not exist yet"
        )

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"--disk-cache: {self.path} cannot be used as a folder for pages: {error.strerror or error}; give one that "
            "this user, and nobody else, can write"
        )


Page = Mapping[str, np.ndarray]
"""A page's arrays by their names, of all shards together."""


class PageFileError(Exception):
    """A file that is not what its name says."""


class Listing(NamedTuple):
    """Names of this space, least recently used first; and likewise (last used, path below the folder, bytes) of other spaces' pages."""

    names: list[bytes]
    others: list[tuple[float, str, int]]


class PageFiles:
    """The files of one space. Its folder is made when the first page is written, and again where it was deleted meanwhile.

    Args:
        folder: locked by this process. space: what pages' values depend on beside the tokens, as JSON.
        shapes: of a page's arrays, by their names; and their dtypes.

    page_bytes: that a page takes on the disk.
    """

    def __init__(
        self, folder: PageFolder, space: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    ):
        arrays = {name: [list(shape), str(dtype)] for name, (shape, dtype) in sorted(shapes.items())}
        described = json.dumps({**space, "arrays": arrays}, sort_keys=True, separators=(",", ":")).encode()
        self._described = described + b"\n"
        self._digest = hashlib.sha256(described).digest()
        self._shapes = dict(sorted(shapes.items()))
        self._content = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
        self.folder = folder
        self.space = space_name(described)
        self.page_bytes = bytes_on_disk(self._content)

    def write(self, name: bytes, page: Page) -> None:
        """Write a page; it is there whole, or not at all. An `OSError` where the disk is full, or cannot be written."""
        parts = [_bytes(np.ascontiguousarray(page[key])) for key in self._shapes]
        whole = (HEADER.pack(MAGIC, self._digest, name, self._content, _checksum(parts)), *parts)
        try:
            self._write(name, whole, make=False)
        except FileNotFoundError:
            self.folder.make_space(self.space, self._described)
            self._write(name, whole, make=True)

    def read(self, name: bytes) -> dict[str, np.ndarray]:
        """Read a page's arrays. An `OSError`: it cannot be read; a `PageFileError`: it is torn, damaged or another page."""
        page = {key: np.empty(shape, dtype) for key, (shape, dtype) in self._shapes.items()}
        parts = [_bytes(array) for array in page.values()]
        shown = self.folder.path / self._path(name)
        with self._opened(name) as folder, os.fdopen(open_file(shown.name, folder), "rb") as file:
            if os.fstat(file.fileno()).st_size != HEADER.size + self._content:
                raise PageFileError(f"{shown} is torn")
            header = bytearray(HEADER.size)
            for part in (memoryview(header), *parts):
                if file.readinto(part) < len(part):
                    raise PageFileError(f"{shown} is torn")
            if bytes(header) != HEADER.pack(MAGIC, self._digest, name, self._content, _checksum(parts)):
                raise PageFileError(f"{shown} is damaged, or of another page")
            with contextlib.suppress(OSError):  # a disk that cannot be written any more can still be read
                os.utime(file.fileno())
        return page

    def delete(self, name: bytes) -> bool:
        """Delete a page, and say whether it was there."""
        return self.folder.delete(self._path(name))

    def delete_all(self) -> None:
        """Delete every page of this space."""
        for entry in self._mine():
            self.folder.delete(entry.path)

    def list(self) -> Listing:
        """List all pages of the folder, of this space and others. What was not written to its end is deleted."""
        named: list[tuple[float, bytes]] = []
        others: list[tuple[float, str, int]] = []
        for entry in self._mine():
            if entry.is_whole and entry.size == HEADER.size + self._content:
                named.append((entry.used, bytes.fromhex(entry.name)))
            else:
                self._delete_unfinished(entry)
        for space in self.folder.spaces():
            if space == self.space:
                continue
            with contextlib.suppress(OSError):  # what cannot be listed of others does not hide what is ours
                for entry in self.folder.files(space):
                    if entry.is_whole:
                        others.append((entry.used, entry.path, -(-entry.size // BLOCK) * BLOCK))
                    else:
                        self._delete_unfinished(entry)
        return Listing([name for _, name in sorted(named)], sorted(others))

    def _mine(self) -> Sequence[Entry]:
        try:
            return list(self.folder.files(self.space))
        except FileNotFoundError:
            return []

    def _delete_unfinished(self, entry: Entry) -> None:
        with contextlib.suppress(OSError):  # a disk that cannot be written any more can still be read
            self.folder.delete(entry.path)

    def _write(self, name: bytes, whole: tuple[bytes | memoryview, ...], make: bool) -> None:
        with self._opened(name, make) as folder:
            write_whole(folder, f"{name.hex()}.page", f"{name.hex()}.writing", whole)

    def _opened(self, name: bytes, make: bool = False) -> contextlib.AbstractContextManager[int]:
        return self.folder.opened(self.space, name.hex()[:2], make=make)

    def _path(self, name: bytes) -> str:
        digits = name.hex()
        return f"{self.space}/{digits[:2]}/{digits}.page"


def bytes_on_disk(content: int) -> int:
    """Count the bytes that a page takes on the disk: its header too, in whole blocks."""
    return -(-(HEADER.size + content) // BLOCK) * BLOCK


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _checksum(parts: list[memoryview]) -> int:
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), parts, 0)


def space_name(described: bytes) -> str:
    """Name the folder of a space. described: what its `space.json` holds."""
    return hashlib.sha256(described.removesuffix(b"\n")).hexdigest()[:16]


def _content(name: str, folder: int) -> bytes | None:
    """Read a small file of this user's; None where there is none."""
    try:
        with os.fdopen(open_file(name, folder), "rb") as file:
            return file.read(_MOST_SPACE_BYTES)
    except OSError:
        return None

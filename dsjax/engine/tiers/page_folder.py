"""The folder of `--disk-cache`. `PageFolder` writes, counts and deletes only files of its own form; `PageFiles` are those of one space.

::

    PATH/dsjax-pages              the mark of a folder in which dsjax may delete pages
    PATH/lock                     held by the engine that uses the folder
    PATH/SPACE/xy/NAME.page       a page. SPACE: 16 hexadecimal digits of the hash of all that pages' values depend on beside tokens;
                                  NAME: 64 hexadecimal digits, which begin with xy
    PATH/SPACE/xy/NAME.writing    a page that is being written

A page's header holds format, space, name, length of the content and its CRC-32. The content is the page's arrays in the order of their
names, in C order, little-endian. A whole file is renamed to its name; a file that is torn, or not the page of its name, is never read.

Other files in the folder belong to somebody else. Whoever can write a page here decides what is answered, because the checksum does not
stop somebody who computes it anew: hence an `OwnedFolder`.
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsjax.errors import UserError
from dsjax.owned_folder import OwnedFolder, is_trusted, open_file, try_lock, write_whole

MARK = "dsjax-pages"
_MARK_TEXT = b"This folder holds pages of dsjax's --disk-cache, which deletes them when it needs their room.\n"
_LOCK = "lock"
_LOST_AND_FOUND = "lost+found"
"""A file system has this folder from its beginning."""

_SPACE = re.compile("[0-9a-f]{16}")
_DIGITS = re.compile("[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{64})\.(page|writing)")

MAGIC = b"dsjaxpg1"
HEADER = struct.Struct("<8s32s32sQI44x")
"""Format, space, name, bytes that follow, their CRC-32."""
BLOCK = 4096
"""Files take whole blocks of so many bytes of a disk."""


class Entry(NamedTuple):
    """A page's file. path: below the folder. name: in hexadecimal. is_whole: it was written to its end. used: time of last use."""

    path: str
    name: str
    is_whole: bool
    size: int
    used: float


class PageFolder(OwnedFolder):
    """A folder for pages, open until `close`. Replacing its path by another folder meanwhile has no effect.

    Raises:
        UserError: it cannot be made or opened, belongs to somebody else, or holds files that are not dsjax's.
    """

    def __init__(self, path: str | Path):
        self.path, self._lock = Path(path), None
        with self._explained():
            super().__init__(self.path)
            self._recognise()

    def close(self) -> None:
        """Release the folder and its lock. Operations of other threads finish; new ones raise `OSError`."""
        if self._lock is not None:
            self._lock()
        super().close()

    def lock(self) -> "PageFolder":
        """Lock the folder until `close` or the end of the process, and return it.

        Raises:
            UserError: another process has the lock.
        """
        with self._explained(), self.opened() as root:
            try:
                file = try_lock(_LOCK, root)
            except BlockingIOError:
                with os.fdopen(open_file(_LOCK, root), "rb") as held:
                    owner = held.read(100).decode(errors="replace").strip() or "unknown"
                raise UserError(
                    f"--disk-cache: {self.path} is in use by another engine (process {owner}); give each engine a folder of its "
                    "own, or end that one"
                ) from None
        self._lock = weakref.finalize(self, os.close, file)
        with contextlib.suppress(OSError):  # the number is for people; on a full disk the lock holds without it
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
        return self

    def entries(self) -> Iterator[Entry]:
        """List the pages of all spaces, and pages that were not written to their end."""
        with self.opened() as root:
            spaces = [name for name in os.listdir(root) if _SPACE.fullmatch(name)]
        for space in spaces:
            with contextlib.suppress(OSError), self.opened(space) as folder:  # a link, a file, or somebody else's
                for digits in os.listdir(folder):
                    if _DIGITS.fullmatch(digits):
                        with contextlib.suppress(OSError):
                            yield from self._files(space, digits)

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a page by its path below the folder, whole or not at all."""
        *folders, name = path.split("/")
        with self.opened(*folders, make=True) as folder:
            write_whole(folder, name, f"{name.removesuffix('.page')}.writing", parts)

    def delete(self, path: str) -> bool:
        """Delete a page by its path below the folder. Return whether it existed."""
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

    def _recognise(self) -> None:
        """Check that the folder has the mark, and mark an empty one."""
        with self.opened() as root:
            names = set(os.listdir(root)) - {_LOST_AND_FOUND}
            with contextlib.suppress(OSError):
                os.close(open_file(MARK, root))
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

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"--disk-cache: {self.path} cannot be used as a folder for pages: {error.strerror or error}; give one that "
                "this user, and nobody else, can write"
            ) from error


Page = Mapping[str, np.ndarray]
"""A page's arrays by their names, of all shards together."""


class PageFileError(Exception):
    """A file that is not what its name says."""


class Listing(NamedTuple):
    """Pages by last use, oldest first: names of this space's; (last use, path below the folder, bytes) of other spaces'."""

    names: list[bytes]
    others: list[tuple[float, str, int]]


class PageFiles:
    """The files of one space.

    Args:
        folder: locked by this process. space: all that pages' values depend on beside their tokens, as JSON.
        shapes: name to shape and dtype of a page's arrays.

    page_bytes: bytes that a page takes on the disk.
    """

    def __init__(
        self, folder: PageFolder, space: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    ):
        arrays = {name: [list(shape), str(dtype)] for name, (shape, dtype) in sorted(shapes.items())}
        described = json.dumps({**space, "arrays": arrays}, sort_keys=True, separators=(",", ":")).encode()
        self._digest = hashlib.sha256(described).digest()
        self._shapes = dict(sorted(shapes.items()))
        self._content = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())
        self.folder = folder
        self.space = self._digest.hex()[:16]
        self.page_bytes = bytes_on_disk(self._content)

    def write(self, name: bytes, page: Page) -> None:
        """Write a page.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        parts = [_bytes(np.ascontiguousarray(page[key])) for key in self._shapes]
        self.folder.write(self._path(name), [self._header(name, parts), *parts])

    def read(self, name: bytes) -> dict[str, np.ndarray]:
        """Read a page's arrays.

        Raises:
            OSError: the file cannot be read.
            PageFileError: it is torn, damaged or another page.
        """
        page = {key: np.empty(shape, dtype) for key, (shape, dtype) in self._shapes.items()}
        parts = [_bytes(array) for array in page.values()]
        shown = self.folder.path / self._path(name)
        with (
            self.folder.opened(self.space, name.hex()[:2]) as folder,
            os.fdopen(open_file(shown.name, folder), "rb") as file,
        ):
            if os.fstat(file.fileno()).st_size != HEADER.size + self._content:
                raise PageFileError(f"{shown} is torn")
            header = bytearray(HEADER.size)
            for part in (memoryview(header), *parts):
                if file.readinto(part) < len(part):
                    raise PageFileError(f"{shown} is torn")
            if bytes(header) != self._header(name, parts):
                raise PageFileError(f"{shown} is damaged, or of another page")
            with contextlib.suppress(OSError):  # a disk that cannot be written any more can still be read
                os.utime(file.fileno())
        return page

    def delete(self, name: bytes) -> bool:
        """Delete a page. Return whether it existed."""
        return self.folder.delete(self._path(name))

    def delete_all(self) -> None:
        """Delete every page of this space."""
        for entry in list(self.folder.entries()):
            if entry.path.startswith(self.space):
                self.folder.delete(entry.path)

    def list(self) -> Listing:
        """List all pages of the folder, and delete those that were not written to their end."""
        named: list[tuple[float, bytes]] = []
        others: list[tuple[float, str, int]] = []
        for entry in list(self.folder.entries()):
            is_own = entry.path.startswith(self.space)
            if not entry.is_whole or (is_own and entry.size != HEADER.size + self._content):
                with contextlib.suppress(OSError):  # a disk that cannot be written any more can still be read
                    self.folder.delete(entry.path)
            elif is_own:
                named.append((entry.used, bytes.fromhex(entry.name)))
            else:
                others.append((entry.used, entry.path, -(-entry.size // BLOCK) * BLOCK))
        return Listing([name for _, name in sorted(named)], sorted(others))

    def _header(self, name: bytes, parts: Iterable[memoryview]) -> bytes:
        checksum = functools.reduce(lambda before, part: zlib.crc32(part, before), parts, 0)
        return HEADER.pack(MAGIC, self._digest, name, self._content, checksum)

    def _path(self, name: bytes) -> str:
        digits = name.hex()
        return f"{self.space}/{digits[:2]}/{digits}.page"


def bytes_on_disk(content: int) -> int:
    """Count the bytes that a page takes on the disk: its header too, in whole blocks."""
    return -(-(HEADER.size + content) // BLOCK) * BLOCK


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))

"""Folder of `--disk-cache`: `PageFolder` touches only files of the form below; `PageFiles` are those of one compatibility fingerprint.

::

    PATH/dsjax-pages              marks a folder in which dsjax may delete pages
    PATH/lock                     held by the engine that uses the folder
    PATH/SPACE/xy/NAME.page       a page. SPACE: first 16 hex digits of the compatibility fingerprint, a hash of everything but the tokens
                                  that determines a page's values; NAME: 64 hex digits, starting with xy
    PATH/SPACE/xy/NAME.writing    a page that is being written

A page's header holds the format, fingerprint, name, content length, CRC-32 and kind (0: context page, 1: window page). The content is the
page's arrays sorted by name, in C order, little-endian. A file gets its final name once it is complete. Truncated or damaged files and
files of other pages are rejected.

dsjax does not touch other files in the folder. Anyone who can write a page here controls what the model answers, because an attacker can
recompute the checksum. The folder is therefore an `OwnedFolder`.
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
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsjax.errors import UserError
from dsjax.owned_folder import OwnedFolder, is_trusted, open_file, try_lock, write_whole

MARK = "dsjax-pages"
_MARK_TEXT = b"This folder holds pages of dsjax's --disk-cache, which deletes them when it needs their room.\n"
_LOCK = "lock"
_LOST_AND_FOUND = "lost+found"
"""Folder that an empty file system (ext4) already contains."""

_SPACE = re.compile("[0-9a-f]{16}")
_DIGITS = re.compile("[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{64})\.(page|writing)")

MAGIC = b"dsjaxpg1"
HEADER = struct.Struct("<8s32s32sQIB43x")
"""Format, fingerprint, name, content length in bytes, CRC-32 of the content, kind."""
_KIND = struct.calcsize("<8s32s32sQI")
"""Offset of the kind in the header."""
BLOCK = 4096
"""Block size in bytes. Files take whole blocks of the disk."""


class Entry(NamedTuple):
    """File of a page."""

    path: str  # relative to the folder
    name: str  # in hexadecimal
    is_whole: bool  # completely written
    size: int
    used: float  # time of last use


class PageFolder(OwnedFolder):
    """Folder for pages, open until `close`. Replacing the folder at its path in the meantime has no effect.

    Raises:
        UserError: the folder cannot be created or opened, belongs to another user, or holds files that are not dsjax's.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = None
        with self._explained():
            super().__init__(self.path)
            self._recognise()

    def close(self) -> None:
        """Release the folder and its lock. Running operations of other threads finish; new ones raise `OSError`."""
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
        with contextlib.suppress(OSError):  # the PID is only informative; on a full disk the lock holds without it
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
        return self

    def entries(self) -> Iterator[Entry]:
        """Yield the pages of all fingerprints, including incompletely written ones."""
        with self.opened() as root:
            spaces = [name for name in os.listdir(root) if _SPACE.fullmatch(name)]
        for space in spaces:
            with contextlib.suppress(OSError), self.opened(space) as folder:  # a link, a file, or another user's folder
                for digits in os.listdir(folder):
                    if _DIGITS.fullmatch(digits):
                        with contextlib.suppress(OSError):
                            yield from self._files(space, digits)

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a page atomically. path: relative to the folder."""
        *folders, name = path.split("/")
        with self.opened(*folders, make=True) as folder:
            write_whole(folder, name, f"{name.removesuffix('.page')}.writing", parts)

    def delete(self, path: str) -> int:
        """Delete a page. Return its bytes on the disk, 0 if it did not exist. path: relative to the folder."""
        *folders, name = path.split("/")
        try:
            with self.opened(*folders) as folder:
                size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return 0
        return in_blocks(size)

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
        """Check that the folder has the mark; mark an empty folder."""
        with self.opened() as root:
            names = set(os.listdir(root)) - {_LOST_AND_FOUND}
            with contextlib.suppress(OSError):
                os.close(open_file(MARK, root))
                return
            if not names:
                file = os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=root)
                with contextlib.suppress(OSError):  # the file's name is the mark; its text is optional
                    os.write(file, _MARK_TEXT)
                os.close(file)
                return
        others = sorted(names)
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise UserError(
            f"--disk-cache: {self.path} holds files that are not dsjax's ({listed}), and nothing of them is touched; "
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
"""A page's unsharded arrays by name."""


class PageFileError(Exception):
    """A file that does not hold the page of its name, intact."""


class Listing(NamedTuple):
    """Pages, least recently used first, with their bytes on the disk."""

    names: dict[bytes, int]  # this fingerprint's
    others: list[tuple[float, str, int]]  # (last use, relative path, bytes) of other fingerprints'


class PageFiles:
    """Page files of one compatibility fingerprint.

    Args:
        folder: locked by this process.
        space: everything but the tokens that determines a page's values; JSON-serialisable.
        shapes: name to shape and dtype of the arrays of both kinds of pages.
        windows: names of those on window pages, if there are any.

    page_bytes: disk space of a context page in bytes.
    """

    def __init__(
        self,
        folder: PageFolder,
        space: Mapping[str, Any],
        shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        windows: Collection[str] = (),
    ):
        arrays = {name: [list(shape), str(dtype)] for name, (shape, dtype) in sorted(shapes.items())}
        described = json.dumps({**space, "arrays": arrays}, sort_keys=True, separators=(",", ":")).encode()
        self._digest = hashlib.sha256(described).digest()
        by_kind = [{key: one for key, one in sorted(shapes.items()) if (key in windows) == kind} for kind in (0, 1)]
        self._kinds = [arrays for arrays in by_kind if arrays]
        self._contents = [
            sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in arrays.values())
            for arrays in self._kinds
        ]
        self.folder = folder
        self.space = self._digest.hex()[:16]
        self.page_bytes = bytes_on_disk(self._contents[0])

    def write(self, name: bytes, page: Page) -> int:
        """Write a page. Return its bytes on the disk.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        kind = [arrays.keys() for arrays in self._kinds].index(page.keys())
        parts = [_bytes(np.ascontiguousarray(page[key])) for key in self._kinds[kind]]
        self.folder.write(self._path(name), [self._header(name, kind, parts), *parts])
        return bytes_on_disk(self._contents[kind])

    def read(self, name: bytes) -> dict[str, np.ndarray]:
        """Read a page's arrays. Its kind is in the file.

        Raises:
            OSError: the file cannot be read.
            PageFileError: the file is truncated, damaged or of another page.
        """
        path = self.folder.path / self._path(name)
        with (
            self.folder.opened(self.space, name.hex()[:2]) as folder,
            os.fdopen(open_file(path.name, folder), "rb") as file,
        ):
            header = file.read(HEADER.size)
            content = os.fstat(file.fileno()).st_size - HEADER.size
            if content not in self._contents:
                raise PageFileError(f"{path} is torn")
            kind = header[_KIND]
            if kind >= len(self._kinds):
                raise PageFileError(f"{path} is damaged")
            page = {key: np.empty(shape, dtype) for key, (shape, dtype) in self._kinds[kind].items()}
            parts = [_bytes(array) for array in page.values()]
            if content != self._contents[kind] or any(file.readinto(part) < len(part) for part in parts):
                raise PageFileError(f"{path} is torn")
            if header != self._header(name, kind, parts):
                raise PageFileError(f"{path} is damaged, or of another page")
            with contextlib.suppress(OSError):  # a disk that became read-only stays readable
                os.utime(file.fileno())
        return page

    def delete(self, name: bytes) -> int:
        """Delete a page. Return its bytes on the disk, 0 if it did not exist."""
        return self.folder.delete(self._path(name))

    def delete_all(self) -> None:
        """Delete every page of this fingerprint."""
        for entry in list(self.folder.entries()):
            if entry.path.startswith(self.space):
                self.folder.delete(entry.path)

    def list(self) -> Listing:
        """Return all pages of the folder, and delete incomplete files."""
        named: list[tuple[float, bytes, int]] = []
        others: list[tuple[float, str, int]] = []
        for entry in list(self.folder.entries()):
            is_own = entry.path.startswith(self.space)
            if not entry.is_whole or (is_own and entry.size - HEADER.size not in self._contents):
                with contextlib.suppress(OSError):  # a disk that became read-only stays readable
                    self.folder.delete(entry.path)
            elif is_own:
                named.append((entry.used, bytes.fromhex(entry.name), in_blocks(entry.size)))
            else:
                others.append((entry.used, entry.path, in_blocks(entry.size)))
        return Listing({name: size for _, name, size in sorted(named)}, sorted(others))

    def _header(self, name: bytes, kind: int, parts: Iterable[memoryview]) -> bytes:
        checksum = functools.reduce(lambda before, part: zlib.crc32(part, before), parts, 0)
        return HEADER.pack(MAGIC, self._digest, name, self._contents[kind], checksum, kind)

    def _path(self, name: bytes) -> str:
        digits = name.hex()
        return f"{self.space}/{digits[:2]}/{digits}.page"


def bytes_on_disk(content: int) -> int:
    """Return the disk space of a page in bytes: header and content, rounded up to whole blocks."""
    return in_blocks(HEADER.size + content)


def in_blocks(size: int) -> int:
    """Return the bytes of the whole blocks that a file of this size takes."""
    return -(-size // BLOCK) * BLOCK


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))

"""`PageFiles`: pages of the cache as files of one folder, which outlive the process that wrote them.

`PATH/SPACE/xy/NAME.page` holds one page: `NAME` is the page's name in hexadecimal, `xy` its first two digits, and `SPACE` stands for all
else that the page's values depend on (`space.json` beside the pages says what). A file has a header of `HEADER.size` bytes, then the
page's arrays in the order of their names, their values in C order, little-endian. The header holds the format, the space, the
name, the length of what follows and its CRC-32. A file is written under another name and renamed when it is whole; what is not whole,
or not what its name says, is never read. What else the folder may hold is `page_folder.py`'s.
"""

import contextlib
import functools
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsjax.engine.tiers.page_folder import Entry, PageFolder, space_name
from dsjax.owned_folder import open_file, write_whole

MAGIC = b"dsjaxpg1"
HEADER = struct.Struct("<8s32s32sQI44x")
"""Format, space, name, bytes that follow, their CRC-32."""
BLOCK = 4096
"""Files take whole blocks of so many bytes of a disk."""

Page = Mapping[str, np.ndarray]
"""A page's arrays by their names, of all shards together."""


class PageFileError(Exception):
    """A file that is not what its name says."""


class Listing(NamedTuple):
    """What lies in a folder.

    Attributes:
        names: of this space, least recently used first.
        others: (last used, path below the folder, bytes) of other spaces' pages, likewise.
    """

    names: list[bytes]
    others: list[tuple[float, str, int]]


class PageFiles:
    """The files of one space. Its folder is made when the first page is written, and again where it was deleted meanwhile.

    Args:
        folder: locked by this process.
        space: everything that pages' values depend on beside the tokens, as JSON.
        shapes: of a page's arrays, by their names; and their dtypes.

    Attributes:
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
        """Write a page; it is there whole, or not at all.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        parts = [_bytes(np.ascontiguousarray(page[key])) for key in self._shapes]
        whole = (HEADER.pack(MAGIC, self._digest, name, self._content, _checksum(parts)), *parts)
        try:
            self._write(name, whole, make=False)
        except FileNotFoundError:
            self.folder.make_space(self.space, self._described)
            self._write(name, whole, make=True)

    def read(self, name: bytes) -> dict[str, np.ndarray]:
        """Read a page's arrays.

        Raises:
            OSError: it is not there, or cannot be read.
            PageFileError: it is torn, damaged or another page.
        """
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

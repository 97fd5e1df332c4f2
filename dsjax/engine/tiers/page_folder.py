"""`PageFolder`: the folder of `--disk-cache`, in which only files of our own form are ever written, counted or deleted.

::

    PATH/dsjax-pages              the mark; who finds it knows that pages may be deleted here
    PATH/lock                     held by the engine that has the folder
    PATH/SPACE/space.json         SPACE is the beginning of this file's SHA-256, as 16 hexadecimal digits
    PATH/SPACE/xy/NAME.page       a page; NAME is 64 hexadecimal digits, the first two of them xy
    PATH/SPACE/xy/NAME.writing    what is to become one

All else in the folder is somebody else's. Whoever can write here decides what is answered, since the checksum in a page's header is no
protection against somebody who computes it. So the rule is ssh's for its keys: the folder belongs to this process's user or to root, and
nobody else may write there. No symbolic link below the folder is followed: everything is opened from an open directory, with `O_NOFOLLOW`.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dsjax.errors import UserError
from dsjax.ownership import WRITABLE_BY_OTHERS, is_trusted

MARK = "dsjax-pages"
_MARK_TEXT = b"This folder holds pages of dsjax's --disk-cache, which deletes them when it needs their room.\n"
_LOCK, _SPACE_FILE = "lock", "space.json"
_LOST_AND_FOUND = "lost+found"
"""A file system has this folder from its beginning."""
_MOST_SPACE_BYTES = 1 << 20

_SPACE = re.compile("[0-9a-f]{16}")
_DIGITS = re.compile("[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{64})\.(page|writing)")

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""A named pipe in the place of a file must not keep its reader waiting."""


class Entry(NamedTuple):
    """A file of our own form.

    Attributes:
        path: below the folder.
        name: of the page, in hexadecimal.
        is_whole: whether it is a page, and not what was to become one.
    """

    path: str
    name: str
    is_whole: bool
    size: int
    used: float


class PageFolder:
    """A folder for pages, open until `close`; whoever replaces its path by another folder meanwhile changes nothing.

    Raises:
        UserError: it cannot be made or opened, is somebody else's, or holds files that are not ours.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)  # prompts can be guessed from pages
            self._root = os.open(self.path, _DIRECTORY)
        except OSError as error:
            raise self._unusable(error) from error
        self._guard = threading.Lock()
        self._closers = [weakref.finalize(self, os.close, self._root)]
        try:
            self._check_owner()
            self._recognise()
        except OSError as error:
            self.close()
            raise self._unusable(error) from error
        except UserError:
            self.close()
            raise

    def __enter__(self) -> "PageFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder and its lock back. What another thread still does here goes on, and what it begins is an `OSError`."""
        with self._guard:
            for close in self._closers:
                close()

    def lock(self) -> None:
        """Take the lock; it is given back by `close`, or when the process ends.

        Raises:
            UserError: another process has it, or the file system has no locks.
        """
        try:
            import fcntl
        except ImportError:
            raise UserError("--disk-cache needs a system with file locks (flock), which this one has not") from None
        try:
            file = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _NO_FOLLOW | _NO_WAIT, 0o600, dir_fd=self._root)
        except OSError as error:
            raise self._unusable(error) from error
        self._closers.insert(0, weakref.finalize(self, os.close, file))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 32).decode(errors="replace").strip() or "unknown"
            raise UserError(
                f"--disk-cache: {self.path} is in use by another engine (process {owner}); give each engine a folder of its own, "
                "or end that one"
            ) from None
        except OSError as error:
            raise self._unusable(error) from error
        with contextlib.suppress(OSError):  # the number is for people; on a full disk the lock holds without it
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())

    @contextlib.contextmanager
    def opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open a folder below this one by its names, and give its descriptor. make: where it is missing.

        Raises:
            OSError: it is not there, no folder, or somebody else's.
        """
        with self._guard:
            if not self._closers[-1].alive:
                raise OSError(errno.EBADF, "the folder is closed")
            descriptor = os.dup(self._root)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=descriptor)
                above, descriptor = descriptor, os.open(name, _DIRECTORY | _NO_FOLLOW, dir_fd=descriptor)
                os.close(above)
                status = os.fstat(descriptor)
                if not is_trusted(status) or status.st_mode & WRITABLE_BY_OTHERS:
                    raise PermissionError(errno.EPERM, "it belongs to another user, or others may write there", name)
            yield descriptor
        finally:
            os.close(descriptor)

    def make_space(self, space: str, described: bytes) -> None:
        """Make the folder of a space, with the file that says what it is.

        Raises:
            OSError: it cannot be made, or written.
        """
        with self.opened(space, make=True) as folder:
            if _content(_SPACE_FILE, folder) == described:
                return
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

    def _check_owner(self) -> None:
        status = os.fstat(self._root)
        if not is_trusted(status):
            raise UserError(
                f"--disk-cache: {self.path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}: its pages "
                "would be believed. Give a folder of this user's, or one below it that does not exist yet"
            )
        if status.st_mode & WRITABLE_BY_OTHERS:
            raise UserError(
                f"--disk-cache: {self.path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}), whose pages would be "
                f"believed. Give a folder below it that does not exist yet, or, where nobody else has written there, chmod go-w {self.path}"
            )

    def _recognise(self) -> None:
        """Make sure that this folder is ours, and make an empty one ours."""
        names = set(os.listdir(self._root)) - {_LOST_AND_FOUND}
        if MARK in names:
            if _is_file(MARK, self._root):
                return
        elif not names or self._is_of_an_earlier_version(names):
            file = os.open(MARK, os.O_WRONLY | os.O_CREAT | _NO_FOLLOW, 0o600, dir_fd=self._root)
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

    def _is_of_an_earlier_version(self, names: set[str]) -> bool:
        """Whether this was a folder for pages before there was a mark, or the mark was deleted: a space, and no lock of another form.

        The name of a space is a hash of what lies in it, so nobody else's folder has one by chance.
        """
        lock = _content(_LOCK, self._root) if _LOCK in names else b""
        return lock is not None and re.fullmatch(rb"(\d{1,10}\n)?", lock) is not None and bool(self.spaces())

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"--disk-cache: {self.path} cannot be used as a folder for pages: {error.strerror}; give one that can be written"
        )


def lock_folder(path: str | Path) -> PageFolder:
    """Open the folder for pages, which is made if it is not there, and take its lock.

    Raises:
        UserError: it cannot be made or written, is not ours, or another process has it.
    """
    folder = PageFolder(path)
    try:
        folder.lock()
    except UserError:
        folder.close()
        raise
    return folder


def space_name(described: bytes) -> str:
    """Name the folder of a space. described: what its `space.json` holds."""
    return hashlib.sha256(described.removesuffix(b"\n")).hexdigest()[:16]


def write_whole(folder: int, name: str, unfinished: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that only this user can read, under the name `unfinished` until it is whole.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
    try:
        try:
            descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
        except FileExistsError:  # of an end in between
            os.unlink(unfinished, dir_fd=folder)
            descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def open_file(name: str, folder: int) -> int:
    """Open a regular file of this user's for reading, and give its descriptor.

    Raises:
        OSError: there is none.
    """
    descriptor = os.open(name, os.O_RDONLY | _NO_FOLLOW | _NO_WAIT, dir_fd=folder)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not is_trusted(status):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is no file of this user's", name)
    return descriptor


def _content(name: str, folder: int) -> bytes | None:
    """Read a small file of this user's; None where there is none."""
    try:
        with os.fdopen(open_file(name, folder), "rb") as file:
            return file.read(_MOST_SPACE_BYTES)
    except OSError:
        return None


def _is_file(name: str, folder: int) -> bool:
    try:
        os.close(open_file(name, folder))
    except OSError:
        return False
    return True

"""`OwnedFolder`: a folder whose files are trusted because only this user and root can have written them, as ssh requires for its keys.

Anyone who can write a cache page, a compiled program or a key controls what this process answers or runs. Files are opened relative to
the open folder without following symbolic links, so that another user cannot swap the folder meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

WRITABLE_BY_OTHERS = 0o022
_ACCESSIBLE_BY_OTHERS = 0o077

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""Opening a named pipe that stands in place of a file must not block."""


class DistrustedError(PermissionError):
    """A file or folder that another user may have written."""


class OwnedFolder:
    """A trusted folder, open until `close`.

    Args:
        path: created with mode 0700 if missing.
        private: whether it must belong to this user (not root), be unreadable for others and be no symbolic link. Its parent must exist.

    Raises:
        DistrustedError: it belongs to another user, or others can write to it. OSError: it cannot be created or opened.
    """

    def __init__(self, path: Path, *, private: bool = False):
        self.path = path
        if not private:
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self._root = os.open(path, _DIRECTORY | (_NO_FOLLOW if private else 0))
        self._root_lock, self._close = threading.Lock(), weakref.finalize(self, os.close, self._root)
        try:
            _check(os.fstat(self._root), private)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder. Operations that other threads have begun continue; new ones raise `OSError`."""
        with self._root_lock:
            self._close()

    @contextlib.contextmanager
    def opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open the folder, or the subfolder with the path `names`, and yield its descriptor. make: create missing folders.

        Raises:
            OSError: it is missing, not a folder, or not trusted.
        """
        with self._root_lock:
            if not self._close.alive:
                raise OSError(errno.EBADF, "the folder is closed")
            descriptor = os.open(".", _DIRECTORY, dir_fd=self._root)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=descriptor)
                parent, descriptor = descriptor, os.open(name, _DIRECTORY | _NO_FOLLOW, dir_fd=descriptor)
                os.close(parent)
                _check(os.fstat(descriptor), False)
            yield descriptor
        finally:
            os.close(descriptor)


def open_file(name: str, folder: int, *, private: bool = False) -> int:
    """Open a regular file of an open folder for reading and return its descriptor. private: as in `OwnedFolder`.

    Raises:
        DistrustedError: another user may have written it, or it is not a regular file. OSError: it is missing.
    """
    descriptor = os.open(name, os.O_RDONLY | _NO_FOLLOW | _NO_WAIT, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DistrustedError(errno.EPERM, "it is no regular file", name)
        _check(status, private)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_whole(
    folder: int, name: str, unfinished: str, parts: Iterable[bytes | memoryview], *, once: bool = False
) -> None:
    """Write a file that only this user can read, under the name `unfinished` until it is complete.

    once: if the file exists, keep it and discard the new one. A new file is synced to disk before it gets its name.

    Raises:
        OSError: it cannot be written; no part of it is left.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
    try:
        try:
            descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
        except FileExistsError:  # left by a killed process
            os.unlink(unfinished, dir_fd=folder)
            descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            if once:
                file.flush()
                os.fsync(descriptor)
        if once:
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            os.unlink(unfinished, dir_fd=folder)
        else:
            os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def try_lock(name: str | Path, folder: int | None = None) -> int:
    """Open a file, created if missing, lock it without waiting, and return its descriptor.

    Closing the descriptor or ending the process releases the lock. folder: descriptor of the folder of `name`; None: `name` is a path.

    Raises:
        BlockingIOError: another process, or another part of this one, holds the lock.
        OSError: the file cannot be created or is another user's, or this system has no file locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("this system has no file locks (flock)") from None
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _NO_FOLLOW | _NO_WAIT, 0o600, dir_fd=folder)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{name} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_trusted(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user or root. True on systems without user ids."""
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def why_distrusted(path: Path) -> str | None:
    """Return why another user may have written a file, or the entries of a folder; None if no other user can have.

    Raises:
        OSError: the path does not exist.
    """
    return _reason(path.stat(), str(path))


def _check(status: os.stat_result, private: bool) -> None:
    if reason := _reason(status, "it", private):
        raise DistrustedError(errno.EPERM, reason)


def _reason(status: os.stat_result, name: str, private: bool = False) -> str | None:
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid() and (private or status.st_uid != 0):
        return f"{name} belongs to another user (number {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    if mode & WRITABLE_BY_OTHERS:
        return f"others can write to {name} (mode {mode:04o}); chmod go-w if they have not"
    if private and mode & _ACCESSIBLE_BY_OTHERS:
        return f"others can read {name} (mode {mode:04o})"
    return None

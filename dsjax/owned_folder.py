"""`OwnedFolder`: a folder whose files are believed, since nobody but this user and root can have written them, as ssh decides for its keys.

Whoever can write a page of the cache, a compiled program or a key decides what this process answers or runs. Files are reached through
the open folder and no symbolic link is followed, so that nobody can put another folder in its place meanwhile.
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
_FOR_OTHERS = 0o077

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""A named pipe in the place of a file must not keep its reader waiting."""


class DistrustedError(PermissionError):
    """A file or folder that somebody else can have written."""


class OwnedFolder:
    """A folder of this user's, open until `close`.

    Args:
        path: made with mode 0700 where it is missing.
        private: whether it must be this user's alone, and no link: nobody else may read there.

    Raises:
        DistrustedError: it is somebody else's, or others may write there. OSError: it cannot be made or opened.
    """

    def __init__(self, path: Path, *, private: bool = False):
        self.path = path
        if not private:
            path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self._root = os.open(path, _DIRECTORY | (_NO_FOLLOW if private else 0))
        self._guard, self._close = threading.Lock(), weakref.finalize(self, os.close, self._root)
        try:
            _check(os.fstat(self._root), private)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder. What another thread still does there goes on, and what it begins is an `OSError`."""
        with self._guard:
            self._close()

    @contextlib.contextmanager
    def opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open the folder, or one below it by its names, and give its descriptor. make: where it is missing.

        Raises:
            OSError: it is not there, no folder, or somebody else's.
        """
        with self._guard:
            if not self._close.alive:
                raise OSError(errno.EBADF, "the folder is closed")
            descriptor = os.open(".", _DIRECTORY, dir_fd=self._root)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=descriptor)
                above, descriptor = descriptor, os.open(name, _DIRECTORY | _NO_FOLLOW, dir_fd=descriptor)
                os.close(above)
                _check(os.fstat(descriptor), False)
            yield descriptor
        finally:
            os.close(descriptor)


def open_file(name: str, folder: int, *, private: bool = False) -> int:
    """Open a regular file of an open folder for reading, and give its descriptor. private: as in `OwnedFolder`.

    Raises:
        DistrustedError: somebody else can have written it, or it is no regular file. OSError: there is none.
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
    """Write a file that only this user can read, under the name `unfinished` until it is whole.

    once: a file that has the name already stays. The new one is on the disk, and not in the system's memory alone, before it has the name.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
    try:
        try:
            descriptor = os.open(unfinished, flags, 0o600, dir_fd=folder)
        except FileExistsError:  # of a process that was killed
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
    """Open a file, made where it is missing, and take its lock, without waiting; give its descriptor.

    Closing it gives the lock back, and so does the end of the process. folder: that the name is in; None: it is a path.

    Raises:
        BlockingIOError: another process, or another part of this one, has it.
        OSError: the file cannot be made or is another user's, or there are no such locks here.
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
    """Whether a file or folder is this user's or root's."""
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def why_distrusted(path: Path) -> str | None:
    """Say why what lies at a path, or a folder's entries, may be somebody else's doing; None where nobody else can have done it.

    Raises:
        OSError: nothing is there.
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
    if private and mode & _FOR_OTHERS:
        return f"others can read {name} (mode {mode:04o})"
    return None

"""Locks between the processes of a host: a file that one of them at a time has."""

import os
from pathlib import Path


def try_lock(path: Path) -> int:
    """Open a file, made where it is missing, and take its lock, without waiting; give its descriptor.

    Closing it gives the lock back, and so does the end of the process.

    Raises:
        BlockingIOError: another process, or another part of this one, has it.
        OSError: the file cannot be made or is another user's, or there are no such locks here.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("this system has no file locks (flock)") from None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

"""Which files and folders are believed: those that nobody but this process's user and root can have written, as ssh decides for keys."""

import os
from pathlib import Path

WRITABLE_BY_OTHERS = 0o022


def is_trusted(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's or root's."""
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def why_distrusted(path: Path) -> str | None:
    """Say why what lies at a path, or a folder's entries, may be somebody else's doing; None where nobody else can have done it.

    Raises:
        OSError: nothing is there.
    """
    status = path.stat()
    if not is_trusted(status):
        return f"{path} belongs to another user (number {status.st_uid})"
    if hasattr(os, "geteuid") and status.st_mode & WRITABLE_BY_OTHERS:
        return f"others can write to {path}; chmod go-w {path} if they have not"
    return None

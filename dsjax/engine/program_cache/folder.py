"""``ProgramFolder``: compiled programs on disk, one per file; a later start loads them without tracing, lowering or compiling.

JAX's own compilation cache saves only the compilation: a lookup there needs the traced and lowered program, and tracing and lowering
take longer than the rest of a start. A file is code that this process runs, so files that another user could have written and incomplete
files are not read; each file begins with the digest of its content. The name of a program identifies it (``identity``).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from pathlib import Path

from dsjax.owned_folder import DistrustedError, OwnedFolder, is_trusted, open_file, try_lock, write_whole

MOST_BYTES = 4 << 30
"""Above this size, the least recently used programs are deleted."""
_WRITES_PER_LOOK = 100
"""Number of writes between two checks of the folder's size; the first write also checks."""
_KIND, _UNFINISHED, _LOCK = ".program", "writing-", ".turn"
_MAGIC = b"dsjax program 1\n"
_OLD_SECONDS = 3600
"""Age above which an unfinished file is taken as left by a killed process."""

_log = logging.getLogger(__name__)


class CompileLock(contextlib.ExitStack):
    """A compile lock for one program, held until closed or until the process ends. An empty one locks nothing."""

    __del__ = contextlib.ExitStack.close  # also if an interrupt lost the reference


class ProgramFolder:
    """A folder of programs. Any thread and any number of processes may use it.

    Attributes:
        path: of the folder.
        num_read, num_written: programs read and written by this process.

    Raises:
        DistrustedError: other users could have written there. OSError: the folder cannot be created.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES):
        self.path = path
        self._most_bytes = most_bytes
        self._folder = OwnedFolder(path)
        self.num_read = self.num_written = 0
        self._lock = threading.Lock()
        self._can_write = True

    @classmethod
    def inside(cls, cache: Path | None) -> ProgramFolder | None:
        """Return the program folder inside JAX's cache folder; None if there is none or it is not trusted.

        cache: the cache folder; None and remote stores (``gs://…``) give None.
        """
        if cache is None or ":/" in str(cache):
            return None
        try:
            return cls(cache / "programs")
        except DistrustedError as error:
            reason = f"{cache / 'programs'}: {error.strerror}"
            _log.warning("The folder of compiled programs is not used, only JAX's own cache: %s.", reason)
        except OSError:  # already reported for the parent folder
            pass
        return None

    def read(self, name: str) -> bytes | None:
        """Return the program of this name; None if it is missing or damaged, or if another user could have written it."""
        try:
            with self._folder.opened() as folder, os.fdopen(open_file(f"{name}{_KIND}", folder), "rb") as file:
                content = file.read()
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())  # mark as recently used
        except DistrustedError as error:
            _log.warning("%s in %s is not read: %s.", f"{name}{_KIND}", self.path, error.strerror)
            return None
        except OSError:
            return None
        head = len(_MAGIC) + hashlib.sha256().digest_size
        data = content[head:]
        if content[:head] != _MAGIC + hashlib.sha256(name.encode() + data).digest():
            return None
        with self._lock:
            self.num_read += 1
        return data

    def write(self, name: str, data: bytes) -> bool:
        """Store a program atomically, and return whether it is stored. After a failure, which is logged, nothing more is stored."""
        if not self._can_write:
            return False
        try:
            head = _MAGIC + hashlib.sha256(name.encode() + data).digest()
            with self._folder.opened() as folder:
                write_whole(folder, f"{name}{_KIND}", f"{_UNFINISHED}{secrets.token_hex(8)}", [head, data])
            with self._lock:
                self.num_written += 1
            if self.num_written % _WRITES_PER_LOOK == 1:
                self._make_room()
            return True
        except OSError as error:
            with self._lock:
                could_write = self._can_write
                self._can_write = False
            if could_write:
                _log.warning("Compiled programs cannot be kept in %s (%s).", self.path, error.strerror or error)
            return False

    def compile_lock(self, name: str) -> CompileLock | None:
        """Return the compile lock of a program name; None while another process, or another part of this one, holds it."""
        lock = CompileLock()
        file = f"{name}{_LOCK}"

        # A process may have opened the file before it is unlinked, and then lock it while another locks a new file of this name. Both
        # look for the program before they compile it, and find it: its writer holds the lock until it is stored.
        def unlink() -> None:
            with contextlib.suppress(OSError), self._folder.opened() as folder:
                os.unlink(file, dir_fd=folder)

        if self._can_write:
            try:
                with self._folder.opened() as folder:
                    lock.callback(os.close, try_lock(file, folder))
                    lock.callback(unlink)
            except BlockingIOError:
                return None
            except OSError:  # where locks are impossible, compile without one
                pass
        return lock

    def _make_room(self) -> None:
        """Delete the least recently used programs, and unfinished files and locks of killed processes."""
        programs = []
        size = 0
        with self._folder.opened() as folder:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # another process has deleted it
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISREG(status.st_mode) or not is_trusted(status):
                            continue
                        if entry.name.endswith(_KIND):
                            programs.append((status.st_mtime, status.st_size, entry.name))
                        is_temporary = entry.name.startswith(_UNFINISHED) or entry.name.endswith(_LOCK)
                        if is_temporary and time.time() - status.st_mtime > _OLD_SECONDS:  # left by a killed process
                            os.unlink(entry.name, dir_fd=folder)
            for _, program_bytes, name in sorted(programs, reverse=True):
                size += program_bytes
                if size > self._most_bytes:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)

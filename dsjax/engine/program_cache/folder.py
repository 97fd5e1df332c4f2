"""``ProgramFolder``: compiled programs on disk, each a file, which a later start loads without tracing, lowering or compiling anything.

JAX's own cache beside it spares the compiler alone: to find a program there it must be traced and lowered first, which takes longer
than all else of a start. A file is code that this process runs, so none is read that somebody else can have written, and none that is
not whole: it begins with the digest of the rest. What makes two programs equal is in their names (``identity``).
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
"""Beyond it the programs that were not used for longest are deleted."""
_WRITES_PER_LOOK = 100
"""A process looks how much there is at its first write and after so many more."""
_KIND, _UNFINISHED, _TURN = ".program", "writing-", ".turn"
_MAGIC = b"dsjax program 1\n"
_OLD_SECONDS = 3600
"""After which an unfinished file is that of a process that was killed."""

_log = logging.getLogger(__name__)


class Turn(contextlib.ExitStack):
    """A process's turn to compile a program, until it is closed or the process ends. An empty one keeps nobody else from it."""

    __del__ = contextlib.ExitStack.close  # also where an interrupt has lost it


class ProgramFolder:
    """A folder of programs. Any thread and any number of processes may use it.

    path: of the folder. num_read, num_written: programs that this process has read and written there.

    Raises:
        DistrustedError: others can have written there. OSError: it cannot be made.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES):
        self.path, self._most_bytes = path, most_bytes
        self._folder = OwnedFolder(path)
        self.num_read = self.num_written = 0
        self._lock = threading.Lock()
        self._writes = True

    @classmethod
    def inside(cls, cache: Path | None) -> ProgramFolder | None:
        """The folder of programs in the folder for compiled programs; None where there is none, or it is not to be believed.

        cache: None, or a store elsewhere (``gs://…``), keeps none.
        """
        if cache is None or ":/" in str(cache):
            return None
        try:
            return cls(cache / "programs")
        except DistrustedError as error:
            reason = f"{cache / 'programs'}: {error.strerror}"
            _log.warning("Compiled programs are neither read nor kept whole, only JAX's cache is used: %s.", reason)
        except OSError:  # of the folder around it that was said already
            pass
        return None

    def read(self, name: str) -> bytes | None:
        """What was written under a name; None where nothing was, or it is torn, or somebody else can have written it."""
        try:
            with self._folder.opened() as folder, os.fdopen(open_file(f"{name}{_KIND}", folder), "rb") as file:
                content = file.read()
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())  # used now
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
        """Keep a program, whole or not at all, and say whether it is kept. After a failure, which is logged, nothing more is kept."""
        if not self._writes:
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
                first, self._writes = self._writes, False
            if first:
                _log.warning("Compiled programs cannot be kept in %s (%s).", self.path, error.strerror or error)
            return False

    def turn(self, name: str) -> Turn | None:
        """The turn to make what is to be kept under a name; None while another process, or another part of this one, has it."""
        turn, file = Turn(), f"{name}{_TURN}"

        def unlink() -> None:  # whoever has opened it meanwhile finds the program before compiling it
            with contextlib.suppress(OSError), self._folder.opened() as folder:
                os.unlink(file, dir_fd=folder)

        if self._writes:
            try:
                with self._folder.opened() as folder:
                    turn.callback(os.close, try_lock(file, folder))
                    turn.callback(unlink)
            except BlockingIOError:
                return None
            except OSError:  # whoever cannot have a turn need not wait for one
                pass
        return turn

    def _make_room(self) -> None:
        """Delete what was not used for longest, of programs alone, and what killed processes have left half written."""
        kept, size = [], 0
        with self._folder.opened() as folder:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # another process has deleted it
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISREG(status.st_mode) or not is_trusted(status):
                            continue
                        if entry.name.endswith(_KIND):
                            kept.append((status.st_mtime, status.st_size, entry.name))
                        is_left = entry.name.startswith(_UNFINISHED) or entry.name.endswith(_TURN)
                        if is_left and time.time() - status.st_mtime > _OLD_SECONDS:  # its process was killed
                            os.unlink(entry.name, dir_fd=folder)
            for _, bytes_of_it, name in sorted(kept, reverse=True):
                size += bytes_of_it
                if size > self._most_bytes:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)

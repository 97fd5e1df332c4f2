"""``CompiledPrograms``: the compiled programs of one executor. One process of a host compiles each program, once."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import jax
from jax.stages import Compiled, Lowered

from dsjax.engine.contract.executor import Progress
from dsjax.engine.program_cache.folder import CompileLock
from dsjax.engine.program_cache.library import Shelf
from sharding.cores import most_threads

_PATIENCE = 120.0
"""Seconds to wait without another process finishing a program. That process may be stopped, so this one then compiles the rest too."""
_LOOK_SECONDS = 0.05
_YOUNG_OBJECTS = 20_000
"""Allocations between two garbage collections while tracing. This value shortens tracing by a fifth."""

ProgramKey = tuple[Hashable, ...]
"""A program's kind, and the values that distinguish it from others of its kind."""

_log = logging.getLogger(__name__)


class CompiledPrograms:
    """Compiles each program once, or loads it from the program store (the shelf).

    lower: traces and lowers the program of a key. meet: barrier of the mesh's processes. compiled: the programs so far, by key.
    shelf: stores programs for this mesh beyond the executor's life.
    """

    def __init__(self, lower: Callable[[ProgramKey], Lowered], meet: Callable[[], object], shelf: Shelf):
        self._lower, self._meet, self.shelf = lower, meet, shelf
        self.compiled: dict[ProgramKey, Compiled] = {}

    def get(self, key: ProgramKey, lower: Callable[[], Lowered]) -> Compiled:
        """Return a program. ``lower`` traces it if it is neither compiled nor stored."""
        if key not in self.compiled:
            self.compile(key, lower)
            self._meet()  # even if it was stored: another process may have compiled it
        return self.compiled[key]

    def compile(self, key: ProgramKey, lower: Callable[[], Lowered]) -> None:
        """Load or compile a program; wait while another process of this host compiles it."""
        deadline = time.monotonic() + _PATIENCE
        while not self._find(key):
            lock = self.shelf.compile_lock(key)
            if lock is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                continue
            with lock or CompileLock():
                if not self._find(key):  # another process may have stored it before this one got the lock
                    self._compile(key, lower())

    def compile_all(
        self, labels: Mapping[ProgramKey, str], report: Progress, after: Callable[[ProgramKey], None]
    ) -> None:
        """Compile programs on all cores at once; call ``after`` with each key, in order, once all programs are available.

        Processes of one host that start together share the work: each starts at a different program, skips the programs that another
        process is compiling, and loads them when they are stored.
        """
        pool = ThreadPoolExecutor(most_threads(), thread_name_prefix="compile")
        locks: list[CompileLock] = []
        try:
            with _RARE_COLLECTIONS:
                list(pool.map(self._find, labels))
                missing = [key for key in labels if key not in self.compiled]
                num_ready = len(labels) - len(missing)
                if not missing:
                    report(num_ready, num_ready, "all")
                first = len(missing) * jax.process_index() // jax.process_count()
                pending = missing[first:] + missing[:first]
                progress_at = time.monotonic()
                while pending:
                    stalled = time.monotonic() > progress_at + _PATIENCE
                    elsewhere: list[ProgramKey] = []
                    begun: dict[Future[None], ProgramKey] = {}
                    for key in pending:
                        lock = self.shelf.compile_lock(key) or (CompileLock() if stalled else None)
                        if lock is None:
                            elsewhere.append(key)
                            continue
                        locks.append(lock)
                        is_found = self._find(key)  # another process may have compiled it meanwhile
                        num_ready += is_found
                        report(num_ready, len(labels), labels[key])
                        if is_found:
                            lock.close()
                        else:
                            begun[pool.submit(self._compile, key, self._lower(key), lock)] = key
                    for future in as_completed(begun):
                        future.result()
                        num_ready += 1
                        report(num_ready, len(labels), labels[begun[future]])
                    if len(elsewhere) < len(pending):
                        progress_at = time.monotonic()
                    pending = elsewhere
                    time.sleep(_LOOK_SECONDS if pending else 0)
                for key in labels:
                    after(key)
            _log.info("Programs: %d were there, %d are compiled now.", len(labels) - len(missing), len(missing))
        finally:
            try:
                # After an error or interrupt, do not wait for queued compilations.
                pool.shutdown(cancel_futures=True)
            finally:
                for lock in locks:
                    lock.close()

    def _find(self, key: ProgramKey) -> bool:
        """Load a program from the shelf if needed; return whether it is available."""
        if key not in self.compiled and (program := self.shelf.find(key)) is not None:
            self.compiled[key] = program
        return key in self.compiled

    def _compile(self, key: ProgramKey, lowered: Lowered, lock: CompileLock | None = None) -> None:
        """Compile and store a program, then release its lock."""
        with lock or CompileLock():
            self.compiled[key] = self.shelf.compile(key, lowered)


class _RareCollections:
    """Collects garbage less often during tracing: traces are large, live graphs, which Python would otherwise scan every 700 objects.

    Blocks may overlap across threads: the first raises the thresholds, and the last restores them.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._users = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = gc.get_threshold()
                gc.set_threshold(max(_YOUNG_OBJECTS, self._before[0]), 20, 50)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                gc.set_threshold(*self._before)


_RARE_COLLECTIONS = _RareCollections()

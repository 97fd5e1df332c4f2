"""``CompiledPrograms``: the compiled programs of one executor, each compiled once, and by one process of a host."""

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
from dsjax.engine.program_cache.folder import Turn
from dsjax.engine.program_cache.library import Shelf
from sharding.cores import most_threads

_PATIENCE = 120.0
"""Seconds without a further program of another process that has begun it. It may have been stopped: the rest is then compiled here too."""
_LOOK_SECONDS = 0.05
_YOUNG_OBJECTS = 20_000
"""So many new objects between two looks for garbage take a fifth off the time that tracing takes."""

ProgramKey = tuple[Hashable, ...]
"""A program's kind, and what distinguishes it from others of its kind."""

_log = logging.getLogger(__name__)


class CompiledPrograms:
    """Compiles each program once, or takes it from a shelf of the library.

    lower: traces the program of a key. meet: waits for the other processes of the mesh. compiled: the programs that exist, by key.
    shelf: where they are kept beyond this executor.
    """

    def __init__(self, lower: Callable[[ProgramKey], Lowered], meet: Callable[[], object], shelf: Shelf):
        self._lower, self._meet, self.shelf = lower, meet, shelf
        self.compiled: dict[ProgramKey, Compiled] = {}

    def get(self, key: ProgramKey, lower: Callable[[], Lowered]) -> Compiled:
        """A program, which ``lower`` traces where it is neither compiled nor kept."""
        if key not in self.compiled:
            self.compile(key, lower)
            self._meet()  # also where it was found: another process may have compiled it
        return self.compiled[key]

    def compile(self, key: ProgramKey, lower: Callable[[], Lowered]) -> None:
        """Have a program, from the shelf or by compiling it; waits where another process of this host compiles it."""
        deadline = time.monotonic() + _PATIENCE
        while not self._find(key):
            turn = self.shelf.turn(key)
            if turn is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                continue
            with turn or Turn():
                if not self._find(key):  # since the other process has ended its turn
                    self._compile(key, lower())

    def compile_all(
        self, labels: Mapping[ProgramKey, str], report: Progress, after: Callable[[ProgramKey], None]
    ) -> None:
        """Compile programs on all cores at once; ``after`` is called with each in turn when all are there.

        Processes of one host that start together share the work: each begins at another program, and leaves out those that another
        one has begun, which it loads when they are there.
        """
        pool = ThreadPoolExecutor(most_threads(), thread_name_prefix="compile")
        turns: list[Turn] = []
        try:
            with _FEWER_LOOKS_FOR_GARBAGE:
                list(pool.map(self._find, labels))
                missing = [key for key in labels if key not in self.compiled]
                num_there = len(labels) - len(missing)
                if not missing:
                    report(num_there, num_there, "all")
                first = len(missing) * jax.process_index() // jax.process_count()
                left, since = missing[first:] + missing[:first], time.monotonic()
                while left:
                    stalls = time.monotonic() > since + _PATIENCE
                    of_others: list[ProgramKey] = []
                    begun: dict[Future[None], ProgramKey] = {}
                    for key in left:
                        turn = self.shelf.turn(key) or (Turn() if stalls else None)
                        if turn is None:
                            of_others.append(key)
                            continue
                        turns.append(turn)
                        is_there = self._find(key)  # another process may have made it meanwhile
                        num_there += is_there
                        report(num_there, len(labels), labels[key])
                        if is_there:
                            turn.close()
                        else:
                            begun[pool.submit(self._compile, key, self._lower(key), turn)] = key
                    for future in as_completed(begun):
                        future.result()
                        num_there += 1
                        report(num_there, len(labels), labels[begun[future]])
                    if len(of_others) < len(left):
                        since = time.monotonic()
                    left = of_others
                    time.sleep(_LOOK_SECONDS if left else 0)
                for key in labels:
                    after(key)
            _log.info("Programs: %d were there, %d are compiled now.", len(labels) - len(missing), len(missing))
        finally:
            try:
                # An end before all is compiled must not wait for what is queued.
                pool.shutdown(cancel_futures=True)
            finally:
                for turn in turns:
                    turn.close()

    def _find(self, key: ProgramKey) -> bool:
        """Take a program from the shelf; whether it is there."""
        if key not in self.compiled and (kept := self.shelf.find(key)) is not None:
            self.compiled[key] = kept
        return key in self.compiled

    def _compile(self, key: ProgramKey, lowered: Lowered, turn: Turn | None = None) -> None:
        """Compile a program, and end the turn in which that is done."""
        with turn or Turn():
            self.compiled[key] = self.shelf.compile(key, lowered)


class _FewerLooksForGarbage:
    """While programs are traced: traces are large graphs that live as long as that, and Python would look through them every 700 objects.

    Threads that trace at the same time count as one.
    """

    def __init__(self):
        self._lock, self._users, self._before = threading.Lock(), 0, gc.get_threshold()

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


_FEWER_LOOKS_FOR_GARBAGE = _FewerLooksForGarbage()

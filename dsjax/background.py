"""Background threads and tasks that do not answer requests themselves. A failure affects only the failed work.

`start_thread`, `WorkQueue` and `contained` log and count failures by kind of work; `/metrics` exports the counts as
`dsjax_background_failures_total`. docs/background-work.csv lists every thread and task with the consequence of a failure, and
`tests/dsjax/test_background.py` checks that list against the code.

The counts are per process, like the log: threads start before the engine exists and before metrics are read.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

WORK = (
    "cache events",
    "chunk drain",
    "chunk offer",
    "chunk pull",
    "chunk server",
    "client watch",
    "compile ahead",
    "disk reader",
    "disk writer",
    "expert balancing",
    "expert calls",
    "front end",
    "front end counters",
    "front end requests",
    "headless server",
    "leave",
    "link monitor",
    "load reports",
    "messaging",
    "observers",
    "request text",
    "transfer connection",
    "warm up",
    "welcome",
)
"""Kinds of background work: the values of the metric's label `work`."""

RESTART_SECONDS = 1.0
"""Seconds before a failed thread restarts."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def failure_counts() -> dict[str, int]:
    """Return the number of failures of each kind of work since the process started, including zeros."""
    with _lock:
        return {work: _counts[work] for work in WORK}


def note_failure(work: str, error: BaseException, consequence: str = "") -> None:
    """Log and count a failure. Thread-safe.

    work: one of `WORK`. consequence: a sentence that says what the failure affects. Only the first failure of each kind logs a traceback.
    """
    assert work in WORK, work
    with _lock:
        first = not _counts[work]
    described = f"{type(error).__name__}: {error}"
    message = f"Background work has failed ({work}): {described}" + (f". {consequence}" if consequence else "")
    _log.error(message, exc_info=error if first else None)
    with _lock:  # after logging, so that the log has the failure as soon as the count shows it
        _counts[work] += 1


@contextlib.contextmanager
def contained(work: str, consequence: str = "") -> Iterator[None]:
    """Log and count an exception raised in the block instead of propagating it."""
    try:
        yield
    except Exception as error:
        note_failure(work, error, consequence)


def start_thread(
    work: str,
    run: Callable[..., object],
    *arguments: object,
    name: str,
    restarts: bool = False,
    on_failure: Callable[[Exception], object] = lambda error: None,
) -> threading.Thread:
    """Run a function in a daemon thread. An exception does not end the process.

    Args:
        work: one of `WORK`.
        name: the thread's name.
        restarts: call `run` again after an exception. A loop over a queue or a listener loses only the item that failed.
        on_failure: called with the exception, to release callers that wait for the thread.

    Raises:
        RuntimeError: the system cannot start another thread.
    """

    def supervise() -> None:
        while True:
            try:
                run(*arguments)
            except Exception as error:
                note_failure(work, error)
                with contained(work):
                    on_failure(error)
                if restarts:
                    time.sleep(RESTART_SECONDS)
                    continue
            return

    thread = threading.Thread(target=supervise, name=name, daemon=True)
    thread.start()
    return thread


class WorkQueue:
    """FIFO queue of tasks that daemon threads run. A failed task does not affect the others.

    work: one of `WORK`. name: the threads' name. cost: a sentence that says what a failed task affects.
    """

    def __init__(self, work: str, name: str, *, threads: int = 1, cost: str = ""):
        self._work, self._name, self._num_threads, self._cost = work, name, threads, cost
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. They also run tasks that were queued before."""
        self._threads = [start_thread(self._work, self._run, name=self._name) for _ in range(self._num_threads)]

    def put(self, task: Callable[[], object]) -> None:
        """Queue `task` for a thread to call."""
        self._tasks.put(task)

    def close(self, seconds: float = 0.0) -> bool:
        """Stop the threads after all queued tasks. Wait at most `seconds`, and return whether all threads have ended."""
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contained(self._work, self._cost):
                task()

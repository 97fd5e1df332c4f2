"""Background work: threads and tasks that do not answer requests themselves. A failure there costs that work alone.

`start_thread`, `WorkQueue` and `contained` log what fails and count it, by the name of the work; `/metrics` shows the counts as
`dsjax_background_failures_total`. docs/background-work.csv lists every thread and task, with what its failure costs, and
`tests/dsjax/test_background.py` holds that list to the code.

The counts belong to the process, as its log does: threads start before the engine exists, and before metrics are read.
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
"""The names of background work: values of the metric's label `work`."""

RESTART_SECONDS = 1.0
"""Seconds before a failed thread starts again."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def failure_counts() -> dict[str, int]:
    """Return the failures of each kind of work since the process began, zeros included."""
    with _lock:
        return {work: _counts[work] for work in WORK}


def note_failure(work: str, error: BaseException, consequence: str = "") -> None:
    """Log a failure, and count it. Any thread may call it.

    work: one of `WORK`. consequence: what the failure costs, as a sentence. Only the first failure of a kind of work has its traceback.
    """
    assert work in WORK, work
    with _lock:
        first = not _counts[work]
    described = f"{type(error).__name__}: {error}"
    message = f"Background work has failed ({work}): {described}" + (f". {consequence}" if consequence else "")
    _log.error(message, exc_info=error if first else None)
    with _lock:  # after the log, so that it is there when somebody sees the count
        _counts[work] += 1


@contextlib.contextmanager
def contained(work: str, consequence: str = "") -> Iterator[None]:
    """Log and count an exception of the block instead of raising it."""
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
    """Run a function in a daemon thread. An exception does not end the process and, with `restarts`, not the work.

    Args:
        work: one of `WORK`.
        name: of the thread.
        restarts: call `run` again after an exception. A loop over a queue or a listener loses the one item that has failed.
        on_failure: called with the exception, to release those who wait for the thread.

    Raises:
        RuntimeError: the system has no thread left.
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
    """Tasks for daemon threads, which take them in order. A task that fails costs nothing but itself.

    work: one of `WORK`. name: of the threads. cost: what a failed task costs, as a sentence.
    """

    def __init__(self, work: str, name: str, *, threads: int = 1, cost: str = ""):
        self._work, self._name, self._num_threads, self._cost = work, name, threads, cost
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, which take also what was put before."""
        self._threads = [start_thread(self._work, self._run, name=self._name) for _ in range(self._num_threads)]

    def put(self, task: Callable[[], object]) -> None:
        """Have a thread call `task`."""
        self._tasks.put(task)

    def close(self, seconds: float = 0.0) -> bool:
        """End the threads once all tasks are done. Wait `seconds` for it at most, and return whether they have ended."""
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

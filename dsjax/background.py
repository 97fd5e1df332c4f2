"""Background work: the threads and tasks beside those that answer requests. What fails there costs that work alone.

`start_thread` and `contained` log what fails and count it, by the name of the work; `/metrics` shows the counts as
`dsjax_background_failures_total`. docs/background-work.csv lists every thread and task, with what its failure costs, and
`tests/dsjax/test_background.py` holds that list to the code.

The counts are the process's, as its log is: threads start before there is an engine, and before anybody asks for metrics.
"""

from __future__ import annotations

import contextlib
import logging
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
    "welcome",
)
"""The names of background work: values of the metric's label `work`."""

RESTART_SECONDS = 1.0
"""A thread that is started again after a failure waits so long before."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def failure_counts() -> dict[str, int]:
    """Count the failures of each kind of work since the process began, also of those without any."""
    with _lock:
        return {work: _counts[work] for work in WORK}


def note_failure(work: str, error: BaseException, consequence: str = "") -> None:
    """Log a failure, and count it. Any thread may call it.

    work: one of `WORK`. consequence: what it costs, as a sentence. The first failure of a kind of work is logged with its traceback.
    """
    assert work in WORK, work
    with _lock:
        first = not _counts[work]
    described = f"{type(error).__name__}: {error}"
    message = f"Background work has failed ({work}): {described}" + (f". {consequence}" if consequence else "")
    _log.error(message, exc_info=error if first else None)
    with _lock:  # afterwards: who sees the count finds the log
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
    """Run a function in a daemon thread; an exception ends neither the process nor, where it restarts, the work.

    Args:
        work: one of `WORK`.
        name: of the thread.
        restarts: call `run` again after an exception. A loop over a queue or a listener loses the one item that has failed.
        on_failure: called with the exception: releases who waits for the thread.

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

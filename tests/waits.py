"""Waiting in tests of several threads and processes."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 240, *, every: float = 0.002, what: str = "") -> None:
    """Wait so long at most, and look every so many seconds. what: is waited for."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(every)

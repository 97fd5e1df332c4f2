"""Waiting in tests of several threads."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object]) -> None:
    """Wait for a minute at most."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)

"""Defer Ctrl-C until the engine's current step has ended."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defer an interrupt (Ctrl-C) until the yielded function is called or the block ends. A second interrupt is raised at once.

    An interrupt in the middle of a step would leave the scheduler behind the device. Only the main thread gets interrupts.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    kept: list[tuple] = []

    def keep(*signal_and_frame) -> None:
        if kept:
            handler(*signal_and_frame)
        else:
            kept.append(signal_and_frame)

    def raise_kept() -> None:
        if kept:
            handler(*kept.pop())

    signal.signal(signal.SIGINT, keep)
    try:
        yield raise_kept
    finally:
        signal.signal(signal.SIGINT, handler)
        raise_kept()  # also when the block raises: the interrupt then has that error as its context

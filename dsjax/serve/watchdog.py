"""`Watchdog`: ends the process with a diagnosis when a step hangs."""

import asyncio
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TextIO

from dsjax.engine.core import EngineCore
from dsjax.engine.engine_thread import ThreadedEngine
from dsjax.engine.schedule.request import Request, Status

HANG_EXIT_CODE = 70
"""Exit code after a hang (EX_SOFTWARE of sysexits). A failed engine exits with 1, a user error with 2."""

_MOST_REQUESTS = 20
# Time for clients to read the error.
_FLUSH_SECONDS = 1.0


class Watchdog:
    """A thread that monitors the duration of the current steps, independently of the engine's thread and the event loop.

    Args:
        step_timeout: seconds after which a step counts as a hang; 0: never.
        steppers: the engine's cores by name, for messages.
        notify_clients: called before the exit to end all streams with an error.
    """

    def __init__(
        self,
        step_timeout: float,
        steppers: Mapping[str, EngineCore],
        *,
        notify_clients: Callable[[], None],
        exit: Callable[[int], None] = os._exit,
        out: TextIO | None = None,
    ):
        self._step_timeout = step_timeout
        self._steppers = steppers
        self._notify_clients = notify_clients
        self._exit = exit
        self._out = out or sys.stderr
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dsjax-watchdog", daemon=True)

    @classmethod
    def over(cls, engine: ThreadedEngine, step_timeout: float) -> "Watchdog":
        """Start a watchdog for an engine. It ends streams in the caller's event loop."""
        loop = asyncio.get_running_loop()
        notify_clients = lambda: loop.call_soon_threadsafe(engine.abort_all)  # noqa: E731
        watchdog = cls(step_timeout, engine.steppers, notify_clients=notify_clients)
        watchdog.start()
        return watchdog

    def start(self) -> None:
        """Start watching, unless steps have no time limit."""
        if self._step_timeout:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        try:
            self._look()
        except BaseException:  # without the watchdog, a hang would go unnoticed
            faulthandler.dump_traceback(file=self._out, all_threads=True)
            traceback.print_exc(file=self._out)
            self._exit(HANG_EXIT_CODE)

    def _look(self) -> None:
        while not self._stopped.wait(min(1.0, self._step_timeout / 4)):
            for name, stepper in self._steppers.items():
                started = stepper.step_started
                if started is not None and (seconds := time.monotonic() - started) > self._step_timeout:
                    self._end(name, seconds)
                    return

    def _end(self, name: str, seconds: float) -> None:
        try:
            self._diagnose(name, seconds)
            self._notify_clients()
            time.sleep(_FLUSH_SECONDS)
        finally:
            self._exit(HANG_EXIT_CODE)

    def _diagnose(self, name: str, seconds: float) -> None:
        out = self._out
        print(
            f"dsjax: a step of {name} has been running for {seconds:.1f} s, more than --step-timeout {self._step_timeout:g}; "
            f"it is taken for a hang, and this process ends with {HANG_EXIT_CODE}. Most often a device waits in a collective "
            "that another never enters, or is lost.",
            file=out,
        )
        for number, rank in enumerate(self._steppers[name].scheduler.ranks):
            rows = [request for request in list(rank.running) if request.status is Status.RUNNING]
            if rows:
                print(f"rank {number}: {len(rows)} rows", file=out)
            for request in rows[:_MOST_REQUESTS]:
                print(f"  {_row(request)}", file=out)
            if len(rows) > _MOST_REQUESTS:
                print(f"  and {len(rows) - _MOST_REQUESTS} more", file=out)
        out.flush()
        faulthandler.dump_traceback(file=out, all_threads=True)
        out.flush()


def _row(request: Request) -> str:
    return (
        f"{request.request_id}: slot {request.slot}, {request.num_computed_tokens} of {len(request.token_ids)} tokens "
        f"computed (prompt {request.num_prompt_tokens}), {len(request.pages)} pages, "
        f"{request.num_preemptions} preemptions"
    )

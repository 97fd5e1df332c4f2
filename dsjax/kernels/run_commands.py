"""Commands that a start waits for: none of them, nor what they have started, is left over when one hangs or this process is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence


def run_command(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run one command as ``run_together`` does; give its exit status and what it wrote."""
    return run_together([command], seconds, 1)[0]


def run_together(commands: Sequence[Sequence[str]], seconds: float, at_once: int) -> list[tuple[int, str]]:
    """Run commands, so many at once; give the exit status of each and what it wrote. Once one has failed, no other is begun.

    What still runs when this ends by an error, or takes longer, is ended with all that it has started.

    Raises:
        OSError: one cannot be started. subprocess.TimeoutExpired: they took longer.
    """
    waiting, ended, deadline = list(commands), [], time.monotonic() + seconds
    running: list[_Started] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Started(waiting.pop(0)))
            first = running[0]
            # With one alone there is nothing else to look at.
            code = first.wait(min(0.02, seconds) if len(running) > 1 else deadline - time.monotonic())
            if code is None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(first.command, seconds)
            done = [started for started in running if started.wait(0) is not None]
            running = [started for started in running if started not in done]
            ended += [started.end() for started in done]
            if any(code != 0 for code, _ in ended):
                waiting.clear()
    finally:
        for started in running:
            started.kill()
    return ended


class _Started:
    """A command that runs in a session of its own. What it writes goes to a file without a name.

    No pipe, which a process that is left over would hold open, and no temporary folder where there is another way.
    """

    def __init__(self, command: Sequence[str]):
        self.command = command
        if hasattr(os, "memfd_create"):
            self._said = os.fdopen(os.memfd_create("said"), "w+b")
        else:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.STDOUT, start_new_session=True
            )
        except BaseException:
            self._said.close()
            raise

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None if it still runs after so many seconds."""
        try:
            return self._process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> tuple[int, str]:
        """The exit status of a command that has ended, and what it wrote."""
        with self._said as said:
            said.seek(0)
            return self._process.returncode, said.read(1 << 20).decode(errors="replace")

    def kill(self) -> None:
        """End it, and all that it has started."""
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._said.close()

"""Run commands during startup. No command or child process is left running when one hangs or this process is interrupted."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence


def run_command(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run one command as ``run_together`` does and return its exit status and output."""
    return run_together([command], seconds, 1)[0]


def run_together(commands: Sequence[Sequence[str]], seconds: float, at_once: int) -> list[tuple[int, str]]:
    """Run at most ``at_once`` commands at a time and return (exit status, output) of each, in the order in which they end.

    After a failure no other command is started. On an error or a timeout, running commands are killed with their child processes.

    Raises:
        OSError: a command cannot be started. subprocess.TimeoutExpired: all together took longer than ``seconds``.
    """
    waiting, ended, deadline = list(commands), [], time.monotonic() + seconds
    running: list[_Started] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Started(waiting.pop(0)))
            first = running[0]
            # Poll only if several run: a single command can be waited for until the deadline.
            status = first.wait(min(0.02, seconds) if len(running) > 1 else deadline - time.monotonic())
            if status is None and time.monotonic() > deadline:
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
    """A command running in its own session. Its output goes to an unnamed file, because a leftover process would hold a pipe open.

    Without ``memfd_create``, a temporary file is used.
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
        """Return the exit status, or None if the command still runs after ``seconds``."""
        try:
            return self._process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> tuple[int, str]:
        """Return the exit status and the first MiB of output of a command that has ended."""
        with self._said as said:
            said.seek(0)
            return self._process.returncode, said.read(1 << 20).decode(errors="replace")

    def kill(self) -> None:
        """Kill the command and all processes that it has started."""
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._said.close()

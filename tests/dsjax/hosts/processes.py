"""Real processes of this project, started again where they have ended; and those of a group, each with two emulated devices."""

import contextlib
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quick_compilation import QUICK_COMPILATION

ROOT = Path(__file__).parents[3]
STUCK = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
"""A collective of one process's devices aborts it after so long, where a busy machine is no reason any more."""

# Below the ports that the system gives out itself: nobody takes one between its choice and its use. And below 32,768: Dynamo reads its
# system port as a signed number of 16 bits.
_BLOCK = 350
_BLOCKS = range(20_000, 32_000 - _BLOCK, _BLOCK)


@functools.cache
def _own_ports() -> tuple[socket.socket, Iterator[int]]:
    """A socket and the ports that no other process takes from here, of this run or of another.

    The block belongs to whoever holds its first port; its end gives it back.
    """
    for first in _BLOCKS:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
            return holder, itertools.cycle(range(first + 7, first + _BLOCK, 7))
        except OSError:
            holder.close()
    raise RuntimeError(
        f"each of {len(_BLOCKS)} blocks of ports is another process's; see what listens from {_BLOCKS[0]} on"
    )


def free_port() -> int:
    for port in _own_ports()[1]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Processes:
    """Commands, each an argument list, started as processes whose output is kept."""

    def __init__(self, commands: list[list[str]]):
        flags = " ".join((*QUICK_COMPILATION, *STUCK))
        python = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._environment = {**os.environ, **python, "XLA_FLAGS": flags, "COLUMNS": "300", "JAX_PLATFORMS": "cpu"}
        self._environment.pop("PJRT_NPROC", None)
        self._arguments = commands
        self.output, self.processes, self._threads = ([None] * len(commands) for _ in range(3))
        for index in range(len(commands)):
            self._start(index)

    def start_again(self, index: int) -> None:
        """Start a process that has ended with the same command, as its supervisor does. What it prints begins anew."""
        self.processes[index].wait()
        self._threads[index].join(60)
        self._start(index)

    def _start(self, index: int) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(self._arguments[index], cwd=ROOT, env=self._environment, **pipes)
        self.output[index], self.processes[index] = "", process
        self._threads[index] = threading.Thread(target=self._read, args=(index, process.stdout), daemon=True)
        self._threads[index].start()

    def _read(self, index: int, lines) -> None:
        for line in lines:
            self.output[index] += line

    def wait_for(self, index: int, text: str, seconds: float = 240, *, times: int = 1) -> None:
        """Wait until a process has printed something, so many times; one that has ended may have printed it last."""
        deadline = time.monotonic() + seconds
        while self.output[index].count(text) < times:
            if self.processes[index].poll() is not None:
                self._threads[index].join(60)
                assert self.output[index].count(text) >= times, self.last_words()
            assert time.monotonic() < deadline, self.last_words()
            time.sleep(0.05)

    def write(self, index: int, text: str) -> None:
        self.processes[index].stdin.write(text)
        self.processes[index].stdin.flush()

    def codes(self, seconds: float) -> list[int]:
        """Exit codes, all within so many seconds."""
        deadline = time.monotonic() + seconds
        try:
            found = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"somebody is still there after {seconds} s: {self.last_words()}") from error
        for thread in self._threads:
            thread.join(60)
        return found

    def last_words(self) -> str:
        return "\n".join(f"--- process {index}:\n{text[-3000:]}" for index, text in enumerate(self.output))

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


class Group(Processes):
    """`command`, an argument list of Python's, started once for each process with the options of a group behind it.

    options: more options of each process. timeout: for its start. heartbeat: its timeout, of which a busy machine needs some: a process
    that gets no core for so long is taken for dead, or ends itself. address: of process 0. before: what stands before a process's command.
    """

    def __init__(
        self,
        command: list[str],
        count: int,
        *,
        options: dict[int, list[str]] | None = None,
        timeout: int = 120,
        heartbeat: int = 30,
        address: str = "127.0.0.1",
        before: Callable[[int], list[str]] = lambda index: [],
    ):
        port, commands = free_port(), []
        for index in range(count):
            own = ["--coordinator-address", f"{address}:{port}", "--num-processes", str(count)]
            own += ["--process-id", str(index), "--start-timeout", str(timeout), "--heartbeat-timeout", str(heartbeat)]
            commands.append([*before(index), sys.executable, *command, *own, *(options or {}).get(index, [])])
        super().__init__(commands)


def outputs_of(options: dict, *lines: str) -> list[str]:
    """What each of two processes behind `LLM` prints, which are given these lines (`llm_process.py`) and end."""
    group = Group(["tests/dsjax/hosts/llm_process.py", "--options", json.dumps(options)], 2)
    try:
        group.write(0, "".join(f"{line}\n" for line in lines))
        group.processes[0].stdin.close()
        assert group.codes(480) == [0, 0], group.last_words()
    finally:
        group.end()
    return group.output

"""`TestBed`: everything a measurement may use: the server, the user's hooks, the network benchmark, keys, progress."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.console import Console

from dsjax.bench.accept.options import TestBedOptions
from dsjax.bench.accept.watch import ServerWatch
from dsjax.bench.serve.datasets import DatasetError
from dsjax.bench.serve.load import LoadResult, run_load
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.ready_server import ReadyServer
from dsjax.bench.serve.records import BenchRequest, RequestRecord
from dsjax.options import OptionError
from dsjax.progress import report_progress

_SCALE = "scale:"
_MOST_OUTPUT = 300


class NotTestedError(Exception):
    """A measurement or one of its values is unavailable here; the message says why, and what would make it testable."""


@dataclass(frozen=True)
class Hooks:
    """Fault commands by name; `NAME-end` removes the fault that `NAME` injects."""

    commands: Mapping[str, str]
    scale: Callable[[str], Awaitable[str | None]]  # scales the server to a mesh; returns an error message or None
    timeout: float = 600.0  # seconds

    def why_not(self, name: str) -> str | None:
        """Return which of a fault's two commands are missing; None if both are given."""
        missing = [f"--hook {hook}=COMMAND" for hook in (name, f"{name}-end") if hook not in self.commands]
        if not missing:
            return None
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given: what makes this fault, and ends it"

    async def run(self, name: str, value: str) -> None:
        """Run a hook; an error quotes its output. Raises `NotTestedError` if the hook fails or times out."""
        command = self.commands[name].replace("{value}", value)
        hook = f"--hook {name} ({command})"
        if command.startswith(_SCALE):
            problem = await self.scale(command.removeprefix(_SCALE))
            if problem is not None:
                raise NotTestedError(f"{hook}: {problem}")
            return
        pipes = {
            "stdin": asyncio.subprocess.DEVNULL,
            "stdout": asyncio.subprocess.PIPE,
            "stderr": asyncio.subprocess.STDOUT,
        }
        process = await asyncio.create_subprocess_shell(command, **pipes, start_new_session=True)
        try:
            # Not `wait_for`: in Python 3.11 it loses a cancellation (Ctrl-C) that arrives just as the command ends.
            async with asyncio.timeout(self.timeout):
                output, _ = await process.communicate()
        except BaseException as error:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if isinstance(error, TimeoutError):
                raise NotTestedError(f"{hook} did not end within {self.timeout:g} s") from None
            raise
        if process.returncode:
            text = " ".join(output.decode("utf-8", "replace").split())[-_MOST_OUTPUT:]
            raise NotTestedError(f"{hook} ended with {process.returncode}: {text or 'it said nothing'}")


def parse_hooks(words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=COMMAND` words into a mapping.

    known: hook names of the criteria file.

    Raises:
        OptionError: a word without a command, or a name that no measurement uses.
    """
    names = [*known, *(f"{name}-end" for name in known)]
    hooks = {}
    for word in words:
        name, _, command = word.partition("=")
        if not command.strip():
            raise OptionError(f"--hook is {word!r}, expected NAME=COMMAND")
        if name not in names:
            raise OptionError(
                f"--hook {name} is no hook of the criteria file; expected one of {', '.join(names) or 'none'}"
            )
        hooks[name] = command
    return hooks


@dataclass(frozen=True)
class Sessions:
    """Closed-loop sessions that run in a task."""

    task: asyncio.Task[LoadResult]
    started: list[RequestRecord]  # records of the requests sent so far
    stop: asyncio.Event  # once set, no further request is sent
    zero: float  # `TestBed.clock()` at the start


_ADMIN_TIMEOUT = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True)
class TestBed:
    """Everything that measurements use."""

    server: ReadyServer
    options: TestBedOptions
    network: Mapping[str, Any] | None  # the JSON of `dsjax bench network`; None if not given
    commands: Mapping[str, str]  # the user's hooks
    seed: int  # of this run's prompts; differs between runs, so that no prompt is in the server's prefix cache already
    console: Console
    progress: bool
    draws: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # draws of workloads, used once

    __test__ = False  # pytest would collect a class named Test…
    clock = staticmethod(time.perf_counter)

    @property
    def hooks(self) -> Hooks:
        """The user's hooks; `scale:MESH` calls the server's `/scale`."""
        return Hooks(self.commands, self._scale)

    async def requests(self, workload: WorkloadOptions) -> Iterator[BenchRequest]:
        """Return an endless iterator of requests that were not sent before; only those of a ShareGPT file repeat.

        Raises:
            NotTestedError: all requests are longer than the server accepts.
            UserError: the server rejects the requests.
        """
        try:
            dataset = await self.server.dataset(workload)
        except DatasetError as error:
            raise NotTestedError(str(error)) from error
        most = self.server.facts.max_model_len
        if workload.dataset_name == "sharegpt":  # each draw of a file is the same
            return itertools.cycle(dataset.fitting_requests(next(self.draws), most)[0])
        return itertools.chain.from_iterable(dataset.fitting_requests(draw, most)[0] for draw in self.draws)

    @contextlib.asynccontextmanager
    async def sessions(self, source: Iterator[BenchRequest], count: int) -> AsyncIterator[Sessions]:
        """Run `count` sessions. Leaving the block cancels sessions that still run."""
        started: list[RequestRecord] = []
        stop = asyncio.Event()
        zero = self.clock()
        sending = run_load(self.server.client, source, None, count, until=stop, zero=zero, on_start=started.append)
        task = asyncio.create_task(sending)
        try:
            yield Sessions(task, started, stop, zero)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def watch(self, interval: float) -> ServerWatch:
        """Return a watch of the server that polls every `interval` seconds."""
        return ServerWatch(self.server.session, self.server.url, self.options.device_metrics or (), interval)

    async def admin(self, path: str, body: Mapping[str, Any] | None = None) -> str | None:
        """Post to one of dsjax's admin endpoints; return an error message or None."""
        key = self.options.admin_api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = self.server.url + path
        try:
            async with self.server.session.post(url, json=body, headers=headers, timeout=_ADMIN_TIMEOUT) as response:
                text = await response.text()
                return None if response.status == 200 else f"{path} answered {response.status}: {text[:300]}"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return f"{path}: {error or type(error).__name__}"

    async def _scale(self, mesh: str) -> str | None:
        if self.options.admin_api_key is None:
            return "scale: needs --admin-api-key"
        return await self.admin("/scale", {"mesh": mesh})

    async def answered(self, started: Sequence[RequestRecord], count: int, seconds: float) -> None:
        """Wait until `count` of the started requests have been answered or have failed, at most `seconds`."""
        until = self.clock() + seconds
        while self.clock() < until and sum(r.error is not None or r.finish_reason is not None for r in started) < count:
            await asyncio.sleep(0.05)

    def report_progress(self, title: str, total: int) -> contextlib.AbstractContextManager[Callable[[int, str], None]]:
        """Show the progress of `total` items."""
        return report_progress(self.console, self.progress, title, total)

    @contextlib.asynccontextmanager
    async def clocked(self, title: str, seconds: float) -> AsyncIterator[None]:
        """Show the elapsed part of `seconds`."""
        with self.report_progress(title, max(1, round(seconds))) as report:

            async def tick() -> None:
                for second in range(round(seconds) + 1):
                    report(second, "s")
                    await asyncio.sleep(1)

            ticking = asyncio.create_task(tick())
            try:
                yield
            finally:
                ticking.cancel()

    @staticmethod
    def why_none(figures: Mapping[str, Any]) -> str:
        """Return why a load has no latencies. figures: result of `statistics.figures`."""
        for message, number in figures["error_counts"].items():
            return f"none of {figures['failed']} requests was answered: {number} × {message}"
        return "no answer had a second token" if figures["completed"] else "no request was answered"

"""`TestBed`: the server, and what else a measurement may use: the user's hooks, the network's measurement, keys, progress."""

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
from dsjax.progress import counting

_SCALE = "scale:"
_MOST_OUTPUT = 300


class NotTestedError(Exception):
    """A measurement, or some of its values, cannot be had here; the message says why, and what would make it testable."""


@dataclass(frozen=True)
class Hooks:
    """Commands by name; `NAME-end` ends what `NAME` began."""

    commands: Mapping[str, str]
    scale: Callable[[str], Awaitable[str | None]]  # asks the server to go on on another mesh, and says what was wrong
    timeout: float = 600.0  # seconds

    def why_not(self, name: str) -> str | None:
        """Why a fault cannot be made; None where both of its commands are there."""
        missing = [f"--hook {each}=COMMAND" for each in (name, f"{name}-end") if each not in self.commands]
        if not missing:
            return None
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given: what makes this fault, and ends it"

    async def run(self, name: str, value: str) -> None:
        """Run one, with its output kept for an error. Raises `NotTestedError`: it ended with an error, or not in time."""
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
            # Not `wait_for`: where the command ends in the same moment, Python 3.11's forgets that this was cancelled, by Ctrl-C.
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
            said = " ".join(output.decode("utf-8", "replace").split())[-_MOST_OUTPUT:]
            raise NotTestedError(f"{hook} ended with {process.returncode}: {said or 'it said nothing'}")


def parse_hooks(words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """`NAME=COMMAND` words as a mapping.

    known: names of the criteria file's hooks.

    Raises:
        OptionError: a word without `=`, or a name that no measurement has.
    """
    names, hooks = [*known, *(f"{name}-end" for name in known)], {}
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


_ADMIN_TIMEOUT = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True)
class TestBed:
    """What measurements are made with.

    seed: of this run's prompts; another one each time, so that no run finds its prompts in the server's prefix cache.
    """

    server: ReadyServer
    options: TestBedOptions
    network: Mapping[str, Any] | None  # the JSON of `dsjax bench network`; None where there is none
    commands: Mapping[str, str]  # the user's hooks
    seed: int
    console: Console
    progress: bool
    draws: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of workloads, each used once

    __test__ = False  # pytest takes classes that are called Test… for its own
    clock = staticmethod(time.perf_counter)

    @property
    def hooks(self) -> Hooks:
        """The user's commands; `scale:` asks the server."""
        return Hooks(self.commands, self._scale)

    async def requests(self, workload: WorkloadOptions) -> Iterator[BenchRequest]:
        """Requests of a workload without end, none of which was sent before; a ShareGPT file's come again and again.

        Raises:
            NotTestedError: they are all longer than the server takes.
            UserError: the server refuses them.
        """
        try:
            dataset = await self.server.dataset(workload)
        except DatasetError as error:
            raise NotTestedError(str(error)) from error
        most = self.server.facts.max_model_len
        if workload.dataset_name == "sharegpt":  # each draw of a file is the same
            return itertools.cycle(dataset.draw(next(self.draws), most)[0])
        return itertools.chain.from_iterable(dataset.draw(draw, most)[0] for draw in self.draws)

    @contextlib.asynccontextmanager
    async def sessions(
        self, source: Iterator[BenchRequest], count: int
    ) -> AsyncIterator[tuple[asyncio.Task[LoadResult], list[RequestRecord], asyncio.Event, float]]:
        """So many sessions that send requests: (their task, the requests that have begun, what ends the sending, the clock at the start).

        They are cancelled where the block is left before they have ended.
        """
        records, until, zero = [], asyncio.Event(), self.clock()
        sending = run_load(self.server.client, source, None, count, until=until, zero=zero, on_start=records.append)
        load = asyncio.create_task(sending)
        try:
            yield load, records, until, zero
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)

    def watch(self, interval: float) -> ServerWatch:
        """A watch of the server."""
        return ServerWatch(self.server.session, self.server.url, self.options.device_metrics or (), interval)

    async def admin(self, path: str, body: Mapping[str, Any] | None = None) -> str | None:
        """Post to one of dsjax's endpoints for administrators; what was wrong, or None."""
        key, url = self.options.admin_api_key, self.server.url + path
        how = {"headers": {"Authorization": f"Bearer {key}"} if key else {}, "timeout": _ADMIN_TIMEOUT}
        try:
            async with self.server.session.post(url, json=body, **how) as response:
                text = await response.text()
                return None if response.status == 200 else f"{path} answered {response.status}: {text[:300]}"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return f"{path}: {error or type(error).__name__}"

    async def _scale(self, mesh: str) -> str | None:
        if self.options.admin_api_key is None:
            return "scale: needs --admin-api-key"
        return await self.admin("/scale", {"mesh": mesh})

    async def answered(self, started: Sequence[RequestRecord], count: int, seconds: float) -> None:
        """Wait until so many of the requests that have begun were answered or have failed, at most so long."""
        until = self.clock() + seconds
        while self.clock() < until and sum(r.error is not None or r.finish_reason is not None for r in started) < count:
            await asyncio.sleep(0.05)

    def counting(self, title: str, total: int) -> contextlib.AbstractContextManager[Callable[[int, str], None]]:
        """Show how many of something are done."""
        return counting(self.console, self.progress, title, total)

    @contextlib.asynccontextmanager
    async def clocked(self, title: str, seconds: float) -> AsyncIterator[None]:
        """Show how much of a time has passed."""
        with self.counting(title, max(1, round(seconds))) as report:

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
        """Say why a load has no latencies. figures: what `statistics.figures` gave for it."""
        for message, number in figures["error_counts"].items():
            return f"none of {figures['failed']} requests was answered: {number} × {message}"
        return "no answer had a second token" if figures["completed"] else "no request was answered"

"""`TestBed`: the server, and what else a measurement may use: hooks, the network's measurement, keys, progress."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from rich.console import Console

from dsjax.bench.accept.errors import NotTestedError
from dsjax.bench.accept.hooks import Hooks
from dsjax.bench.accept.options import TestBedOptions
from dsjax.bench.accept.watch import ServerWatch
from dsjax.bench.serve.datasets import DatasetError
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.ready_server import ReadyServer
from dsjax.bench.serve.records import BenchRequest, RequestRecord
from dsjax.bench.serve.statistics import Statistics
from dsjax.progress import counting

_ADMIN_TIMEOUT = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True)
class TestBed:
    """What measurements are made with.

    Attributes:
        server: that is tested.
        options: the command's.
        network: the JSON of `dsjax bench network`; None where there is none.
        hooks: the user's commands.
        seed: of this run's prompts; another one each time, so that no run finds its prompts in the server's prefix cache.
        console, progress: where progress is shown, and whether.
        draws: numbers of draws of workloads, each used once.
    """

    server: ReadyServer
    options: TestBedOptions
    network: Mapping[str, Any] | None
    hooks: Hooks
    seed: int
    console: Console
    progress: bool
    draws: Iterator[int]

    __test__ = False  # pytest takes classes that are called Test… for its own

    @classmethod
    def of(
        cls,
        server: ReadyServer,
        options: TestBedOptions,
        network: Mapping[str, Any] | None,
        commands: Mapping[str, str],
        seed: int,
        console: Console,
        progress: bool,
    ) -> "TestBed":
        """Make one."""
        scale = partial(_scale, server, options.admin_api_key)
        return cls(server, options, network, Hooks(commands, scale), seed, console, progress, itertools.count(1))

    clock = staticmethod(time.perf_counter)

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

    def watch(self, interval: float) -> ServerWatch:
        """A watch of the server."""
        return ServerWatch(self.server.session, self.server.url, self.options.metrics_urls, interval)

    async def admin(self, path: str, body: Mapping[str, Any] | None = None) -> str | None:
        """Post to one of dsjax's endpoints for administrators; what was wrong, or None."""
        return await _post(self.server, self.options.admin_api_key, path, body)

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
    def why_none(statistics: Statistics) -> str:
        """Why there are no latencies."""
        if statistics.errors:
            message, number = statistics.errors[0]
            return f"none of {statistics.failed} requests was answered: {number} × {message}"
        return "no request was answered" if not statistics.completed else "no answer had a second token"


async def _scale(server: ReadyServer, key: str | None, mesh: str) -> str | None:
    if key is None:
        return "scale: needs --admin-api-key"
    return await _post(server, key, "/scale", {"mesh": mesh})


async def _post(server: ReadyServer, key: str | None, path: str, body: Mapping[str, Any] | None) -> str | None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    how = {} if body is None else {"json": dict(body)}
    try:
        async with server.session.post(server.url + path, headers=headers, timeout=_ADMIN_TIMEOUT, **how) as response:
            text = await response.text()
            return None if response.status == 200 else f"{path} answered {response.status}: {text[:300]}"
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return f"{path}: {error or type(error).__name__}"

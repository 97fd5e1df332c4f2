"""`Benchmark` measures the points that the options ask for: query the server, draw requests, warm up, run each load."""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dsjax.bench.serve.client import open_session
from dsjax.bench.serve.datasets import Dataset
from dsjax.bench.serve.load import arrival_times, run_load
from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.bench.serve.ready_server import WARM_UP_DRAW, ReadyServer
from dsjax.bench.serve.records import RequestRecord
from dsjax.bench.serve.report import Advance
from dsjax.bench.serve.server_facts import ServerFacts, scrape
from dsjax.bench.serve.statistics import draft_figures, figures
from dsjax.options import OptionError

_TOLERANCE = 0.05
"""The search ends when the smallest failing load exceeds the largest passing one by at most this share."""

_UPPER_LIMITS = {"concurrency": 65_536, "rate": 100_000.0}
_LOWEST_RATE = 1 / 1024


@dataclass
class Search:
    """Search for the largest load that meets the objectives: doubling or halving, then bisection."""

    quantity: str  # `concurrency` (whole numbers) or `rate` (requests a second)
    best: float | None = None  # the largest load that met the objectives; None if none has yet
    failed: float | None = None  # the smallest load that did not

    def next(self) -> float | None:
        """Return the next load to try; None when the search is over."""
        best, failed = self.best, self.failed
        is_whole = self.quantity == "concurrency"
        if best is None and failed is None:
            return 1
        if failed is None:
            return best * 2 if best * 2 <= _UPPER_LIMITS[self.quantity] else None
        if best is None:
            return None if is_whole or failed <= _LOWEST_RATE else failed / 2
        if is_whole:
            between = (int(best) + int(failed)) // 2
            return between if failed - best > max(1, _TOLERANCE * best) else None
        return (best + failed) / 2 if failed - best > _TOLERANCE * best else None

    def record(self, load: float, share: float | None, goodput_share: float) -> None:
        """Record a load as passed or failed, by the `share` of its requests that met every objective; None: none was answered."""
        if share is not None and share >= goodput_share:
            self.best = load if self.best is None else max(self.best, load)
        else:
            self.failed = load if self.failed is None else min(self.failed, load)

    def sentence(self, goodput_share: float, objectives: dict[str, float]) -> str:
        """Return the result as a sentence."""
        limits = " ".join(f"{name} ≤ {limit:g} ms" for name, limit in objectives.items())
        goal = f"at which {goodput_share:.0%} of the requests have {limits}"
        if self.best is None:
            return f"no {self.quantity} was found {goal}; the least that was tried is {self.failed or 0:g}"
        failing = f"{self.failed:g} does not" if self.failed is not None else "none that was tried does not"
        unit = " requests/s" if self.quantity == "rate" else ""
        return f"largest {self.quantity} {goal}: {self.best:.4g}{unit} ({failing})"


@dataclass(frozen=True)
class Point:
    """One measured load."""

    body: dict[str, Any]  # its JSON without date and server name
    records: list[RequestRecord]  # its requests


@dataclass(frozen=True)
class Benchmark:
    """A benchmark run."""

    server: ServerOptions
    workload: WorkloadOptions
    load: LoadOptions
    report: ReportOptions
    say: Callable[[str], None]  # called with each status line for the user
    # called with a title and a number of requests; returns a context manager that shows their progress
    progress: Callable[[str, int], AbstractContextManager[Advance]]
    stop: asyncio.Event  # ends the run when set; the current point keeps its completed requests

    async def run(self, on_ready: Callable[[ServerFacts], None], on_point: Callable[[Point], None]) -> ServerFacts:
        """Measure every point, until `stop` is set; return the server's facts.

        on_ready: called once the server has answered a test request, before the load begins. on_point: called with each point.

        Raises:
            UserError: no server, a rejected test request, or an impossible workload.
        """
        load = self.load
        has_own_times = self.workload.dataset_name == "trace"
        if has_own_times and (load.request_rate or load.sweep_rate or load.search == "rate"):
            raise OptionError("a trace has arrival times of its own; instead of a request rate give --trace-speed")
        if load.search and not self.report.objectives:
            raise OptionError("--search wants objectives; give --goodput, for example --goodput ttft:500 tps:20")
        async with open_session(self.server.api_key) as session:
            ready = await ReadyServer.connect(session, self.server)
            dataset = await ready.dataset(self.workload)
            on_ready(ready.facts)
            await self._warm_up(ready, dataset)
            if load.search:
                await self._search(ready, dataset, on_point)
                return ready.facts
            for number, (rate, concurrency) in enumerate(load.points(), 1):
                if self.stop.is_set():
                    break
                on_point(await self._measure(ready, dataset, number, rate, concurrency))
        return ready.facts

    async def _warm_up(self, ready: ReadyServer, dataset: Dataset) -> None:
        """Send the warm-up requests, which are not counted."""
        if not self.load.num_warmups:
            return
        requests, _ = dataset.fitting_requests(WARM_UP_DRAW, ready.facts.max_model_len, self.load.num_warmups)
        concurrency = max((n for _, n in self.load.points() if n), default=None)
        arrivals = [0.0] * len(requests)
        with self.progress("warm-up", len(requests)) as advance:
            await run_load(ready.client, requests, arrivals, concurrency, stop=self.stop, on_done=advance)

    async def _search(self, ready: ReadyServer, dataset: Dataset, on_point: Callable[[Point], None]) -> None:
        """Search for the largest load that meets the objectives, and report it."""
        goodput_share = self.load.goodput_share
        say = self.say
        search = Search(self.load.search)
        number = 0
        while (tried := search.next()) is not None:
            number += 1
            point = await self._measure(ready, dataset, number, *self.load.point_of(tried))
            on_point(point)
            if self.stop.is_set():
                say("interrupted: the search has not ended")
                return
            share = point.body["good_share"]
            outcome = "nothing was answered" if share is None else f"{share:.1%} of the requests meet the objectives"
            say(f"{search.quantity} {tried:g}: {outcome}")
            search.record(tried, share, goodput_share)
        say(search.sentence(goodput_share, self.report.objectives))

    async def _measure(
        self, ready: ReadyServer, dataset: Dataset, number: int, rate: float, concurrency: int | None
    ) -> Point:
        load = self.load
        duration = load.duration
        max_model_len = ready.facts.max_model_len
        requests, left_out = dataset.fitting_requests(number, max_model_len)  # another draw for each point
        if left_out:
            self.say(f"{left_out} requests are longer than the server's {max_model_len:,} tokens and left out")
        own_times = [request.arrival for request in requests]
        if None in own_times:
            arrivals = arrival_times(len(requests), rate, load.burstiness, self.workload.seed)
        else:
            arrivals = [time - own_times[0] for time in own_times]
        title = f"point {number}" if load.search else f"point {number} of {len(load.points())}"
        ends = {"duration": duration, "stop": self.stop}
        metrics = f"{ready.url}/metrics"
        before = await scrape(ready.session, metrics)
        with self.progress(title, len(requests)) as advance:
            result = await run_load(ready.client, requests, arrivals, concurrency, **ends, on_done=advance)
        drafts = draft_figures(before, await scrape(ready.session, metrics))
        records = result.records
        if duration is not None and len(records) == len(requests) and arrivals[-1] < duration > result.duration:
            self.say(
                f"all {len(requests)} requests were answered before --duration {duration:g} s; raise --num-prompts"
            )
        statistics = figures(
            records, result.duration, self.report.percentiles, self.report.objectives, load.goodput_share
        )
        devices = self.server.devices or ready.facts.num_devices
        settings = {
            "num_prompts": len(requests) if duration is None else len(records),
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": "inf" if math.isinf(load.burstiness) else load.burstiness,
            "max_concurrency": concurrency,
            "interrupted": result.interrupted,
            "cached_share_bound": dataset.cached_share_bound(len(requests)),
            "num_devices": devices,
            "output_throughput_per_device": statistics["output_throughput"] / devices if devices else None,
        }
        return Point(settings | statistics | drafts, records)

"""`Benchmark`: from options to points: ask the server, choose the prompts' form, warm up, measure."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from dsjax.bench.serve.client import open_session
from dsjax.bench.serve.datasets import Dataset
from dsjax.bench.serve.load import arrival_times, run_load
from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.bench.serve.ready_server import WARM_UP_DRAW, ReadyServer
from dsjax.bench.serve.records import BenchRequest
from dsjax.bench.serve.report import LoadPoint, PointProgress
from dsjax.bench.serve.result_files import PointResult
from dsjax.bench.serve.server_facts import ServerFacts, read_counters
from dsjax.bench.serve.statistics import DraftFigures, GoodputVerdict, summarise
from dsjax.options import OptionError

_TOLERANCE = 0.05
"""The search ends where the load that fails is at most so much more than the one that meets."""

_MOST = {"concurrency": 65_536, "rate": 100_000.0}
_LEAST_RATE = 1 / 1024


@dataclass
class Search:
    """Which load to try next, and what is known so far.

    Attributes:
        quantity: `concurrency` (whole numbers) or `rate` (requests a second).
        best: the largest load that met the objectives; None as long as there is none.
        failed: the smallest that did not.
    """

    quantity: str
    best: float | None = None
    failed: float | None = None

    def next(self) -> float | None:
        """The load to try; None when the answer is known."""
        best, failed, whole = self.best, self.failed, self.quantity == "concurrency"
        if best is None and failed is None:
            return 1
        if failed is None:
            return best * 2 if best * 2 <= _MOST[self.quantity] else None
        if best is None:
            return None if whole or failed <= _LEAST_RATE else failed / 2
        if whole:
            between = (int(best) + int(failed)) // 2
            return between if failed - best > max(1, _TOLERANCE * best) else None
        return (best + failed) / 2 if failed - best > _TOLERANCE * best else None

    def record(self, load: float, share: float | None, wanted: float) -> None:
        """Record the share of a load's requests that met every objective; None where none was answered."""
        if share is not None and share >= wanted:
            self.best = load if self.best is None else max(self.best, load)
        else:
            self.failed = load if self.failed is None else min(self.failed, load)

    def sentence(self, wanted: float, objectives: dict[str, float]) -> str:
        """The answer."""
        said = " ".join(f"{name} ≤ {limit:g} ms" for name, limit in objectives.items())
        goal = f"at which {wanted:.0%} of the requests have {said}"
        if self.best is None:
            return f"no {self.quantity} was found {goal}; the least that was tried is {self.failed or 0:g}"
        more = f"{self.failed:g} does not" if self.failed is not None else "none that was tried does not"
        unit = " requests/s" if self.quantity == "rate" else ""
        return f"largest {self.quantity} {goal}: {self.best:.4g}{unit} ({more})"


@dataclass(frozen=True)
class Benchmark:
    """A whole run.

    Attributes:
        server, workload, load, report: the options.
        say: called with each line that tells the user what is going on.
        progress: called with a title and a number of requests; a context in which it shows how far they are.
    """

    server: ServerOptions
    workload: WorkloadOptions
    load: LoadOptions
    report: ReportOptions
    say: Callable[[str], None]
    progress: Callable[[str, int], AbstractContextManager[PointProgress]]

    async def run(
        self, stop: asyncio.Event, on_ready: Callable[[ServerFacts], None], on_point: Callable[[PointResult], None]
    ) -> ServerFacts:
        """Measure every point, until `stop` is set; give what the server said of itself.

        Args:
            stop: ends the run; the point under way counts as far as it came.
            on_ready: called once the server has answered a test request: now the load begins.
            on_point: called with each point.

        Raises:
            UserError: no server, a refused test request, or a workload that cannot be.
        """
        server, load = self.server, self.load
        own_times = self.workload.dataset_name == "trace"
        if own_times and (load.request_rate or load.sweep_rate or load.search == "rate"):
            raise OptionError("a trace has arrival times of its own; instead of a request rate give --trace-speed")
        if load.search and not self.report.objectives:
            raise OptionError("--search wants objectives; give --goodput, for example --goodput ttft:500 tps:20")
        async with open_session(server.api_key) as session:
            ready = await ReadyServer.connect(session, server)
            facts, dataset = ready.facts, await ready.dataset(self.workload)
            on_ready(facts)
            points = _Points(self, ready, dataset, stop)
            await points.warm_up()
            if load.search:
                await points.search(on_point)
                return facts
            for number, (rate, concurrency) in enumerate(load.points(), 1):
                if stop.is_set():
                    break
                on_point(await points.measure(number, rate, concurrency))
        return facts


@dataclass(frozen=True)
class _Points:
    """The points of a run, over one session with a server that takes the dataset's prompts."""

    run: Benchmark
    server: ReadyServer
    dataset: Dataset
    stop: asyncio.Event

    async def warm_up(self) -> None:
        """Send the requests that are not counted."""
        count = self.run.load.num_warmups
        if not count:
            return
        requests, _ = self.dataset.draw(WARM_UP_DRAW, self.server.facts.max_model_len, count)
        concurrency = max((n for _, n in self.run.load.points() if n), default=None)
        arrivals = [0.0] * len(requests)
        with self.run.progress("warm-up", len(requests)) as bar:
            await run_load(self.server.client, requests, arrivals, concurrency, stop=self.stop, on_done=bar.advance)

    async def search(self, on_point: Callable[[PointResult], None]) -> None:
        """Measure the points that lead to the largest load that meets the objectives, and say which that is."""
        load, wanted, say = self.run.load, self.run.load.goodput_share, self.run.say
        search, number = Search(load.search), 0
        while (tried := search.next()) is not None:
            number += 1
            point = await self.measure(number, *load.point_of(tried))
            on_point(point)
            if self.stop.is_set():
                say("interrupted: the search has not ended")
                return
            share = point.statistics.good_share
            told = "nothing was answered" if share is None else f"{share:.1%} of the requests meet the objectives"
            say(f"{search.quantity} {tried:g}: {told}")
            search.record(tried, share, wanted)
        say(search.sentence(wanted, self.run.report.objectives))

    async def measure(self, number: int, rate: float, concurrency: int | None) -> PointResult:
        """Measure one point."""
        load, report, say = self.run.load, self.run.report, self.run.say
        requests, left_out = self.dataset.draw(number, self.server.facts.max_model_len)
        if left_out:
            say(
                f"{left_out} requests are longer than the server's {self.server.facts.max_model_len:,} tokens and left out"
            )
        arrivals = self._arrivals(requests, rate)
        title = f"point {number}" if load.search else f"point {number} of {len(load.points())}"
        duration = load.duration
        before = await read_counters(self.server.session, self.server.url)
        with self.run.progress(title, len(requests)) as bar:
            result = await run_load(
                self.server.client,
                requests,
                arrivals,
                concurrency,
                duration=duration,
                stop=self.stop,
                on_done=bar.advance,
            )
        drafts = DraftFigures.between(before, await read_counters(self.server.session, self.server.url))
        if duration is not None and len(result.records) == len(requests) and arrivals[-1] < duration > result.duration:
            say(f"all {len(requests)} requests were answered before --duration {duration:g} s; raise --num-prompts")
        statistics = summarise(result, report.percentiles, report.objectives)
        sent = len(result.records) if duration is not None else len(requests)
        bound = self.dataset.cached_share_bound(len(requests))
        verdict = GoodputVerdict.of(result.records, report.objectives, load.goodput_share)
        point = LoadPoint(sent, rate, load.burstiness, concurrency, bound)
        return PointResult(point, result, statistics, drafts, verdict)

    def _arrivals(self, requests: list[BenchRequest], rate: float) -> list[float]:
        """When each request is due: at the dataset's own times, or at the rate's."""
        times = [request.arrival for request in requests]
        if None not in times:
            return [time - times[0] for time in times]
        return arrival_times(len(requests), rate, self.run.load.burstiness, self.run.workload.seed)

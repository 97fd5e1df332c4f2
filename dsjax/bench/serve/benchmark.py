"""`Benchmark`: from options to points: ask the server, choose the prompts' form, warm up, measure."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from dsjax.bench.serve.client import Client, Target, open_session
from dsjax.bench.serve.datasets import Dataset
from dsjax.bench.serve.load import arrival_times, run_load
from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.bench.serve.progress import PointProgress
from dsjax.bench.serve.prompts import PromptSource, count_tokens
from dsjax.bench.serve.records import BenchRequest
from dsjax.bench.serve.report import LoadPoint
from dsjax.bench.serve.result_files import PointResult
from dsjax.bench.serve.server_facts import (
    Counters,
    DraftFigures,
    ServerError,
    ServerFacts,
    ask_server,
    read_counters,
    server_url,
)
from dsjax.bench.serve.statistics import summarise
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

    def enter(self, load: float, share: float | None, wanted: float) -> None:
        """What came of a load: the share of its requests that met every objective; None where none was answered."""
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


_WARM_UP_DRAW = 0


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
        self,
        stop: asyncio.Event,
        on_ready: Callable[[ServerFacts], None],
        on_point: Callable[[PointResult], None],
    ) -> ServerFacts:
        """Measure every point, until `stop` is set; give what the server said of itself.

        Args:
            stop: ends the run; the point under way counts as far as it came.
            on_ready: called once the server has answered a test request: now the load begins.
            on_point: called with each point.

        Raises:
            UserError: no server, a refused test request, or a workload that cannot be.
        """
        url = server_url(self.server.base_url)
        self._check_times()
        if self.load.search and not self.report.objectives:
            raise OptionError("--search wants objectives; give --goodput, for example --goodput ttft:500 tps:20")
        async with open_session(self.server.api_key) as session:
            facts = await ask_server(session, url, self.server.model, self.server.ready_check_timeout_sec)
            source = PromptSource.find(self.server.tokenizer, self.server.vocab_size, facts)
            client = Client(session, self._target(url, facts), self._counter(source))
            dataset = await self._first_that_is_taken(client, source, facts)
            on_ready(facts)
            await self._warm_up(client, dataset, facts, stop)
            read = functools.partial(read_counters, session, url)
            if self.load.search:
                await self._search(client, dataset, facts, stop, on_point, read)
                return facts
            for number, (rate, concurrency) in enumerate(self.load.points(), 1):
                if stop.is_set():
                    break
                on_point(await self._point(client, dataset, facts, stop, number, rate, concurrency, read))
        return facts

    async def _search(
        self,
        client: Client,
        dataset: Dataset,
        facts: ServerFacts,
        stop: asyncio.Event,
        on_point: Callable[[PointResult], None],
        read_drafts: Callable[[], Awaitable[Counters | None]],
    ) -> None:
        """Measure the points that lead to the largest load that meets the objectives, and say which that is."""
        objectives, wanted = self.report.objectives, self.load.search_share
        search, number = Search(self.load.search), 0
        while (load := search.next()) is not None:
            number += 1
            point = await self._point(client, dataset, facts, stop, number, *self.load.point_of(load), read_drafts)
            on_point(point)
            if stop.is_set():
                self.say("interrupted: the search has not ended")
                return
            share = point.statistics.good_share
            told = "nothing was answered" if share is None else f"{share:.1%} of the requests meet the objectives"
            self.say(f"{search.quantity} {load:g}: {told}")
            search.enter(load, share, wanted)
        self.say(search.sentence(wanted, objectives))

    def _check_times(self) -> None:
        if self.workload.dataset_name == "trace" and (
            self.load.request_rate or self.load.sweep_rate or self.load.search == "rate"
        ):
            raise OptionError("a trace has arrival times of its own; instead of a request rate give --trace-speed")

    def _target(self, url: str, facts: ServerFacts) -> Target:
        s = self.server
        fields = s.extra_fields()
        return Target(url, s.endpoint, facts.model, s.ignore_eos, s.temperature, fields, s.request_timeout)

    def _counter(self, source: PromptSource) -> Callable[[str], int] | None:
        tokenizer = source.tokenizer
        return None if tokenizer is None else lambda text: count_tokens(tokenizer, text)

    async def _first_that_is_taken(self, client: Client, source: PromptSource, facts: ServerFacts) -> Dataset:
        """The dataset with prompts in the first form that a test request of two tokens is answered in."""
        refused = ""
        for prompts in source.forms(self.server.prompt_form, self.server.endpoint):
            dataset = Dataset(self.workload, prompts, source)
            requests, _ = dataset.draw(_WARM_UP_DRAW, facts.max_model_len)
            record = await client.send(replace(requests[0], output_tokens=min(2, requests[0].output_tokens)))
            if record.succeeded:
                return dataset
            refused = record.error or ""
            if not refused.startswith(("HTTP 400", "HTTP 422")):
                break
        raise ServerError(f"the server refuses a test request: {refused}")

    async def _warm_up(self, client: Client, dataset: Dataset, facts: ServerFacts, stop: asyncio.Event) -> None:
        count = self.load.num_warmups
        if not count:
            return
        requests, _ = dataset.draw(_WARM_UP_DRAW, facts.max_model_len, count)
        concurrency = max((n for _, n in self.load.points() if n), default=None)
        with self.progress("warm-up", len(requests)) as bar:
            await run_load(client, requests, [0.0] * len(requests), concurrency, stop=stop, on_done=bar.advance)

    async def _point(
        self,
        client: Client,
        dataset: Dataset,
        facts: ServerFacts,
        stop: asyncio.Event,
        number: int,
        rate: float,
        concurrency: int | None,
        read_drafts: Callable[[], Awaitable[Counters | None]],
    ) -> PointResult:
        requests, left_out = dataset.draw(number, facts.max_model_len)
        if left_out:
            self.say(f"{left_out} requests are longer than the server's {facts.max_model_len:,} tokens and left out")
        arrivals = self._arrivals(requests, rate)
        title = f"point {number}" if self.load.search else f"point {number} of {len(self.load.points())}"
        duration = self.load.duration
        before = await read_drafts()
        with self.progress(title, len(requests)) as bar:
            result = await run_load(
                client, requests, arrivals, concurrency, duration=duration, stop=stop, on_done=bar.advance
            )
        drafts = DraftFigures.between(before, await read_drafts())
        if duration is not None and len(result.records) == len(requests) and arrivals[-1] < duration > result.duration:
            self.say(
                f"all {len(requests)} requests were answered before --duration {duration:g} s; raise --num-prompts"
            )
        statistics = summarise(result, self.report.percentiles, self.report.objectives)
        point = LoadPoint(
            len(result.records) if duration is not None else len(requests),
            rate,
            self.load.burstiness,
            concurrency,
            dataset.cached_share_bound(len(requests)),
        )
        return PointResult(point, result, statistics, drafts)

    def _arrivals(self, requests: list[BenchRequest], rate: float) -> list[float]:
        own = [request.arrival for request in requests]
        if None not in own:
            return [arrival - own[0] for arrival in own]
        return arrival_times(len(requests), rate, self.load.burstiness, self.workload.seed)

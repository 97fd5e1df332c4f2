"""Measurements that put load on the server.

`LoadMeasurement`: concurrent sessions or a request rate for a fixed time. `BalanceMeasurement`: the same, plus expert load balance and the
frequency and duration of rebalancing. `TtftMeasurement`: prompts of one length, one request at a time.
"""

import asyncio
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsjax.bench.accept.kinds.kind import Measured, Measurement, RandomLengths
from dsjax.bench.accept.test_bed import NotTestedError, TestBed
from dsjax.bench.accept.watch import COMPILED, ServerWatch
from dsjax.bench.serve.load import LoadResult, arrival_times, run_load
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.records import RequestRecord
from dsjax.bench.serve.server_facts import scrape
from dsjax.bench.serve.statistics import figures
from dsjax.errors import UserError
from dsjax.top.reading import Exposition

_FEWEST_WINDOWS = 3
_NO_MEMORY_METRICS = "the server's /metrics has no dsjax_device_memory_…; give --device-metrics URL of a dcgm-exporter"
_LATENCIES = (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99), ("itl", 99))


@dataclass(frozen=True)
class LoadRun:
    """Outcome of one load on a server."""

    result: LoadResult  # of all requests, including warm-up
    begin: float  # start of the measured interval, in seconds after the first request's start
    watch: ServerWatch  # observed in the measured interval

    @property
    def counted(self) -> list[RequestRecord]:
        """Requests sent in the measured interval, plus failed warm-up requests."""
        return [record for record in self.result.records if record.start >= self.begin or not record.succeeded]


@dataclass(frozen=True, kw_only=True)
class LoadMeasurement(RandomLengths):
    """Throughput, latency, availability and memory of a server under load.

    With sessions, measuring starts once as many requests have been answered as there are sessions, to exclude the initial burst of
    prompts; at the latest after `seconds`. Give either `sessions` or `request_rate`.
    """

    KIND: ClassVar = "load"
    UNITS: ClassVar = {
        "output_tokens_per_s": "tokens/s",
        "total_tokens_per_s": "tokens/s",
        "sessions_at_once": "sessions",
        "error_share": "",
        **dict.fromkeys((*(f"{metric}_p{p}" for metric, p in _LATENCIES), "ttft_mean", "generation_p99"), "s"),
        **dict.fromkeys(("ttft_drift", "tpot_drift", "outages", "restarts", "memory_share", "memory_drift"), ""),
    }
    ABOVE_ZERO: ClassVar = (*RandomLengths.ABOVE_ZERO, "seconds", "windows")

    seconds: float  # duration of sending
    sessions: int = 0  # closed-loop clients, each of which sends its next request when the last is answered
    request_rate: float = 0.0  # requests per second with Poisson arrivals
    windows: int = 12  # equal parts of the run, whose medians give the drift

    def __post_init__(self):
        super().__post_init__()
        if bool(self.sessions) == bool(self.request_rate):
            problem = "both are given" if self.sessions else "neither is above 0"
            raise UserError(f"measurement {self.name}: {problem}, expected sessions or request_rate; give one of them")

    def expected_seconds(self) -> float:
        """Return `seconds` plus 10 % for the warm-up and for requests in flight at the end."""
        return self.seconds * 1.1

    def depends_on(self, bed: TestBed) -> tuple[str, ...]:
        """Return the device-metrics URLs, whether expert load can be recorded, and the ShareGPT path."""
        o = bed.options
        return (*(o.device_metrics or ()), "admin" if o.admin_api_key else "", o.dataset_path or "")

    async def put_load(self, bed: TestBed) -> LoadRun:
        """Put the load on the server and watch it meanwhile."""
        source = await bed.requests(self.workload(bed))
        watch = bed.watch(min(5.0, max(0.5, self.seconds / 20)))
        if self.request_rate:
            requests = max(1, math.ceil(self.request_rate * self.seconds))
            arrivals = arrival_times(requests, self.request_rate, burstiness=1.0, seed=bed.seed)
            async with watch, bed.clocked(self.title, self.seconds):
                result = await run_load(bed.server.client, source, arrivals, None, duration=self.seconds)
            return LoadRun(result, 0.0, watch)
        async with bed.sessions(source, self.sessions) as load:
            await bed.answered(load.started, self.sessions, self.seconds)
            begin = bed.clock() - load.zero
            async with watch, bed.clocked(self.title, self.seconds):
                await asyncio.wait({load.task}, timeout=self.seconds)
                load.stop.set()
            return LoadRun(await load.task, begin, watch)

    async def measure(self, bed: TestBed) -> Measured:
        """Put the load on the server and return all values of `UNITS`."""
        return self.evaluate(bed, await self.put_load(bed))

    def evaluate(self, bed: TestBed, run: LoadRun) -> Measured:
        """Compute the values of a load run."""
        counted = run.counted
        statistics = _statistics(counted, run.result.duration, (50, 99))
        measured = Measured(samples=statistics["completed"])
        self._enter_throughput(measured, run)
        error_share = statistics["failed"] / len(counted) if counted else None
        measured.enter({"error_share": error_share}, why_not="no request was sent")
        good = [record for record in counted if record.succeeded]
        _enter_latencies(measured, statistics, good, why_not=bed.why_none(statistics))
        self._enter_drift(measured, run, good)
        self._enter_health(measured, run.watch)
        if measured.samples < 1000:
            measured.notes.append(f"P99 is of {measured.samples} requests.")
        if self.sessions and measured.samples < self.sessions:
            measured.notes.append(
                f"That is less than one for each of {self.sessions} sessions: the load is too short for this server."
            )
        errors = list(statistics["error_counts"].items())
        measured.notes += [f"{number} × {message}" for message, number in errors[:3]]
        return measured

    def _enter_throughput(self, measured: Measured, run: LoadRun) -> None:
        records = run.result.records
        end = run.begin + self.seconds
        rate = tokens_between(records, run.begin, end) / self.seconds
        inputs = sum(r.prompt_tokens for r in records if r.succeeded and run.begin <= r.chunk_times[0] < end)
        measured.enter({"output_tokens_per_s": rate, "total_tokens_per_s": rate + inputs / self.seconds})
        peak = _statistics(records, run.result.duration, (50,))["max_concurrent_requests"]
        measured.enter({"sessions_at_once": peak})

    def _enter_drift(self, measured: Measured, run: LoadRun, good: Sequence[RequestRecord]) -> None:
        with_tpot = [record for record in good if record.tpot is not None]
        drifts = {
            "ttft_drift": self._drift([r.start - run.begin for r in good], [r.ttft for r in good]),
            "tpot_drift": self._drift([r.start - run.begin for r in with_tpot], [r.tpot for r in with_tpot]),
        }
        measured.enter(drifts, f"fewer than {_FEWEST_WINDOWS} of {self.windows} parts of the run had answers")

    def _enter_health(self, measured: Measured, watch: ServerWatch) -> None:
        measured.enter({"outages": watch.outages})
        measured.enter({"restarts": watch.restarts}, "the server has no /metrics that counts its tokens")
        times, shares, used_bytes = zip(*watch.memory, strict=True) if watch.memory else ((), (), ())
        memory = {"memory_share": max(shares, default=None), "memory_drift": self._drift(times, used_bytes)}
        measured.enter(memory, _NO_MEMORY_METRICS)

    def _drift(self, times: Sequence[float], values: Sequence[float]) -> float | None:
        return drift(times, values, self.seconds, self.windows)


def _statistics(records: Sequence[RequestRecord], duration: float, percentiles: Sequence[float]) -> dict[str, Any]:
    """Return `statistics.figures` without latency objectives."""
    return figures(records, duration, percentiles, objectives={}, wanted=1.0)


def _enter_latencies(
    measured: Measured, statistics: Mapping[str, Any], good: Sequence[RequestRecord], why_not: str
) -> None:
    """Enter latencies in seconds; without an answer, their criteria are missed rather than not tested."""
    milliseconds = {f"{metric}_p{p}": statistics[f"p{p}_{metric}_ms"] for metric, p in _LATENCIES}
    milliseconds["ttft_mean"] = statistics["mean_ttft_ms"]
    latencies = {name: ms and ms / 1e3 for name, ms in milliseconds.items()}
    latencies["generation_p99"] = np.percentile([r.latency - r.ttft for r in good], 99) if good else None
    measured.enter(latencies, why_not, verdict="missed")


def tokens_between(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    """Return the output tokens that arrived from `begin` to `end`, with a request's tokens spread evenly over its chunks.

    A chunk of a failed or unfinished request counts as one token.
    """
    total = 0.0
    for record in records:
        chunks = len(record.chunk_times)
        is_counted = chunks and record.succeeded and record.output_tokens
        tokens_per_chunk = record.output_tokens / chunks if is_counted else 1.0
        total += tokens_per_chunk * sum(begin <= time < end for time in record.chunk_times)
    return total


def drift(times: Sequence[float], values: Sequence[float], seconds: float, windows: int) -> float | None:
    """Return the relative growth over a run: Theil-Sen slope of the medians of equal parts × the run's length ÷ their median.

    None if fewer than three parts have a value, or the median is 0.
    """
    from scipy.stats import theilslopes

    window_of_value = np.minimum((np.asarray(times) / seconds * windows).astype(int), windows - 1)
    with_values = np.unique(window_of_value)
    if len(with_values) < _FEWEST_WINDOWS:
        return None
    medians = [np.median(np.asarray(values)[window_of_value == window]) for window in with_values]
    level = np.median(medians)
    return float(theilslopes(medians, with_values).slope) * windows / level if level else None


_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, kw_only=True)
class TtftMeasurement(Measurement):
    """TTFT of `requests` sequential requests, each with a prompt of `input_tokens` and one output token."""

    KIND: ClassVar = "ttft"
    UNITS: ClassVar = {**{f"ttft_p{p}": "s" for p in _PERCENTILES}, "ttft_mean": "s", "error_share": ""}
    ABOVE_ZERO: ClassVar = ("input_tokens", "requests")

    input_tokens: int
    requests: int = 30

    def expected_seconds(self) -> float:
        """Return one second per request and for the warm-up, a guess."""
        return self.requests + 1.0

    async def measure(self, bed: TestBed) -> Measured:
        """Send one warm-up request, then the measured ones."""
        lengths = {"random_input_len": self.input_tokens, "random_output_len": 1}
        source = await bed.requests(WorkloadOptions(num_prompts=64, seed=bed.seed, **lengths))
        client = bed.server.client
        await client.send(next(source))
        with bed.report_progress(self.title, self.requests) as report:
            ended = itertools.count(1)
            result = await run_load(
                client, source, [0.0] * self.requests, 1, on_done=lambda record: report(next(ended), "")
            )
        statistics = _statistics(result.records, result.duration, _PERCENTILES)
        measured = Measured(samples=statistics["completed"])
        for name in ("mean", *(f"p{p}" for p in _PERCENTILES)):
            ms = statistics[f"{name}_ttft_ms"]
            measured.enter({f"ttft_{name}": ms and ms / 1e3}, bed.why_none(statistics), verdict="missed")
        measured.enter({"error_share": statistics["failed"] / self.requests})
        if 0 < measured.samples < 100:
            measured.notes.append(f"P99 of {measured.samples} requests is little more than the largest.")
        return measured


_NO_EPLB = "the server does not move experts; start it with --enable-eplb"
_NO_EXPERT_LOAD = "the experts' load is not recorded; give --admin-api-key, or start the server with --enable-eplb"
_FEWEST_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class BalanceMeasurement(LoadMeasurement):
    """Expert load balance and rebalancing under load, from dsjax's `/metrics`."""

    KIND: ClassVar = "balance"
    UNITS: ClassVar = {
        "rank_variation": "",
        "expert_variation": "",
        "balancedness": "",
        "steps": "steps",
        "rebalances_per_1000_steps": "",
        "rebalance_pause": "s",
        "rebalance_seconds": "s",
    }

    async def measure(self, bed: TestBed) -> Measured:
        """Put the load on the server; record the expert distribution if there is an admin key."""
        metrics = await scrape(bed.server.session, f"{bed.server.url}/metrics", (COMPILED,))
        if metrics is None or not metrics.by(COMPILED):
            raise NotTestedError("the server has no /metrics of dsjax, which tells of experts and ranks")
        is_recording = False
        if bed.options.admin_api_key is not None:
            error = await bed.admin("/start_expert_distribution_record")
            is_recording = error is None
        try:
            run = await self.put_load(bed)
        finally:
            if is_recording:
                await bed.admin("/stop_expert_distribution_record")
        counters = [metrics for metrics in run.watch.counters if metrics.by(COMPILED)]
        if len(counters) < 2:
            raise NotTestedError("the server's /metrics did not answer during the load")
        measured = Measured(samples=sum(record.succeeded for record in run.counted))
        enter_balance(measured, counters[0], counters[-1])
        return measured


def enter_balance(measured: Measured, before: Exposition, after: Exposition) -> None:
    """Enter the values of two scrapes, at the start and the end of a load.

    Tokens are counted since the recording began; without a recording, in EPLB's last window.
    """
    name = "dsjax_expert_tokens_total"
    ranks = after.by(name, "ep_rank")
    if not ranks:
        ranks = after.by("dsjax_eplb_rank_tokens", "ep_rank")
        measured.notes.append("The ranks' load is that of the last window of --enable-eplb: no --admin-api-key.")
    tokens = list(ranks.values())
    balancedness = float(np.mean(tokens)) / max(tokens) if tokens and max(tokens) > 0 else None
    variations = {"rank_variation": variation(tokens), "expert_variation": variation(after.by(name, "expert").values())}
    measured.enter(variations | {"balancedness": balancedness}, _NO_EXPERT_LOAD)

    def growth(name: str) -> float:
        return sum(after.growth(before, name).values())

    steps = growth("dsjax_step_seconds_count")
    measured.enter({"steps": steps})
    if not after.by("dsjax_eplb_rebalances_total"):
        measured.enter(dict.fromkeys(("rebalances_per_1000_steps", "rebalance_pause", "rebalance_seconds")), _NO_EPLB)
        return
    rebalances = growth("dsjax_eplb_rebalances_total")
    frequency = rebalances / steps * 1000 if steps >= _FEWEST_STEPS else None
    few = f"the load had {steps:g} steps, and fewer than {_FEWEST_STEPS} tell no frequency"
    measured.enter({"rebalances_per_1000_steps": frequency}, few)
    # Serving pauses only while experts are exchanged, not while their new places are computed.
    for name, counter in (("rebalance_pause", "exchange_seconds"), ("rebalance_seconds", "rebalance_seconds")):
        seconds = growth(f"dsjax_eplb_{counter}_total") / rebalances if rebalances else None
        measured.enter({name: seconds}, f"no rebalance ended in the {steps:g} steps of the load")


def variation(tokens: Collection[float]) -> float | None:
    """Return the coefficient of variation (population standard deviation ÷ mean); None for fewer than two values or only zeros."""
    values = np.array(list(tokens), float)
    return float(values.std() / values.mean()) if len(values) > 1 and values.any() else None

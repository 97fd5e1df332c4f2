"""Measurements that put load on the server.

`LoadMeasurement`: concurrent sessions or a request rate for a fixed time. `BalanceMeasurement`: the same, plus expert load balance and the
frequency and duration of rebalancing. `TtftMeasurement`: prompts of one length, one request at a time.
"""

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dsjax.bench.accept.kinds.kind import Measured, Measurement, RandomLengths
from dsjax.bench.accept.test_bed import NotTestedError, TestBed
from dsjax.bench.accept.watch import OURS, ServerWatch
from dsjax.bench.serve.load import LoadResult, arrival_times, run_load
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.records import RequestRecord
from dsjax.bench.serve.statistics import figures
from dsjax.errors import UserError
from dsjax.top.reading import Exposition

_FEWEST_WINDOWS = 3
_UNTOLD = "the server's /metrics has no dsjax_device_memory_…; give --device-metrics URL of a dcgm-exporter"
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
    prompts; at the latest after `seconds`.

    sessions: closed-loop clients, each of which sends its next request when the last is answered; or request_rate: requests per second
    with Poisson arrivals. seconds: duration of sending. windows: equal parts of the run, whose medians give the drift.
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

    seconds: float
    sessions: int = 0
    request_rate: float = 0.0
    windows: int = 12

    def __post_init__(self):
        super().__post_init__()
        if bool(self.sessions) == bool(self.request_rate):
            found = "both are given" if self.sessions else "neither is above 0"
            raise UserError(f"measurement {self.name}: {found}, expected sessions or request_rate; give one of them")

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
        watch, client = bed.watch(min(5.0, max(0.5, self.seconds / 20))), bed.server.client
        if self.request_rate:
            arrivals = arrival_times(
                max(1, math.ceil(self.request_rate * self.seconds)), self.request_rate, 1.0, bed.seed
            )
            async with watch, bed.clocked(self.title, self.seconds):
                result = await run_load(client, source, arrivals, None, duration=self.seconds)
            return LoadRun(result, 0.0, watch)
        async with bed.sessions(source, self.sessions) as (load, records, until, zero):
            await bed.answered(records, self.sessions, self.seconds)
            begin = bed.clock() - zero
            async with watch, bed.clocked(self.title, self.seconds):
                await asyncio.wait({load}, timeout=self.seconds)
                until.set()
            return LoadRun(await load, begin, watch)

    async def measure(self, bed: TestBed) -> Measured:
        """Put the load on the server and return all values of `UNITS`."""
        return self.evaluate(bed, await self.put_load(bed))

    def evaluate(self, bed: TestBed, run: LoadRun) -> Measured:
        """Compute the values of a load run."""
        counted, records, end = run.counted, run.result.records, run.begin + self.seconds
        of_counted = figures(counted, run.result.duration, (50, 99), {}, 1.0)
        completed = of_counted["completed"]
        good = [record for record in counted if record.succeeded]
        found, why = Measured(samples=completed), bed.why_none(of_counted)
        rate = tokens_between(records, run.begin, end) / self.seconds
        inputs = sum(r.prompt_tokens for r in records if r.succeeded and run.begin <= r.chunk_times[0] < end)
        found.enter({"output_tokens_per_s": rate, "total_tokens_per_s": rate + inputs / self.seconds})
        found.enter(
            {"sessions_at_once": figures(records, run.result.duration, (50,), {}, 1.0)["max_concurrent_requests"]}
        )
        found.enter({"error_share": of_counted["failed"] / len(counted) if counted else None}, "no request was sent")
        for metric, p in _LATENCIES:
            ms = of_counted[f"p{p}_{metric}_ms"]
            found.enter({f"{metric}_p{p}": ms and ms / 1e3}, why, "missed")
        mean = of_counted["mean_ttft_ms"]
        found.enter({"ttft_mean": mean and mean / 1e3}, why, "missed")
        generating = [r.latency - r.ttft for r in good]
        found.enter({"generation_p99": np.percentile(generating, 99) if good else None}, why, "missed")

        def grew(times: Sequence[float], values: Sequence[float]) -> float | None:
            return drift(times, values, self.seconds, self.windows)

        starts, several = [r.start - run.begin for r in good], [r for r in good if r.tpot is not None]
        tpots = grew([r.start - run.begin for r in several], [r.tpot for r in several])
        few = f"fewer than {_FEWEST_WINDOWS} of {self.windows} parts of the run had answers"
        found.enter({"ttft_drift": grew(starts, [r.ttft for r in good]), "tpot_drift": tpots}, few)
        found.enter({"outages": run.watch.outages})
        found.enter({"restarts": run.watch.restarts}, "the server has no /metrics that counts its tokens")
        seen, shares, used = zip(*run.watch.memory, strict=True) if run.watch.memory else ((), (), ())
        found.enter({"memory_share": max(shares, default=None), "memory_drift": grew(seen, used)}, _UNTOLD)
        if completed < 1000:
            found.notes.append(f"P99 is of {completed} requests.")
        if self.sessions and completed < self.sessions:
            found.notes.append(
                f"That is less than one for each of {self.sessions} sessions: the load is too short for this server."
            )
        found.notes += [f"{number} × {message}" for message, number in list(of_counted["error_counts"].items())[:3]]
        return found


def tokens_between(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    """Return the output tokens that arrived from `begin` to `end`, with a request's tokens spread evenly over its chunks.

    A chunk of a failed or unfinished request counts as one token.
    """
    total = 0.0
    for record in records:
        chunks = len(record.chunk_times)
        each = record.output_tokens / chunks if chunks and record.succeeded and record.output_tokens else 1.0
        total += each * sum(begin <= time < end for time in record.chunk_times)
    return total


def drift(times: Sequence[float], values: Sequence[float], seconds: float, windows: int) -> float | None:
    """Return the relative growth over a run: Theil-Sen slope of the medians of equal parts × the run's length ÷ their median.

    None if fewer than three parts have a value, or the median is 0.
    """
    from scipy.stats import theilslopes

    part = np.minimum((np.asarray(times) / seconds * windows).astype(int), windows - 1)
    parts = np.unique(part)
    if len(parts) < _FEWEST_WINDOWS:
        return None
    medians = [np.median(np.asarray(values)[part == each]) for each in parts]
    level = np.median(medians)
    return float(theilslopes(medians, parts).slope) * windows / level if level else None


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
        client, done = bed.server.client, []
        await client.send(next(source))
        with bed.counting(self.title, self.requests) as report:

            def on_done(record) -> None:
                done.append(record)
                report(len(done), "")

            result = await run_load(client, source, [0.0] * self.requests, 1, on_done=on_done)
        found_in = figures(result.records, result.duration, _PERCENTILES, {}, 1.0)
        answered, found, why = found_in["completed"], Measured(samples=found_in["completed"]), bed.why_none(found_in)
        for name in ("mean", *(f"p{p}" for p in _PERCENTILES)):
            ms = found_in[f"{name}_ttft_ms"]
            found.enter({f"ttft_{name}": ms and ms / 1e3}, why, "missed")
        found.enter({"error_share": found_in["failed"] / self.requests})
        if 0 < answered < 100:
            found.notes.append(f"P99 of {answered} requests is little more than the largest.")
        return found


_NO_EPLB = "the server does not move experts; start it with --enable-eplb"
_UNRECORDED = "the experts' load is not recorded; give --admin-api-key, or start the server with --enable-eplb"
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
        async with bed.watch(60.0) as glance:
            pass
        if not any(each.by(OURS) for each in glance.counters):
            raise NotTestedError("the server has no /metrics of dsjax, which tells of experts and ranks")
        records = bed.options.admin_api_key is not None and await bed.admin("/start_expert_distribution_record") is None
        try:
            run = await self.put_load(bed)
        finally:
            if records:
                await bed.admin("/stop_expert_distribution_record")
        counters = [each for each in run.watch.counters if each.by(OURS)]
        if len(counters) < 2:
            raise NotTestedError("the server's /metrics did not answer during the load")
        found = Measured(samples=sum(record.succeeded for record in run.counted))
        enter_balance(found, counters[0], counters[-1])
        return found


def enter_balance(found: Measured, before: Exposition, after: Exposition) -> None:
    """Enter the values of two scrapes, at the start and the end of a load.

    Tokens are counted since the recording began; without a recording, in EPLB's last window.
    """
    name = "dsjax_expert_tokens_total"
    ranks, experts = after.by(name, "ep_rank"), after.by(name, "expert")
    if not ranks:
        ranks = after.by("dsjax_eplb_rank_tokens", "ep_rank")
        found.notes.append("The ranks' load is that of the last window of --enable-eplb: no --admin-api-key.")
    tokens = list(ranks.values())
    even = float(np.mean(tokens)) / max(tokens) if tokens and max(tokens) > 0 else None
    variations = {"rank_variation": variation(tokens), "expert_variation": variation(experts.values())}
    found.enter(variations | {"balancedness": even}, _UNRECORDED)

    def grew(name: str) -> float:
        return sum(after.growth(before, name).values())

    steps = grew("dsjax_step_seconds_count")
    found.enter({"steps": steps})
    if not after.by("dsjax_eplb_rebalances_total"):
        found.enter(dict.fromkeys(("rebalances_per_1000_steps", "rebalance_pause", "rebalance_seconds")), _NO_EPLB)
        return
    rebalances = grew("dsjax_eplb_rebalances_total")
    often = rebalances / steps * 1000 if steps >= _FEWEST_STEPS else None
    few = f"the load had {steps:g} steps, and fewer than {_FEWEST_STEPS} tell no frequency"
    found.enter({"rebalances_per_1000_steps": often}, few)
    for name, counter in (("rebalance_pause", "exchange_seconds"), ("rebalance_seconds", "rebalance_seconds")):
        each = grew(f"dsjax_eplb_{counter}_total") / rebalances if rebalances else None
        found.enter({name: each}, f"no rebalance ended in the {steps:g} steps of the load")


def variation(tokens: Collection[float]) -> float | None:
    """Return the coefficient of variation (population standard deviation ÷ mean); None for fewer than two values or only zeros."""
    values = np.array(list(tokens), float)
    return float(values.std() / values.mean()) if len(values) > 1 and values.any() else None

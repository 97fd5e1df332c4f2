"""`LoadMeasurement`: sessions or a rate of requests for some time: tokens a second, latencies, errors, drift, memory."""

import asyncio
import math
import statistics as middle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dsjax.bench.accept.kinds.kind import Measured, RandomLengths
from dsjax.bench.accept.watch import ServerWatch
from dsjax.bench.serve.load import LoadResult, arrival_times, run_load, run_sessions
from dsjax.bench.serve.records import BenchRequest, RequestRecord
from dsjax.bench.serve.statistics import summarise
from dsjax.errors import UserError

if TYPE_CHECKING:
    from dsjax.bench.accept.test_bed import TestBed

_FEWEST_WINDOWS = 3
_UNTOLD = "the server's /metrics has no dsjax_device_memory_…; give --device-metrics URL of a dcgm-exporter"


class Upcoming(Sequence):
    """So many requests, each made when it is sent: those of an hour need not be in memory."""

    def __init__(self, count: int, requests: Iterator[BenchRequest]):
        self._count, self._requests = count, requests

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> BenchRequest:
        return next(self._requests)


@dataclass(frozen=True)
class LoadRun:
    """A load that was put on a server.

    Attributes:
        result: of all requests, those of the warm-up too.
        begin: seconds after the first request's start at which the measured time began.
        watch: what was seen of the server in that time.
    """

    result: LoadResult
    begin: float
    watch: ServerWatch

    @property
    def counted(self) -> list[RequestRecord]:
        """Requests that were sent in the measured time, and the failed ones of the warm-up."""
        records = self.result.records
        return [record for record in records if record.start >= self.begin or not record.succeeded]


@dataclass(frozen=True, kw_only=True)
class LoadMeasurement(RandomLengths):
    """A load, and the server under it.

    The measured time of sessions begins when as many requests were answered as there are sessions, so that the first wave, in which all
    prompts come at once, is not in it; at the latest after as long again.

    Attributes:
        sessions: clients, each of which sends its next request when the last is answered; or
        request_rate: requests a second, at Poisson's times.
        seconds: in which requests are sent.
        windows: equal parts whose medians tell the drift.
    """

    UNITS: ClassVar = {
        "output_tokens_per_s": "tokens/s",
        "total_tokens_per_s": "tokens/s",
        "sessions_at_once": "sessions",
        "error_share": "",
        "ttft_p50": "s",
        "ttft_p99": "s",
        "tpot_p50": "s",
        "tpot_p99": "s",
        "itl_p99": "s",
        "generation_p99": "s",
        "ttft_drift": "",
        "tpot_drift": "",
        "outages": "",
        "restarts": "",
        "memory_share": "",
        "memory_drift": "",
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
        """The load's time, and a tenth for the warm-up and for what is under way at its end."""
        return self.seconds * 1.1

    def depends_on(self, bed: "TestBed") -> tuple[str, ...]:
        """Where memory is read, whether experts' load can be recorded, and a ShareGPT file."""
        o = bed.options
        return (*o.metrics_urls, "admin" if o.admin_api_key else "", o.dataset_path or "")

    async def put_load(self, bed: "TestBed") -> LoadRun:
        """Put the load on the server and watch it meanwhile."""
        source = await bed.requests(self.workload(bed))
        watch, client, begin = bed.watch(min(5.0, max(0.5, self.seconds / 20))), bed.server.client, 0.0
        if self.request_rate:
            count = max(1, math.ceil(self.request_rate * self.seconds))
            arrivals = arrival_times(count, self.request_rate, 1.0, bed.seed)
            async with watch, bed.clocked(self.title, self.seconds):
                result = await run_load(client, Upcoming(count, source), arrivals, None, duration=self.seconds)
            return LoadRun(result, begin, watch)
        until, zero, started = asyncio.Event(), bed.clock(), []
        load = asyncio.create_task(
            run_sessions(client, source, self.sessions, until=until, zero=zero, on_start=started.append)
        )
        try:
            await bed.answered(started, self.sessions, self.seconds)
            begin = bed.clock() - zero
            async with watch, bed.clocked(self.title, self.seconds):
                await asyncio.wait({load}, timeout=self.seconds)
                until.set()
            result = await load
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        return LoadRun(result, begin, watch)

    async def measure(self, bed: "TestBed") -> Measured:
        """Put the load on the server; all values of `UNITS`."""
        return self.evaluate(bed, await self.put_load(bed))

    def rate(self, run: LoadRun) -> float:
        """Output tokens a second of the measured time."""
        return tokens_between(run.result.records, run.begin, run.begin + self.seconds) / self.seconds

    def evaluate(self, bed: "TestBed", run: LoadRun) -> Measured:
        """The values of a load that was put on a server."""
        counted = run.counted
        s = summarise(LoadResult(counted, run.result.duration, False), (50, 99), {})
        good = [record for record in counted if record.succeeded]
        found, why = Measured(samples=s.completed), bed.why_none(s)
        end = run.begin + self.seconds
        whole = [record for record in run.result.records if record.succeeded]
        inputs = sum(r.prompt_tokens for r in whole if run.begin <= r.chunk_times[0] < end)
        found.enter("output_tokens_per_s", self.rate(run), why)
        found.enter("total_tokens_per_s", self.rate(run) + inputs / self.seconds, why)
        at_once = summarise(run.result, (50,), {}).max_concurrent_requests
        found.enter("sessions_at_once", at_once, why)
        found.enter("error_share", s.failed / len(counted) if counted else None, "no request was sent")
        for name, metric, p in (
            ("ttft_p50", "ttft", 50), ("ttft_p99", "ttft", 99), ("tpot_p50", "tpot", 50), ("tpot_p99", "tpot", 99), ("itl_p99", "itl", 99),
        ):  # fmt: skip
            milliseconds = s.latencies[metric].percentiles[p]
            found.enter(name, None if milliseconds is None else milliseconds / 1e3, why, "missed")
        found.enter("generation_p99", percentile([r.latency - r.ttft for r in good], 99), why, "missed")
        self._enter_drift(found, good, run.begin)
        self._enter_watched(found, run.watch)
        if s.completed < 1000:
            found.notes.append(f"P99 is of {s.completed} requests.")
        if self.sessions and s.completed < self.sessions:
            found.notes.append(
                f"That is less than one for each of {self.sessions} sessions: the load is too short for this server."
            )
        if s.errors:
            found.notes += [f"{number} × {message}" for message, number in s.errors[:3]]
        return found

    def _enter_drift(self, found: Measured, good: list[RequestRecord], begin: float) -> None:
        why = f"fewer than {_FEWEST_WINDOWS} of {self.windows} parts of the run had answers"
        starts = [r.start - begin for r in good]
        found.enter("ttft_drift", drift(starts, [r.ttft for r in good], self.seconds, self.windows), why)
        several = [r for r in good if r.tpot is not None]
        tpots = drift([r.start - begin for r in several], [r.tpot for r in several], self.seconds, self.windows)
        found.enter("tpot_drift", tpots, why)

    def _enter_watched(self, found: Measured, watch: ServerWatch) -> None:
        found.enter("outages", watch.outages, "")
        found.enter("restarts", watch.restarts, "the server has no /metrics that counts its tokens")
        found.enter("memory_share", max((share for _, share, _ in watch.memory), default=None), _UNTOLD)
        times, used = [t for t, _, _ in watch.memory], [b for _, _, b in watch.memory]
        found.enter("memory_drift", drift(times, used, self.seconds, self.windows), _UNTOLD)


def tokens_between(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    """Output tokens that arrived from `begin` to `end`. A request's tokens are spread evenly over its chunks.

    A chunk counts as one token where its request failed or is under way.
    """
    total = 0.0
    for record in records:
        chunks = len(record.chunk_times)
        each = record.output_tokens / chunks if chunks and record.succeeded and record.output_tokens else 1.0
        total += each * sum(begin <= time < end for time in record.chunk_times)
    return total


def percentile(values: Sequence[float], p: float) -> float | None:
    """As NumPy's; None of nothing."""
    import numpy as np

    return float(np.percentile(values, p)) if len(values) else None


def drift(times: Sequence[float], values: Sequence[float], seconds: float, windows: int) -> float | None:
    """Growth over a run as a share: Theil and Sen's slope over the medians of equal parts × the run's length ÷ their median.

    None where fewer than three parts have a value, or the median is 0.
    """
    from scipy.stats import theilslopes

    parts: dict[int, list[float]] = {}
    for time, value in zip(times, values, strict=True):
        parts.setdefault(min(windows - 1, int(time / seconds * windows)), []).append(value)
    if len(parts) < _FEWEST_WINDOWS:
        return None
    at = sorted(parts)
    medians = [middle.median(parts[k]) for k in at]
    level = middle.median(medians)
    return None if not level else float(theilslopes(medians, at).slope) * windows / level

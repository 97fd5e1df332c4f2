"""One point of a benchmark: send requests at their arrival times, or with a fixed concurrency, until all are answered."""

import asyncio
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dsjax.bench.serve.client import Client
from dsjax.bench.serve.records import BenchRequest, RequestRecord

_STREAM = 0xA881
"""Separates the random stream of arrivals from the streams of lengths and prompts, which have the same seed."""


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the arrival times in seconds of `count` requests; the first is 0.

    As in vLLM, gaps have a gamma distribution with mean 1 / rate and shape `burstiness`: 1 is a Poisson process, less is burstier,
    more is more even (coefficient of variation 1 / √burstiness; infinite: equal gaps). They are then scaled so that the `count - 1`
    gaps take exactly (count - 1) / rate seconds: every seed offers the requested rate.

    rate: requests per second; infinite: all at once. burstiness: more than 0.
    """
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count - 1, 1 / rate)
    else:
        gaps = np.random.default_rng([seed, _STREAM]).gamma(burstiness, 1 / (rate * burstiness), count - 1)
        # A shape far below 1 can draw gaps that are all 0 in floating point; use equal gaps then.
        gaps = gaps / gaps.sum() * (count - 1) / rate if gaps.any() else np.full(count - 1, 1 / rate)
    return [0.0, *np.cumsum(gaps).tolist()]


_PAUSE_AFTER_ERROR = 0.5
"""Seconds that a session waits after an error, to avoid flooding a server that refuses connections."""


@dataclass(frozen=True)
class LoadResult:
    """Result of a point."""

    records: list[RequestRecord]  # of every answered or failed request, in the order of arrival
    duration: float  # seconds from the run's start to the last answer's end (or to Ctrl-C)
    interrupted: bool  # by Ctrl-C; requests in flight or not yet sent have no record


async def run_load(
    sender: Client,
    requests: Iterable[BenchRequest],
    arrivals: Iterable[float] | None,
    max_concurrency: int | None,
    *,
    duration: float | None = None,
    until: asyncio.Event | None = None,
    stop: asyncio.Event | None = None,
    zero: float | None = None,
    on_start: Callable[[RequestRecord], None] | None = None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Send every request when it is due, but never more than `max_concurrency` at once, and wait for the answers.

    A request that is held back is sent as soon as an earlier one ends, in the order of arrival.

    Args:
        requests: in order. Consumed lazily, so a long load need not fit in memory. The load ends with them.
        arrivals: seconds after the start at which each is due, ascending. None: `max_concurrency` sessions, each of which sends its next
            request when the last is answered, or half a second after an error.
        max_concurrency: None for no bound.
        duration: seconds after which nothing more is sent.
        until: set it to send nothing more.
        stop: set it to end the run early.
        zero: reading of `clock` from which the records' times count; None: the start.
        on_start: called with a request's record when it is sent; the record grows while the answer arrives.
        on_done: called with each complete record.
        clock: the clock of `sender`.
    """
    zero = clock() if zero is None else zero
    source = iter(requests)
    until, stop = until or asyncio.Event(), stop or asyncio.Event()
    slots = asyncio.Semaphore(max_concurrency or sys.maxsize)
    how = {} if on_start is None else {"on_start": on_start}
    done: dict[int, RequestRecord] = {}

    def is_over(due: float = 0.0) -> bool:
        return until.is_set() or (duration is not None and max(due, clock() - zero) >= duration)

    async def one(index: int, request: BenchRequest, arrival: float) -> None:
        done[index] = record = await sender.send(request, arrival=arrival, zero=zero, **how)
        on_done(record)
        if arrivals is None and record.error is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_AFTER_ERROR):
                    await until.wait()
        slots.release()

    async def everything() -> None:
        async with asyncio.TaskGroup() as group:
            for index, arrival in enumerate(itertools.repeat(0.0) if arrivals is None else arrivals):
                if is_over(arrival):
                    break
                if (wait := zero + arrival - clock()) > 0:
                    await asyncio.sleep(wait)
                await slots.acquire()
                if is_over() or (request := next(source, None)) is None:
                    break
                group.create_task(one(index, request, clock() - zero if arrivals is None else arrival))

    work = asyncio.create_task(everything())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        interrupted = not work.done()
        if not interrupted:
            work.result()
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
    return LoadResult([done[index] for index in sorted(done)], clock() - zero, interrupted)

"""One point of a benchmark: requests sent at their times, or a number of them at once, until all are answered."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.bench.serve.client import Client
from dsjax.bench.serve.records import BenchRequest, RequestRecord

_STREAM = 0xA881
"""Keeps the draws of arrivals apart from those of lengths and prompts under the same seed."""


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which `count` requests are due; the first at 0.

    The gaps are gamma distributed with mean 1 / rate and shape `burstiness`, vLLM's meaning: 1 is a Poisson process, less
    is burstier, more is more even (their coefficient of variation is 1 / √burstiness; infinite: all gaps equal). The gaps
    are then scaled so that the `count - 1` of them take exactly (count - 1) / rate seconds, as vLLM scales its own: the
    offered rate is the one asked for with every seed.

    rate: requests a second; infinite: all at once. burstiness: more than 0.
    """
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count - 1, 1 / rate)
    else:
        gaps = np.random.default_rng([seed, _STREAM]).gamma(burstiness, 1 / (rate * burstiness), count - 1)
        # A shape far below 1 can draw gaps that are all 0 in floating point: then they are taken as even.
        gaps = gaps / gaps.sum() * (count - 1) / rate if gaps.any() else np.full(count - 1, 1 / rate)
    return [0.0, *np.cumsum(gaps).tolist()]


_PAUSE_AFTER_ERROR = 0.5
"""Seconds for which a session waits after an error: a server that refuses connections would else be asked thousands of times a second."""


@dataclass(frozen=True)
class LoadResult:
    """What came of a point.

    records: of every request that was answered, or failed; in the order of arrival. duration: seconds from the run's start to the last
    answer's end (or to Ctrl-C). interrupted: Ctrl-C came first; what was under way then, or not yet sent, is in no record.
    """

    records: list[RequestRecord]
    duration: float
    interrupted: bool


async def run_load(
    sender: Client,
    requests: Iterable[BenchRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    *,
    duration: float | None = None,
    stop: asyncio.Event | None = None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Send every request when it is due, but never more than `max_concurrency` at once.

    A request that is held back goes out as soon as one before it ends, in the order of arrival.

    requests: in order; each is taken when it is sent, so that those of an hour need not be in memory. arrivals: seconds after the start at
    which each is due, ascending. max_concurrency: None for no bound. duration: seconds after which nothing more is sent; what is under
    way then is waited for. stop: ends the run early when set. on_done: called with each record. clock: the one that `sender` reads.
    """
    zero, source = clock(), iter(requests)
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    done: dict[int, RequestRecord] = {}

    async def one(index: int) -> None:
        async with slots:
            if duration is not None and clock() - zero >= duration:
                return
            record = await sender.send(next(source), arrival=arrivals[index], zero=zero)
        done[index] = record
        on_done(record)

    async def everything() -> None:
        async with asyncio.TaskGroup() as group:
            for index, arrival in enumerate(arrivals):
                if duration is not None and max(arrival, clock() - zero) >= duration:
                    break
                wait = zero + arrival - clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(index))

    work = asyncio.create_task(everything())
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
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


async def run_sessions(
    sender: Client,
    requests: Iterator[BenchRequest],
    sessions: int,
    *,
    until: asyncio.Event,
    zero: float,
    on_start: Callable[[RequestRecord], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Have so many sessions send one request after another, until no more are to be sent; what is under way then is waited for.

    After an error a session waits for half a second.

    requests: where it ends, so do the sessions. sessions: requests that are under way at once. until: nothing more is sent when it is
    set. zero: the clock's reading from which the records' times count. on_start: called with the record of each request when its sending
    begins; the record grows while the answer comes. clock: the one that `sender` reads.
    """
    records: list[RequestRecord] = []
    how = {} if on_start is None else {"on_start": on_start}

    async def session() -> None:
        while not until.is_set():
            request = next(requests, None)
            if request is None:
                return
            record = await sender.send(request, arrival=clock() - zero, zero=zero, **how)
            records.append(record)
            if record.error is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_AFTER_ERROR):
                        await until.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(sessions):
            group.create_task(session())
    return LoadResult(sorted(records, key=lambda record: record.start), clock() - zero, False)

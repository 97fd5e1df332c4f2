"""Requests go out at their times, which have the rate and burstiness asked for, and never more than allowed at once: on virtual time."""

import asyncio
import contextlib
import itertools
import math

import numpy as np
import pytest

from dsjax.bench.serve.benchmark import Search
from dsjax.bench.serve.load import arrival_times, run_load
from dsjax.bench.serve.records import BenchRequest, RequestRecord

COUNT = 20_000


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    now = 0.0

    def __init__(self):
        super().__init__()
        self._selector.select, self._select = self._jump, self._selector.select

    def _jump(self, timeout):
        assert timeout is not None, "nothing will ever happen any more"
        self.now += timeout
        return self._select(0)

    def time(self) -> float:
        return self.now


class Sender:
    """Answers request i after `seconds[i]`, by virtual time."""

    def __init__(self, loop: VirtualLoop, seconds: list[float]):
        self.loop, self.seconds = loop, seconds
        self.running, self.most = 0, 0

    async def send(self, request: BenchRequest, *, arrival: float, zero: float, **how) -> RequestRecord:
        index, start = request.prompt_tokens, self.loop.time() - zero
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds[index])
        finally:
            self.running -= 1
        end = self.loop.time() - zero
        return RequestRecord(arrival, start, index, [end], end, 1)


def run(seconds, arrivals, concurrency=None, requests=None, *, after=0.0, event="stop", **how):
    """A load, and its sender. event: of the load, which is set after so many seconds."""
    loop = VirtualLoop()
    sender = Sender(loop, seconds)
    requests = requests or [BenchRequest("", i, 1) for i in range(len(seconds))]

    async def work():
        how[event] = asyncio.Event()
        if after:
            loop.call_later(after, how[event].set)
        return await run_load(sender, requests, arrivals, concurrency, clock=loop.time, **how)

    with contextlib.closing(loop):
        return loop.run_until_complete(work()), sender


def test_requests_start_when_they_are_due():
    result, sender = run([1.0, 1.0, 1.0], [0.0, 0.25, 5.0])
    assert [r.start for r in result.records] == pytest.approx([0.0, 0.25, 5.0])
    assert (result.duration, result.interrupted, sender.most) == (pytest.approx(6.0), False, 2)


def test_the_bound_holds_requests_back_in_order_and_their_latency_begins_when_they_are_sent():
    result, sender = run([1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], concurrency=2)
    assert sender.most == 2
    assert [r.start for r in result.records] == pytest.approx([0.0, 0.0, 1.0, 2.0])
    assert [r.latency for r in result.records] == pytest.approx([1.0, 2.0, 1.0, 1.0])
    assert [r.start - r.arrival for r in result.records] == pytest.approx([0.0, 0.0, 1.0, 2.0])


def test_sessions_send_one_request_after_the_other_until_no_more_are_wanted():
    endless = (BenchRequest("", i % 100, 1) for i in itertools.count())
    result, sender = run([1.0] * 100, None, 2, endless, after=2.5, event="until")
    assert sender.most == 2
    assert [r.start for r in result.records] == pytest.approx([0, 0, 1, 1, 2, 2])
    assert [r.arrival for r in result.records] == pytest.approx([r.start for r in result.records])
    assert result.duration == pytest.approx(3.0)


def test_stopping_keeps_what_is_done_and_ends_what_runs():
    result, sender = run([1.0, 1.0, 50.0, 50.0, 1.0], [0.0, 0.5, 1.0, 1.0, 40.0], after=3.0)
    assert [r.prompt_tokens for r in result.records] == [0, 1]
    assert (result.duration, result.interrupted, sender.running) == (pytest.approx(3.0), True, 0)


@pytest.mark.parametrize(("arrivals", "concurrency"), [([0.0] * 10, 2), ([float(i) for i in range(10)], None)])
def test_after_its_duration_a_point_sends_no_more_and_waits_for_what_is_under_way(arrivals, concurrency):
    result, _ = run([2.0] * 10, arrivals, concurrency, duration=3.5)
    assert len(result.records) == 4
    assert all(record.start < 3.5 for record in result.records)
    assert result.duration >= max(record.end for record in result.records)
    assert not result.interrupted


@pytest.mark.parametrize("quantity", ["concurrency", "rate"])
@pytest.mark.parametrize("limit", [0.4, 1, 23.7, 700])
def test_a_search_ends_close_below_the_load_that_fails(quantity, limit):
    unanswered = Search("concurrency")
    unanswered.record(unanswered.next(), None, 0.95)
    assert (unanswered.next(), unanswered.best) == (None, None)
    search, tried = Search(quantity), []
    while (load := search.next()) is not None:
        tried.append(load)
        search.record(load, 1.0 if load <= limit else 0.5, 0.95)
    assert len(tried) <= 20
    if quantity == "concurrency" and limit < 1:
        assert search.best is None
        assert "no concurrency was found" in search.sentence(0.95, {"ttft": 5})
        return
    assert search.best <= limit
    assert limit < search.failed <= search.best * 1.05 + (quantity == "concurrency")
    assert f"{search.best:.4g}" in search.sentence(0.95, {"ttft": 5})


def gaps(rate: float, burstiness: float, seed: int = 3) -> np.ndarray:
    return np.diff(arrival_times(COUNT, rate, burstiness, seed))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_rate_is_exact_and_the_gaps_spread_is_that_of_the_gamma_distribution(burstiness):
    found = gaps(8.0, burstiness)
    assert found.sum() == pytest.approx((COUNT - 1) / 8.0)
    assert found.min() >= 0
    # Coefficient of variation 1 / √shape; its standard error at 20,000 gaps is below 1.5 % for these shapes, so 6 % is 4 of them.
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_burstiness_of_one_is_a_poisson_process():
    found = np.sort(gaps(5.0, 1.0))
    exponential = 1 - np.exp(-5.0 * found)
    distance = np.abs(exponential - np.arange(1, len(found) + 1) / len(found)).max()
    assert distance < 1.95 / math.sqrt(len(found)), "Kolmogorov-Smirnov, 0.1 % level"


def test_the_seed_decides_and_edges_are_exact():
    assert arrival_times(100, 2.0, 1.0, 7) == arrival_times(100, 2.0, 1.0, 7)
    assert arrival_times(100, 2.0, 1.0, 7) != arrival_times(100, 2.0, 1.0, 8)
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, math.inf, 0) == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert [arrival_times(count, 2.0, 1.0, 0) for count in (0, 1)] == [[], [0.0]]
    tiny_shape = arrival_times(5, 2.0, 1e-9, 0)
    assert tiny_shape[-1] == pytest.approx(2.0)
    assert tiny_shape == sorted(tiny_shape)

"""Requests go out at their times and never more than allowed at once: on virtual time."""

import asyncio
import itertools

import pytest

from dsjax.bench.serve.benchmark import Search
from dsjax.bench.serve.load import run_load
from dsjax.bench.serve.records import BenchRequest, RequestRecord


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def jump(timeout):
            assert timeout is not None, "nothing will ever happen any more"
            self._now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


class Sender:
    """Answers request i after `seconds[i]`, by virtual time."""

    def __init__(self, loop: VirtualLoop, seconds: list[float]):
        self.loop, self.seconds = loop, seconds
        self.running, self.most = 0, 0

    async def send(self, request: BenchRequest, *, arrival: float, zero: float, **how) -> RequestRecord:
        index = request.prompt_tokens
        self.running += 1
        self.most = max(self.most, self.running)
        start = self.loop.time() - zero
        try:
            await asyncio.sleep(self.seconds[index])
        finally:
            self.running -= 1
        end = self.loop.time() - zero
        return RequestRecord(arrival, start, index, [end], end, 1)


def run(seconds, arrivals, concurrency=None, stop_after=None, duration=None):
    loop = VirtualLoop()
    sender = Sender(loop, seconds)
    requests = [BenchRequest("", i, 1) for i in range(len(seconds))]

    async def work():
        stop = asyncio.Event()
        if stop_after is not None:
            loop.call_later(stop_after, stop.set)
        return await run_load(sender, requests, arrivals, concurrency, duration=duration, stop=stop, clock=loop.time)

    try:
        return loop.run_until_complete(work()), sender
    finally:
        loop.close()


def test_requests_start_when_they_are_due():
    result, sender = run([1.0, 1.0, 1.0], [0.0, 0.25, 5.0])
    assert [r.start for r in result.records] == pytest.approx([0.0, 0.25, 5.0])
    assert result.duration == pytest.approx(6.0)
    assert sender.most == 2
    assert not result.interrupted


def test_the_bound_holds_requests_back_in_order_and_their_latency_begins_when_they_are_sent():
    result, sender = run([1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], concurrency=2)
    assert sender.most == 2
    assert [r.start for r in result.records] == pytest.approx([0.0, 0.0, 1.0, 2.0])
    assert [r.latency for r in result.records] == pytest.approx([1.0, 2.0, 1.0, 1.0])
    assert [r.start - r.arrival for r in result.records] == pytest.approx([0.0, 0.0, 1.0, 2.0])


def test_sessions_send_one_request_after_the_other_until_no_more_are_wanted():
    loop = VirtualLoop()
    sender, until, begun = Sender(loop, [1.0] * 100), asyncio.Event(), []

    async def work():
        loop.call_later(2.5, until.set)
        endless = (BenchRequest("", i % 100, 1) for i in itertools.count())
        return await run_load(sender, endless, None, 2, until=until, on_start=begun.append, clock=loop.time)

    result = loop.run_until_complete(work())
    loop.close()
    assert sender.most == 2
    assert [r.start for r in result.records] == pytest.approx([0, 0, 1, 1, 2, 2])
    assert [r.arrival for r in result.records] == pytest.approx([r.start for r in result.records])
    assert result.duration == pytest.approx(3.0)


def test_stopping_keeps_what_is_done_and_ends_what_runs():
    result, sender = run([1.0, 1.0, 50.0, 50.0, 1.0], [0.0, 0.5, 1.0, 1.0, 40.0], stop_after=3.0)
    assert result.interrupted
    assert [r.prompt_tokens for r in result.records] == [0, 1]
    assert result.duration == pytest.approx(3.0)
    assert sender.running == 0


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

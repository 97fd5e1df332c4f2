"""Requests that are too long for the mesh of now wait for a larger one, hold nobody back, and end with a clear error after the limit."""

import time
from collections import Counter
from types import SimpleNamespace

import pytest
from fake_executor import FakeExecutor, expected_tokens
from waits import until

from dsjax import SamplingParams
from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.engine_thread import EngineThread
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.engine.schedule.page_source import PageSource
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Scheduler

LONG, SHORT = ([1] * 10, 40), ([3], 4)
SIZES = {"large": 33, "small": 5}  # pages of a rank's cache


def mesh(size: str, is_reduced: bool = True) -> MeshEpoch:
    """A mesh whose executor has a large cache or a small one."""
    executor = FakeExecutor(pages_per_rank=SIZES[size])
    return MeshEpoch(executor, executor.config, is_reduced=is_reduced and size != "large")


class Engine:
    """A core in its thread's loop, which the test turns, and the clock of the core."""

    def __init__(self, monkeypatch):
        self.now, self.updates = 1000.0, []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
        monkeypatch.setattr("dsjax.engine.core.time", clock)
        parts = FakeExecutor(pages_per_rank=SIZES["large"]).parts()
        self.core, self.inputs = parts.core, parts.inputs
        self.core.parked.seconds = 60.0
        self.thread = EngineThread(self.core, on_done=lambda updates, stats: self.updates.extend(updates))

    def request(self, name: str, prompt: list[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        [request] = self.inputs.prepare(name, {"prompt_token_ids": prompt}, params, arrival_time=0.0).completions
        return request

    def add(self, name: str, prompt: list[int], max_tokens: int) -> Request:
        request = self.request(name, prompt, max_tokens)
        self.thread.add([request])
        return request

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.thread.turn(wait=False)

    def change(self, size: str, **wanted) -> None:
        self.thread.change(lambda: mesh(size, **wanted))

    def finish(self) -> None:
        self.turn()
        while self.core.has_unfinished:
            self.turn()

    def outcome(self, request: Request):
        return next((update for update in self.updates if update.request is request and update.finish_reason), None)


@pytest.fixture
def engine(monkeypatch) -> Engine:
    return Engine(monkeypatch)


def parked(engine: Engine) -> tuple[Request, Request]:
    """A request that runs and is too long for the smaller mesh, which has come; and one that is not."""
    long, short = engine.add("long", *LONG), engine.add("short", *SHORT)
    engine.turn(3)
    assert long.num_output_tokens
    engine.change("small")
    assert engine.core.parked.requests == [long]
    return long, short


def test_a_request_too_long_for_the_smaller_mesh_waits_behind_nobody_and_goes_on_with_the_larger_one(engine):
    long, short = parked(engine)
    engine.add("later", *SHORT)
    engine.finish()
    assert engine.outcome(short).finish_reason is FinishReason.LENGTH
    assert engine.outcome(long) is None, "its stream stays open"
    engine.change("small")  # another change that does not help
    assert engine.core.parked.requests == [long]
    engine.now += 59
    engine.turn()
    engine.change("large")
    assert not engine.core.parked
    engine.finish()
    assert engine.outcome(long).finish_reason is FinishReason.LENGTH
    assert long.token_ids[10:] == expected_tokens(*LONG)
    assert engine.core.parked.outcomes["resumed"] == 1


def test_it_ends_with_the_error_when_it_has_waited_long_enough_though_the_mesh_changed_and_others_run(engine):
    long, _ = parked(engine)
    engine.finish()
    engine.now += 59
    engine.change("small")
    assert engine.core.rest_seconds == 1, "the thread, which has nothing else to do, looks then"
    other = engine.add("other", [2], 12)
    engine.turn(2)
    engine.now += 1
    engine.turn(2)
    assert engine.outcome(other) is None
    engine.finish()
    assert other.token_ids[1:] == expected_tokens([2], 12)
    update = engine.outcome(long)
    assert (update.finish_reason, update.result.kind) == (FinishReason.ERROR, ErrorKind.NO_ROOM)
    assert update.result.error == (
        "the server's mesh has changed, and the prompt has 10 tokens and max_tokens is 40, together 50, but the cache of a rank "
        "holds 16 (4 pages of 4 tokens); shorten the prompt, lower max_tokens or raise --cache-tokens; no larger mesh came in 60 s"
    )
    assert engine.core.parked.outcomes == Counter(expired=1)
    assert engine.core.rest_seconds is None


def test_where_the_smaller_mesh_is_the_one_that_was_asked_for_nothing_is_waited_for(engine):
    long, _ = parked(engine)
    engine.change("small", is_reduced=False)
    assert engine.outcome(long).result.kind is ErrorKind.NO_ROOM, "it had waited for a return"
    assert "no larger mesh came" not in engine.outcome(long).result.error
    late = engine.request("late", [1] * 4, 8)
    engine.change("large")
    again = engine.add("again", *LONG)
    engine.turn(3)
    engine.change("small", is_reduced=False)
    assert engine.outcome(again).result.kind is ErrorKind.NO_ROOM
    engine.thread.add([late])
    engine.finish()
    assert engine.outcome(late).finish_reason is FinishReason.LENGTH


def test_one_that_was_accepted_for_the_mesh_before_waits_too_in_its_place_of_the_queue(engine):
    late = engine.request("late", *LONG)
    engine.change("small")
    engine.thread.add([late])
    engine.turn()
    assert engine.core.parked.requests == [late]
    assert engine.thread.waiting == (0, 0), "the queue is free for others"
    engine.change("large")
    engine.finish()
    assert late.token_ids[10:] == expected_tokens(*LONG)


def test_a_thread_that_rests_ends_it_in_time(engine, monkeypatch):
    long, _ = parked(engine)
    engine.core.parked.seconds, real = 0.05, time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: engine.now + time.monotonic() - real)
    monkeypatch.setattr("dsjax.engine.core.time", clock)
    engine.thread.start()
    until(lambda: engine.outcome(long))
    assert engine.outcome(long).result.kind is ErrorKind.NO_ROOM
    engine.thread.end()
    engine.thread.join(60)


def test_a_page_source_forgets_one_that_waits_and_hears_of_it_again(engine):
    source, told = PageSource(), []
    source.added, source.ended = (lambda one, what=what: told.append(what) for what in ("added", "ended"))
    large, small = (FakeExecutor(pages_per_rank=SIZES[size]).config for size in ("large", "small"))
    scheduler = Scheduler(large, 1, source=source)
    scheduler.add(long := engine.request("long", *LONG))
    for config, parked in ((small, []), (small, [long]), (large, [long])):
        scheduler, refused = scheduler.successor(config, 1, parked)
        assert [one for one, _ in refused] == ([long] if config is small else [])
    assert told == ["added", "ended", "added"]
    assert scheduler.num_unfinished == 1

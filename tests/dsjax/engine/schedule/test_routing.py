"""Requests go where their beginning is cached, as long as that rank is not the one that all others wait for; how prompts share a step.
These are the tests of `schedule/scheduler.py` and `schedule/scheduler_config.py` too."""

import random
from types import SimpleNamespace

import pytest

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import Request, RequestOptions, StepPlan
from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig


def config(**changes) -> SchedulerConfig:
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "prefill_chunk": 256, "max_prefill_rows": 16}
    sizes |= {"page_size": 16, "pages_per_rank": 1025, "max_model_len": 1024}
    return SchedulerConfig(**sizes | changes)


def request(name: str, prompt: list[int], max_tokens: int = 4, **options) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(name, list(prompt), len(prompt), params, max_tokens, 0, options=RequestOptions(**options))


def answer(scheduler: Scheduler, plan: StepPlan) -> None:
    made = lambda rows: [RowResult((5,)) if row.sampled else RowResult() for row in rows]  # noqa: E731
    scheduler.update(plan, [RankResults(made(rank.decodes), made(rank.prefills)) for rank in plan.ranks])


def step(scheduler: Scheduler) -> list[int]:
    answer(scheduler, plan := scheduler.schedule())
    return [len(rank.decodes) + len(rank.prefills) for rank in plan.ranks]


def finish(scheduler: Scheduler) -> None:
    while scheduler.num_unfinished:
        step(scheduler)


def test_prompts_share_the_budget_in_chunks_by_arrival_and_behind_decodes():
    scheduler = Scheduler(config(max_num_seqs=4, max_num_batched_tokens=12, prefill_chunk=8, max_prefill_rows=2), 2)
    scheduler.add(request("short", [1, 2], 8))
    assert step(scheduler) == [1, 0], "an idle rank is in every plan"
    scheduler.add(request("long", [3] * 20, dp_rank=0))
    scheduler.add(request("next", [4] * 9, dp_rank=0))
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        rows = [*plan.ranks[0].decodes, *plan.ranks[0].prefills]
        seen.append([(row.request.request_id, row.start, row.length) for row in rows])
        answer(scheduler, plan)
    assert seen == [
        [("short", 2, 1), ("long", 0, 8), ("next", 0, 3)],
        [("short", 3, 1), ("long", 8, 8), ("next", 3, 3)],
        [("short", 4, 1), ("long", 16, 4), ("next", 6, 3)],
        [("short", 5, 1), ("long", 20, 1), ("next", 9, 1)],
    ]


def test_a_request_without_max_tokens_that_comes_while_the_mesh_shrinks_makes_as_many_as_the_new_cache_holds():
    open_ended = request("open", [1] * 30, 34)  # what the larger cache could hold
    open_ended.params = SamplingParams(max_tokens=None)
    Scheduler(config(page_size=4, pages_per_rank=11), 1).add(open_ended)
    assert (open_ended.max_tokens, open_ended.max_total_tokens) == (11, 41)  # the last one is never stored


def test_the_cost_is_uncached_tokens_and_backlog_and_a_sixteenth_of_the_context_and_rows():
    scheduler = Scheduler(config(), 2)
    scheduler.add(request("running", [1] * 320, max_tokens=8))
    step(scheduler)
    step(scheduler)  # its prompt takes two steps of 256 tokens
    scheduler.ranks[0].add(waiting := request("waiting", [2] * 30))
    waiting.rank = 0
    cost = scheduler.loads()[0].cost
    assert cost == 30 + 321 / 16 + 2 * 32
    assert scheduler.loads()[1].cost == 0


def test_a_rank_without_a_slot_comes_last_even_where_all_is_cached():
    scheduler = Scheduler(config(max_num_seqs=2), 2)
    requests = [request(str(index), [1] * 640, max_tokens=50) for index in range(4)]
    for each in requests:
        scheduler.add(each)
        for _ in range(3):
            step(scheduler)  # its prompt takes three steps of 256 tokens
    assert [each.rank for each in requests] == [0, 0, 1, 1]


def test_a_rank_without_pages_comes_last_even_where_all_is_cached():
    scheduler = Scheduler(config(pages_per_rank=51), 2)
    requests = [request("long", [1] * 700, 50), request("cached but too long", [1] * 200 + [2] * 300)]
    for each in requests:
        scheduler.add(each)
        step(scheduler)
    assert [each.rank for each in requests] == [0, 1]


def test_a_session_stays_on_its_rank_until_that_is_hopeless():
    scheduler = Scheduler(config(max_num_seqs=2), 3)
    scheduler.add(first := request("first", [1] * 32, max_tokens=30, session="s"))
    scheduler.add(request("other", [2] * 300, max_tokens=30))
    turns = [request(f"turn {i}", [3 + i] * 320, max_tokens=30, session="s") for i in range(6)]
    for turn in turns:
        scheduler.add(turn)
        step(scheduler)
    # Two slots; the queue behind them may be two long, and one that sees three waiting leaves.
    assert [turn.rank for turn in turns] == [first.rank] * 4 + [2, 2]


def test_the_sessions_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("dsjax.engine.schedule.scheduler.MAX_SESSIONS", 3)
    scheduler = Scheduler(config(), 2)
    for index in range(10):
        scheduler.add(request(str(index), [index] * 8, session=str(index)))
    assert list(scheduler._router._sessions) == ["7", "8", "9"]


def play(num_ranks: int, sizes: SchedulerConfig, requests: list[Request], concurrency: int = 200) -> SimpleNamespace:
    """Keep so many requests in the system until all are done.

    Gives cached tokens (hits), steps until all was done, and rows of the fullest rank ÷ mean rows (fullest).
    """
    scheduler, waiting = Scheduler(sizes, num_ranks), list(reversed(requests))
    steps, fullest, mean = 0, 0, 0.0
    while waiting or scheduler.num_unfinished:
        while waiting and scheduler.num_unfinished < concurrency:
            scheduler.add(waiting.pop())
        rows = step(scheduler)
        steps += 1
        if waiting:  # while the system is full
            fullest += max(rows)
            mean += sum(rows) / num_ranks
    hits = sum(each.num_cached_tokens for each in requests)
    assert hits == sum(sum(rank.hits.values()) for rank in scheduler.ranks)
    return SimpleNamespace(hits=hits, steps=steps, fullest=fullest / mean)


def prefix_repetition(prefixes: int, repetitions: int) -> list[Request]:
    """Prompts of 256 + 64 tokens, each prefix `repetitions` times, in any order; outputs of 16 to 112 tokens."""
    draw = random.Random(0)
    heads = [[draw.randrange(1000) for _ in range(256)] for _ in range(prefixes)]
    order = [head for head in heads for _ in range(repetitions)]
    draw.shuffle(order)
    tails = ([draw.randrange(1000) for _ in range(64)] for _ in order)
    return [request(str(i), head + next(tails), draw.randint(16, 112)) for i, head in enumerate(order)]


@pytest.mark.parametrize(("prefixes", "repetitions"), [(10, 60), (32, 20), (100, 8)])
def test_32_ranks_keep_four_fifths_of_the_hits_of_one_and_stay_balanced(prefixes, repetitions):
    large = {"max_num_seqs": 512, "max_num_batched_tokens": 512 * 32, "max_prefill_rows": 512}
    large = config(**large, pages_per_rank=32 * 1024 + 1)
    alone = play(1, large, prefix_repetition(prefixes, repetitions))
    assert alone.hits == prefixes * (repetitions - 1) * 256, "one rank computes each prefix once"
    spread = play(32, config(), prefix_repetition(prefixes, repetitions))
    assert spread.hits >= 0.8 * alone.hits
    assert spread.fullest < 1.5, "the fullest rank, which all wait for, has not much more rows than the mean one"
    # Each step on 32 ranks is far shorter than on one; their number must not grow much by queueing.
    assert spread.steps <= 1.3 * alone.steps


def test_a_router_outside_chooses_as_long_as_the_mesh_has_the_rank():
    scheduler = Scheduler(config(), 3)
    for name, wanted in (("first", 2), ("second", 2), ("third", 0)):
        scheduler.add(chosen := request(name, [1] * 64, dp_rank=wanted))
        assert chosen.rank == wanted
    scheduler.add(beyond := request("beyond", [2] * 64, dp_rank=3))
    assert beyond.rank == 1, "the rank that has nothing to do"
    smaller, refused = scheduler.successor(config(), 1)
    assert refused == []
    assert len(smaller.ranks[0].waiting) == 4

"""How work is spread over ranks, budget and pages.

These are the tests of `schedule/rank.py`, `schedule/request.py` and `schedule/scheduler_config.py` too.
"""

import pytest
from fake_executor import FakeExecutor, expected_tokens

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.pages import PagePool
from dsjax.engine.schedule.request import FinishReason, Request, RequestOptions
from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig
from dsjax.engine.text.logit_rules import LogitRules
from dsjax.errors import UserError


def make_config(**changes) -> SchedulerConfig:
    sizes = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "prefill_chunk": 8,
        "max_prefill_rows": 2,
        "page_size": 4,
        "pages_per_rank": 17,
        "max_model_len": 64,
    }
    return SchedulerConfig(**{**sizes, **changes})


def make_request(name: str, prompt_len: int, max_tokens: int = 8, **changes) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **changes.pop("params", {}))
    first = changes.pop("first", 0)
    if params.min_tokens:
        changes["rules"] = LogitRules(params, 300, changes.get("stop_ids", frozenset()))
    return Request(name, list(range(first, first + prompt_len)), prompt_len, params, max_tokens, 0, **changes)


def work(plan) -> list[list[tuple[str, int, int]]]:
    rows = lambda rank: [*rank.decodes, *rank.prefills]  # noqa: E731
    return [[(row.request.request_id, row.start, row.length) for row in rows(rank)] for rank in plan.ranks]


def answer(plan, token: int = 7) -> list[RankResults]:
    made = lambda rows: [RowResult((token,)) if row.sampled else RowResult() for row in rows]  # noqa: E731
    return [RankResults(made(rank.decodes), made(rank.prefills)) for rank in plan.ranks]


def test_new_requests_go_to_the_rank_with_fewest_tokens_and_ties_to_the_lowest():
    scheduler = Scheduler(make_config(), num_ranks=3)
    requests = [make_request(str(i), length) for i, length in enumerate([10, 3, 3, 2, 4])]
    for request in requests:
        scheduler.add(request)
    assert [request.rank for request in requests] == [0, 1, 2, 1, 2]


def test_idle_ranks_are_in_every_plan():
    scheduler = Scheduler(make_config(), num_ranks=4)
    scheduler.add(make_request("a", 3))
    plan = scheduler.schedule()
    assert work(plan) == [[("a", 0, 3)], [], [], []]


def test_prompts_go_in_chunks_within_the_budget_and_behind_decodes():
    scheduler = Scheduler(make_config(), num_ranks=1)
    scheduler.add(make_request("short", 2))
    scheduler.update(plan := scheduler.schedule(), answer(plan))
    scheduler.add(make_request("long", 20))
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen.append(work(plan)[0])
        scheduler.update(plan, answer(plan))
    assert seen == [
        [("short", 2, 1), ("long", 0, 8)],
        [("short", 3, 1), ("long", 8, 8)],
        [("short", 4, 1), ("long", 16, 4)],
        [("short", 5, 1), ("long", 20, 1)],
    ]


def test_two_prompts_share_the_budget_in_the_order_of_arrival():
    scheduler = Scheduler(make_config(), num_ranks=1)
    scheduler.add(make_request("a", 9))
    scheduler.add(make_request("b", 9, first=100))
    plan = scheduler.schedule()
    assert work(plan) == [[("a", 0, 8), ("b", 0, 4)]]


def test_the_newest_request_gives_way_when_pages_run_out_and_comes_back_first():
    executor = FakeExecutor(page_size=4, pages_per_rank=6, max_rows_decode=4, max_chunk=8, max_model_len=64)
    scheduler = Scheduler(SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=12), num_ranks=1)
    requests = [make_request(name, 7, max_tokens=10) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    finished = []
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        finished += [
            u.request.request_id for u in scheduler.update(plan, executor.execute(plan, scheduler)) if u.finish_reason
        ]
    assert finished == ["a", "b", "c"]
    assert requests[0].num_preemptions == 0
    assert requests[1].num_preemptions > 0
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 10)


def test_admissions_tell_a_slot_s_contents_apart_after_preemption():
    executor = FakeExecutor(page_size=4, pages_per_rank=6, max_rows_decode=4, max_chunk=8, max_model_len=64)
    scheduler = Scheduler(SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=12), num_ranks=1)
    for name in "ab":
        scheduler.add(make_request(name, 7, max_tokens=10))
    contents: dict[tuple[int, str, int], list[int]] = {}
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        for row in [*plan.ranks[0].decodes, *plan.ranks[0].prefills]:
            request = row.request
            key = (request.slot, request.request_id, request.admissions)
            before = contents.setdefault(key, [])
            assert request.pages[: len(before)] == before, "between admissions pages only grow at the end"
            contents[key] = list(request.pages)
        scheduler.update(plan, executor.execute(plan, scheduler))
    assert any(admissions > 1 for _, _, admissions in contents)


def test_priority_runs_lower_numbers_first_and_fcfs_ignores_them():
    for policy, expected in (("priority", ["low", "high"]), ("fcfs", ["high", "low"])):
        scheduler = Scheduler(make_config(max_num_seqs=1, policy=policy), num_ranks=1)
        scheduler.add(make_request("high", 2, max_tokens=1, options=RequestOptions(priority=5)))
        scheduler.add(make_request("low", 2, max_tokens=1, options=RequestOptions(priority=-5)))
        order = []
        while scheduler.num_unfinished:
            plan = scheduler.schedule()
            order += [update.request.request_id for update in scheduler.update(plan, answer(plan))]
        assert order == expected


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "reason"),
    [(60, 5, "maximum context length of this model is 64"), (30, 12, "the cache of a rank holds 40")],
)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(prompt_len, max_tokens, reason):
    scheduler = Scheduler(make_config(pages_per_rank=11), num_ranks=1)
    with pytest.raises(AdmissionError, match=f"{prompt_len} tokens and max_tokens is {max_tokens}.*{reason}"):
        scheduler.add(make_request("big", prompt_len, max_tokens))
    assert scheduler.num_unfinished == 0


def test_a_request_without_max_tokens_that_comes_while_the_mesh_shrinks_makes_as_many_as_the_new_cache_holds():
    request = make_request("open", 30, max_tokens=34)  # what the larger cache could hold
    request.params = SamplingParams(max_tokens=None)
    scheduler = Scheduler(make_config(pages_per_rank=11), num_ranks=1)
    scheduler.add(request)
    assert (request.max_tokens, request.max_total_tokens) == (11, 41)  # the last one is never stored


def test_the_largest_request_that_fits_runs_alone_to_its_end():
    executor = FakeExecutor(page_size=4, pages_per_rank=11, max_model_len=64)
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=12)
    scheduler = Scheduler(config, num_ranks=1)
    scheduler.add(request := make_request("big", 30, config.max_request_len - 30))
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        scheduler.update(plan, executor.execute(plan, scheduler))
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.token_ids) == 41, "40 tokens in the cache; the last one made need not be there"


def test_non_finite_logits_fail_that_request_alone():
    scheduler = Scheduler(make_config(), num_ranks=1)
    for name in "ab":
        scheduler.add(make_request(name, 2, max_tokens=2))
    plan = scheduler.schedule()
    results = [RankResults([], [RowResult((), finite=False), RowResult((5,))])]
    reasons = {u.request.request_id: u.finish_reason for u in scheduler.update(plan, results)}
    assert reasons == {"a": FinishReason.ERROR, "b": None}


def test_a_stop_token_ends_the_request_and_before_min_tokens_the_executor_makes_none():
    prompt = list(range(5))
    free = expected_tokens(prompt, 6)
    for min_tokens, expected in ((0, 1), (3, 6)):
        executor = FakeExecutor(page_size=4)
        scheduler = Scheduler(SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=12), num_ranks=1)
        request = make_request("a", 5, 6, stop_ids=frozenset(free[:1]), params={"min_tokens": min_tokens})
        scheduler.add(request)
        while scheduler.num_unfinished:
            plan = scheduler.schedule()
            scheduler.update(plan, executor.execute(plan, scheduler))
        assert request.num_output_tokens == expected
        assert (free[0] in request.output_token_ids) == (request.finish_reason is FinishReason.STOP)


def test_an_abort_while_a_step_runs_is_passed_over_by_its_results():
    scheduler = Scheduler(make_config(), num_ranks=1)
    scheduler.add(make_request("a", 2))
    plan = scheduler.schedule()
    results = answer(plan)
    scheduler.abort("a")
    assert scheduler.update(plan, results) == []
    assert scheduler.ranks[0].pool.num_used == 0


def test_a_page_given_back_twice_is_a_fault():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.release(pages)
    for wrong in ([pages[0]], [0]):
        with pytest.raises(ValueError, match="given back"):
            pool.release(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": 3}, "less than max_num_seqs=4"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"policy": "random"}, "expected fcfs or priority"),
    ],
)
def test_sizes_that_cannot_work_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make_config(**changes)

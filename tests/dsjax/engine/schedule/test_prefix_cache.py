"""Prefix cache hits and their counts. Also tests `schedule/pages.py`, `schedule/request_pages.py` and `schedule/rank.py`."""

from zlib import crc32

import pytest
from fake_executor import FakeExecutor, expected_tokens

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.schedule.pages import extend_hashes
from dsjax.engine.schedule.request import FinishReason, Request, RequestOptions
from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig

PROMPT = list(range(100, 120))  # five pages of four tokens


def make(*, prefix_caching: bool = True, budget: int = 24, **sizes) -> EngineCore:
    executor = FakeExecutor(**{"pages_per_rank": 33, "max_chunk": 24, **sizes})
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    # Without asynchronous scheduling a call of `step` is a step.
    return EngineCore(executor, config, async_scheduling=False, attachments=attachments_of(config))


def request(name: str, prompt: list[int], max_tokens: int = 1, *, salt: str | None = None, **params) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    seed, options = crc32(name.encode()), RequestOptions(cache_salt=salt)
    return Request(name, list(prompt), len(prompt), params, max_tokens, seed, options=options)


def run(core: EngineCore, *requests: Request) -> None:
    for each in requests:
        core.add(each)
    while core.has_unfinished:
        core.step()
    for each in requests:
        if each.finish_reason is not FinishReason.ERROR:
            assert each.output_token_ids == expected_tokens(each.prompt_token_ids, each.max_tokens)


def cached_again(core: EngineCore, prompt: list[int] = PROMPT, **options) -> int:
    """How many tokens of a further request are found."""
    run(core, again := request("again", prompt, **options))
    return again.num_cached_tokens


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        (PROMPT, 19),  # cached whole: the last page is copied, and the last token computed again for its logits
        ([*PROMPT, 1], 20),
        (PROMPT[:19], 16),
        (PROMPT[:4], 3),
        (PROMPT[:5], 4),
        ([*PROMPT[:7], 1, *PROMPT[8:]], 4),  # one token differs: its page and all after it are others
        ([1, *PROMPT], 0),
    ],
)
def test_the_longest_run_of_full_pages_from_the_first_token_is_found(prompt, cached):
    core = make()
    run(core, request("first", PROMPT))
    assert cached_again(core, prompt) == cached


@pytest.mark.parametrize(("salts", "cached"), [(("a", "a"), 19), (("a", "b"), 0), (("a", None), 0), (("", None), 0)])
def test_pages_are_shared_under_one_salt_only(salts, cached):
    core = make()
    run(core, request("first", PROMPT, salt=salts[0]))
    assert cached_again(core, salt=salts[1]) == cached


def test_a_salt_that_is_no_valid_unicode_is_a_salt():
    assert len(extend_hashes(request("r", PROMPT, salt="\ud800"), 4)) == 5


def test_without_prefix_caching_nothing_is_found_or_kept():
    core = make(prefix_caching=False)
    run(core, request("first", PROMPT))
    assert cached_again(core) == core.loads()[0].cached_pages == 0
    assert (core.loads()[0].queried, core.loads()[0].hits) == (0, {"device": 0})


def test_a_prompt_that_another_is_computing_is_waited_for_and_others_pass():
    core = make(max_chunk=8, budget=16)
    twins = [request(name, PROMPT) for name in "ab"]
    other = request("other", [7] * 6)
    for each in (*twins, other):
        core.add(each)
    core.step()
    a, b = twins
    assert (a.num_computed_tokens, b.num_cached_tokens, other.finish_reason) == (8, None, "length")
    run(core)
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 16)
    assert b.output_token_ids == a.output_token_ids == expected_tokens(PROMPT, 1)


def test_a_preempted_request_finds_its_own_pages_again():
    core = make(pages_per_rank=11, max_rows_decode=2)
    old, new = request("old", PROMPT[:9], 20), request("new", PROMPT[10:20], 20)
    core.add(old)
    core.add(new)
    while core.has_unfinished and not new.num_preemptions:
        core.step()
    found = core.scheduler.ranks[0].pool.find(new.page_hashes)
    assert found, "right after it gave way, what its elder did not take is there"
    run(core)
    assert new.num_preemptions == 1
    for each in (old, new):
        assert each.output_token_ids == expected_tokens(each.prompt_token_ids, 20)


def test_a_failed_request_takes_its_pages_out_of_the_cache_and_leaves_those_of_others_as_they_are():
    core = make()
    run(core, request("first", PROMPT))
    bad, good = request("bad", [*PROMPT, 1], 9), request("good", [*PROMPT, 2], 9)
    core.add(bad)
    core.add(good)
    core.step()
    assert bad.num_cached_tokens == good.num_cached_tokens == 20
    core.executor.non_finite.add(crc32(b"bad"))
    run(core)
    assert bad.finish_reason is FinishReason.ERROR
    assert good.output_token_ids == expected_tokens([*PROMPT, 2], 9), "it reads pages that the other one held"
    assert cached_again(core) == 0


def test_a_request_that_fails_for_another_reason_leaves_its_pages_to_be_found():
    core = make()
    core.add(bad := request("bad", PROMPT, 9))
    core.step()
    core.executor.impossible[bad.seed] = "no legal token"
    core.step()
    assert (bad.finish_reason, len(bad.token_ids), core.scheduler.ranks[0].load) == (FinishReason.ERROR, 21, 0)
    assert cached_again(core) == 19


def test_prompt_logprobs_given_again_after_a_preemption_are_passed_over():
    config = SchedulerConfig.from_limits(FakeExecutor(max_chunk=8, page_size=4).limits, max_num_batched_tokens=8)
    scheduler = Scheduler(config, 1)
    scheduler.add(asking := request("r", PROMPT[:12], 2, prompt_logprobs=0))
    entries = [(token, -1.0, 1, []) for token in PROMPT[1:12]]
    found = []

    def step():
        plan = scheduler.schedule()
        (row,) = plan.ranks[0].prefills
        some = entries[row.start : row.start + row.length]
        result = RowResult((9,) if row.sampled else (), prompt_scores=some)
        updates = scheduler.update(plan, [RankResults([], [result])])
        found.extend(entry for update in updates for entry in update.result.prompt_scores or ())
        return updates

    (update,) = step()
    assert (update.result.token_ids, len(asking.token_ids)) == ((), 12), "no token is made before the prompt's end"
    scheduler.ranks[0].running.remove(asking)
    scheduler.ranks[0]._preempt(asking)
    assert step() == [], "there is nothing new to tell"
    step()
    assert found == entries
    assert not asking.wants_prompt_logprobs

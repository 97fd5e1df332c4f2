"""Pages of two kinds, without an executor: which are given out first and found, where cached tokens are used, which window pages are kept,
and when they are given back. These are the tests of `schedule/pages.py` too."""

from collections.abc import Sequence
from zlib import crc32

import pytest

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.schedule.pages import PagePool, extend_hashes, held_windows, window_columns, window_name
from dsjax.engine.schedule.request import Request, Status, StepPlan
from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig

G = 128


def scheduler(*, slots=4, chunk=512, kept=20, drafts=0) -> Scheduler:
    windows = held_windows(slots, 2 * chunk, G, drafts) + kept
    speculation = SpeculativeConfig(method="mtp", num_speculative_tokens=drafts) if drafts else None
    sizes = {"windows_per_rank": windows, "speculation": speculation}
    return Scheduler(SchedulerConfig(slots, chunk, chunk, slots, G, 1000, 1 << 20, **sizes), 1)


def request(name: str, tokens: int | Sequence[int], max_tokens: int = 1) -> Request:
    """One of so many tokens that no other has, or of these."""
    if isinstance(tokens, int):
        tokens = [crc32(f"{name} {index}".encode()) % 1000 for index in range(tokens)]
    return Request(name, list(tokens), len(tokens), SamplingParams(temperature=0), max_tokens, 0)


def results(plan: StepPlan, made: int = 1) -> list[RankResults]:
    """What a step gives where each decode row makes so many tokens."""
    rank = plan.ranks[0]
    decoded = [RowResult([7] * min(made, row.length)) for row in rank.decodes]
    return [RankResults(decoded, [RowResult([7] if row.sampled else []) for row in rank.prefills])]


def run(of: Scheduler, *requests: Request) -> list[int]:
    """Two steps under way at a time, until all have ended; give the tokens that each found cached."""
    for each in requests:
        of.add(each)
    under_way: list[StepPlan] = []
    while of.num_unfinished or under_way:
        plan = of.schedule()
        under_way += [] if plan.is_empty else [plan]
        if len(under_way) == 2 or plan.is_empty:
            first = under_way.pop(0)
            of.update(first, results(first))
    pool = of.ranks[0].pool
    assert (pool.num_used, pool.num_windows - 1 - pool.num_free_windows) == (0, 0), "all pages are given back"
    return [each.num_cached_tokens for each in requests]


def overwrite_what_is_not_kept(pool: PagePool) -> None:
    pool.release(pool.allocate(pool.num_free_windows - len(pool._kept), windows=True))


def test_a_prompt_sent_again_is_cached_up_to_the_last_border_before_its_last_token():
    of = scheduler(chunk=100, kept=3)
    for length in range(1, 601):
        run(of, request(str(length), length))
        overwrite_what_is_not_kept(of.ranks[0].pool)
        assert run(of, request(str(length), length)) == [(length - 1) // G * G]


def test_a_long_request_sent_again_hits_also_after_eight_others():
    of = scheduler()
    for cached in (0, 9984):
        assert run(of, *(request(name, 10_000) for name in "abcdefghi")) == [cached] * 9


def test_a_conversation_goes_on_at_the_last_page_of_its_answer():
    of = scheduler()
    run(of, first := request("a", 300, 400))
    assert run(of, request("next", [*first.token_ids, 1, 2, 3])) == [699 // G * G], "the last token is never computed"


@pytest.mark.parametrize(("overwritten", "expected"), [(True, [0, 0, 896, 896]), (False, [0, 896, 896])])
def test_a_shared_beginning_hits_from_its_third_use_and_sooner_where_nobody_has_overwritten_it(overwritten, expected):
    of = scheduler(kept=10)
    shared = request("shared", 1000).token_ids
    ends = [request(str(index), 900).token_ids for index in range(len(expected))]
    found = []
    for index, end in enumerate(ends):
        found += run(of, request(str(index), shared + end))
        if index or overwritten:
            overwrite_what_is_not_kept(of.ranks[0].pool)
    assert found == expected


@pytest.mark.parametrize(
    ("windows", "cached", "border"),
    [((10, 30), 39, 31), ((10, 30), 30, 11), ((), 39, 0), ((38,), 39, 39), ((0,), 39, 1)],
)
def test_a_hit_ends_at_the_last_border_with_a_window_page(windows, cached, border):
    pool, names = PagePool(50, G, num_windows=50), extend_hashes(request("a", 39 * G), G)
    for place in windows:
        [page] = pool.allocate(1, windows=True)
        pool.seal(page, window_name(names[place]))
    assert pool.usable(names, cached) == border
    assert PagePool(50, G).usable(names, cached) == cached, "without window pages every page ends at a border"


def test_a_page_that_can_be_loaded_or_is_promised_counts():
    pool, names = PagePool(50, G, num_windows=50), extend_hashes(request("a", 5 * G), G)
    assert pool.usable(names, 5, {window_name(names[2])}) == 3
    assert pool.usable(names, 5, (), {names[3]}) == 4


def test_a_window_page_that_comes_with_pages_belongs_to_the_border_behind_the_last():
    pool, one = PagePool(50, G, num_windows=50), request("a", 5 * G)
    names = extend_hashes(one, G)
    pool.seal_of(one, 0, pool.allocate(2))
    pool.seal_of(one, 2, pool.allocate(3) + pool.allocate(1, windows=True))
    assert (pool.usable(names, 5), pool.usable(names, 4)) == (5, 0)


def test_window_pages_are_given_back_behind_confirmed_tokens_alone():
    of = scheduler(drafts=3)
    of.add(one := request("a", 254, 300))
    plan = of.schedule()
    of.update(plan, results(plan))
    plans = [of.schedule(), of.schedule()]
    planned = one.num_computed_tokens + one.num_in_flight
    assert (one.num_computed_tokens, planned, one.first_window) == (254, 262, 0), "token 254 sees token 127"
    assert len(one.window_pages) <= window_columns(3 * 3 + 2, G), "a ring has room for what steps under way may write"
    given_back = 0
    while one.status is not Status.FINISHED:
        plans.append(of.schedule())
        first = plans.pop(0)
        of.update(first, results(first, made=1))
        assert len(one.window_pages) <= 3, "what W counts of a row"
        assert one.first_window * G <= max(0, one.num_computed_tokens - G + 1)
        given_back = max(given_back, one.first_window)
    assert given_back == 2


def test_window_pages_that_are_not_kept_go_first_and_are_found_until_then():
    pool = PagePool(2, G, num_windows=5)
    evicted = []
    pool.on_evict = lambda page, name: evicted.append(name)
    pages = pool.allocate(4, windows=True)
    for page, name in zip(pages, (b"a", b"b", b"c", b"d"), strict=True):
        pool.seal(page, name)
    pool.keep(b"a")
    pool.keep(b"c")
    pool.release(pages)
    assert pool.find([b"b"]) == [pages[1]]
    assert (pool.num_free_windows, pool.num_free) == (4, 1)
    pool.keep(b"c")  # used again
    for name in (b"b", b"d", b"a", b"c"):
        before = set(pool._page_of)
        pool.allocate(1, windows=True)
        assert before - set(pool._page_of) == {name}
    assert evicted == [b"a", b"c"], "what is not kept goes to no tier"
    for page in pages:
        pool.seal(page, bytes([page]))
    pool.release(pages)
    pool.allocate(4, windows=True)
    assert evicted == [b"a", b"c"], "a page is kept as long as it has its name"


def test_pages_without_content_are_given_out_before_cached_ones_and_those_from_the_end_of_the_oldest_chain():
    pool = PagePool(7, 4)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, name in zip(old + new, (b"old 0", b"old 1", b"new 0", b"new 1"), strict=True):
        pool.seal(page, name)
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (6, 4, 0)
    pool.allocate(2)
    assert pool.num_cached == 4
    pool.hold(pool.find([b"old 0"]))
    pool.release(pool.find([b"old 0"]))  # used just now
    evicted = []
    while pool.num_cached:
        before = set(pool._page_of)
        pool.allocate(1)
        evicted += before - set(pool._page_of)
    assert evicted == [b"old 1", b"new 1", b"new 0", b"old 0"]


def test_of_two_pages_with_the_same_tokens_the_first_is_found():
    pool = PagePool(4, 4)
    first, second = pool.allocate(2)
    pool.seal(first, b"same")
    pool.seal(second, b"same")
    assert pool.find([b"same"]) == [first]
    pool.release([second])
    assert (pool.num_cached, pool.num_free) == (0, 2)


def test_a_page_given_back_twice_is_a_fault():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.release(pages)
    for wrong in ([pages[0]], [0]):
        with pytest.raises(ValueError, match="given back"):
            pool.release(wrong)

"""Under any interleaving of add, chunk, decode, preempt, abort, finish, fail, evict and flush: no page is lost, none is
written by two, and every page that is read holds the tokens it should.

These are the tests of `core.py`, `schedule/scheduler.py`, `schedule/rank.py`, `schedule/pages.py` and `schedule/page_loads.py` too.
"""

from collections import Counter
from operator import add

import pytest
from event_subscriber import Subscriber
from fake_executor import NAN, FakeExecutor, expected_tokens, folds
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsjax.engine.contract.commands import Clear, PlacePages
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.contract.speculative import SpeculativeConfig
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.schedule.page_loads import PageLoads
from dsjax.engine.schedule.pages import extend_hashes, window_columns, window_name
from dsjax.engine.schedule.request import FinishReason, Request, RequestOptions, Status
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig
from dsjax.engine.tiers.event_publisher import PageEventStream

MAX_LEN = 40
SHARED = [[7] * 24, list(range(100, 124)), [7] * 9 + [8] * 15]
"""Prompts begin with a part of one of these, so that many have pages in common, and some nearly have."""

LIMITS = {
    "num_ranks": st.integers(1, 3),
    "page_size": st.integers(1, 5),
    "pages_per_rank": st.integers(4, 24),
    "max_rows_decode": st.integers(1, 5),
    "max_chunk": st.integers(1, 6),
    "max_rows_prefill": st.integers(1, 3),
    "host_pages_per_rank": st.sampled_from([0, 0, 2, 30]),
    "disk_pages": st.sampled_from([0, 0, 3, 40]),
}
_beginnings = st.builds(lambda shared, length: shared[:length], st.sampled_from(SHARED), st.integers(0, 24))
_requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(add, _beginnings, st.lists(st.integers(0, 299), max_size=6)).filter(bool),
        "max_tokens": st.integers(1, 16),
        "priority": st.integers(0, 2),
        "cache_salt": st.sampled_from([None, None, None, "a"]),
        "session": st.sampled_from([None, None, "s", "t"]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
    }
)


def pages_of(prompts, page_size):
    """What an earlier engine has left on the disk: the pages of these prompts by their names."""
    found = {}
    for tokens in prompts:
        request = Request("", list(tokens), len(tokens), SamplingParams(), 1, 0)
        for place, name in enumerate(extend_hashes(request, page_size)):
            found[name] = list(tokens[place * page_size : (place + 1) * page_size])
    return found


class SchedulerMachine(RuleBasedStateMachine):
    """Small sizes, so that pages, slots, rows and budget all run out.

    The executor keeps what was written to each page, and asserts that a row finds its request's own tokens there.
    """

    @initialize(
        limits=st.fixed_dictionaries(LIMITS),
        policy=st.sampled_from(["fcfs", "priority"]),
        prefix_caching=st.integers(0, 7).map(bool),
        extra_budget=st.integers(0, 8),
        left_over=st.booleans(),
        asynchronous=st.booleans(),
        drafts=st.sampled_from([None, None, [[1, 4096, 1]], [[1, 4096, 3]], [[1, 2, 2], [3, 4096, 0]]]),
        windows=st.sampled_from([None, None, 0, 1, 3, 10, 60]),
    )
    def make(self, limits, extra_budget, left_over, asynchronous, drafts, windows, **options):
        if windows is not None and limits["page_size"] > 1:  # so many more than one request needs
            columns = window_columns(max(limits["max_chunk"], 3 * 3 + 2), limits["page_size"])
            limits = limits | {"windows_per_rank": columns + 3 + windows, "window_columns": columns}
            limits |= {"host_windows_per_rank": (limits["host_pages_per_rank"] + 1) // 2}
        disk = pages_of(SHARED, limits["page_size"]) if limits["disk_pages"] and left_over else None
        self.executor = FakeExecutor(max_model_len=MAX_LEN, disk=disk, **limits)
        drafted = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": drafts}
        options["speculation"] = drafts and SpeculativeConfig(method="mtp", **drafted)
        options["max_num_batched_tokens"] = limits["max_rows_decode"] + extra_budget
        self.config = SchedulerConfig.from_limits(self.executor.limits, **options)
        self.subscriber = Subscriber(limits["num_ranks"], limits["page_size"], self.executor.disk)
        parts = attachments_of(self.config, sinks=[self.subscriber])
        self.core = EngineCore(self.executor, self.config, async_scheduling=asynchronous, attachments=parts)
        self.scheduler = self.core.scheduler
        self.alive: dict[str, Request] = {}
        self.gone: list[Request] = []
        # Of every hash: salt, and the tokens from the first on.
        self.pages: dict[bytes, tuple[str | None, list[int]]] = {}
        self.count = 0

    @rule(several=st.lists(_requests, min_size=1, max_size=6))
    def add(self, several):
        for given in several:
            self._add(**given)

    def _add(self, prompt, max_tokens, prompt_logprobs, **options):
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        request = Request(str(self.count), list(prompt), len(prompt), params, max_tokens, self.count)
        request.options = RequestOptions(**options)
        total = len(prompt) + max_tokens
        fits = total <= MAX_LEN and total - 1 <= (self.config.pages_per_rank - 1) * self.config.page_size
        try:
            self.core.add(request)
        except AdmissionError:
            assert not fits
        else:
            assert fits
            self.alive[request.request_id] = request

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self._step()

    @rule(data=st.data(), given=_requests)
    def step_while_requests_come_and_go(self, data, given):
        aborted = []

        def meanwhile():
            if self.alive:
                aborted.append(data.draw(st.sampled_from(sorted(self.alive))))
                self._abort(aborted[0])
            if not aborted:
                self._add(**given)

        self._step(meanwhile)

    def _step(self, meanwhile=None):
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda now: self._checked(schedule(now))
        updates = self.core.step(meanwhile)
        self.scheduler.schedule = schedule
        self._enter(update for update in updates if update.finish_reason)

    def _abort(self, name):
        request = self.alive.pop(name)
        assert self.core.abort(name).finish_reason is FinishReason.ABORT
        self.gone.append(request)

    def _checked(self, plan):
        under_way = any(request.num_rows_in_flight for request in self._all())
        arriving = any(request.is_loading for request in self.alive.values())
        assert not plan.is_empty or under_way or arriving or not self.alive, "no step, and there is something to do"
        assert len(plan.ranks) == self.executor.limits.num_ranks
        for rank in plan.ranks:
            known = len(rank.decodes) + sum(row.length for row in rank.prefills)
            assert known <= self.config.max_num_batched_tokens
            for row in rank.prefills:
                assert not row.request.params.prompt_logprobs or row.request.num_cached_tokens == 0
        return plan

    def _all(self):
        return [*self.alive.values(), *self.gone]

    def _enter(self, updates):
        """Look at a step's updates, and at everything after it: a rule may make several steps."""
        for update in updates:
            request = self.alive.pop(update.request.request_id)
            self.gone.append(request)
            if request.finish_reason is FinishReason.ERROR:
                assert request.seed in self.executor.non_finite
                continue
            expected = expected_tokens(request.prompt_token_ids, request.max_tokens)
            assert request.output_token_ids == expected, "preempted or not, cached or not, the tokens are the same"
        self.every_page_is_free_or_cached_or_held_and_the_holders_are_counted()
        self.a_cached_page_holds_exactly_the_tokens_of_its_hash()
        self.slots_queues_and_counters_are_consistent()

    @rule(data=st.data())
    def abort(self, data):
        if self.alive:
            self._abort(data.draw(st.sampled_from(sorted(self.alive))))
        assert self.core.abort("unknown") is None

    @rule(data=st.data())
    def poison(self, data):
        """From now on, what this request writes is not finite; rather one that has begun, whose pages others may read."""
        begun = [name for name, request in self.alive.items() if request.num_output_tokens]
        if self.alive:
            self.executor.non_finite.add(self.alive[data.draw(st.sampled_from(sorted(begun or self.alive)))].seed)

    @rule(takes=st.sampled_from([0, 1, 5, None]), fails=st.booleans())
    def change_the_disk(self, takes, fails):
        """It becomes fast or slow, hangs until the next change, or fails."""
        self.executor.disk_takes, self.executor.reads_fail, self.executor.writes_fail = takes, fails, fails

    @rule(data=st.data())
    def evict(self, data):
        pool = data.draw(st.sampled_from(self.scheduler.ranks)).pool
        pool.release(pool.allocate(data.draw(st.integers(0, pool.num_free))))

    @rule()
    def flush(self):
        self.core.flush_prefix_cache()
        assert all(rank.pool.num_cached == 0 for rank in self.scheduler.ranks)
        assert all(not rank.pool.find([name]) for rank in self.scheduler.ranks for name in self.pages)

    @invariant()
    def every_page_is_free_or_cached_or_held_and_the_holders_are_counted(self):
        for index, rank in enumerate(self.scheduler.ranks):
            pool = rank.pool
            mine = [*self._of(index), *self._leaving(index)]
            held = Counter(page for one in mine for page in one.pages + one.window_pages + one.held_pages)
            under_way = rank.loads.under_way if isinstance(rank.loads, PageLoads) else []
            held.update(page for load in under_way if load.request for page in load.pages)
            assert {page: count for page, count in enumerate(pool._holders) if count} == held
            everywhere = [*pool._free, *pool._idle, *pool._free_windows, *pool._idle_windows, *held]
            numbers = range(pool.num_pages + pool.num_windows)
            assert sorted(everywhere) == [number for number in numbers if number not in (0, pool.num_pages)]
            held_windows = sum(map(pool.is_window, held))
            assert (len(held) - held_windows, len(pool._idle)) == (pool.num_used, pool.num_cached)
            for request in mine:
                own_windows = request.window_pages[max(0, request.num_sealed_pages - request.first_window) :]
                for page in request.pages[request.num_sealed_pages :] + own_windows:
                    assert held[page] == 1, "who may write a page has it alone"
                    assert pool._hash_of[page] is None

    @invariant()
    def a_cached_page_holds_exactly_the_tokens_of_its_hash(self):
        size = self.config.page_size
        for request in (*self.alive.values(), *self.gone):
            for place, name in enumerate(extend_hashes(request, size), start=1):
                found = (request.options.cache_salt, request.token_ids[: place * size])
                assert self.pages.setdefault(name, found) == found
                self.pages[window_name(name)] = (found[0], folds(found[1]))
        for index, (rank, cache) in enumerate(zip(self.scheduler.ranks, self.executor._cache, strict=True)):
            named = {page: name for page, name in enumerate(rank.pool._hash_of) if name is not None}
            assert rank.pool._page_of == {name: page for page, name in named.items()}
            for page in named.keys() - self.executor.pages_of(PlacePages, index):
                assert cache[page] == self.pages[named[page]][1][-size:]
            cleared = self.executor.pages_of(Clear, index)
            cleared |= {page for one in self._leaving(index) for page in one.pages + one.window_pages}
            left = {page for page, values in enumerate(cache) if NAN in values}
            assert left <= cleared, "no page is left with values that are not finite"

    @invariant()
    def subscribers_know_where_every_page_is(self):
        self.core.part(PageEventStream).planned()
        self.subscriber.check(self.scheduler, {window_name(name) for name in self.pages})

    @invariant()
    def slots_queues_and_counters_are_consistent(self):
        for index, rank in enumerate(self.scheduler.ranks):
            mine = self._of(index)
            slots = [request.slot for request in (*mine, *self._leaving(index)) if request.slot >= 0]
            assert len(slots) == len(set(slots)) <= self.config.max_num_seqs
            waiting = [request for request in mine if request.status is Status.WAITING]
            assert sorted(rank.waiting, key=id) == sorted(waiting, key=id)
            assert rank.load == sum(len(request.token_ids) for request in mine)
            assert rank.waiting_tokens == sum(len(request.token_ids) for request in waiting)
            assert rank.backlog == sum(request.backlog for request in mine)
            assert rank.promised == Counter(name for one in mine for name in one.page_hashes[: one.num_promised])
            for queue in (rank.running, rank.waiting):
                assert [r.order for r in queue] == sorted(r.order for r in queue)
            for request in waiting:
                assert (request.pages, request.slot, request.num_computed_tokens) == ([], -1, 0)
            for request in rank.running:
                assert request.num_writable_pages * self.config.page_size >= request.num_computed_tokens
                if request.window_pages:
                    confirmed = request.num_computed_tokens
                    assert request.first_window * self.config.page_size <= max(0, confirmed - self.config.page_size + 1)
                assert request.num_sealed_pages * self.config.page_size <= request.num_computed_tokens

    @invariant()
    def what_is_gone_holds_nothing(self):
        """But for those that a step under way still has a row of."""
        assert all(not request.pages and request.slot == -1 for request in self.gone if not request.num_rows_in_flight)
        assert self.scheduler.num_unfinished == len(self.alive)

    def _leaving(self, index):
        """Requests that have ended while a step has a row of them."""
        return [request for request in self.gone if request.rank == index and request.num_rows_in_flight]

    def _of(self, index):
        return [request for request in self.alive.values() if request.rank == index]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.executor.disk_takes, steps = 1, 0
        while self.core.has_unfinished and (steps := steps + 1) < 2000:
            self._step()
        assert not self.alive, "every admitted request ends"
        for rank in self.scheduler.ranks:
            assert (rank.pool.num_used, rank.load, rank.backlog, rank.waiting_tokens) == (0, 0, 0, 0)
            assert not rank.promised


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)

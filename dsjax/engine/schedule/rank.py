"""`Rank`: schedules the waiting and running requests of one DP rank."""

import bisect
from collections import Counter
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from dsjax.engine.schedule.page_loads import Admittance, PageLoads
from dsjax.engine.schedule.pages import PagePool
from dsjax.engine.schedule.request import RankPlan, Request, ScheduledRow, Status
from dsjax.engine.schedule.request_pages import RequestPages, StartPages
from dsjax.engine.schedule.scheduler_config import SchedulerConfig

_by_order = attrgetter("order")
_MAX_SKIPPED = 16
"""Maximum waiting requests that a step skips because others compute their pages. Requests whose pages are being loaded do not count."""


class RankLoad(NamedTuple):
    """Load and free room of one DP rank."""

    rank: int
    running: int
    waiting: int
    waiting_tokens: int  # known tokens of the waiting requests
    used_pages: int  # pages held by requests
    cached_pages: int  # pages only in the prefix cache; they count as free
    usable_pages: int  # all pages
    # the router's cost of sending a new request here, without the request's own tokens, in tokens to compute (docs/scheduler.md)
    cost: float
    # cached tokens of requests at their first admission, by tier (`device`, and the KV connector's tiers)
    hits: Mapping[str, int] = {"device": 0}
    queried: int = 0  # prompt tokens of requests at their first admission: the hits and the misses
    tiers: Mapping[str, Any] = {}  # the KV connector's counts for this rank, by tier


class Rank:
    """The queue, pages and slots of one DP rank.

    At admission a request gets pages for *all* its known tokens, so only decodes allocate more. When no page is left, the newest
    running request is preempted: it releases everything and is recomputed later, except for what the prefix cache still has. `running` is
    sorted by `order`.

    A step is planned while the previous one computes, so a request may have a row in flight (planned, result not committed).
    The plan then assumes an upper bound of its tokens (`Request.num_in_flight`). A request releases its pages and slot only when none of
    its rows is in flight, so that no late write can reach a page's next owner.

    Attributes:
        pages: the pages of the running requests.
        load, waiting_tokens: known tokens of all requests, and of the waiting ones.
        backlog: tokens to compute before every request here has its next token: uncached and not promised tokens of waiting requests,
            and the rest of the prompts being computed.
        promised: hashes of the pages that requests here will compute for their prompts, and how many requests will compute each.
        prefix_queries: known tokens of requests at their first admission. hits: how many of these tokens were cached, by tier.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig, loads: PageLoads):
        self.pool, self.config, self.loads = pool, config, loads
        self.pages = RequestPages(pool, config, loads)
        self.waiting, self.running = list[Request](), list[Request]()
        self.load = self.waiting_tokens = self.backlog = 0
        self.promised: Counter[bytes] = Counter()
        self.num_preemptions = self.prefix_queries = 0
        self.hits: Counter[str] = Counter(device=0)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    def num_uncached_tokens(self, request: Request) -> int:
        """Return how many tokens of a request this rank would have to compute: tokens neither cached nor promised."""
        names = self.pages.readable_names(request)
        num_found = self.pool.count(names, self.promised, self.loads)
        num_cached = self.pool.usable(names, num_found, self.loads, self.promised)
        return len(request.token_ids) - num_cached * self.pool.page_size

    def add(self, request: Request) -> None:
        """Queue a request, sorted by `order`."""
        self.load += len(request.token_ids)
        self._enqueue(request)

    def remove(self, request: Request) -> None:
        """Remove a waiting or running request. It releases pages and slot once none of its rows is in flight."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.pages.seal(request)
            if not request.num_rows_in_flight:
                self._free(request)
        else:
            self.waiting.remove(request)
            self.waiting_tokens -= len(request.token_ids)
            self.loads.release(request)
        self._clear_backlog(request)
        self.load -= len(request.token_ids)

    def remove_finished(self, finished: list[Request]) -> None:
        """Remove running requests that have just become `FINISHED`."""
        self.running = [request for request in self.running if request.status is Status.RUNNING]
        for request in finished:
            self.pages.seal(request)
            if not request.num_rows_in_flight:
                self._free(request)
            self._clear_backlog(request)
            self.load -= len(request.token_ids)

    def discard_row(self, request: Request, finite: bool) -> None:
        """Drop the result of a row whose request has ended; release the request's pages and slot after its last row."""
        if not finite and request.num_clean_pages is None:
            request.num_clean_pages = request.num_sealed_pages
        if not request.num_rows_in_flight:
            self._free(request)

    def flush(self) -> None:
        """Empty the prefix cache, on the device and in KV connectors. Pages that are being loaded will not be found either."""
        self.loads.cancel()
        self.pool.flush()
        self.loads.clear()

    def invalidate(self) -> None:
        """Forget pages that failed commands may have left incomplete: all pages on the device, and pages being sent to a KV connector."""
        self.loads.cancel()
        self.pool.forget_all()
        self.loads.invalidate()

    def preempt_if_due(self, request: Request) -> None:
        """Preempt a running request marked `should_preempt`, if none of its rows is in flight."""
        if request.should_preempt and not request.num_rows_in_flight:
            self.running.remove(request)
            self._preempt(request)

    def commit_chunk(self, request: Request) -> None:
        """Account for a computed prompt chunk, after `num_computed_tokens` has been updated."""
        left = len(request.token_ids) - request.num_computed_tokens
        self.pages.seal(request)
        if left:
            self._set_backlog(request, left)
        else:
            self._clear_backlog(request)

    def schedule(self, now: float, num_drafts: int = 0) -> RankPlan:
        """Plan decodes, then running prompts, then new prompts, within the token budget. Drafts do not count against it."""
        preemptions = self.num_preemptions
        self.loads.begin(now)
        decodes, prompts, computing = self._schedule_decodes(num_drafts)
        budget = self.config.max_num_batched_tokens - len(decodes)
        plan = RankPlan(decodes, [], [])
        for request in prompts:
            if budget <= 0 or len(plan.prefills) == self.config.max_prefill_rows:
                break
            # An earlier prompt may have preempted this one for its window pages.
            if request.status is Status.RUNNING and not request.should_preempt:
                budget -= self._schedule_chunk(request, budget, plan.prefills)
        if self.waiting and preemptions == self.num_preemptions:
            self._admit(budget, plan, prompts + computing, now)
        return plan

    def _schedule_decodes(self, num_drafts: int) -> tuple[list[ScheduledRow], list[Request], list[Request]]:
        """Return decode rows, requests with prompt tokens left to plan, and requests whose last prompt row is in flight; oldest first."""
        decodes, prompts, computing = list[ScheduledRow](), list[Request](), list[Request]()
        page_size = self.pool.page_size
        # `ScheduledRow(...)` is a Python function, which would take a third of this loop's time at a thousand rows a step.
        new_row = partial(tuple.__new__, ScheduledRow)
        max_length, windowed = 1 + num_drafts, self.pool.num_windows > 0
        num_batches = self.config.num_batches
        max_decodes = -(-len(self.running) // num_batches)
        for request in self.running:  # preemption removes requests from the end of the list
            if request.should_preempt:
                continue
            planned, num_tokens = request.num_computed_tokens + request.num_in_flight, len(request.token_ids)
            if num_tokens - planned > 1:
                prompts.append(request)
                continue
            if request.num_rows_in_flight:
                if request.num_computed_tokens + 1 < num_tokens:
                    computing.append(request)
                if num_batches > 1:  # its token is unknown until that step is entered
                    continue
                # The rows in flight will produce its last token.
                if num_tokens + request.num_tokens_due >= request.max_total_tokens:
                    continue
                if request.num_tokens_due and request.rules is not None and request.rules.needs_tokens:
                    continue
            if len(decodes) == max_decodes:
                continue
            # With drafts in flight, `planned` may reach its bound; nothing is written beyond it.
            num_pages = request.num_writable_pages if windowed else len(request.pages)
            is_full = planned >= num_pages * page_size
            if is_full and not self._grow(request, min(planned + 1, request.max_cached_tokens)):
                continue
            length = 1
            if num_drafts:
                self.pages.grow_for_drafts(request, planned + max_length + num_drafts)
                length = max(1, min(max_length, request.max_cached_tokens - planned))
            decodes.append(new_row((request, planned, length, True)))
            request.num_in_flight += length
            request.num_rows_in_flight += 1
            request.num_tokens_due += 1
        return decodes, prompts, computing

    def _schedule_chunk(self, request: Request, budget: int, prefills: list[ScheduledRow]) -> int:
        """Add the next chunk of a prompt and return its length; 0 if it has to wait for window pages."""
        start, num_tokens = request.num_computed_tokens + request.num_in_flight, len(request.token_ids)
        length = min(num_tokens - start, self.config.prefill_chunk, budget)
        sampled = start + length == num_tokens
        if self.pool.num_windows and not self._grow(request, start + length):
            return 0
        prefills.append(ScheduledRow(request, start, length, sampled))
        request.num_in_flight += length
        request.num_rows_in_flight += 1
        request.num_tokens_due += sampled
        return length

    def _admit(self, budget: int, plan: RankPlan, prompts: list[Request], now: float) -> None:
        """Admit waiting requests in order. The first one that does not fit blocks the rest, so none starves.

        prompts: requests being prefilled. A waiting request whose next page one of them computes is skipped: it will find the page cached.
        """
        index = num_loading = 0
        while index < min(len(self.waiting), _MAX_SKIPPED + num_loading) and self._free_slots and budget > 0:
            request = self.waiting[index]
            if request.is_loading:
                index += 1
                num_loading += 1
                continue
            names = self.pages.readable_names(request)
            cached = self.pool.find(names)
            admittance = self._look_up(request, names, cached, prompts, now)
            if admittance is Admittance.BLOCK:
                return
            if admittance is not Admittance.START:
                index += 1
                num_loading += admittance is Admittance.REMOTE
                continue
            start = self.pages.plan_start(request, names, cached, budget)
            if start.num_remaining > 1 and len(plan.prefills) == self.config.max_prefill_rows:
                return
            # 1 % of the pages stays free for running decodes, so that a new request is not preempted at once.
            headroom = min(len(self.running), self.pool.num_usable // 100)
            held = start.cached + start.shared_windows + start.copied
            if not self.pool.can_hold(held, start.num_pages + headroom, start.num_windows):
                # Release pages held for other requests before the pages held for this one.
                if self.loads.release_held(self.waiting, request) or self.loads.release_held(self.waiting):
                    continue
                return
            del self.waiting[index]
            self._start(request, start, now)
            if start.copied:
                plan.copies.append((start.copied[0], request.pages[-1]))
            if start.num_remaining == 1:
                self._clear_backlog(request)
                plan.decodes.append(ScheduledRow(request, request.num_computed_tokens, 1))
                request.num_in_flight = request.num_rows_in_flight = request.num_tokens_due = 1
                budget -= 1
            else:
                self._set_backlog(request, start.num_remaining)
                prompts.append(request)
                budget -= self._schedule_chunk(request, budget, plan.prefills)

    def _look_up(
        self, request: Request, names: list[bytes], cached: list[int], prompts: list[Request], now: float
    ) -> Admittance:
        """Return whether a waiting request starts, or waits for pages that a running prompt or the KV connector provides."""
        if len(cached) < len(names) and _is_being_computed(prompts, len(cached), names[len(cached)]):
            return Admittance.SKIP
        admittance = self.loads.look_up(request, names, cached, len(self._free_slots), now)
        if admittance is Admittance.REMOTE:
            self._set_backlog(request, len(request.token_ids) - len(names) * self.pool.page_size)
        return admittance

    def _start(self, request: Request, start: StartPages, now: float) -> None:
        """Give a waiting request its pages and a slot."""
        self.pages.take_start(request, start)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.admissions += 1
        request.drafts = ()
        self.waiting_tokens -= len(request.token_ids)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            elsewhere = self.loads.num_computed_elsewhere(request) * self.pool.page_size
            request.num_cached_tokens = max(0, request.num_computed_tokens - elsewhere)
            if self.config.prefix_caching and not request.wants_prompt_logprobs:
                self.prefix_queries += len(request.token_ids)
                self.hits.update(self.loads.hits(request))
        bisect.insort(self.running, request, key=_by_order)
        self.loads.sealed(request)
        self.loads.release(request)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate pages up to `num_tokens`, preempting newer requests. Return False if the request is preempted itself or has to wait."""
        self.pages.seal(request)
        end = self.pool.pages_for(num_tokens)
        count, windows = max(0, end - len(request.pages)), self.pages.num_missing_windows(request, end)
        while not self.pool.can_hold((), count, windows):
            if self.loads.release_held(self.waiting):
                continue
            if self.pool.num_free_windows < windows and request.num_rows_in_flight:
                return False  # it can release window pages once these rows are done
            victim = self.running[-1]
            if victim.num_rows_in_flight:
                victim.should_preempt = True
                return False
            self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(count)
        request.window_pages += self.pool.allocate(windows, windows=True)
        return True

    def _preempt(self, request: Request) -> None:
        self.pages.seal(request)
        self._free(request)
        self._clear_backlog(request)
        request.status = Status.WAITING
        request.should_preempt = False
        self.loads.preempted(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._set_backlog(request, self.num_uncached_tokens(request))
        names = self.pages.readable_names(request)
        self.promised.update(names)
        request.num_promised = len(names)
        bisect.insort(self.waiting, request, key=_by_order)
        self.waiting_tokens += len(request.token_ids)

    def _free(self, request: Request) -> None:
        self.pages.release(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _clear_backlog(self, request: Request) -> None:
        """Remove a request from `backlog` and `promised`: its prompt is computed, or it has ended."""
        self._set_backlog(request, 0)
        for name in request.page_hashes[: request.num_promised]:
            if self.promised[name] == 1:
                del self.promised[name]
            else:
                self.promised[name] -= 1
        request.num_promised = 0

    def _set_backlog(self, request: Request, tokens: int) -> None:
        self.backlog += tokens - request.backlog
        request.backlog = tokens


def _is_being_computed(prompts: list[Request], index: int, name: bytes) -> bool:
    """Whether one of `prompts` will compute the page with this index and hash."""
    return any(
        prompt.num_sealed_pages <= index < len(prompt.page_hashes) and prompt.page_hashes[index] == name
        for prompt in prompts
    )

"""`Rank`: the requests of one DP rank, waiting and running, and what it computes in the next step."""

import bisect
from collections import Counter
from functools import partial
from operator import attrgetter

from dsjax.engine.pages import PagePool, extend_hashes
from dsjax.engine.plan import RankPlan, ScheduledRow
from dsjax.engine.request import Request, Status

_by_order = attrgetter("order")
_MOST_PASSED = 16
"""Requests in the queue that a step looks past because others are computing what they will find cached."""


class Rank:
    """One attention replica's queue, pages and slots.

    A request holds pages for *all* its known tokens from its admission on, so prefill never runs out in the middle;
    only decodes ask for more, one page at a time. When none is left, the newest running request is preempted: it
    gives everything back, and is recomputed when its turn comes again, except what the prefix cache still has. `running` is
    sorted by `order`, so the newest is always its last element.

    Attributes:
        load: known tokens of all requests.
        waiting_tokens: known tokens of the waiting ones.
        backlog: tokens to be computed before every request here makes its next one: of waiting requests those that are
            neither cached nor promised, of prompts under way the rest.
        promised: hashes of the pages that requests here are to compute for their prompts; for each, by how many requests.
        prefix_queries, prefix_hits: known tokens of the requests admitted for the first time, and how many were cached.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk: int,
        max_prefill_rows: int,
        prefix_caching: bool = True,
    ):
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk = prefill_chunk
        self.max_prefill_rows = max_prefill_rows
        self.prefix_caching = prefix_caching
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.load = self.waiting_tokens = self.backlog = 0
        self.promised: Counter[bytes] = Counter()
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._filling: list[Request] = []

    def uncached(self, request: Request) -> int:
        """Tokens that this rank would have to compute for a request's next one, given what is cached and promised."""
        found = self.pool.count(self._readable(request), self.promised)
        return len(request.token_ids) - found * self.pool.page_size

    def add(self, request: Request) -> None:
        """Queue a request at its place by `order`. `load` counts its tokens from now on."""
        self.load += len(request.token_ids)
        self._queue(request)

    def remove(self, request: Request) -> None:
        """Forget a request, waiting or running, and take back what it holds."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._seal(request)
            self._take_back(request)
        else:
            self.waiting.remove(request)
            self.waiting_tokens -= len(request.token_ids)
        self._settle(request)
        self.load -= len(request.token_ids)

    def remove_finished(self, finished: list[Request]) -> None:
        """Forget running requests that have just become `FINISHED`."""
        self.running = [request for request in self.running if request.status is Status.RUNNING]
        for request in finished:
            self._seal(request)
            self._take_back(request)
            self._settle(request)
            self.load -= len(request.token_ids)

    def spoil(self, request: Request) -> None:
        """A request's values are not finite: nobody may find any of its pages any more.

        What it read of others was finite when it was computed. Yet should it be at fault, it must not fail the next one too.
        """
        self.pool.forget(request.pages)
        request.num_sealed_pages = len(request.pages)  # none is left to be sealed

    def enter_chunk(self, request: Request) -> None:
        """Note that a prompt has come further; `num_computed_tokens` says how far."""
        left = len(request.token_ids) - request.num_computed_tokens
        self._seal(request)
        if left:
            self._set_backlog(request, left)
        else:
            self._settle(request)

    def prepare(self, plan: RankPlan) -> None:
        """While a step computes: hash and allocate what the next one needs where decodes now fill a page. May be left out."""
        page_size = self.pool.page_size
        for request in self._filling:  # those of the step before, whose results are known by now
            if request.status is Status.RUNNING:
                self._seal(request)
        self._filling = [
            request
            for request, start, _ in plan.decodes
            if start + 1 == len(request.pages) * page_size and len(request.token_ids) + 1 < request.max_total_tokens
        ]
        for request in self._filling:
            if self.prefix_caching:
                extend_hashes(request, page_size)
            if self.pool.can_allocate(1):
                request.pages += self.pool.allocate(1)

    def schedule(self, now: float) -> RankPlan:
        """Decodes first, then prompts under way, then new ones, within the token budget."""
        preemptions = self.num_preemptions
        decodes, prompts = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        prefills: list[ScheduledRow] = []
        for request in prompts:
            if budget <= 0 or len(prefills) == self.max_prefill_rows:
                break
            budget -= self._schedule_chunk(request, budget, prefills)
        if self.waiting and preemptions == self.num_preemptions:
            self._admit(budget, decodes, prefills, prompts, now)
        return RankPlan(decodes, prefills)

    def _schedule_decodes(self) -> tuple[list[ScheduledRow], list[Request]]:
        """Rows for requests with one token to compute, and the requests still in their prompt; each oldest first."""
        decodes: list[ScheduledRow] = []
        prompts: list[Request] = []
        page_size = self.pool.page_size
        # `ScheduledRow(...)` is a Python function, which at a thousand rows a step would be a third of this loop.
        new_row = partial(tuple.__new__, ScheduledRow)
        for request in self.running:  # preemption shortens the list at its end, which ends this loop the sooner
            computed = request.num_computed_tokens
            if len(request.token_ids) - computed > 1:
                prompts.append(request)
            else:
                if computed == len(request.pages) * page_size and not self._grow(request):
                    break
                decodes.append(new_row((request, computed, 1)))
        return decodes, prompts

    def _schedule_chunk(self, request: Request, budget: int, prefills: list[ScheduledRow]) -> int:
        """Add the next chunk of a prompt; give its length."""
        start = request.num_computed_tokens
        length = min(len(request.token_ids) - start, self.prefill_chunk, budget)
        prefills.append(ScheduledRow(request, start, length))
        return length

    def _admit(
        self,
        budget: int,
        decodes: list[ScheduledRow],
        prefills: list[ScheduledRow],
        prompts: list[Request],
        now: float,
    ) -> None:
        """Start waiting requests in their order. The first that does not fit holds back the rest, so none starves.

        Those whose next page another prompt is just computing are passed: they find it cached when they start later.
        """
        at = 0
        while at < min(len(self.waiting), _MOST_PASSED) and self._free_slots and budget > 0:
            request = self.waiting[at]
            names = self._readable(request)
            found = self.pool.find(names)
            if len(found) < len(names) and _computes(prompts, len(found), names[len(found)]):
                at += 1
                continue
            left = len(request.token_ids) - len(found) * self.pool.page_size
            if left > 1 and len(prefills) == self.max_prefill_rows:
                break
            count = self.pool.pages_for(len(request.token_ids)) - len(found)
            # A hundredth of the pages stays free for decodes under way, lest a newcomer be preempted at once.
            headroom = min(len(self.running), self.pool.num_usable // 100)
            if not self.pool.can_hold(found, count + headroom):
                break
            del self.waiting[at]
            self._start(request, found, count, now)
            if left == 1:
                self._settle(request)
                decodes.append(ScheduledRow(request, request.num_computed_tokens, 1))
                budget -= 1
            else:
                self._set_backlog(request, left)
                prompts.append(request)
                budget -= self._schedule_chunk(request, budget, prefills)

    def _start(self, request: Request, found: list[int], count: int, now: float) -> None:
        """Give a request its slot and pages: those found in the cache, and `count` more."""
        self.pool.hold(found)
        request.pages = found + self.pool.allocate(count)
        request.num_sealed_pages = len(found)
        request.num_computed_tokens = len(found) * self.pool.page_size
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.admissions += 1
        self.waiting_tokens -= len(request.token_ids)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
            if self.prefix_caching and not request.wants_prompt_logprobs:
                self.prefix_queries += len(request.token_ids)
                self.prefix_hits += request.num_cached_tokens
        bisect.insort(self.running, request, key=_by_order)

    def _grow(self, request: Request) -> bool:
        """Get a decode its next page, preempting newer requests for it; False when it had to give way itself."""
        self._seal(request)
        while not self.pool.can_allocate(1):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        self._seal(request)
        self._take_back(request)
        self._settle(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(request)

    def _queue(self, request: Request) -> None:
        self._set_backlog(request, self.uncached(request))
        names = self._readable(request)
        self.promised.update(names)
        request.num_promised = len(names)
        bisect.insort(self.waiting, request, key=_by_order)
        self.waiting_tokens += len(request.token_ids)

    def _readable(self, request: Request) -> list[bytes]:
        """Hashes of the pages that a request may read from the cache: all full ones, but its last token is left to compute."""
        if not self.prefix_caching or request.wants_prompt_logprobs:
            return []
        page_size = self.pool.page_size
        return extend_hashes(request, page_size)[: (len(request.token_ids) - 1) // page_size]

    def _seal(self, request: Request) -> None:
        """Let others find the pages that are full and computed. Every result so far was finite, or it would have failed."""
        if not self.prefix_caching:
            return
        sealed, full = request.num_sealed_pages, request.num_computed_tokens // self.pool.page_size
        if full > sealed:
            names = extend_hashes(request, self.pool.page_size)
            for page, name in zip(request.pages[sealed:full], names[sealed:full], strict=True):
                self.pool.seal(page, name)
            request.num_sealed_pages = full

    def _take_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages = []
        request.num_sealed_pages = 0
        request.slot = -1

    def _settle(self, request: Request) -> None:
        """Its prompt is computed, or it is gone: it promises no page and is no backlog."""
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


def _computes(prompts: list[Request], index: int, name: bytes) -> bool:
    """Whether one of these requests is about to compute the page of this place and hash."""
    return any(
        other.num_sealed_pages <= index < len(other.page_hashes) and other.page_hashes[index] == name
        for other in prompts
    )

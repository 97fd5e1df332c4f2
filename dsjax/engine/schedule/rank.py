"""`Rank`: schedules the waiting and running requests of one DP rank."""

import bisect
from collections import Counter
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from dsjax.engine.schedule.page_loads import Admittance, PageLoads
from dsjax.engine.schedule.pages import PagePool, extend_hashes, window_name
from dsjax.engine.schedule.request import RankPlan, Request, ScheduledRow, Status
from dsjax.engine.schedule.scheduler_config import SchedulerConfig

_by_order = attrgetter("order")
_MOST_SKIPPED = 16
"""Maximum waiting requests that a step skips because others compute their pages. Requests whose pages are being loaded do not count."""


class RankLoad(NamedTuple):
    """Load and free room of one DP rank.

    Attributes:
        waiting_tokens: known tokens of the waiting requests.
        used_pages: pages held by requests. cached_pages: pages only in the prefix cache; they count as free. usable_pages: all pages.
        cost: the router's cost of sending a new request here, without the request's own tokens, in tokens to compute (docs/scheduler.md).
        hits: cached tokens of requests at their first admission, by tier (`device`, and the KV connector's tiers). queried: all tokens of
            these requests.
        tiers: the KV connector's counts for this rank, by tier.
    """

    rank: int
    running: int
    waiting: int
    waiting_tokens: int
    used_pages: int
    cached_pages: int
    usable_pages: int
    cost: float
    hits: Mapping[str, int] = {"device": 0}
    queried: int = 0
    tiers: Mapping[str, Any] = {}


class Rank:
    """The queue, pages and slots of one DP rank.

    At admission a request gets pages for *all* its known tokens, so only decodes allocate more. When no page is left, the newest
    running request is preempted: it releases everything and is recomputed later, except for what the prefix cache still has. `running` is
    sorted by `order`.

    A step is planned while the previous one computes, so a request may have a row in flight ("under way": planned, result not entered).
    The plan then assumes an upper bound of its tokens (`Request.num_in_flight`). A request releases its pages and slot only when none of
    its rows is in flight, so that no late write can reach a page's next owner.

    Attributes:
        dirty: released pages that may hold non-finite values. The reader clears the pages and then the list.
        load, waiting_tokens: known tokens of all requests, and of the waiting ones.
        backlog: tokens to compute before every request here has its next token: uncached and not promised tokens of waiting requests,
            and the rest of the prompts being computed.
        promised: hashes of the pages that requests here will compute for their prompts, and how many requests will compute each.
        prefix_queries: known tokens of requests at their first admission. hits: how many of these tokens were cached, by tier.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig, loads: PageLoads):
        self.pool, self.config, self.loads = pool, config, loads
        self.waiting, self.running = list[Request](), list[Request]()
        self.load = self.waiting_tokens = self.backlog = 0
        self.promised: Counter[bytes] = Counter()
        self.num_preemptions = self.prefix_queries = 0
        self.hits: Counter[str] = Counter(device=0)
        self.dirty: list[int] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    def uncached(self, request: Request) -> int:
        """Return how many tokens of a request this rank would have to compute: tokens neither cached nor promised."""
        names = self.readable(request)
        found = self.pool.count(names, self.promised, self.loads)
        cached = self.pool.usable(names, found, self.loads, self.promised)
        return len(request.token_ids) - cached * self.pool.page_size

    def add(self, request: Request) -> None:
        """Queue a request, sorted by `order`."""
        self.load += len(request.token_ids)
        self._queue(request)

    def remove(self, request: Request) -> None:
        """Remove a waiting or running request. It releases pages and slot once none of its rows is in flight."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._seal(request)
            if not request.num_rows_under_way:
                self._take_back(request)
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
            self._seal(request)
            if not request.num_rows_under_way:
                self._take_back(request)
            self._clear_backlog(request)
            self.load -= len(request.token_ids)

    def drop(self, request: Request, finite: bool) -> None:
        """Drop the result of a row whose request has ended; release the request's pages and slot after its last row."""
        if not finite and request.num_clean_pages is None:
            request.num_clean_pages = request.num_sealed_pages
        if not request.num_rows_under_way:
            self._take_back(request)

    def invalidate_request(self, request: Request) -> None:
        """Drop all pages of a request with non-finite values from the prefix cache, even shared ones, so that no other request fails."""
        request.num_clean_pages = request.num_sealed_pages
        pages = request.pages + request.window_pages
        self.loads.forget(self.pool.names_of(pages))
        self.pool.forget(pages)
        request.num_sealed_pages = len(request.pages)  # so that `_seal` skips them

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

    def leave_if_due(self, request: Request) -> None:
        """Preempt a running request marked `must_leave`, if none of its rows is in flight."""
        if request.must_leave and not request.num_rows_under_way:
            self.running.remove(request)
            self._preempt(request)

    def enter_chunk(self, request: Request) -> None:
        """Account for a computed prompt chunk, after `num_computed_tokens` has been updated."""
        left = len(request.token_ids) - request.num_computed_tokens
        self._seal(request)
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
            if request.status is Status.RUNNING and not request.must_leave:
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
        batches = self.config.num_batches
        room = len(self.running) if batches == 1 else -(-len(self.running) // batches)
        for request in self.running:  # preemption removes requests from the end of the list
            if request.must_leave:
                continue
            planned, known = request.num_computed_tokens + request.num_in_flight, len(request.token_ids)
            if known - planned > 1:
                prompts.append(request)
                continue
            if request.num_rows_under_way:
                if request.num_computed_tokens + 1 < known:
                    computing.append(request)
                if batches > 1:  # its token is unknown until that step is entered
                    continue
                # The rows in flight will produce its last token.
                if known + request.num_due >= request.max_total_tokens:
                    continue
                if request.num_due and request.rules is not None and request.rules.needs_tokens:
                    continue
            if len(decodes) == room:
                continue
            # With drafts in flight, `planned` may reach its bound; nothing is written beyond it.
            full = planned >= len(request.pages) * page_size
            if windowed:
                full = planned >= request.num_writable_pages * page_size
            if full and not self._grow(request, min(planned + 1, request.max_cached_tokens)):
                continue
            length = 1
            if num_drafts:
                self._grow_for_drafts(request, planned + max_length + num_drafts)
                length = max(1, min(max_length, request.max_cached_tokens - planned))
            decodes.append(new_row((request, planned, length, True)))
            request.num_in_flight += length
            request.num_rows_under_way += 1
            request.num_due += 1
        return decodes, prompts, computing

    def _schedule_chunk(self, request: Request, budget: int, prefills: list[ScheduledRow]) -> int:
        """Add the next chunk of a prompt and return its length; 0 if it has to wait for window pages."""
        start, known = request.num_computed_tokens + request.num_in_flight, len(request.token_ids)
        length = min(known - start, self.config.prefill_chunk, budget)
        sampled = start + length == known
        if self.pool.num_windows and not self._grow(request, start + length):
            return 0
        prefills.append(ScheduledRow(request, start, length, sampled))
        request.num_in_flight += length
        request.num_rows_under_way += 1
        request.num_due += sampled
        return length

    def _admit(self, budget: int, plan: RankPlan, prompts: list[Request], now: float) -> None:
        """Admit waiting requests in order. The first one that does not fit blocks the rest, so none starves.

        prompts: requests being prefilled. A waiting request whose next page one of them computes is skipped: it will find the page cached.
        """
        at = num_loading = 0
        while at < min(len(self.waiting), _MOST_SKIPPED + num_loading) and self._free_slots and budget > 0:
            request = self.waiting[at]
            if request.is_loading:
                at += 1
                num_loading += 1
                continue
            names = self.readable(request)
            cached = self.pool.find(names)
            if len(cached) < len(names) and _computes(prompts, len(cached), names[len(cached)]):
                at += 1
                continue
            admission = self.loads.look(request, names, cached, len(self._free_slots), now)
            if admission is not Admittance.START:
                if admission is Admittance.BLOCK:
                    break
                if admission is Admittance.REMOTE:
                    self._set_backlog(request, len(request.token_ids) - len(names) * self.pool.page_size)
                    num_loading += 1
                at += 1
                continue
            border = self.pool.usable(names, len(cached))
            request.missed_border = len(cached) if border < len(cached) else 0
            cached = cached[:border]
            at_border = [window_name(names[border - 1])] if border and self.pool.num_windows else []
            last_page = self._last_page(request) if len(cached) == len(names) else []
            left = 1 if last_page else len(request.token_ids) - len(cached) * self.pool.page_size
            if left > 1 and len(plan.prefills) == self.config.max_prefill_rows:
                break
            count = self.pool.pages_for(len(request.token_ids)) - len(cached)
            # 1 % of the pages stays free for running decodes, so that a new request is not preempted at once.
            headroom = min(len(self.running), self.pool.num_usable // 100)
            windows = self.pool.pages_for(min(left, self.config.prefill_chunk, budget)) if self.pool.num_windows else 0
            shared = self.pool.find(at_border)
            if not self.pool.can_hold(cached + shared + last_page, count + headroom, windows):
                # Release pages held for other requests before the pages held for this one.
                if self.loads.release_held(self.waiting, request) or self.loads.release_held(self.waiting):
                    continue
                break
            del self.waiting[at]
            for name in at_border:  # another request may have the same prefix
                self.pool.keep(name)
            self.pool.hold(shared)
            request.window_pages = shared + self.pool.allocate(windows, windows=True)
            request.first_window = len(cached) - len(shared)
            self._start(request, cached, last_page, count, now)
            self.loads.release(request)
            if last_page:
                plan.copies.append((last_page[0], request.pages[-1]))
            if left == 1:
                self._clear_backlog(request)
                start = request.num_computed_tokens
                plan.decodes.append(ScheduledRow(request, start, 1))
                request.num_in_flight = request.num_rows_under_way = request.num_due = 1
                budget -= 1
            else:
                self._set_backlog(request, left)
                prompts.append(request)
                budget -= self._schedule_chunk(request, budget, plan.prefills)

    def _last_page(self, request: Request) -> list[int]:
        """Return a list with the cached page that the request's last token fills, or an empty list. The token is recomputed in a copy.

        Always empty with window pages, because they do not keep the state before their last token.
        """
        page_size = self.pool.page_size
        if (
            len(request.token_ids) % page_size
            or self.pool.num_windows
            or not self.config.prefix_caching
            or request.wants_prompt_logprobs
        ):
            return []
        return self.pool.find(extend_hashes(request, page_size)[-1:])

    def _start(self, request: Request, cached: list[int], last_page: list[int], count: int, now: float) -> None:
        """Give a request a slot, the `cached` pages and `count` new ones. The last new page is for a copy of `last_page`, if any."""
        self.pool.hold(cached)
        # Held only so that `allocate` does not take it. The copy runs before everything planned later.
        self.pool.hold(last_page)
        request.pages = cached + self.pool.allocate(count)
        self.pool.release(last_page)
        request.num_sealed_pages = len(cached)
        request.num_computed_tokens = len(request.token_ids) - 1 if last_page else len(cached) * self.pool.page_size
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

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate pages up to `num_tokens`, preempting newer requests. Return False if the request is preempted itself or has to wait."""
        self._seal(request)
        end = self.pool.pages_for(num_tokens)
        count, windows = max(0, end - len(request.pages)), self._windows_to(request, end)
        while not self.pool.can_hold((), count, windows):
            if self.loads.release_held(self.waiting):
                continue
            if self.pool.num_free_windows < windows and request.num_rows_under_way:
                return False  # it can release window pages once these rows are done
            victim = self.running[-1]
            if victim.num_rows_under_way:
                victim.must_leave = True
                return False
            self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(count)
        request.window_pages += self.pool.allocate(windows, windows=True)
        return True

    def _windows_to(self, request: Request, end: int) -> int:
        """Return how many window pages a request lacks for its pages up to number `end` (exclusive)."""
        return max(0, end - request.num_writable_pages) if self.pool.num_windows else 0

    def _grow_for_drafts(self, request: Request, num_tokens: int) -> None:
        """Allocate pages for drafts if they are free. No request is preempted for drafts."""
        end = self.pool.pages_for(min(num_tokens, request.max_cached_tokens))
        wanted = end - len(request.pages)
        if 0 < wanted <= self.pool.num_free:
            request.pages += self.pool.allocate(wanted)
        if windows := self._windows_to(request, min(end, len(request.pages))):
            self._seal(request)
            request.window_pages += self.pool.allocate(min(windows, self.pool.num_free_windows), windows=True)

    def _preempt(self, request: Request) -> None:
        self._seal(request)
        self._take_back(request)
        self._clear_backlog(request)
        request.status = Status.WAITING
        request.must_leave = False
        self.loads.preempted(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(request)

    def _queue(self, request: Request) -> None:
        self._set_backlog(request, self.uncached(request))
        names = self.readable(request)
        self.promised.update(names)
        request.num_promised = len(names)
        bisect.insort(self.waiting, request, key=_by_order)
        self.waiting_tokens += len(request.token_ids)

    def readable(self, request: Request) -> list[bytes]:
        """Return the hashes of the pages that a request may read from the cache: full ones before its last token, which is computed."""
        if not self.config.prefix_caching or request.wants_prompt_logprobs:
            return []
        page_size = self.pool.page_size
        return extend_hashes(request, page_size)[: (len(request.token_ids) - 1) // page_size]

    def _seal(self, request: Request) -> None:
        """Add the full, computed pages to the prefix cache, and release the window pages that no later row reads.

        Their values are finite: a request with non-finite values would have failed.
        """
        # Accepted drafts may reach beyond the token that ended the request.
        computed = min(request.num_computed_tokens, len(request.token_ids))
        page_size, sealed = self.pool.page_size, request.num_sealed_pages
        full = computed // page_size
        if full > sealed and self.config.prefix_caching:
            names, borders = extend_hashes(request, page_size), _kept_borders(request, page_size)
            self.pool.seal_of(request, sealed, request.pages[sealed:full])
            for index in range(sealed, full) if request.window_pages else ():
                name = window_name(names[index])
                self.pool.seal(request.window_pages[index - request.first_window], name)
                if index + 1 in borders:
                    self.pool.keep(name)
            request.num_sealed_pages = full
            self.loads.sealed(request)
        behind = full - 1 - request.first_window
        if behind > 0 and request.window_pages:
            self.pool.release(request.window_pages[:behind])
            del request.window_pages[:behind]
            request.first_window += behind

    def _take_back(self, request: Request) -> None:
        if request.num_clean_pages is not None:
            self.dirty += request.pages[request.num_clean_pages :]
            self.dirty += request.window_pages[max(0, request.num_clean_pages - request.first_window) :]
        for name in request.page_hashes[request.num_sealed_pages - 1 : request.num_sealed_pages]:
            self.pool.keep(window_name(name))
        self.pool.release(request.pages)
        self.pool.release(request.window_pages)
        self._free_slots.append(request.slot)
        request.pages, request.window_pages, request.first_window = [], [], 0
        request.num_sealed_pages = 0
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


def _kept_borders(request: Request, page_size: int) -> tuple[int, int]:
    """Return the borders (ends of pages, in pages) whose window page is kept because other requests are likely to continue there.

    The first is the last border before the prompt's last token, for a repetition of the prompt. The second is where this request found
    cached pages but no window page: two requests share this prefix, so a third may too. Other code keeps the window pages where a request
    continued, ended or was preempted.
    """
    return (request.num_prompt_tokens - 1) // page_size, request.missed_border


def _computes(prompts: list[Request], index: int, name: bytes) -> bool:
    """Whether one of `prompts` will compute the page with this index and hash."""
    return any(
        other.num_sealed_pages <= index < len(other.page_hashes) and other.page_hashes[index] == name
        for other in prompts
    )

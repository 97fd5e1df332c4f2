"""`Rank`: the requests of one DP rank, waiting and running, and what it computes in the next step."""

import bisect
from operator import attrgetter

from dsjax.engine.pages import PagePool
from dsjax.engine.plan import RankPlan, ScheduledRow
from dsjax.engine.request import Request, Status

_by_order = attrgetter("order")


class Rank:
    """One attention replica's queue, pages and slots.

    A request holds pages for *all* its known tokens from its admission on, so prefill never runs out in the middle;
    only decodes ask for more, one page at a time. When none is left, the newest running request is preempted: it
    gives everything back, and is recomputed from its first token when its turn comes again. `running` is sorted by
    `order`, so the newest is always its last element.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk: int,
        max_prefill_rows: int,
    ):
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk = prefill_chunk
        self.max_prefill_rows = max_prefill_rows
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.load = 0
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request at its place by `order`. `load` counts its tokens from now on."""
        bisect.insort(self.waiting, request, key=_by_order)
        self.load += len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Forget a request, waiting or running, and take back what it holds."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._take_back(request)
        else:
            self.waiting.remove(request)
        self.load -= len(request.token_ids)

    def remove_finished(self, finished: list[Request]) -> None:
        """Forget running requests that have just become `FINISHED`."""
        self.running = [request for request in self.running if request.status is Status.RUNNING]
        for request in finished:
            self._take_back(request)
            self.load -= len(request.token_ids)

    def schedule(self, now: float) -> RankPlan:
        """Decodes first, then prompts under way, then new ones, within the token budget."""
        preemptions = self.num_preemptions
        decodes, partial = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        prefills: list[ScheduledRow] = []
        for request in partial:
            if budget <= 0 or len(prefills) == self.max_prefill_rows:
                break
            budget -= self._schedule_chunk(request, budget, prefills)
        if self.waiting and preemptions == self.num_preemptions:
            self._admit(budget, decodes, prefills, now)
        return RankPlan(decodes, prefills)

    def _schedule_decodes(self) -> tuple[list[ScheduledRow], list[Request]]:
        """Rows for requests with one token to compute, and the requests still in their prompt; each oldest first."""
        decodes: list[ScheduledRow] = []
        partial: list[Request] = []
        page_size = self.pool.page_size
        for request in self.running:  # preemption shortens the list at its end, which ends this loop the sooner
            computed = request.num_computed_tokens
            if len(request.token_ids) - computed > 1:
                partial.append(request)
            else:
                if computed == len(request.pages) * page_size and not self._grow(request):
                    break
                decodes.append(ScheduledRow(request, computed, 1))
        return decodes, partial

    def _schedule_chunk(self, request: Request, budget: int, prefills: list[ScheduledRow]) -> int:
        """Add the next chunk of a prompt; give its length."""
        start = request.num_computed_tokens
        length = min(len(request.token_ids) - start, self.prefill_chunk, budget)
        prefills.append(ScheduledRow(request, start, length))
        return length

    def _admit(self, budget: int, decodes: list[ScheduledRow], prefills: list[ScheduledRow], now: float) -> None:
        """Start waiting requests in their order. The first that does not fit holds back the rest, so none starves."""
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting[0]
            one_token = len(request.token_ids) == 1
            if not one_token and len(prefills) == self.max_prefill_rows:
                break
            count = self.pool.pages_for(len(request.token_ids))
            # A hundredth of the pages stays free for decodes under way, lest a newcomer be preempted at once.
            headroom = min(len(self.running), self.pool.num_usable // 100)
            if not self.pool.can_allocate(count + headroom):
                break
            del self.waiting[0]
            request.pages = self.pool.allocate(count)
            request.slot = self._free_slots.pop()
            request.status = Status.RUNNING
            request.admissions += 1
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
            bisect.insort(self.running, request, key=_by_order)
            if one_token:
                decodes.append(ScheduledRow(request, 0, 1))
                budget -= 1
            else:
                budget -= self._schedule_chunk(request, budget, prefills)

    def _grow(self, request: Request) -> bool:
        """Get a decode its next page, preempting newer requests for it; False when it had to give way itself."""
        while not self.pool.can_allocate(1):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.pool.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        self._take_back(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=_by_order)

    def _take_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages = []
        request.slot = -1

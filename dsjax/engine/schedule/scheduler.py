"""`Scheduler`: chooses the tokens that each DP rank computes in the next step. `Router`: chooses a request's rank."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.schedule.page_events import Event, PageEvents
from dsjax.engine.schedule.page_loads import SourcedPages
from dsjax.engine.schedule.page_source import PageSource
from dsjax.engine.schedule.pages import PagePool
from dsjax.engine.schedule.rank import Rank, RankLoad
from dsjax.engine.schedule.request import FinishReason, Request, ScheduledRow, Status, StepPlan
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig

CONTEXT_WEIGHT = 1 / 16
"""Cost of one token of running context, in tokens to compute. In V3 a decode spends 1/4,300 of a token's compute on reading one
context token; over about 270 decodes that is 1/16."""
REQUEST_WEIGHT = 32
"""Cost of one more row in every step, in tokens to compute."""
MAX_SESSIONS = 65_536
"""Maximum number of remembered sessions; the least recently used one is forgotten first."""


class Update(NamedTuple):
    """A step's result for one request."""

    request: Request
    result: RowResult | None  # cut off after the token that ended the request; None if the request was aborted
    finish_reason: FinishReason | None


class Scheduler:
    """Gives requests to ranks and plans each step.

    The caller repeats `plan = schedule(now)`, computes the plan, and commits the results with `update(plan, results, now)`. It may plan
    ahead before it commits results. Times are seconds of any clock; the planner's simulator has a virtual one.

    source: KV connector; None if pages are only on the devices. page_events: whether to collect events for `take_page_events`.

    Attributes:
        choose_drafts: returns the number of drafts per row in the next step; None to use `SpeculativeConfig.drafts`.
    """

    def __init__(
        self, config: SchedulerConfig, num_ranks: int, *, source: PageSource | None = None, page_events: bool = False
    ):
        self.config, self._is_sourced, self.source = config, source is not None, source or PageSource()
        self.events = PageEvents(num_ranks, config.page_size) if page_events else None
        sizes = config.pages_per_rank, config.page_size
        windows = {"num_windows": config.windows_per_rank}
        pools = [PagePool(*sizes, self.events, rank, **windows) for rank in range(num_ranks)]
        self.pages = SourcedPages(self.source, pools)
        self.ranks = [Rank(pool, config, loads) for pool, loads in zip(pools, self.pages.ranks, strict=True)]
        self._router = Router(self.ranks)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self.choose_drafts: Callable[[], int] | None = None

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of the waiting requests."""
        return sum(rank.waiting_tokens for rank in self.ranks)

    @property
    def has_work(self) -> bool:
        """Whether a step must be planned: a request is unfinished, or the KV connector has work."""
        return bool(self._requests) or self.source.has_work()

    def take_page_events(self) -> list[tuple[int, list[Event]]]:
        """Take (rank, page events) for each rank that has events."""
        return [] if self.events is None else self.events.take()

    def loads(self) -> list[RankLoad]:
        """Return the load and free capacity of each rank."""
        return [
            RankLoad(
                rank=index,
                running=len(rank.running),
                waiting=len(rank.waiting),
                waiting_tokens=rank.waiting_tokens,
                used_pages=rank.pool.num_used,
                cached_pages=rank.pool.num_cached,
                usable_pages=rank.pool.num_usable,
                cost=current_cost(rank),
                hits=dict(rank.hits),
                queried=rank.prefix_queries,
                tiers=self.source.counts(index),
            )
            for index, rank in enumerate(self.ranks)
        ]

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache. Requests keep their pages."""
        for rank in self.ranks:
            rank.flush()

    def add(self, request: Request) -> None:
        """Queue a request. Raises `AdmissionError` if it could never finish, `ValueError` if an unfinished request has the same id."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        priority = request.options.priority if self.config.policy == "priority" else 0
        request.order = (priority, request.arrival_time, self._arrivals)
        self._arrivals += 1
        _check_fits(request, self.config)
        self.source.added(request)
        self._requests[request.request_id] = request
        self._assign(request)

    def _assign(self, request: Request) -> None:
        request.rank = self._router.choose(request)
        self.ranks[request.rank].add(request)

    def abort(self, request_id: str, now: float = 0.0) -> Update | None:
        """End a request and return its update; None if it is unknown or finished. Its pages stay until none of its rows is in flight."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.ranks[request.rank].remove(request)
        self.source.ended(request)
        request.finish(FinishReason.ABORT, now)
        return Update(request, None, FinishReason.ABORT)

    def successor(
        self, config: SchedulerConfig, num_ranks: int, parked: Sequence[Request] = ()
    ) -> tuple["Scheduler", list[tuple[Request, AdmissionError]]]:
        """Return a scheduler for a new executor with all requests that fit, and the requests that do not fit, with reasons.

        `parked` requests are added. Running requests wait again in their old order, as if preempted. Requests without `max_tokens` may
        fill the new cache. The KV connector has forgotten the requests that do not fit. Do not use this scheduler any more.
        """
        source = self.source if self._is_sourced else None
        new = Scheduler(config, num_ranks, source=source, page_events=self.events is not None)
        new._arrivals = self._arrivals
        refused: list[tuple[Request, AdmissionError]] = []
        for request in sorted([*self._requests.values(), *parked], key=lambda request: request.order):
            ran, was_here = request.status is Status.RUNNING, request.request_id in self._requests
            request.reset()
            try:
                _check_fits(request, config)
            except AdmissionError as error:
                if was_here:
                    self.source.ended(request)
                refused.append((request, error))
                continue
            if not was_here:
                self.source.added(request)
            new._requests[request.request_id] = request
            new._assign(request)
            new.ranks[request.rank].num_preemptions += ran
        return new, refused

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plan the next step, even while the previous one computes. The plan is empty if all work has to wait for the previous results."""
        num_drafts = self._num_drafts()
        self.source.begin_step(now)
        ranks = [rank.schedule(now, num_drafts) for rank in self.ranks]
        after_prompts = 0 if self.config.speculation is None else self.config.speculation.after_prompts
        return StepPlan(ranks, num_drafts, self.pages.commands() if self._is_sourced else (), after_prompts)

    def landed(self, rank: int, numbers: Iterable[int], ok: bool, now: float = 0.0) -> None:
        """Enter pages that the KV connector has brought to a rank, by their landing numbers. ok: False if it could not bring them."""
        for number in numbers:
            self.ranks[rank].loads.landed(number, ok, now)

    def take_pages_to_clear(self) -> list[list[int]] | None:
        """Take each rank's pages that must be cleared before the next step; None if there are none."""
        if not any(rank.pages.to_clear for rank in self.ranks):
            return None
        pages_to_clear = [rank.pages.to_clear for rank in self.ranks]
        for rank in self.ranks:
            rank.pages.to_clear = []
        return pages_to_clear

    def update(self, plan: StepPlan, results: Sequence[RankResults], now: float = 0.0) -> list[Update]:
        """Commit a step's results, in the order of plans. Return an `Update` for each request that got tokens, prompt scores or an error.

        Rows of requests that have ended in the meantime are dropped.
        """
        updates: list[Update] = []
        for rank, rank_plan, rank_results in zip(self.ranks, plan.ranks, results, strict=True):
            first = len(updates)
            rank.load += _commit_decodes(rank, rank_plan.decodes, rank_results.decodes, now, updates)
            rank.load += _commit_prefills(rank, rank_plan.prefills, rank_results.prefills, now, updates)
            finished = [request for request, _, reason in updates[first:] if reason is not None]
            if finished:
                rank.remove_finished(finished)
                for request in finished:
                    del self._requests[request.request_id]
                    self.source.ended(request)
        return updates

    def withdraw(self, plan: StepPlan) -> None:
        """Withdraw a plan whose dispatch failed. Its requests are recomputed, because the executor may have received a part of the plan."""
        self.source.withdrawn()
        for rank, (decodes, prefills, _) in zip(self.ranks, plan.ranks, strict=True):
            if self._is_sourced:  # some of the plan's commands may not have been executed
                rank.invalidate()
            for request, _, length, sampled in (*decodes, *prefills):
                request.num_in_flight -= length
                request.num_rows_in_flight -= 1
                request.num_tokens_due -= sampled
                request.should_preempt = True
                rank.preempt_if_due(request)

    def _num_drafts(self) -> int:
        """Return the number of drafts per row in the next step."""
        if self.choose_drafts is not None:
            return self.choose_drafts()
        if self.config.speculation is None:
            return 0
        num_requests = max(len(rank.running) + len(rank.waiting) for rank in self.ranks)
        return self.config.speculation.drafts(max(1, min(num_requests, self.config.max_num_seqs)))


def _check_fits(request: Request, config: SchedulerConfig) -> None:
    """Raise an `AdmissionError` if a request could never finish. If the client gave no `max_tokens`, limit it to what the mesh can hold."""
    before = request.max_tokens
    if request.params.max_tokens is None:
        room = config.max_request_len - request.num_prompt_tokens
        request.set_max_tokens(max(min(room, request.max_tokens), request.num_output_tokens + 1))
    try:
        config.check_fits(request.num_prompt_tokens, request.max_tokens, request.params.max_tokens is not None)
    except AdmissionError:
        request.set_max_tokens(before)  # a later, larger mesh may hold more
        raise


def _commit_decodes(
    rank: Rank, rows: Sequence[ScheduledRow], results: Sequence[RowResult], now: float, updates: list[Update]
) -> int:
    """Commit the results of decode rows, and append their updates. Return the number of new tokens."""
    # This loop takes most of the engine's host time, so the common case is inlined and the slow call `Update(...)` avoided.
    new_update = partial(tuple.__new__, Update)
    running = Status.RUNNING
    num_new_tokens = 0
    for (request, _, length, _), result in zip(rows, results, strict=True):
        request.num_in_flight -= length
        request.num_rows_in_flight -= 1
        request.num_tokens_due -= 1
        if request.status is not running:
            rank.discard_row(request, result.finite)
            continue
        new_tokens, tokens, reason = result[0], request.token_ids, None
        request.num_computed_tokens += len(new_tokens)
        if (
            len(new_tokens) == 1
            and new_tokens[0] not in request.stop_ids
            and len(tokens) + 1 < request.max_total_tokens
            and request.first_token_time is not None
            and result.finite
            and result.error is None
        ):
            tokens.append(new_tokens[0])
            num_new_tokens += 1
        else:
            num_before = len(tokens)
            result, reason = _commit_tokens(rank, request, result, now)
            num_new_tokens += len(tokens) - num_before
        request.drafts = result.drafts
        updates.append(new_update((request, result, reason)))
        if request.should_preempt and reason is None:
            rank.preempt_if_due(request)
    return num_new_tokens


def _commit_prefills(
    rank: Rank, rows: Sequence[ScheduledRow], results: Sequence[RowResult], now: float, updates: list[Update]
) -> int:
    """Commit the results of prefill rows, and append their updates. Return the number of new tokens."""
    num_new_tokens = 0
    for row, result in zip(rows, results, strict=True):
        request = row.request
        request.num_in_flight -= row.length
        request.num_rows_in_flight -= 1
        request.num_tokens_due -= row.sampled
        if request.status is not Status.RUNNING:
            rank.discard_row(request, result.finite)
            continue
        num_before = len(request.token_ids)
        update = _commit_prefill(rank, row, result, now)
        num_new_tokens += len(request.token_ids) - num_before
        if update is not None:
            updates.append(update)
        if request.status is Status.RUNNING:
            rank.preempt_if_due(request)
    return num_new_tokens


def _commit_prefill(rank: Rank, row: ScheduledRow, result: RowResult, now: float) -> Update | None:
    """Commit the result of a prefill row. Return an update; None if the row has no token, no scores and no error."""
    request, start, length, sampled = row
    if not result.finite:
        _, reason = _commit_tokens(rank, request, result, now)
        return Update(request, result, reason)
    request.num_computed_tokens = start + length
    rank.commit_chunk(request)
    if result.prompt_scores is not None:
        # After a preemption the prompt is scored again: keep only the new scores.
        new = result.prompt_scores[max(0, request.num_prompt_logprobs - start) :]
        request.num_prompt_logprobs = max(request.num_prompt_logprobs, start + len(result.prompt_scores))
        result = result._replace(prompt_scores=new)
    if sampled:
        result, reason = _commit_tokens(rank, request, result, now)
        request.drafts = result.drafts
        return Update(request, result, reason)
    return Update(request, result, None) if result.prompt_scores else None


def _commit_tokens(
    rank: Rank, request: Request, result: RowResult, now: float
) -> tuple[RowResult, FinishReason | None]:
    """Append tokens up to the one that ends the request, or fail it. Return the result cut off there, and the finish reason."""
    tokens, reason = request.token_ids, None
    for count, token_id in enumerate(result.token_ids, start=1):
        tokens.append(token_id)
        if request.first_token_time is None:
            request.first_token_time = now
        reason = request.finish_reason_after(token_id)
        if reason is not None:
            scores = None if result.scores is None else result.scores[:count]
            if not result.finite:  # non-finite values in tokens after the end
                rank.pages.invalidate(request)
            result = result._replace(token_ids=result.token_ids[:count], scores=scores, finite=True, error=None)
            break
    else:
        if not result.finite or result.error is not None:
            reason = FinishReason.ERROR
            if not result.finite:
                rank.pages.invalidate(request)
    if reason is not None:
        request.finish(reason, now)
    return result, reason


class Router:
    """Sends each request to the cheapest rank: the cost is the request's uncached tokens there plus `current_cost`.

    Ranks without a free slot or free pages for the request come last. Ties go to the lowest rank. A session stays on its rank, unless that
    rank has a queue longer than all its slots while another rank has a free slot. `RequestOptions.dp_rank` overrides the choice if the
    mesh has that rank.
    """

    def __init__(self, ranks: Sequence[Rank]):
        self._ranks = ranks
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, request: Request) -> int:
        """Choose the rank of a new request, and remember it for the request's session."""
        options = request.options
        if options.dp_rank is not None and 0 <= options.dp_rank < len(self._ranks):
            return options.dp_rank
        if options.session is None:
            return self._cheapest(request)
        pinned = self._sessions.pop(options.session, None)
        if pinned is None or self._is_overloaded(pinned):
            pinned = self._cheapest(request)
        self._sessions[options.session] = pinned
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return pinned

    def _cheapest(self, request: Request) -> int:
        if len(self._ranks) == 1:
            return 0
        return min(range(len(self._ranks)), key=lambda index: _cost(self._ranks[index], request))

    def _is_overloaded(self, index: int) -> bool:
        rank = self._ranks[index]
        return len(rank.waiting) > rank.config.max_num_seqs and any(_has_slot(other) for other in self._ranks)


def current_cost(rank: Rank) -> float:
    """Return the cost of a rank's current work, in tokens to compute: backlog, context and rows."""
    requests = len(rank.running) + len(rank.waiting)
    context = rank.load - rank.waiting_tokens
    return rank.backlog + context * CONTEXT_WEIGHT + requests * REQUEST_WEIGHT


def _cost(rank: Rank, request: Request) -> tuple[bool, float]:
    """Return whether a rank has no room for a request, and the request's cost there."""
    num_uncached = rank.num_uncached_tokens(request)
    free_tokens = rank.pool.num_free * rank.pool.page_size
    is_full = not _has_slot(rank) or free_tokens < rank.backlog + num_uncached
    return is_full, num_uncached + current_cost(rank)


def _has_slot(rank: Rank) -> bool:
    return len(rank.running) + len(rank.waiting) < rank.config.max_num_seqs

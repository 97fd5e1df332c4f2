"""`EngineCore`: the loop body. Plan a step, compute it, enter its results."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dsjax.engine.plan import Runner, StepPlan
from dsjax.engine.request import Request
from dsjax.engine.scheduler import Scheduler, SchedulerConfig, Update
from dsjax.engine.stats import RankLoad, StepStats


class _Totals(NamedTuple):
    """What the scheduler has counted since its start."""

    preemptions: int
    prefix_queries: int
    prefix_hits: int


class _LastStep(NamedTuple):
    """A step that has ended: when it began, was planned, launched, computed, entered; and the totals before it."""

    plan: StepPlan
    num_non_finite: int
    times: tuple[float, float, float, float, float]
    before: _Totals


class EngineCore:
    """Scheduler and runner together. Everything here happens in one thread; text is made elsewhere.

    While the device computes a step, the host does what does not depend on its tokens: it hashes and allocates the pages
    that the next step needs, and does what it is given to do `meanwhile`, such as taking new requests. A request aborted
    meanwhile keeps its pages until the results are entered, because the runner may still have to clear them.
    """

    def __init__(self, runner: Runner, scheduler_config: SchedulerConfig):
        self.runner = runner
        self.scheduler = Scheduler(scheduler_config, runner.limits.num_ranks)
        self._computing = False
        self._afterwards: list[Callable[[], object]] = []
        self._last: _LastStep | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.num_unfinished > 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        if self._afterwards:  # one of the same id may be about to be aborted
            self._afterwards.append(partial(self.scheduler.add, request))
        else:
            self.scheduler.add(request)

    def abort(self, request_id: str) -> Update | None:
        """End a request; its pages are free at once. While a step computes, that waits for its end, and gives None."""
        if self._computing:
            self._afterwards.append(lambda: self.scheduler.abort(request_id, time.monotonic()))
            return None
        return self.scheduler.abort(request_id, time.monotonic())

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Update]:
        """Compute one step; give what it did to each request. Returns at once where there is nothing to do.

        meanwhile: called once while the device computes. It may `add` and `abort`.
        """
        began, before = time.monotonic(), self._totals()
        plan = self.scheduler.schedule(began)
        if plan.is_empty:
            return []
        planned = time.monotonic()
        self._computing = True
        try:
            pending = self.runner.launch(plan)
            launched = time.monotonic()
            self.scheduler.prepare(plan)
            if meanwhile is not None:
                meanwhile()
            results = self.runner.collect(pending)
            computed = time.monotonic()
            updates = self.scheduler.update(plan, results, computed)
        finally:
            self._computing = False
            afterwards, self._afterwards = self._afterwards, []
            for action in afterwards:
                action()
        non_finite = sum(update.result is not None and not update.result.finite for update in updates)
        self._last = _LastStep(plan, non_finite, (began, planned, launched, computed, time.monotonic()), before)
        return updates

    def stats(self) -> StepStats | None:
        """What the last step did; None before the first."""
        if self._last is None:
            return None
        plan, num_non_finite, (began, planned, launched, computed, entered), before = self._last
        now, counts = self._totals(), self.runner.counts()
        return StepStats(
            time=entered,
            duration=entered - began,
            host_seconds={
                "plan": planned - began,
                "launch": launched - planned,
                "device": computed - launched,
                "enter": entered - computed,
            },
            num_decode_tokens=sum(len(rank.decodes) for rank in plan.ranks),
            num_prompt_tokens=sum(row.length for rank in plan.ranks for row in rank.prefills),
            num_padding_tokens=counts.num_padding_tokens,
            num_preemptions=now.preemptions - before.preemptions,
            prefix_queries=now.prefix_queries - before.prefix_queries,
            prefix_hits=now.prefix_hits - before.prefix_hits,
            num_non_finite=num_non_finite,
            compilations_after_warm_up=counts.compilations_after_warm_up,
            ranks=self.loads(),
            experts=counts.experts,
        )

    def loads(self) -> list[RankLoad]:
        """What each rank has to do, and has room for."""
        return self.scheduler.loads()

    def flush_prefix_cache(self) -> bool:
        """Forget every page that is cached; True, as nothing can prevent it. Running requests keep what they read."""
        self.scheduler.flush_prefix_cache()
        return True

    def _totals(self) -> _Totals:
        ranks = self.scheduler.ranks
        return _Totals(
            sum(rank.num_preemptions for rank in ranks),
            sum(rank.prefix_queries for rank in ranks),
            sum(rank.prefix_hits for rank in ranks),
        )

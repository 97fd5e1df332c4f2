"""`EngineCore`: the loop body. Plan a step, have it computed, enter its results: one step ahead of the device."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dsjax.engine.contract.commands import Flush, Step
from dsjax.engine.contract.executor import Executor, ExecutorLimits, RankResults
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.mesh_changer import Generation, MeshChanger
from dsjax.engine.schedule.page_source import SourceChain
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import Request, Status, StepPlan
from dsjax.engine.schedule.scheduler import Scheduler, Update
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig
from dsjax.engine.schedule.step_writer import StepWriter, clear_command
from dsjax.engine.stats import DraftCounts, StepStats

Part = TypeVar("Part", bound=Attachment)


class _UnderWay(NamedTuple):
    """A step that was launched, and when it was begun to be planned, was planned, was launched."""

    plan: StepPlan
    command: Step
    pending: Any
    times: tuple[float, float, float]


class EngineCore:
    """Scheduler and executor together, in one thread; text is made elsewhere.

    While the device computes a step, the next one is planned, written down and launched, and the results before it are entered.

    Args:
        async_scheduling: False plans a step only when the results of the one before are entered.
        attachments: the optional parts of this engine, told of steps, and asked for pages, in this order.
        generations: makes further executors; None: this one is all there is.

    Attributes:
        parked: requests that the mesh of now cannot hold, and that wait for a larger one.
        step_started: when the step under way began, on the monotonic clock; None between steps. Any thread may read it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler_config: SchedulerConfig,
        *,
        async_scheduling: bool = True,
        attachments: Sequence[Attachment] = (),
        generations: MeshChanger | None = None,
    ):
        limits = executor.limits
        self.executor, self.generations = executor, generations
        self.attachments = list(attachments)
        for part in self.attachments:
            part.start(executor, scheduler_config)
        sources = [part.source for part in self.attachments if part.source is not None]
        self.scheduler = Scheduler(
            scheduler_config,
            limits.num_ranks,
            source=SourceChain(sources) if sources else None,
            page_events=any(part.wants_page_events for part in self.attachments),
        )
        self._writer = _writer(limits)
        self._is_async = async_scheduling
        self._under_way: deque[_UnderWay] = deque()
        self.parked = ParkedRequests()
        self.step_started: float | None = None
        self._owed: list[Update] = []  # entered, and not given yet: what comes behind may fail
        self._entered = 0.0  # when the last step was
        self._stats: StepStats | None = None
        self._preemptions = 0  # at the stats before, of this scheduler
        for part in self.attachments:
            part.scheduled(self.scheduler)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, a step is under way, or an attachment has something to do."""
        return bool(self._under_way) or self.scheduler.has_work or self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether an attachment needs steps although no request is unfinished."""
        return any(part.busy for part in self.attachments)

    @property
    def rest_seconds(self) -> float | None:
        """Seconds after which to call `look` while there is nothing to compute; None: never."""
        wanted = [part.look_seconds for part in self.attachments]
        if self.parked:
            wanted.append(self.parked.look_seconds(time.monotonic()))
        return min((seconds for seconds in wanted if seconds is not None), default=None)

    def part(self, kind: type[Part]) -> Part | None:
        """The attachment of this kind; None without one."""
        return next((part for part in self.attachments if isinstance(part, kind)), None)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def park(self, request: Request, error: AdmissionError) -> list[Update]:
        """Have a request that `add` refuses with `error` wait for a larger mesh; give what became of it where it does not wait."""
        return self.parked.park(request, error, time.monotonic())

    def abort(self, request_id: str) -> Update | None:
        """End a request; None where it is unknown or has ended. Its pages are free when no step has a row of it any more."""
        now = time.monotonic()
        update = self.scheduler.abort(request_id, now) or self.parked.abort(request_id, now)
        for part in self.attachments:
            part.send()
        return update

    def look(self) -> list[Update]:
        """Let attachments take in what came from outside, and end requests that have waited too long; nothing is computed."""
        now = time.monotonic()
        for part in self.attachments:
            part.begin_step(now)
            part.send()
        return self.parked.expire(now)

    def step(
        self,
        meanwhile: Callable[[], None] | None = None,
        *,
        ahead: bool = True,
        before_change: Callable[[], None] = lambda: None,
    ) -> list[Update]:
        """Launch steps as far ahead as is allowed, wait for the oldest, and give what it did to each request.

        Returns at once where there is nothing to do, and waits for a moment where all wait for pages. Where a step fails because a process
        is gone, the core goes on without that process, or raises what the step raised.

        Args:
            meanwhile: called once while the device computes. It may `add` and `abort`.
            ahead: launch the next step before the results of this one are collected; else what comes meanwhile has a place in the next.
            before_change: called when a step has failed, before anything else.
        """
        self.step_started = time.monotonic()
        try:
            return self._step(meanwhile, ahead)
        except Exception as error:
            self.step_started = None
            before_change()
            return self._survive(error)
        finally:
            self.step_started = None

    def _step(self, meanwhile: Callable[[], None] | None, ahead: bool) -> list[Update]:
        self._stats = None
        if self.parked:
            self._owed += self.parked.expire(time.monotonic())
        most = max(2, self.scheduler.config.num_batches) if ahead and self._is_async else 1
        while len(self._under_way) < most and self._launch():
            pass
        if not self._under_way:
            for part in self.attachments:
                part.idle()
            any(part.wait() for part in self.attachments)
            return self._take_owed()
        if meanwhile is not None:
            meanwhile()
        self._enter_oldest()
        return self._take_owed()

    def finish(self) -> None:
        """Wait for the steps under way, and enter them; nothing further is launched."""
        while self._under_way:
            self._enter_oldest()

    def _take_owed(self) -> list[Update]:
        owed, self._owed = self._owed, []
        return owed

    def _enter_oldest(self) -> None:
        plan, command, pending, (began, planned, launched) = self._under_way[0]
        self.executor.wait(pending)  # what is under way behind it starts now, before anything else is done
        computed = time.monotonic()
        results = self.executor.collect(pending)
        self._under_way.popleft()  # an interrupt before leaves it to be waited for
        _follow_rules(plan, command, results)
        updates = self.scheduler.update(plan, results, computed)
        self._owed += updates
        self._clear_dirty()
        before, self._preemptions = self._preemptions, sum(rank.num_preemptions for rank in self.scheduler.ranks)
        counts, entered = self.executor.counts(), time.monotonic()
        seconds = entered - max(began, self._entered)
        for part in self.attachments:
            part.after_step(seconds, plan, updates)
        self._entered = entered
        self._stats = StepStats(
            time=entered,
            duration=entered - began,
            host_seconds={
                "plan": planned - began,
                "launch": launched - planned,
                "device": computed - launched,
                "enter": entered - computed,
            },
            num_decode_tokens=sum(1 + row.num_drafts for rank in results for row in rank.decodes),
            num_prompt_tokens=plan.num_prompt_tokens,
            num_padding_tokens=counts.num_padding_tokens,
            num_preemptions=self._preemptions - before,
            compilations_after_warm_up=counts.compilations_after_warm_up,
            ranks=self.loads(),
            experts=counts.experts,
            drafts=DraftCounts.of(results) if plan.num_drafts else None,
            parts=self.statistics(),
            page_waits=self.scheduler.pages.take_waits(),
        )

    def change(self, make: Callable[[], Generation | None]) -> list[Update]:
        """Finish the steps under way, then change the executor. Return the updates of these steps.

        make: replaces the executor; None: it has changed in place, and its caches and requests stay.
        """
        try:
            self.finish()
        except Exception as error:
            return self._survive(error)
        return self._renew(make)

    def _survive(self, error: Exception) -> list[Update]:
        """Go on after a step failed because a process is gone, or raise the error; give the updates that are owed.

        The steps under way are dropped: no token of theirs is entered, and no page that they wrote is found again.
        """
        if self.generations is None:
            raise error
        return self._renew(lambda: self.generations.after(error))

    def _renew(self, make: Callable[[], Generation | None]) -> list[Update]:
        self._under_way.clear()
        self._stats = None
        new = make()
        if new is None:
            return self._take_owed()
        self.executor = new.executor
        for part in self.attachments:
            part.start(new.executor, new.config)
        limits = new.executor.limits
        self.scheduler, refused = self.scheduler.successor(new.config, limits.num_ranks, self.parked.requests)
        self._writer = _writer(limits)
        self._preemptions = 0
        for part in self.attachments:
            part.scheduled(self.scheduler)
        self.parked.larger_is_wanted = new.larger_is_wanted
        return self._take_owed() + self.parked.renew(refused, time.monotonic())

    def stats(self) -> StepStats | None:
        """What the step did that the last call of `step` entered; None where it entered none. Counts are those since the stats before."""
        return self._stats

    def loads(self) -> list[RankLoad]:
        """What each rank has to do, and has room for."""
        return self.scheduler.loads()

    def statistics(self) -> Mapping[str, Any]:
        """What the attachments have done so far, and hold, by their names: `disk`, `transfers`, `balance`."""
        named = {part.statistics_name: part.statistics() for part in self.attachments if part.statistics_name}
        return {name: counts for name, counts in named.items() if counts is not None}

    def flush_prefix_cache(self) -> None:
        """Forget every page that is cached, but for what running requests read; without any, zero the cache's memory too."""
        self.scheduler.flush_prefix_cache()
        for part in self.attachments:
            part.flush()
        if not self.has_unfinished:
            self.executor.collect(self.executor.launch(Flush()))
            self._writer.reset()

    def _launch(self) -> bool:
        """Plan and launch one step, and what goes before it; False where there is nothing to compute now."""
        began = time.monotonic()
        for part in self.attachments:
            part.begin_step(began)
        plan = self.scheduler.schedule(began)
        for part in self.attachments:
            part.send()
            part.planned()
        self._clear_dirty()  # pages of a request that was preempted or aborted
        planned = time.monotonic()
        try:
            for command in plan.page_commands:
                self.executor.launch(command)
            if plan.is_empty:
                return False
            for part in self.attachments:
                part.before_launch(len(self._under_way))
            copies = self._writer.copies(plan)
            if copies is not None:
                self.executor.launch(copies)
            command = self._writer.write(plan)
            pending = self.executor.launch(command)
        except BaseException:  # an interrupt too: whoever goes on afterwards must not find pages that nobody gives back
            self.scheduler.withdraw(plan)
            raise
        self._under_way.append(_UnderWay(plan, command, pending, (began, planned, time.monotonic())))
        return True

    def shutdown(self) -> None:
        """End the attachments, and give back what the executor holds."""
        for part in self.attachments:
            part.close(failed=False)
        self.executor.shutdown()

    def abandon(self) -> None:
        """End the attachments after an error. The executor keeps what it holds: giving it back would wait for a failed device."""
        for part in self.attachments:
            part.close(failed=True)

    def _clear_dirty(self) -> None:
        dirty = self.scheduler.take_dirty()
        if dirty is not None:
            self.executor.launch(clear_command(dirty))


def _writer(limits: ExecutorLimits) -> StepWriter:
    return StepWriter(limits.num_ranks, limits.page_size, (limits.max_pages, limits.window_columns))


def _follow_rules(plan: StepPlan, command: Step, results: Sequence[RankResults]) -> None:
    """Let the rules of guided rows follow the tokens that were made; where a grammar cannot go on, the result says so."""
    guided = [
        rows
        for rank, told, made in zip(plan.ranks, command.ranks, results, strict=True)
        if told.guides
        for rows in ((rank.decodes, made.decodes), (rank.prefills, made.prefills))
    ]
    for rows, row_results in guided:
        for index, (row, result) in enumerate(zip(rows, row_results, strict=True)):
            request = row.request
            if request.rules is None or not row.sampled or request.status is not Status.RUNNING or not result.finite:
                continue
            count, error = request.rules.follow(result.token_ids)
            if error is not None:
                row_results[index] = result._replace(token_ids=result.token_ids[:count], error=error)

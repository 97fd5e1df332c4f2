"""`EngineCore`: the loop body. Plan a step, launch it, and enter its results, one step ahead of the device."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dsjax.engine.contract.commands import Flush, Step
from dsjax.engine.contract.executor import Executor, ExecutorLimits, RankResults
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.mesh_changer import MeshChanger, MeshEpoch
from dsjax.engine.schedule.page_source import SourceChain
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import Request, Status, StepPlan
from dsjax.engine.schedule.scheduler import Scheduler, Update
from dsjax.engine.schedule.scheduler_config import AdmissionError, SchedulerConfig
from dsjax.engine.schedule.step_writer import StepWriter, clear_command
from dsjax.engine.stats import DraftCounts, StepStats

Part = TypeVar("Part", bound=Attachment)


class _InFlight(NamedTuple):
    """A launched step."""

    plan: StepPlan
    command: Step
    pending: Any
    began: float  # time at which its planning began
    planned: float  # time at which its planning ended
    launched: float  # time at which it was launched


class EngineCore:
    """A scheduler and an executor in one thread. Text is made elsewhere.

    While the device computes a step, the core plans and launches the next one and enters the results of the previous one.

    Args:
        async_scheduling: False: plan a step only when the results of the previous one are entered.
        attachments: the engine plugins. The scheduler asks their page sources in this order.
        mesh_changer: makes the executors of other meshes; None: the mesh is fixed.

    Attributes:
        parked: requests that the current mesh cannot hold and that wait for a larger one.
        step_started: start of the current step, on the monotonic clock; None between steps. Any thread may read it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler_config: SchedulerConfig,
        *,
        async_scheduling: bool = True,
        attachments: Sequence[Attachment] = (),
        mesh_changer: MeshChanger | None = None,
    ):
        limits = executor.limits
        self.executor = executor
        self.mesh_changer = mesh_changer
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
        self._in_flight: deque[_InFlight] = deque()
        self.parked = ParkedRequests()
        self.step_started: float | None = None
        self._unreturned: list[Update] = []  # entered but not returned yet, because a later step may fail
        self._committed_at = 0.0  # time at which the last step was entered
        self._stats: StepStats | None = None
        self._num_preemptions = 0  # of this scheduler, at the previous stats
        for part in self.attachments:
            part.scheduled(self.scheduler)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, a step is under way, or a plugin has work."""
        return bool(self._in_flight) or self.scheduler.has_work or self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether a plugin needs steps although no request is unfinished."""
        return any(part.busy for part in self.attachments)

    @property
    def rest_seconds(self) -> float | None:
        """Seconds after which to call `look` while there is nothing to compute; None: never."""
        delays = [part.look_seconds for part in self.attachments]
        if self.parked:
            delays.append(self.parked.look_seconds(time.monotonic()))
        return min((seconds for seconds in delays if seconds is not None), default=None)

    def part(self, kind: type[Part]) -> Part | None:
        """Return the plugin of this class, or None."""
        return next((part for part in self.attachments if isinstance(part, kind)), None)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def park(self, request: Request, error: AdmissionError) -> list[Update]:
        """Keep a request that `add` refused with `error` until a larger mesh comes. Return its last update if it does not wait."""
        return self.parked.park(request, error, time.monotonic())

    def abort(self, request_id: str) -> Update | None:
        """End a request and return its last update; None if it is unknown or has ended. Its pages stay until no step has a row of it."""
        now = time.monotonic()
        update = self.scheduler.abort(request_id, now) or self.parked.abort(request_id, now)
        for part in self.attachments:
            part.send()
        return update

    def look(self) -> list[Update]:
        """Without a step, let plugins process external input, and end parked requests that have waited too long."""
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
        """Launch as many steps ahead as allowed, wait for the oldest, and return its updates.

        Returns at once if there is nothing to compute, and after a moment if all requests wait for pages. If a step fails because a process
        is gone, the core continues without that process, or raises the step's error.

        Args:
            meanwhile: called once while the device computes. It may `add` and `abort`.
            ahead: launch the next step before the results of this one are collected. False: requests that `meanwhile` adds can be in it.
            before_change: called first when a step has failed.
        """
        self.step_started = time.monotonic()
        try:
            return self._step(meanwhile, ahead)
        except Exception as error:
            self.step_started = None
            before_change()
            return self._recover(error)
        finally:
            self.step_started = None

    def _step(self, meanwhile: Callable[[], None] | None, ahead: bool) -> list[Update]:
        self._stats = None
        if self.parked:
            self._unreturned += self.parked.expire(time.monotonic())
        max_in_flight = max(2, self.scheduler.config.num_batches) if ahead and self._is_async else 1
        while len(self._in_flight) < max_in_flight and self._launch():
            pass
        if not self._in_flight:
            for part in self.attachments:
                part.idle()
            any(part.wait() for part in self.attachments)
            return self._take_unreturned()
        if meanwhile is not None:
            meanwhile()
        self._commit_oldest()
        return self._take_unreturned()

    def finish(self) -> None:
        """Wait for the steps under way and enter their results."""
        while self._in_flight:
            self._commit_oldest()

    def _take_unreturned(self) -> list[Update]:
        owed, self._unreturned = self._unreturned, []
        return owed

    def _commit_oldest(self) -> None:
        plan, command, pending, started, planned, launched = self._in_flight[0]
        self.executor.wait(pending)  # the next step starts now, before anything else is done
        computed = time.monotonic()
        results = self.executor.collect(pending)
        self._in_flight.popleft()  # after an interrupt (Ctrl-C) above, the step is still there to be waited for
        _follow_rules(plan, command, results)
        updates = self.scheduler.update(plan, results, computed)
        self._unreturned += updates
        self._clear_released_pages()
        preemptions_before, self._num_preemptions = (
            self._num_preemptions,
            sum(rank.num_preemptions for rank in self.scheduler.ranks),
        )
        counts, committed = self.executor.counts(), time.monotonic()
        seconds = committed - max(started, self._committed_at)
        for part in self.attachments:
            part.after_step(seconds, plan, updates)
        self._committed_at = committed
        self._stats = StepStats(
            time=committed,
            duration=committed - started,
            host_seconds={
                "plan": planned - started,
                "launch": launched - planned,
                "device": computed - launched,
                "enter": committed - computed,
            },
            num_decode_tokens=sum(1 + row.num_drafts for rank in results for row in rank.decodes),
            num_prompt_tokens=plan.num_prompt_tokens,
            num_padding_tokens=counts.num_padding_tokens,
            num_preemptions=self._num_preemptions - preemptions_before,
            compilations_after_warm_up=counts.compilations_after_warm_up,
            ranks=self.loads(),
            experts=counts.experts,
            drafts=DraftCounts.of(results) if plan.num_drafts else None,
            parts=self.statistics(),
            page_waits=self.scheduler.pages.take_waits(),
        )

    def change(self, make: Callable[[], MeshEpoch | None]) -> list[Update]:
        """Finish the steps under way, then change the executor. Return the updates of these steps.

        make: returns the next executor, or None if the executor has changed in place and keeps its caches and requests.
        """
        try:
            self.finish()
        except Exception as error:
            return self._recover(error)
        return self._switch_executor(make)

    def _recover(self, error: Exception) -> list[Update]:
        """Continue after a step failed because a process is gone, or raise the error. Return the updates that are owed.

        The steps under way are dropped: their tokens are not entered, and the pages that they wrote are not found again.
        """
        if self.mesh_changer is None:
            raise error
        return self._switch_executor(lambda: self.mesh_changer.recover_from(error))

    def _switch_executor(self, make: Callable[[], MeshEpoch | None]) -> list[Update]:
        self._in_flight.clear()
        self._stats = None
        epoch = make()
        if epoch is None:
            return self._take_unreturned()
        self.executor = epoch.executor
        for part in self.attachments:
            part.start(epoch.executor, epoch.config)
        limits = epoch.executor.limits
        self.scheduler, refused = self.scheduler.successor(epoch.config, limits.num_ranks, self.parked.requests)
        self._writer = _writer(limits)
        self._num_preemptions = 0
        for part in self.attachments:
            part.scheduled(self.scheduler)
        self.parked.is_reduced = epoch.is_reduced
        return self._take_unreturned() + self.parked.renew(refused, time.monotonic())

    def stats(self) -> StepStats | None:
        """Return the statistics of the step that the last call of `step` entered; None if it entered none."""
        return self._stats

    def loads(self) -> list[RankLoad]:
        """Return the load and the free room of each DP rank."""
        return self.scheduler.loads()

    def statistics(self) -> Mapping[str, Any]:
        """Return the statistics of the plugins by their names: `disk`, `transfers`, `balance`, …"""
        named = {part.statistics_name: part.statistics() for part in self.attachments if part.statistics_name}
        return {name: counts for name, counts in named.items() if counts is not None}

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests keep their pages; if there are none, the cache's memory is zeroed too."""
        self.scheduler.flush_prefix_cache()
        for part in self.attachments:
            part.flush()
        if not self.has_unfinished:
            self.executor.collect(self.executor.launch(Flush()))
            self._writer.reset()

    def _launch(self) -> bool:
        """Plan and launch one step with the commands that precede it. Return False if there is nothing to compute now."""
        began = time.monotonic()
        for part in self.attachments:
            part.begin_step(began)
        plan = self.scheduler.schedule(began)
        for part in self.attachments:
            part.send()
            part.planned()
        self._clear_released_pages()  # of requests that were preempted or aborted
        planned = time.monotonic()
        try:
            for command in plan.page_commands:
                self.executor.launch(command)
            if plan.is_empty:
                return False
            for part in self.attachments:
                part.before_launch(len(self._in_flight))
            copies = self._writer.copy_command(plan)
            if copies is not None:
                self.executor.launch(copies)
            command = self._writer.write(plan)
            pending = self.executor.launch(command)
        except BaseException:  # also interrupts; otherwise the plan's pages would never be released
            self.scheduler.withdraw(plan)
            raise
        self._in_flight.append(_InFlight(plan, command, pending, began, planned, time.monotonic()))
        return True

    def shutdown(self) -> None:
        """Close the plugins and the executor."""
        for part in self.attachments:
            part.close(failed=False)
        self.executor.shutdown()

    def abandon(self) -> None:
        """Close the plugins after an error. The executor stays as it is, because closing it would wait for a failed device."""
        for part in self.attachments:
            part.close(failed=True)

    def _clear_released_pages(self) -> None:
        pages = self.scheduler.take_pages_to_clear()
        if pages is not None:
            self.executor.launch(clear_command(pages))


def _writer(limits: ExecutorLimits) -> StepWriter:
    return StepWriter(limits.num_ranks, limits.page_size, (limits.max_pages, limits.window_columns))


def _follow_rules(plan: StepPlan, command: Step, results: Sequence[RankResults]) -> None:
    """Advance the rules of guided rows by the sampled tokens. If a grammar cannot continue, put its error into the result."""
    for rank, rank_step, rank_results in zip(plan.ranks, command.ranks, results, strict=True):
        if not rank_step.guides:
            continue
        for rows, row_results in ((rank.decodes, rank_results.decodes), (rank.prefills, rank_results.prefills)):
            for index, (row, result) in enumerate(zip(rows, row_results, strict=True)):
                rules = row.request.rules
                if rules is None or not row.sampled or row.request.status is not Status.RUNNING or not result.finite:
                    continue
                count, error = rules.follow(result.token_ids)
                if error is not None:
                    row_results[index] = result._replace(token_ids=result.token_ids[:count], error=error)

"""`EngineCore`: the loop body. Plan a step, have it computed, enter its results: one step ahead of the device."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dsjax.engine.contract.commands import Flush, Step
from dsjax.engine.contract.executor import Executor, RankResults
from dsjax.engine.schedule.page_events import AllBlocksCleared, EventSink
from dsjax.engine.schedule.plan import RankPlan, StepPlan
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.schedule.request import Request, Status
from dsjax.engine.schedule.scheduler import Scheduler, Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.schedule.step_writer import StepWriter, clear_command, drop_command
from dsjax.engine.stats import BalanceStats, DraftCounts, StepStats
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.transfer.incoming import Incoming, TransferCounts
from dsjax.engine.transfer.leases import Leases
from dsjax.engine.transfer.page_transfer import PrefillLink
from dsjax.engine.transfer.prefill_links import PrefillLinks
from dsjax.errors import UserError

if TYPE_CHECKING:  # NumPy is not loaded where nothing is balanced
    from dsjax.engine.elastic.generations import Generation, Generations
    from dsjax.engine.experts.expert_balancer import ExpertBalancer


class ChangeUnderWayError(UserError):
    """Another mesh was asked for while the mesh is being changed."""


DISK_WAIT = 0.002
"""Seconds that the engine waits for the disk at a time where every request does. It looks for new requests in between."""


TRANSFER_WAIT = 0.01
"""The same for prefill sides, where it ends as soon as one has said something."""


LEAVE_SECONDS = 3.0
"""At the end of an engine pages that only its devices have are sent to the disk for so long at most."""


class _Totals(NamedTuple):
    """What the scheduler has counted since its start."""

    preemptions: int
    prefix_queries: int
    prefix_hits: int


class _UnderWay(NamedTuple):
    """A step that was launched, and when it was begun to be planned, was planned, was launched."""

    plan: StepPlan
    command: Step
    pending: Any
    times: tuple[float, float, float]


class EngineCore:
    """Scheduler and executor together. Everything here happens in one thread; text is made elsewhere.

    While the device computes a step, the next one is planned, written down and launched: the executor holds it back until the
    device is free, or lets both be in flight. Results are entered while that next step computes.

    Args:
        async_scheduling: False plans a step only when the results of the one before are entered.
        balancer: moves experts between steps; None: they stay where they are.
        publisher: is given the events of pages; None: there are none.
        prefills: engines that compute prompts for this one, which closes them at its end; None: it computes all by itself.
            connect_prefill: gives further ones, by the address that a request names. local_tokens, transfer_timeout: as of
            `Incoming`.
        leases: of parcels, where this one computes prompts for others.

    Attributes:
        generations: makes further executors; None: this one is all there is.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler_config: SchedulerConfig,
        *,
        async_scheduling: bool = True,
        balancer: "ExpertBalancer | None" = None,
        prefills: Sequence[PrefillLink] | None = None,
        connect_prefill: Callable[[str], PrefillLink] | None = None,
        local_tokens: int = 1,
        transfer_timeout: float = 30.0,
        leases: Leases | None = None,
        publisher: EventSink | None = None,
    ):
        limits = executor.limits
        self.executor = executor
        incoming = None if prefills is None else Incoming(len(prefills), local_tokens, transfer_timeout)
        self.scheduler = Scheduler(
            scheduler_config,
            limits.num_ranks,
            page_events=publisher is not None,
            incoming=incoming,
            leases=leases,
        )
        self._prefills: PrefillLinks | None = None
        self._connects = connect_prefill is not None  # to the prefill engine that a request names
        if incoming is not None:
            self._prefills = PrefillLinks(incoming, prefills, connect_prefill)
            executor.pull_parcels(self._prefills.pull, self._prefills.report)
        self._publisher = publisher
        self._writer = StepWriter(limits.num_ranks, limits.max_rows_decode, limits.page_size)
        self._most_under_way = 2 if async_scheduling else 1
        self._under_way: deque[_UnderWay] = deque()
        self._balancing = self._balancer = balancer
        self.generations: Generations | None = None
        self._owed: list[Update] = []  # entered, and not given yet: what comes behind may fail
        self._entered = 0.0  # when the last step was
        self._stats: StepStats | None = None
        self._reported = _Totals(0, 0, 0)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step or the exchange of experts is under way."""
        return self.scheduler.num_unfinished > 0 or bool(self._under_way) or self.is_exchanging or self.scheduler.sends

    @property
    def is_exchanging(self) -> bool:
        """Whether experts are being moved."""
        return self._balancer is not None and self._balancer.busy

    @property
    def is_separated(self) -> bool:
        """Whether prompts are computed elsewhere."""
        return self._prefills is not None

    def add(self, request: Request) -> None:
        """Queue a request."""
        prefill = request.options.prefill
        if prefill is not None and self._connects:
            request.prefill_link = self._prefills.number_of(prefill["address"])
            request.prefill_transfer = prefill["transfer"]
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Update | None:
        """End a request; None where it is unknown or has ended. Its pages are free when no step has a row of it any more."""
        update = self.scheduler.abort(request_id, time.monotonic())
        if self._prefills is not None:
            self._prefills.send()
        return update

    def step(self, meanwhile: Callable[[], None] | None = None, *, ahead: bool = True) -> list[Update]:
        """Launch steps as far ahead as is allowed, wait for the oldest, and give what it did to each request.

        Returns at once where there is nothing to do, and waits for a moment where all there is to do is to wait for pages.

        meanwhile: called once while the device computes. It may `add` and `abort`. ahead: launch the next step before the results of this
        one are collected. Without that, what comes while it computes has a place in the step after it.
        """
        self._stats = None
        most = self._most_under_way if ahead else 1
        while len(self._under_way) < most and self._launch():
            pass
        if not self._under_way:
            if self._balancer is not None:
                self._balancer.idle()
            if self.scheduler.waits_for_disk:
                self._enter_pages(DISK_WAIT)  # there is nothing else to do
            elif self.scheduler.waits_for_pages:
                self._prefills.wake.wait(TRANSFER_WAIT)
            return []
        if meanwhile is not None:
            meanwhile()
        self._enter_oldest()
        return self._take_owed()

    def finish(self) -> list[Update]:
        """Wait for the steps under way, and enter them; nothing further is launched."""
        self._enter_all()
        return self._take_owed()

    def _enter_all(self) -> None:
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
        self._publish()
        before, now = self._reported, self._totals()
        self._reported = now
        counts, entered = self.executor.counts(), time.monotonic()
        if self._balancer is not None:
            self._balancer.after_step(entered - max(began, self._entered))
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
            num_prompt_tokens=sum(row.length for rank in plan.ranks for row in rank.prefills),
            num_padding_tokens=counts.num_padding_tokens,
            num_preemptions=now.preemptions - before.preemptions,
            prefix_queries=now.prefix_queries - before.prefix_queries,
            prefix_hits=now.prefix_hits - before.prefix_hits,
            num_non_finite=sum(update.result is not None and not update.result.finite for update in updates),
            compilations_after_warm_up=counts.compilations_after_warm_up,
            ranks=self.loads(),
            experts=counts.experts,
            drafts=DraftCounts.of(results) if plan.num_drafts else None,
            balance=self.balance(),
            disk=self.disk(),
            transfers=self.transfers(),
            page_waits=self.scheduler.take_page_waits(),
        )

    def change(self, make: "Callable[[], Generation]") -> list[Update]:
        """Go on with an executor made anew, on another mesh, when the steps under way are done and entered; give their updates too.

        make: gives up the old executor and gives the new one.
        """
        try:
            self._enter_all()
        except Exception as error:
            return self.survive(error)
        return self._renew(make)

    def survive(self, error: Exception) -> list[Update]:
        """Go on after a step failed, where that is because of a process that is gone. The steps under way are void: no token of theirs is
        entered, and no page that they wrote is found again. Gives what was entered before, and what became of requests.

        Raises:
            the error itself, where nothing goes on.
        """
        if self.generations is None:
            raise error
        return self._renew(lambda: self.generations.after(error))

    def _renew(self, make: "Callable[[], Generation]") -> list[Update]:
        self._under_way.clear()
        self._stats = None
        new = make()
        self.executor = new.executor
        if self._prefills is not None:
            self._prefills.take_pulled()  # by the executor before
            new.executor.pull_parcels(self._prefills.pull, self._prefills.report)
        limits = new.executor.limits
        if self._publisher is not None:
            for rank in range(max(len(self.scheduler.ranks), limits.num_ranks)):
                self._publisher.publish(rank, [AllBlocksCleared()])
        self.scheduler, refused = self.scheduler.successor(new.config, limits.num_ranks, time.monotonic())
        self._writer = StepWriter(limits.num_ranks, limits.max_rows_decode, limits.page_size)
        self._reported = _Totals(0, 0, 0)
        if self._balancing is not None:  # a mesh may be too small for it, and the next one may not
            self._balancing = self._balancing.successor(new.executor)
            self._balancer = None if new.executor.expert_slots is None else self._balancing
        return self._take_owed() + refused

    def stats(self) -> StepStats | None:
        """What the step did that the last call of `step` entered; None where it entered none.

        Preemptions and the prefix cache's counts are those since the stats before: the next step is planned by then.
        """
        return self._stats

    def loads(self) -> list[RankLoad]:
        """What each rank has to do, and has room for."""
        return self.scheduler.loads()

    def disk(self) -> DiskCounts | None:
        """What the disk below the cache has done, and holds; None without one."""
        return self.scheduler.disk_counts()

    def transfers(self) -> TransferCounts | None:
        """What has come so far of pages that prefill sides compute; None without them."""
        return None if self.scheduler.incoming is None else self.scheduler.incoming.counts

    def balance(self) -> BalanceStats | None:
        """What came of balancing experts so far; None where they stay where they are."""
        return self._balancing.stats if self._balancing else None

    def flush_prefix_cache(self) -> bool:
        """Forget every page that is cached; True, as nothing can prevent it. Running requests keep what they read.

        Where nothing is under way, the cache's memory is zeroed too.
        """
        self.scheduler.flush_prefix_cache()
        if self._prefills is not None:
            self._prefills.forget()
        if self.scheduler.disk is not None:
            self.executor.launch(drop_command(*self.scheduler.disk.take_dropped()))
        self._publish()
        if not self.has_unfinished:
            self.executor.collect(self.executor.launch(Flush()))
            self._writer.void()
        return True

    def rebalance_experts(self) -> dict[str, Any] | None:
        """Place experts after the load of the window so far, between the next steps; what is to be moved. None where they cannot be moved.

        Raises:
            UserError: a rebalance is under way.
        """
        return self._balancer.rebalance_now() if self._balancer else None

    def _launch(self) -> bool:
        """Plan and launch one step, and what goes before it; False where there is nothing to compute now."""
        began = time.monotonic()
        if self._prefills is not None:
            self._prefills.enter(began)
        if self.scheduler.disk is not None or self._prefills is not None:
            self._enter_pages()
        plan = self.scheduler.schedule(began)
        if self._prefills is not None:
            self._prefills.send()
        self._publish()
        self._clear_dirty()  # pages of a request that was preempted or aborted
        planned = time.monotonic()
        try:
            for moves in self._writer.moves(plan):
                self.executor.launch(moves)
            if plan.is_empty:
                return False
            if self._balancer is not None:
                self._balancer.before_step(len(self._under_way))
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

    def _enter_pages(self, seconds: float = 0.0) -> None:
        """Enter what came of pages and the disk; wait so long for the first of it."""
        now = time.monotonic()
        self.scheduler.enter_pages(self.executor.page_reports(seconds), now)
        if self._prefills is not None:
            for rank, _, _, numbers, ok in self._prefills.take_pulled():
                self.scheduler.enter_pulled(rank, numbers, ok, now)

    def _publish(self) -> None:
        if self._publisher is not None:
            for rank, events in self.scheduler.take_page_events():
                self._publisher.publish(rank, events)

    def shutdown(self) -> None:
        """Give back what the executor holds, and tell subscribers nothing more. What only the devices hold goes to the disk before."""
        if self.scheduler.disk is not None:
            self._leave()
        if self._publisher is not None:
            self._publisher.close()
        if self._prefills is not None:
            self._prefills.close()
        self.executor.shutdown()

    def abandon(self) -> None:
        """End after an error. Prefill sides are told that this engine wants nothing more from them.

        What the executor holds is left until the process ends, because giving it back would wait for a device that has failed.
        """
        if self._prefills is not None:
            self._prefills.close()

    def _leave(self) -> None:
        """Write what only the devices hold to the disk, most recently used first, for `LEAVE_SECONDS` at most."""
        end, disk = time.monotonic() + LEAVE_SECONDS, self.scheduler.disk
        room = disk.num_pages  # lest what is written now goes for more of it
        while (now := time.monotonic()) < end and room:
            plan = self.scheduler.leave(room, now)
            if plan is not None:
                for moves in self._writer.moves(plan):
                    self.executor.launch(moves)
                room = max(0, room - sum(len(rank.moves.stores) for rank in plan.ranks))
            elif disk.writable:
                return
            self._enter_pages(0.05)

    def _clear_dirty(self) -> None:
        dirty = self.scheduler.take_dirty()
        if dirty is not None:
            self.executor.launch(clear_command(dirty))

    def _totals(self) -> _Totals:
        ranks = self.scheduler.ranks
        return _Totals(
            sum(rank.num_preemptions for rank in ranks),
            sum(rank.prefix_queries for rank in ranks),
            sum(rank.prefix_hits for rank in ranks),
        )


def _follow_rules(plan: StepPlan, command: Step, results: Sequence[RankResults]) -> None:
    """Let the rules of guided rows follow the tokens that were made; where a grammar cannot go on, the result says so."""
    for rank_plan, rank_command, found in zip(plan.ranks, command.ranks, results, strict=True):
        if rank_command.guides:
            _follow_rank(rank_plan, found)


def _follow_rank(plan: RankPlan, found: RankResults) -> None:
    for rows, row_results in ((plan.decodes, found.decodes), (plan.prefills, found.prefills)):
        for index, (row, result) in enumerate(zip(rows, row_results, strict=True)):
            request = row.request
            if request.rules is None or not row.sampled or request.status is not Status.RUNNING or not result.finite:
                continue
            count, error = request.rules.follow(result.token_ids)
            if error is not None:
                row_results[index] = result._replace(token_ids=result.token_ids[:count], error=error)

"""Several decode engines of one process seen as one: what each of them has, does and counts, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dsjax.engine.contract.executor import ExpertCounts
from dsjax.engine.core import EngineCore
from dsjax.engine.experts.eplb import BalanceStats, RebalanceUnderWayError
from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.stats import StepStats
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.transfer.remote_prefill import TransferCounts

if TYPE_CHECKING:
    from collections.abc import Callable


class EngineState(NamedTuple):
    """What an engine has to do, and what it has counted since its start; None where it has no such thing.

    Attributes:
        loads: of each DP rank, by their numbers.
    """

    loads: list[RankLoad]
    disk: DiskCounts | None = None
    balance: BalanceStats | None = None
    transfers: TransferCounts | None = None
    experts: ExpertCounts | None = None
    compilations: int = 0

    @classmethod
    def of(cls, core: EngineCore) -> EngineState:
        """Of one engine, between two steps. Without the experts' record and compilations."""
        parts = core.statistics()
        return cls(core.loads(), parts.get("disk"), parts.get("balance"), parts.get("transfers"))

    @classmethod
    def after(cls, stats: StepStats) -> EngineState:
        """Of one engine, after a step."""
        parts = stats.parts
        return cls(
            stats.ranks,
            parts.get("disk"),
            parts.get("balance"),
            parts.get("transfers"),
            stats.experts,
            stats.compilations_after_warm_up,
        )

    @classmethod
    def together(cls, states: Sequence[EngineState]) -> EngineState:
        """Of several engines."""
        if len(states) == 1:
            return states[0]
        loads, disks, balances, transfers, experts, compilations = zip(*states, strict=True)
        return cls(
            [load for own in loads for load in own],
            _present(disks, _disks),
            _present(balances, _balances),
            _present(transfers, lambda found: TransferCounts(*map(sum, zip(*found, strict=True)))),
            all_experts(experts),
            sum(compilations),
        )


class Whole:
    """Makes of the statistics of one engine's step those of a step of the whole: what the step did, and the state of all engines."""

    def __init__(self, cores: Iterable[EngineCore]):
        self._cores = list(cores)
        self._states = [EngineState.of(core) for core in self._cores]

    def after(self, index: int, stats: StepStats) -> StepStats:
        """Engine `index` has done a step."""
        if stats.experts is None:  # recording is switched for all: what others have is of a record that has ended
            self._states = [state._replace(experts=None) for state in self._states]
        # The others' loads are those of now, because requests come and end without a step too. Only lengths and numbers are read.
        self._states = [
            EngineState.after(stats) if number == index else state._replace(loads=core.loads())
            for number, (core, state) in enumerate(zip(self._cores, self._states, strict=True))
        ]
        state = EngineState.together(self._states)
        return replace(
            stats,
            ranks=state.loads,
            parts={
                name: value
                for name, value in (("disk", state.disk), ("balance", state.balance), ("transfers", state.transfers))
                if value is not None
            },
            experts=state.experts,
            compilations_after_warm_up=state.compilations,
        )


def all_experts(found: Iterable[ExpertCounts | None]) -> ExpertCounts | None:
    """What several engines have recorded; None where none has recorded anything.

    They are copies of all experts, as those of `dp=16,ep=8` are: a slot's tokens are added up, and devices go on behind one another.
    Where each engine moves its experts after its own load, slots are those of the first one.
    """
    found = list(found)
    return _experts(found) if any(one is not None for one in found) else None


def all_rebalances(found: Sequence[dict[str, Any] | RebalanceUnderWayError | None]) -> dict[str, Any] | None:
    """What several engines move now, as `rebalance_experts` says it of one; None where they do not move experts.

    An engine that is in the middle of a rebalance goes on with that.

    Raises:
        RebalanceUnderWayError: all of them are.
    """
    begun = [one for one in found if isinstance(one, dict)]
    if not begun:
        errors = [one for one in found if isinstance(one, RebalanceUnderWayError)]
        if errors:
            raise errors[0]
        return None
    sums = {name: sum(one[name] for one in begun) for name in begun[0] if name != "balancedness"}
    ratios = {when: sum(one["balancedness"][when] for one in begun) / len(begun) for when in begun[0]["balancedness"]}
    return {**sums, "balancedness": ratios}


def rebalance(core: EngineCore) -> dict[str, Any] | RebalanceUnderWayError | None:
    """What one engine moves now, for `all_rebalances`."""
    try:
        return rebalance_experts(core)
    except RebalanceUnderWayError as error:
        return error


def rebalance_experts(core: EngineCore) -> dict[str, Any] | None:
    """Place a core's experts after the load of the window so far, between the next steps; what is to be moved. None where they cannot be
    moved.

    Raises:
        RebalanceUnderWayError: a rebalance is under way.
    """
    from dsjax.engine.experts.expert_balancer import ExpertBalancer  # loads NumPy

    balancer = core.part(ExpertBalancer)
    return None if balancer is None else balancer.rebalance_now()


def _present(found: Iterable[Any], combine: Callable[[list[Any]], Any]) -> Any:
    found = [one for one in found if one is not None]
    return combine(found) if len(found) > 1 else found[0] if found else None


def _disks(found: list[DiskCounts]) -> DiskCounts:
    return DiskCounts(*map(sum, zip(*found, strict=True)))._replace(page_bytes=found[0].page_bytes)


def _balances(found: list[BalanceStats]) -> BalanceStats:
    """Counts are added up; a ratio is the mean of the engines that have read a window."""
    counted = ("windows", "rebalances", "failures", "layers_changed", "experts_moved", "bytes_moved", "exchanges")
    counted += ("exchange_seconds", "rebalance_seconds", "layers_left")
    read = [one for one in found if one.windows] or found
    return BalanceStats(
        balancedness=sum(one.balancedness for one in read) / len(read),
        layer_balancedness=sum(one.layer_balancedness for one in read) / len(read),
        rank_tokens=tuple(map(sum, zip(*(one.rank_tokens for one in read), strict=True))),
        **{name: sum(getattr(one, name) for one in found) for name in counted},
    )


def _experts(each: list[ExpertCounts | None]) -> ExpertCounts:
    import numpy as np

    found = [one for one in each if one is not None]
    nothing = np.zeros_like(found[0].rows_sent)  # of an engine that has had no step since the record began
    sent = sum(one.dispatch_bytes for one in found)
    return ExpertCounts(
        tokens_per_expert=sum(one.tokens_per_expert for one in found),
        rows_sent=np.concatenate([nothing if one is None else one.rows_sent for one in each]),
        rounds=sum(one.rounds for one in found),
        dispatch_bytes=sent,
        padding_share=sum(one.padding_share * one.dispatch_bytes for one in found) / sent if sent else 0.0,
        logical_load=sum(one.logical_load for one in found),
        physical_to_logical=found[0].physical_to_logical,
    )

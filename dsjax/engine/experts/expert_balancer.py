"""`ExpertBalancer`: reads expert loads, decides which layers are worth changing, and launches one command between two steps."""

from __future__ import annotations

import importlib
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dsjax.background import contained
from dsjax.engine.contract.commands import Command, PlaceExperts, ReadLoads, StageExperts, int32s
from dsjax.engine.contract.executor import Executor
from dsjax.engine.experts.eplb import (
    BalanceStats,
    EplbConfig,
    ExpertMover,
    ExpertSlots,
    LoadWindow,
    RebalanceUnderWayError,
)
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.request import StepPlan
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from sharding.balancing import balancedness_of_ranks, by_host, experts_moved, keep_in_place, rank_loads, rebalance
from sharding.layer_placement import exchange_rounds

_NUM_TIMES = 64
"""Number of recent exchanges of each kind; their median predicts the duration of the next."""
_WORK, _UNDECIDED = "expert balancing", "Experts stay where they are until the next decision."

_log = logging.getLogger(__name__)


class LayerChange(NamedTuple):
    """One layer's part of a rebalance."""

    layer: int
    physical_to_logical: np.ndarray
    rounds: list[list[tuple[int, int]]]  # one `StageExperts` each
    experts: int
    gain: float  # predicted seconds over the next interval
    cost: float  # likewise

    def commands(self) -> list[Command]:
        """Return the commands to launch, in order."""
        stages: list[Command] = [
            StageExperts(self.layer, int32s(slot for pair in moves for slot in pair)) for moves in self.rounds
        ]
        slots = int32s(slot for moves in self.rounds for _, slot in moves)
        return [*stages, PlaceExperts(self.layer, slots, int32s(self.physical_to_logical.tolist()))]


@dataclass(frozen=True)
class Decision:
    """Changes of a rebalance."""

    changes: list[LayerChange]
    left: list[LayerChange]  # layers whose gain is too small for the cost; they stay unchanged
    # for the window's load before and after (predicted), as the ratio of sums over layers
    balancedness: tuple[float, float]

    def summary(self, expert_bytes: int) -> dict[str, Any]:
        """Return a readable summary: layers, experts, bytes, exchanges, and balancedness before and after."""
        experts = sum(change.experts for change in self.changes)
        return {
            "layers": len(self.changes),
            "experts": experts,
            "bytes": experts * expert_bytes,
            "exchanges": sum(len(change.rounds) for change in self.changes),
            "balancedness": {"before": self.balancedness[0], "after": self.balancedness[1]},
        }


def decide(
    load: np.ndarray, slots: ExpertSlots, policy: str, *, interval: int, step_seconds: float, payback: float = 1.0
) -> Decision:
    """Decide which layers get a new placement for `load`, tokens of shape `[layers, experts]`. See docs/balancing.md.

    interval: steps over which a gain counts. step_seconds: duration of a step. payback: minimum gain, as a multiple of the cost.
    """
    old, ranks = slots.physical_to_logical, slots.ranks
    new = rebalance(load, n_physical=old.shape[1], ranks=ranks, groups=slots.groups, hosts=slots.hosts, policy=policy)
    new = keep_in_place(old, new, ranks, slots.hosts if by_host(policy, slots.groups, slots.hosts) else 1)
    loads, new_loads = (rank_loads(load, rows, ranks) for rows in (old, new))
    old_maximum, target_maximum = loads.max(axis=1), new_loads.max(axis=1)
    expert_seconds = step_seconds * slots.expert_share * interval
    stage_seconds, place_seconds = slots.seconds or (0.0, 0.0)
    chosen, skipped = [], []
    moved = experts_moved(old, new)
    for layer in np.flatnonzero(old_maximum > target_maximum).tolist():
        rounds = list(exchange_rounds(old[layer], new[layer], ranks=ranks, experts=slots.per_exchange))
        gain = float((old_maximum[layer] - target_maximum[layer]) / old_maximum.sum() * expert_seconds)
        cost = len(rounds) * stage_seconds + place_seconds
        change = LayerChange(layer, new[layer], rounds, int(moved[layer]), gain, cost)
        (chosen if gain >= payback * cost else skipped).append(change)
    chosen.sort(key=lambda change: change.cost - change.gain)
    changed = [change.layer for change in chosen]
    new_maximum = old_maximum.copy()
    new_maximum[changed] = target_maximum[changed]
    mean = loads.mean(axis=1).sum()
    return Decision(
        chosen, skipped, tuple(float(mean / sums) if sums else 1.0 for sums in (old_maximum.sum(), new_maximum.sum()))
    )


class _Launched(NamedTuple):
    """A command in flight, and the number of the step after it; the command is done when that step ends."""

    command: Command
    pending: Any
    step: int


class ExpertBalancer(Attachment):
    """Balances the experts of a core's executor. Everything except `decide` runs in the engine's thread.

    Commands are launched before a step. Results are collected, and decisions made, after a step.
    """

    statistics_name = "balance"

    def __init__(self, config: EplbConfig, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock = config, clock
        self._executor: Executor | None = None
        self._stats = BalanceStats()
        self._pool: ThreadPoolExecutor | None = None

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Start with a new executor and empty windows. On a mesh too small to move experts, do nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._executor, self._stats = executor, replace(self._stats, rank_tokens=())
        self._mover = executor.extension(ExpertMover)
        reads = -(-self._config.window_size // self._config.read_interval)
        self._windows: deque[LoadWindow] = deque(maxlen=reads)
        self._step_seconds: deque[float] = deque(maxlen=256)
        self._pending_commands: deque[Command] = deque()
        self._launched: deque[_Launched] = deque()
        self._pending_decision: Future[Decision] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dsjax-eplb")
        with contained(_WORK):  # the import takes half a second; keep it out of the first decision
            self._pool.submit(importlib.import_module, "scipy.optimize")
        self._steps = 0  # completed
        self._last_read_step = self._last_decision_step = 0
        self._started_at: float | None = None  # start time of the current rebalance
        self._num_moved: dict[int, int] = {}  # number of experts to move, by layer of the current rebalance
        self._seconds: dict[type, deque[float]] = {
            kind: deque(maxlen=_NUM_TIMES) for kind in (StageExperts, PlaceExperts)
        }

    @property
    def busy(self) -> bool:
        """Whether a rebalance is in progress. An engine without requests keeps running until it is done."""
        return bool(self._pending_commands) or any(
            not isinstance(launched.command, ReadLoads) for launched in self._launched
        )

    @property
    def _layers_left(self) -> int:
        return sum(isinstance(command, PlaceExperts) for command in self._pending_commands)

    def statistics(self) -> BalanceStats:
        """Return the statistics so far."""
        return replace(self._stats, layers_left=self._layers_left)

    def before_launch(self, num_under_way: int) -> None:
        """Launch the commands due before the next step."""
        if self._mover is None:
            return
        number = self._steps + num_under_way
        if number - self._last_read_step >= self._config.read_interval:
            self._last_read_step = number
            self._launch(ReadLoads(), number)
        if self._pending_commands:
            self._launch(self._pending_commands.popleft(), number)

    def after_step(self, seconds: float, plan: StepPlan | None = None, updates: list[Update] = ()) -> None:
        """Collect the results of commands launched before the step just completed, which took `seconds`."""
        if self._mover is None:
            return
        self._steps += 1
        self._step_seconds.append(seconds)
        while self._launched and self._launched[0].step < self._steps:
            self._collect(self._launched.popleft())
        if self._pending_decision is not None and self._pending_decision.done():
            deciding, self._pending_decision = self._pending_decision, None
            with contained(_WORK, _UNDECIDED):
                self._begin(deciding.result())

    def idle(self) -> None:
        """Run one command to completion, since there is no step to wait for."""
        while self._launched:
            self._collect(self._launched.popleft())
        if self._pending_commands:
            self._launch(self._pending_commands.popleft(), self._steps)
            self._collect(self._launched.popleft())

    def rebalance_now(self) -> dict[str, Any] | None:
        """Decide now, from the last window and the load since. Every layer with any gain is changed between the next steps.

        Return a summary; None if the current mesh is too small to move experts.

        Raises:
            RebalanceUnderWayError: another rebalance is in progress.
        """
        if self._mover is None:
            return None
        if self.busy or self._pending_decision is not None:
            layers_left = self._layers_left
            state = f"under way, with {layers_left} layers left" if layers_left else "being decided"
            raise RebalanceUnderWayError(f"a rebalance is {state}; ask again when it is done")
        while self._launched:
            self._collect(self._launched.popleft(), decide=False)
        window = self._executor.collect(self._executor.launch(ReadLoads()))
        # Merge with the last reading: a few steps, or none, say little, and a reading of their own would evict an older one.
        if self._windows:
            window = self._windows.pop().and_then(window)
        self._windows.append(window)
        self._last_read_step = self._steps
        decision = self._bind_decision(payback=0)()
        self._begin(decision)
        return decision.summary(self._mover.slots.expert_bytes)

    @property
    def latest(self) -> LoadWindow | None:
        """The last load reading; None before the first."""
        return self._windows[-1] if self._windows else None

    def load(self) -> np.ndarray | None:
        """Return tokens `[layers, experts]` over the window; None before the first reading."""
        return sum(window.logical for window in self._windows) if self._windows else None

    def _launch(self, command: Command, step: int) -> None:
        self._launched.append(_Launched(command, self._executor.launch(command), step))

    def _collect(self, launched: _Launched, decide: bool = True) -> None:
        result = self._executor.collect(launched.pending)
        if isinstance(launched.command, ReadLoads):
            self._record_window(result, decide)
            return
        self._count(exchanges=1, exchange_seconds=result.seconds)
        if result.error is not None:
            _log.error(
                f"Rebalancing experts is given up: MoE layer {launched.command.layer} could not be changed ({result.error}). It is as it "
                f"was; {self._layers_left} layers after it were to be changed."
            )
            self._pending_commands.clear()
            self._count(failures=1)
            self._started_at, self._num_moved = None, {}
            return
        self._seconds[type(launched.command)].append(result.seconds)
        if isinstance(launched.command, PlaceExperts):
            experts = self._num_moved.pop(launched.command.layer, 0)
            self._count(layers_changed=1, experts_moved=experts, bytes_moved=experts * self._mover.slots.expert_bytes)
            if not self._num_moved and self._started_at is not None:
                seconds, self._started_at = self._clock() - self._started_at, None
                self._count(rebalances=1, rebalance_seconds=seconds)
                _log.info("Rebalancing experts took %.3f s, in which steps went on.", seconds)

    def _count(self, **increments: float) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + value for name, value in increments.items()}
        )

    def _record_window(self, window: LoadWindow, decide: bool) -> None:
        self._windows.append(window)
        of_sums, of_layers, _ = balancedness_of_ranks(window.by_rank)
        self._count(windows=1)
        tokens = tuple(window.by_rank.sum(axis=0).tolist())
        self._stats = replace(self._stats, balancedness=of_sums, layer_balancedness=of_layers, rank_tokens=tokens)
        if self._config.log_balancedness:
            _log.info(
                f"Experts' balancedness over {self._config.read_interval} steps: {of_sums:.3f} as ratio of sums over "
                f"layers, {of_layers:.3f} as mean of the layers' ratios; the busiest rank of a layer had {1 / of_sums:.2f} times the mean "
                "rank's tokens."
            )
        is_due = self._steps - self._last_decision_step >= self._config.step_interval
        if decide and is_due and self._pending_decision is None and not self.busy and window.by_rank.any():
            self._last_decision_step = self._steps
            with contained(_WORK, _UNDECIDED):
                self._pending_decision = self._pool.submit(self._bind_decision(self._config.payback))

    def _bind_decision(self, payback: float) -> Callable[[], Decision]:
        """Bind `decide` to the last window. Its inputs are captured now, so that it may run in another thread."""
        return partial(
            decide,
            self.load(),
            self._slots,
            self._config.policy,
            interval=self._config.step_interval,
            step_seconds=statistics.median(self._step_seconds) if self._step_seconds else 0.0,
            payback=payback,
        )

    @property
    def _slots(self) -> ExpertSlots:
        """Current placement. Exchange durations measured since the start replace those from warm-up.

        Without warm-up, skip the first exchange of each kind, which includes compilation.
        """
        slots = self._mover.slots
        times = [list(seconds)[slots.seconds is None :] for seconds in self._seconds.values()]
        if not all(times):
            return slots
        staged, placed = map(statistics.median, times)
        return replace(slots, seconds=(staged, placed))

    def _begin(self, decision: Decision) -> None:
        skipped = "" if not decision.left else (
            f" {len(decision.left)} layers are left: they would gain {sum(change.gain for change in decision.left):.3g} s and cost "
            f"{sum(change.cost for change in decision.left):.3g} s."
        )  # fmt: skip
        if not decision.changes:
            _log.info("Experts stay where they are, at a balancedness of %.3f.%s", decision.balancedness[0], skipped)
            return
        summary = decision.summary(self._mover.slots.expert_bytes)
        before, after = decision.balancedness
        gain, cost = (sum(getattr(change, name) for change in decision.changes) for name in ("gain", "cost"))
        _log.info(
            f"Rebalancing experts: {summary['layers']} layers, {summary['experts']} experts, {summary['bytes']} bytes in "
            f"{summary['exchanges']} exchanges, from a balancedness of {before:.3f} to {after:.3f}; predicted to gain {gain:.3g} s in "
            f"{self._config.step_interval} steps and to cost {cost:.3g} s.{skipped}"
        )
        self._started_at = self._clock()
        self._num_moved = {change.layer: change.experts for change in decision.changes}
        self._pending_commands.extend(command for change in decision.changes for command in change.commands())

"""`DraftChoice`: chooses the number of draft tokens from measured step times and acceptance rates.

With n drafts a row generates E(n) = 1 + Σ P(its first k drafts are accepted), k = 1 … n, tokens in a step of t(n) seconds. The best n
maximizes E(n) / t(n). This is the goodput of TurboSpec (Liu et al. 2024, https://arxiv.org/abs/2406.14066), with measured times.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.engine.contract.executor import Executor, RowResult
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.request import StepPlan
from dsjax.engine.schedule.scheduler import Scheduler, Update
from dsjax.engine.schedule.scheduler_config import SchedulerConfig

TRIAL = 5
"""Number of measured steps in a trial. One unmeasured step precedes them: its rows still have the previous number of drafts."""
BETWEEN = 64
"""Minimum number of steps between two trials at a load."""
SHARE = 0.02
"""Maximum share of the recent steps' time that trials may cost."""
_KEPT_TIMES = 2 * TRIAL - 1
"""Step times kept per load and number of drafts. Their 33rd percentile is used, because other work on the machine only slows steps."""
_STEP_DECAY, _ROW_DECAY = 0.9996, 0.99
"""Exponential decay of times per step (a window of about 2,500 steps), and of acceptances per row (about 100 rows)."""


@dataclass
class _RecentSteps:
    """Decayed sums over recent steps at one load with one number of drafts."""

    seconds: float = 0.0
    tokens: float = 0.0  # generated per row


class DraftChoice(Attachment):
    """Chooses the number of drafts of each step, from 0 to `max_drafts`.

    A load is the bit length of the number of running requests per batch on the fullest rank. A step is measured if it has no prompts and
    the previous step had the same number of drafts. If no other load has two measured numbers, `max_drafts` drafts, no drafts, and a
    promising number in between are tried without a pause. A new load starts with the best number of the nearest load. Later trials cost
    at most `SHARE`.
    """

    statistics_name = "draft_choice"

    def __init__(self, max_drafts: int):
        super().__init__()
        self._max_drafts = max_drafts
        self._num_batches = 1
        self._reset()

    def _reset(self) -> None:
        # Times of measured steps by load, then by number of drafts; the number that was tried last comes last.
        self._times: dict[int, dict[int, deque[float]]] = {}
        # By draft position: number of drafts whose predecessors were all accepted, and number of these that were accepted.
        self._offered, self._accepted = [0.0] * self._max_drafts, [0.0] * self._max_drafts
        self._load, self._num_drafts, self._previous_drafts = 0, self._max_drafts, -1
        self._trial_steps_left = 0
        self._steps_since_trial: dict[int, int] = {}  # by load
        # By load, then by number of drafts; None: steps whose previous step had another number.
        self._recent: dict[int, dict[int | None, _RecentSteps]] = {}

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Discard all measurements, because a new mesh has other step times."""
        self._num_batches = config.num_batches
        self._reset()

    def scheduled(self, scheduler: Scheduler) -> None:
        """Make the scheduler call `choose`."""
        super().scheduled(scheduler)
        scheduler.choose_drafts = self.choose

    def statistics(self) -> int:
        """Return the current number of drafts."""
        return self._num_drafts

    def choose(self) -> int:
        """Return the number of drafts per row in the next step."""
        load = self._current_load()
        if load != self._load:
            self._load, self._trial_steps_left = load, 0
            self._num_drafts = self._best(load)
        return self._num_drafts

    def _current_load(self) -> int:
        running = max(len(rank.running) for rank in self.scheduler.ranks)
        return (-(-running // self._num_batches)).bit_length()

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """Record a step's measurements, and begin or end a trial."""
        load, drafts = self._current_load(), plan.num_drafts
        is_measured = drafts == self._previous_drafts
        self._previous_drafts = drafts
        results = [update.result for update in updates if update.result is not None]
        if plan.page_commands or not results or any(rank.prefills or rank.copies for rank in plan.ranks):
            return
        if is_measured:
            self._times.setdefault(load, {}).setdefault(drafts, deque(maxlen=_KEPT_TIMES)).append(seconds)
            self._record_acceptance(results)
        if load not in self._times:
            return
        recent = self._recent.setdefault(load, {})
        for steps in recent.values():
            steps.seconds *= _STEP_DECAY
            steps.tokens *= _STEP_DECAY
        steps = recent.setdefault(drafts if is_measured else None, _RecentSteps())
        steps.seconds += seconds
        steps.tokens += sum(len(result.token_ids) for result in results) / len(results)
        if is_measured and (load, drafts) == (self._load, self._num_drafts):
            self._advance_trial()

    def _record_acceptance(self, results: list[RowResult]) -> None:
        for result in results:
            for position in range(min(result.num_drafts, len(result.token_ids))):
                is_accepted = len(result.token_ids) > position + 1
                self._offered[position] = self._offered[position] * _ROW_DECAY + 1
                self._accepted[position] = self._accepted[position] * _ROW_DECAY + is_accepted

    def _advance_trial(self) -> None:
        """Continue or end a trial, and begin the next one when it is due."""
        times = self._times[self._load]
        num_steps = self._steps_since_trial.get(self._load, 0) + 1
        self._steps_since_trial[self._load] = num_steps
        self._trial_steps_left = max(0, self._trial_steps_left - 1)
        if self._trial_steps_left or len(times[self._num_drafts]) < TRIAL:
            return
        self._num_drafts = best = self._best(self._load)
        untried = self._untried()
        measured = [drafts for drafts in times if drafts != best]
        candidate = (untried or measured or [best])[0]
        is_first_load = all(len(tried) < 2 for load, tried in self._times.items() if load != self._load)
        is_affordable = num_steps >= BETWEEN and self._lost_share(best, candidate) <= SHARE
        if (untried and is_first_load) or is_affordable:
            self._num_drafts = candidate
            times[candidate] = times.pop(candidate, deque(maxlen=_KEPT_TIMES))  # move to the end
            self._trial_steps_left, self._steps_since_trial[self._load] = TRIAL, 0

    def _untried(self) -> list[int]:
        """Return the untried numbers that are worth a trial at this load: both extremes, then the promising ones in between."""
        times = self._times[self._load]
        extremes = [drafts for drafts in (self._max_drafts, 0) if not times.get(drafts)]
        between = range(1, self._max_drafts)
        return extremes or [drafts for drafts in between if not times.get(drafts) and self._is_promising(drafts)]

    def _is_promising(self, drafts: int) -> bool:
        """Whether an untried number may beat the best measured one, with a step time interpolated between 0 and `max_drafts`."""
        times = self._times[self._load]
        shortest, longest = _typical(times[0]), _typical(times[self._max_drafts])
        seconds = shortest + (longest - shortest) * drafts / self._max_drafts
        return self._tokens(drafts) / seconds > 1.02 * self._rate(self._load, self._best(self._load))

    def _lost_share(self, best: int, candidate: int) -> float:
        """Return the share of recent time at this load lost by not using `best`, including one more trial of `candidate`."""
        recent, rate = self._recent[self._load], self._rate(self._load, best)
        lost = sum(steps.seconds - steps.tokens / rate for drafts, steps in recent.items() if drafts != best)
        times = self._times[self._load].get(candidate)
        if times:
            lost += (TRIAL + 1) * max(0.0, _typical(times) - self._tokens(candidate) / rate)
        return lost / sum(steps.seconds for steps in recent.values())

    def _best(self, load: int) -> int:
        """Return the best number of drafts measured at the nearest load; `max_drafts` if there are no measurements."""
        if not self._times:
            return self._max_drafts
        nearest = min(self._times, key=lambda other: abs(other - load))
        return max(self._times[nearest], key=lambda drafts: self._rate(nearest, drafts))

    def _rate(self, load: int, drafts: int) -> float:
        """Return the tokens per second of a row; 0 if this number of drafts was not measured at the load."""
        times = self._times[load].get(drafts)
        return self._tokens(drafts) / _typical(times) if times else 0.0

    def _tokens(self, drafts: int) -> float:
        """Return the expected number of tokens that a row generates per step."""
        counts = zip(self._accepted, self._offered, strict=True)
        rates = (accepted / offered if offered else 1.0 for accepted, offered in counts)
        return 1 + sum(itertools.islice(itertools.accumulate(rates, operator.mul), drafts))


def _typical(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 3]

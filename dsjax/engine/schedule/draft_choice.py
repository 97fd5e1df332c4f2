"""`DraftChoice`: chooses the number of draft tokens from measured step times and acceptance rates.

With n drafts a row generates E(n) = 1 + Σ P(its first k drafts are accepted), k = 1 … n, tokens in a step of t(n) seconds. The best n
maximizes E(n) / t(n). This is the goodput of TurboSpec (Liu et al. 2024, https://arxiv.org/abs/2406.14066), with measured times.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Sequence

import numpy as np

from dsjax.engine.contract.executor import Executor
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
_KEPT = 2 * TRIAL - 1
"""Step times kept per load and number of drafts. Their 33rd percentile is used, because other work on the machine only slows steps."""
_FADING, _ROW_FADING = 0.9996, 0.99
"""Exponential decay of times per step (a window of about 2,500 steps), and of acceptances per row (about 100 rows)."""


class DraftChoice(Attachment):
    """Chooses the number of drafts of each step, from 0 to `most`.

    A load is the bit length of the number of running requests per batch on the fullest rank. A step is measured if it has no prompts and
    the previous step had the same number of drafts. If no other load has two measured numbers, `most` drafts, no drafts, and a promising
    number in between are tried at once. A new load starts with the best number of the nearest load. Later trials cost at most `SHARE`.
    """

    statistics_name = "draft_choice"

    def __init__(self, most: int):
        super().__init__()
        self._most = most
        self._batches = 1
        self._forget()

    def _forget(self) -> None:
        self._times: dict[int, dict[int, deque[float]]] = {}  # by load, then by number of drafts
        # By draft position: number of drafts whose predecessors were all accepted, and number of these that were accepted.
        self._offered, self._accepted = [0.0] * self._most, [0.0] * self._most
        self._load, self._chosen, self._before = 0, self._most, -1
        self._left = 0  # remaining steps of the trial
        self._since: dict[int, int] = {}  # steps since the last trial, by load
        # [seconds, tokens per row], by load, then by number of drafts; None: steps whose previous step had another number.
        self._spent: dict[int, dict[int | None, np.ndarray]] = {}

    def start(self, executor: Executor, config: SchedulerConfig) -> None:
        """Discard all measurements, because a new mesh has other step times."""
        self._batches = config.num_batches
        self._forget()

    def scheduled(self, scheduler: Scheduler) -> None:
        """Make the scheduler call `choose`."""
        super().scheduled(scheduler)
        scheduler.choose_drafts = self.choose

    def statistics(self) -> int:
        """Return the current number of drafts."""
        return self._chosen

    def choose(self) -> int:
        """Return the number of drafts per row in the next step."""
        load = self._load_now()
        if load != self._load:
            self._load, self._left = load, 0
            self._chosen = self._best(load)
        return self._chosen

    def _load_now(self) -> int:
        running = max(len(rank.running) for rank in self.scheduler.ranks)
        return (-(-running // self._batches)).bit_length()

    def after_step(self, seconds: float, plan: StepPlan, updates: list[Update]) -> None:
        """Record a step's measurements, and begin or end a trial."""
        load, drafts = self._load_now(), plan.num_drafts
        steady, self._before = self._before == drafts, drafts
        results = [result for _, result, _ in updates if result is not None]
        if plan.page_commands or not results or any(rank.prefills or rank.copies for rank in plan.ranks):
            return
        if steady:
            self._times.setdefault(load, {}).setdefault(drafts, deque(maxlen=_KEPT)).append(seconds)
            for result in results:
                for place in range(min(result.num_drafts, len(result.token_ids))):
                    self._offered[place] = self._offered[place] * _ROW_FADING + 1
                    self._accepted[place] = self._accepted[place] * _ROW_FADING + (len(result.token_ids) > place + 1)
        if load in self._times:
            for spent in self._spent.setdefault(load, {}).values():
                spent *= _FADING
            spent = self._spent[load].setdefault(drafts if steady else None, np.zeros(2))
            spent += seconds, sum(len(result.token_ids) for result in results) / len(results)
            if steady and (load, drafts) == (self._load, self._chosen):
                self._choose_next()

    def _lost(self, best: int, tried: int) -> float:
        """Return the share of recent time at this load lost by not using `best`, including one more trial of `tried`."""
        spent, rate = self._spent[self._load], self._rate(self._load, best)
        lost = sum(seconds - tokens / rate for drafts, (seconds, tokens) in spent.items() if drafts != best)
        times = self._times[self._load].get(tried)
        if times:
            lost += (TRIAL + 1) * max(0.0, _typical(times) - self._tokens(tried) / rate)
        return lost / sum(seconds for seconds, _ in spent.values())

    def _choose_next(self) -> None:
        """Continue or end a trial, and begin the next one when it is due."""
        known = self._times[self._load]
        self._since[self._load] = since = self._since.get(self._load, 0) + 1
        self._left = max(0, self._left - 1)
        if self._left or len(known[self._chosen]) < TRIAL:
            return
        self._chosen = best = self._best(self._load)
        untried = [drafts for drafts in (self._most, 0) if not known.get(drafts)]
        untried = untried or [
            drafts for drafts in range(1, self._most) if not known.get(drafts) and self._promises(drafts)
        ]
        next_one = (untried or [drafts for drafts in known if drafts != best] or [best])[0]
        at_once = untried and all(len(tried) < 2 for load, tried in self._times.items() if load != self._load)
        if at_once or (since >= BETWEEN and self._lost(best, next_one) <= SHARE):
            self._chosen = next_one
            known[next_one] = known.pop(next_one, deque(maxlen=_KEPT))  # move to the end: tried most recently
            self._left, self._since[self._load] = TRIAL, 0

    def _promises(self, drafts: int) -> bool:
        """Whether an untried number between 0 and `most` may be better than the best measured one at this load."""
        known = self._times[self._load]
        if not (known.get(0) and known.get(self._most)):
            return False
        none, most = _typical(known[0]), _typical(known[self._most])
        seconds = none + (most - none) * drafts / self._most
        return self._tokens(drafts) / seconds > 1.02 * self._rate(self._load, self._best(self._load))

    def _best(self, load: int) -> int:
        """Return the best number of drafts measured at the nearest load; `most` if there are no measurements."""
        if not self._times:
            return self._most
        nearest = min(self._times, key=lambda other: abs(other - load))
        return max(self._times[nearest], key=lambda drafts: self._rate(nearest, drafts))

    def _rate(self, load: int, drafts: int) -> float:
        """Return the tokens per second of a row; 0 if this number of drafts was not measured at the load."""
        times = self._times[load].get(drafts)
        return self._tokens(drafts) / _typical(times) if times else 0.0

    def _tokens(self, drafts: int) -> float:
        """Return the expected number of tokens that a row generates per step."""
        chances = (taken / of if of else 1.0 for taken, of in zip(self._accepted, self._offered, strict=True))
        return 1 + sum(itertools.islice(itertools.accumulate(chances, operator.mul), drafts))


def _typical(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 3]

"""`Admission`: when an engine takes new prompts in. Some engines look for them less often than every step, or hold them back."""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.plan.simulation.service import Served, SimulatedEngine


@dataclass(frozen=True)
class Admission:
    """The rule by which prompts that have arrived are given to an engine's scheduler.

    poll_steps: an engine that only decodes looks for new prompts after so many steps, and after each step that had prompts. 1 is every
    step; SGLang's `--scheduler-recv-interval` (SchedulerRecvSkipper in its source) is this number.
    hold_steps: prompts wait until every DP rank can have one, and every so many steps they wait no longer; 0 holds none back.
    TensorRT-LLM's `attention_dp_config.timeout_iters` with `enable_balance` (`_balance_adp_requests` in its source) is this number.
    """

    poll_steps: int = 1
    hold_steps: int = 0

    @property
    def is_open(self) -> bool:
        """Whether every prompt is taken in at the next step."""
        return self.poll_steps <= 1 and not self.hold_steps


class Lobby:
    """Prompts that have arrived at an engine and that its scheduler does not know yet."""

    def __init__(self, rule: Admission):
        self._rule = rule
        self._unseen: list[tuple[Served, float]] = []
        self._held: list[tuple[Served, float]] = []
        self._unpolled = self._unbalanced = 0

    def __len__(self) -> int:
        return len(self._unseen) + len(self._held)

    def enter(self, arrived: list[tuple[Served, float]]) -> None:
        """Take prompts in, each with the second of its arrival."""
        self._unseen += arrived

    def leave(self, engine: SimulatedEngine) -> list[tuple[Served, float]]:
        """Give the prompts that the engine schedules in its next step. Called once between two steps."""
        self._unpolled += 1
        if engine.idle or engine.had_prompts or self._unpolled >= self._rule.poll_steps:
            self._held += self._unseen
            self._unseen, self._unpolled = [], 0
        if not (self._rule.hold_steps and self._waits_for_balance(engine)):
            released, self._held = self._held, []
            return released
        return []

    def _waits_for_balance(self, engine: SimulatedEngine) -> bool:
        """Whether held prompts wait for one more step."""
        running = engine.running
        taken = set()
        counts = list(running)
        for _ in self._held:
            rank = counts.index(min(counts))
            counts[rank] += 1
            taken.add(rank)
        if len(taken) == len(counts):
            self._unbalanced = 0
            return False
        self._unbalanced += 1
        if self._unbalanced < self._rule.hold_steps and min(running):
            return True
        self._unbalanced = 0
        return False

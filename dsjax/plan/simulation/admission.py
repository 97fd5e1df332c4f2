"""`Admission`: when an engine takes new prompts in. Some engines look for them less often than every step, or hold them back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsjax.plan.simulation.service import Served, SimulatedEngine


@dataclass(frozen=True)
class Admission:
    """The rule by which prompts that have arrived are given to an engine's scheduler.

    poll_steps: an engine that only decodes looks for new prompts after so many steps, and after each step that had prompts. 1 is every
    step; SGLang's `--scheduler-recv-interval` (SchedulerRecvSkipper in its source) is this number.
    hold_steps: prompts wait until every DP rank can have one, and every so many steps they wait no longer; 0 holds none back.
    TensorRT-LLM's `attention_dp_config.timeout_iters` with `enable_balance` (`_balance_adp_requests` in its source) is this number. What is
    let through is what one step computes: TensorRT-LLM asks of the prompts that it has scheduled for a step, and the others wait again.
    fill: (steps, share): with one DP rank, prompts beside running requests wait until they and the decodes are this share of a step's
    tokens, and so many steps at most; (0, 0) holds none back. TensorRT-LLM's `batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio`
    (`_waiting_requests` in its source) are these numbers.
    step_tokens: most tokens of a DP rank in a step, with prompts held back. decode_tokens: of them for each running request.
    keeps: (at the start, in the end, decode steps between): the share of their outputs to come that running requests keep room for in the
    cache. The next prompt is taken in where it finds room beside that for itself and its own whole output. (0, 0, 1) keeps none.
    knows_ends: requests run to their given length, and what they will need is known (`SimulatedEngine.takes`).
    """

    poll_steps: int = 1
    hold_steps: int = 0
    fill: tuple[int, float] = (0, 0.0)
    step_tokens: float = math.inf
    decode_tokens: int = 1
    keeps: tuple[float, float, int] = (0.0, 0.0, 1)
    knows_ends: bool = False

    @property
    def is_open(self) -> bool:
        """Whether every prompt is taken in at the next step."""
        rules = self.hold_steps, self.fill[0], *self.keeps[:2], self.knows_ends
        return self.poll_steps <= 1 and not any(rules)

    def kept(self, steps: int) -> float:
        """Share of outputs to come that is kept free after so many decode steps."""
        first, last, between = self.keeps
        return first + (last - first) * min(1.0, steps / between)


class Lobby:
    """Prompts that have arrived at an engine and that its scheduler does not know yet."""

    def __init__(self, rule: Admission):
        self._rule = rule
        self._unseen: list[tuple[Served, float]] = []
        self._held: list[tuple[Served, float]] = []
        self._unpolled = self._unbalanced = self._unfilled = self._steps = 0

    def __len__(self) -> int:
        return len(self._unseen) + len(self._held)

    def enter(self, arrived: list[tuple[Served, float]]) -> None:
        """Take prompts in, each with the second of its arrival."""
        self._unseen += arrived

    def leave(self, engine: SimulatedEngine) -> list[tuple[Served, float]]:
        """Give the prompts that the engine schedules in its next step. Called once between two steps."""
        self._unpolled += 1
        self._steps += not engine.had_prompts
        if engine.idle or engine.had_prompts or self._unpolled >= self._rule.poll_steps:
            self._held += self._unseen
            self._unseen, self._unpolled = [], 0
        places = list(range(len(self._held)))
        if self._rule.hold_steps:
            places, ranks = self._in_a_step(engine)
            if self._waits_for_balance(engine, ranks):
                return []
        elif self._rule.fill[0] and self._waits_to_fill(engine):
            return []
        if self._rule.knows_ends and places:
            places = places[: engine.takes([self._held[place][0] for place in places])]
        elif any(self._rule.keeps[:2]):
            places = places[: self._with_room(engine, [self._held[place][0] for place in places])]
        released, chosen = [self._held[place] for place in places], set(places)
        self._held = [held for place, held in enumerate(self._held) if place not in chosen]
        return released

    def _with_room(self, engine: SimulatedEngine, prompts: list[Served]) -> int:
        """How many of these prompts, by their order, find room for themselves and their whole outputs. An idle engine takes one."""
        free, count = engine.free_tokens(self._rule.kept(self._steps)), 0
        for served in prompts:
            rank = free.index(max(free))
            free[rank] -= served.asked.prompt + served.asked.output
            if free[rank] < 0 and (count or not engine.idle):
                break
            count += 1
        return count

    def _in_a_step(self, engine: SimulatedEngine) -> tuple[list[int], set[int]]:
        """(places of the held prompts that one step computes, the DP ranks that they go to).

        Each prompt goes to the rank with fewest requests, and waits there for its own rank's turn alone: TensorRT-LLM gives requests to
        ranks when it fetches them, and each rank schedules its own.
        """
        counts = list(engine.running)
        left = [self._rule.step_tokens - self._rule.decode_tokens * running for running in counts]
        taken: set[int] = set()
        full: set[int] = set()
        places: list[int] = []
        for place, (served, _) in enumerate(self._held):
            rank = counts.index(min(counts))
            counts[rank] += 1
            if rank in full:
                continue
            left[rank] -= served.asked.prompt
            if left[rank] < 0 and rank in taken:
                full.add(rank)
                if len(full) == len(counts):
                    break
                continue
            taken.add(rank)
            places.append(place)
        return places, taken

    def _waits_to_fill(self, engine: SimulatedEngine) -> bool:
        """Whether held prompts, with the decodes, are too few for a step, and may wait for one more."""
        running = sum(engine.running)
        if not (self._held and running):
            return False
        steps, share = self._rule.fill
        wanted = share * self._rule.step_tokens - self._rule.decode_tokens * running
        if self._unfilled >= steps or sum(served.asked.prompt for served, _ in self._held) >= wanted:
            self._unfilled = 0
            return False
        self._unfilled += 1
        return True

    def _waits_for_balance(self, engine: SimulatedEngine, ranks: set[int]) -> bool:
        """Whether held prompts, the next of which go to these ranks, wait for one more step."""
        running = engine.running
        if len(ranks) == len(running):
            self._unbalanced = 0
            return False
        self._unbalanced += 1
        if self._unbalanced < self._rule.hold_steps and min(running):
            return True
        self._unbalanced = 0
        return False

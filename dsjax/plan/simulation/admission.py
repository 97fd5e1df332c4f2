"""`Lobby`: when an engine takes new prompts in. Some engines look for them less often than every step, or hold them back.

Every rule is of `Engine`'s fields. `poll_steps` is SGLang's `--scheduler-recv-interval` (SchedulerRecvSkipper in its source), `hold_steps`
TensorRT-LLM's `attention_dp_config.timeout_iters` with `enable_balance` (`_balance_adp_requests`), `fill` its `batch_wait_timeout_iters` and
`batch_wait_max_tokens_ratio` (`_waiting_requests`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

from dsjax.plan.engine import Engine
from dsjax.plan.simulation.load import Asked, Served
from dsjax.plan.simulation.service import SimulatedEngine


class Lobby:
    """Prompts that have arrived at an engine and that its scheduler does not know yet.

    step_tokens: most tokens of a DP rank in a step; decode_tokens: of them for each running request. Prompts are held back until every DP
    rank can have one only where there are several `ranks`, and until they fill a step only where there is one.
    """

    def __init__(self, rule: Engine, ranks: int, step_tokens: float, decode_tokens: int):
        self._rule, self._step_tokens, self._decode_tokens = rule, step_tokens, decode_tokens
        self._hold = rule.hold_steps if rule.holds_prompts and ranks > 1 else 0
        self._fill = rule.fill if ranks == 1 else (0, 0.0)
        self._unseen: list[tuple[Served, float]] = []
        self._held: list[tuple[Served, float]] = []
        self._unpolled = self._waited = self._decode_steps = 0

    @property
    def is_open(self) -> bool:
        """Whether every prompt is taken in at the next step."""
        rule = self._rule
        return rule.poll_steps <= 1 and not (self._hold or self._fill[0] or any(rule.keeps[:2]) or rule.knows_ends)

    def admit(self, engine: SimulatedEngine, arrived: list[tuple[Served, float]]) -> list[tuple[Served, float]]:
        """Prompts, each with the second of its arrival, that the engine schedules in its next step. Called once between two steps."""
        self._unseen += arrived
        self._unpolled += 1
        self._decode_steps += not engine.had_prompts
        if engine.idle or engine.had_prompts or self._unpolled >= self._rule.poll_steps:
            self._held += self._unseen
            self._unseen, self._unpolled = [], 0
        places, running = list(range(len(self._held))), engine.running
        if self._hold:
            places, ranks = self._in_a_step(running)
            if self._waits(ranks == len(running) or not min(running), self._hold - 1):
                return []
        elif self._fill[0] and self._held and any(running):
            steps, share = self._fill
            wanted = share * self._step_tokens - self._decode_tokens * sum(running)
            if self._waits(sum(served.asked.prompt for served, _ in self._held) >= wanted, steps):
                return []
        fits, idle = self._room(engine), engine.idle
        chosen = set()
        for place in places:
            if not fits(self._held[place][0].asked) and (chosen or not idle):  # an idle engine takes one
                break
            chosen.add(place)
        released = [self._held[place] for place in sorted(chosen)]
        self._held = [held for place, held in enumerate(self._held) if place not in chosen]
        return released

    def _waits(self, ready: bool, most: int) -> bool:
        """Whether prompts wait for one more step: until they are ready, for `most` steps."""
        self._waited = 0 if ready or self._waited >= most else self._waited + 1
        return self._waited > 0

    def _in_a_step(self, running: list[int]) -> tuple[list[int], int]:
        """(places of the held prompts that one step computes, number of DP ranks that they go to).

        Each prompt goes to the rank with fewest requests, and waits there for its own rank's turn alone: TensorRT-LLM gives requests to
        ranks when it fetches them, and each rank schedules its own.
        """
        counts = list(running)
        left = [self._step_tokens - self._decode_tokens * count for count in counts]
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
                continue
            taken.add(rank)
            places.append(place)
        return places, len(taken)

    def _room(self, engine: SimulatedEngine) -> Callable[[Asked], bool]:
        """Tell of one prompt after the other whether the KV cache has room for it and its output beside the requests before."""
        if self._rule.knows_ends:
            return self._room_until_ends(engine)
        first, last, steps = self._rule.keeps
        if not first and not last:
            return lambda asked: True
        kept = first + (last - first) * min(1.0, self._decode_steps / steps)
        free = [
            engine.cache_tokens - sum(made + kept * to_come for to_come, made in requests) for requests in engine.held
        ]

        def fits(asked: Asked) -> bool:
            rank = free.index(max(free))
            free[rank] -= asked.prompt + asked.output
            return free[rank] >= 0

        return fits

    def _room_until_ends(self, engine: SimulatedEngine) -> Callable[[Asked], bool]:
        """SGLang's rule for requests whose ends are known (`add_one_req_ignore_eos` of its srt/managers/schedule_policy.py).

        Whoever is nearest to its end gives its tokens back first, and until then all make as many. Prompts go to the emptiest DP rank.
        """
        held = [sorted(requests) for requests in engine.held]

        def fits(asked: Asked) -> bool:
            requests = min(held, key=len)
            bisect.insort(requests, (asked.output, asked.prompt))
            before = itertools.accumulate((made for _, made in requests), initial=0)
            free = engine.cache_tokens - sum(made for _, made in requests)
            return all(
                free + given_back > (to_come + 1) * (len(requests) - at)
                for at, ((to_come, _), given_back) in enumerate(zip(requests, before, strict=False))
            )

        return fits

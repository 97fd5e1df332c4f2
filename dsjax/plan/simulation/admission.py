"""`Lobby`: when an engine takes new prompts in. Some engines look for them less often than every step, or hold them back.

The rules are fields of `Engine`. `poll_steps` is SGLang's `--scheduler-recv-interval` (SchedulerRecvSkipper in its source). Of TensorRT-LLM
`hold_steps` is `attention_dp_config.timeout_iters` with `enable_balance` (`_balance_adp_requests` in its source), and `fill` is
`batch_wait_timeout_iters` with `batch_wait_max_tokens_ratio` (`_waiting_requests`).
"""

import bisect
from collections.abc import Callable
from functools import partial

from dsjax.plan.engine import Engine
from dsjax.plan.simulation.service import Served, SimulatedEngine


class Lobby:
    """Prompts that have arrived at an engine and that its scheduler does not know yet.

    step_tokens: most tokens of a DP rank in a step; decode_tokens: of them for each running request. Prompts are held back until every DP
    rank can have one only where there are several `ranks`, and until they fill a step only where there is one.
    """

    def __init__(self, rule: Engine, ranks: int, step_tokens: float, decode_tokens: int):
        self._rule, self._step_tokens, self._decode_tokens = rule, step_tokens, decode_tokens
        self._hold = rule.hold_steps if rule.holds_prompts and ranks > 1 else 0
        self._fill = rule.fill if ranks == 1 else (0, 0.0)
        self._unseen: list[Served] = []
        self._held: list[Served] = []
        self._unpolled = self._waited = self._decode_steps = 0

    @property
    def is_open(self) -> bool:
        """Whether every prompt is taken in at the next step."""
        rule = self._rule
        return rule.poll_steps <= 1 and not (self._hold or self._fill[0] or any(rule.keeps[:2]) or rule.knows_ends)

    def admit(self, engine: SimulatedEngine, arrived: list[Served]) -> list[Served]:
        """Prompts that the engine schedules in its next step. Called once between two steps."""
        self._unseen += arrived
        self._unpolled += 1
        self._decode_steps += not engine.had_prompts
        if engine.idle or engine.had_prompts or self._unpolled >= self._rule.poll_steps:
            self._held += self._unseen
            self._unseen, self._unpolled = [], 0
        places, running = list(range(len(self._held))), [len(rank.running) for rank in engine.scheduler.ranks]
        if self._hold:
            places, ranks = self._in_a_step(running)
            if self._waits(ranks == len(running) or not min(running), self._hold - 1):
                return []
        elif self._fill[0] and self._held and any(running):
            steps, share = self._fill
            wanted = share * self._step_tokens - self._decode_tokens * sum(running)
            if self._waits(sum(served.prompt for served in self._held) >= wanted, steps):
                return []
        fits, idle = self._room(engine), engine.idle
        chosen = set()
        for place in places:
            if not fits(self._held[place]) and (chosen or not idle):  # an idle engine takes one
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
        for place, served in enumerate(self._held):
            rank = counts.index(min(counts))
            counts[rank] += 1
            if rank in full:
                continue
            left[rank] -= served.prompt
            if left[rank] < 0 and rank in taken:
                full.add(rank)
                continue
            taken.add(rank)
            places.append(place)
        return places, len(taken)

    def _room(self, engine: SimulatedEngine) -> Callable[[Served], bool]:
        """Tell of one prompt after the other whether the KV cache has room for it and its output beside the requests before."""
        rule, cache = self._rule, engine.cache_tokens
        if not rule.knows_ends and not any(rule.keeps[:2]):
            return lambda served: True
        # Of each rank's requests: tokens still to make, and tokens so far.
        held = [
            [(r.max_tokens - r.num_output_tokens, len(r.token_ids)) for r in (*rank.running, *rank.waiting)]
            for rank in engine.scheduler.ranks
        ]
        if rule.knows_ends:
            return partial(_fits_until_ends, [sorted(requests) for requests in held], cache)
        first, last, steps = rule.keeps
        kept = first + (last - first) * min(1.0, self._decode_steps / steps)
        return partial(_fits, [cache - sum(so_far + kept * left for left, so_far in requests) for requests in held])


def _fits(free: list[float], served: Served) -> bool:
    """Give a request to the rank with most free tokens, and tell whether it has room there with its whole output."""
    rank = free.index(max(free))
    free[rank] -= served.prompt + served.output
    return free[rank] >= 0


def _fits_until_ends(held: list[list[tuple[int, int]]], cache: float, served: Served) -> bool:
    """SGLang's rule for requests whose ends are known (`add_one_req_ignore_eos` of its srt/managers/schedule_policy.py).

    Whoever is nearest to its end gives its tokens back first, and until then all make as many. Prompts go to the emptiest DP rank.
    """
    requests = min(held, key=len)
    bisect.insort(requests, (served.output, served.prompt))
    free = cache - sum(so_far for _, so_far in requests)
    for ended, (left, so_far) in enumerate(requests):
        if free <= (left + 1) * (len(requests) - ended):
            return False
        free += so_far
    return True

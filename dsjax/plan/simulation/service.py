"""Instances on virtual time: the engine's own scheduler where there are prompts, and a decode side that gets caches from elsewhere."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import RankPlan, Request
from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.plan.simulation.load import Asked
from dsjax.plan.simulation.prices import Fastest, RankWork

PAGE = 16
"""Slots of a page, as `dsjax serve` has them by default."""
_SHARED_TOKEN, _OWN_TOKEN, _PARAMS = 1, 2, SamplingParams()
_TINY = 1e-9


class Served:
    """One request: its number, and the seconds of its arrival, first token and last token."""

    __slots__ = ("arrival", "asked", "finished", "first", "number")

    def __init__(self, number: int, asked: Asked, arrival: float):
        self.number, self.asked, self.arrival = number, asked, arrival
        self.first = self.finished = 0.0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first; None where there is only one."""
        return (self.finished - self.first) / (self.asked.output - 1) if self.asked.output > 1 else None


_SOME, _NONE = RowResult((0,)), RowResult()


def _results(rank: RankPlan, waits: bool, made: float) -> RankResults:
    """Some token for every row that makes one, `made` on average for a decode. waits: decodes have to wait, and make none."""
    decoded = [_NONE if waits else _SOME] * len(rank.decodes)
    if made != 1 and not waits:
        decoded = [_tokens_of_a_step(row.request.num_output_tokens, made) for row in rank.decodes]
    return RankResults(decoded, [_SOME if row.sampled else _NONE for row in rank.prefills])


def _tokens_of_a_step(before: int, made: float) -> RowResult:
    """Whole tokens of a request's next step: `made` on average; `before`: the tokens that it has made, the first by its prompt."""
    steps = max(0, math.ceil((before - 1) / made - _TINY))
    return RowResult((0,) * math.floor(made * (steps + 1) - (before - 1) + _TINY)) if before else _SOME


class SimulatedEngine:
    """One instance under the engine's scheduler: aggregated serving, or the prefill side (outputs of one token).

    gaps: (begin, seconds, decodes) of each step with decodes: a running request waits so long for its next token. made: tokens that a
    step yields for a request; with drafts more than one, so that a request takes as many steps fewer. step_tokens: most of a step, decodes
    among them; chunk: most of one prompt in a step, by default as many. mixes: a rank computes prompts and decodes in one step; otherwise
    its decodes wait for the next step without prompts.
    """

    def __init__(
        self,
        prices: Fastest,
        ranks: int,
        *,
        seqs: int,
        step_tokens: int,
        cache_tokens: int,
        longest: int,
        sharing: bool,
        chunk: int | None = None,
        one_token: bool = False,
        made: float = 1.0,
        mixes: bool = True,
    ):
        config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=max(seqs, step_tokens),
            prefill_chunk=chunk or max(seqs, step_tokens),
            max_prefill_rows=step_tokens,
            page_size=PAGE,
            pages_per_rank=max(2, cache_tokens // PAGE + 1),
            max_model_len=longest,
            prefix_caching=sharing,
        )
        self._scheduler, self._prices, self._one_token = Scheduler(config, ranks), prices, one_token
        self._made, self._cache_tokens, self._mixes = made, cache_tokens, mixes
        self._stalled = 0.0
        self._serving: dict[str, Served] = {}
        self._count = 0
        self._plan = None
        self.gaps: list[tuple[float, float, int]] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._serving

    @property
    def waiting_tokens(self) -> int:
        """Tokens of requests that have not begun."""
        return self._scheduler.waiting_tokens

    @property
    def had_prompts(self) -> bool:
        """Whether the last step computed any prompt."""
        return self._plan is not None and any(rank.prefills for rank in self._plan.ranks)

    @property
    def running(self) -> list[int]:
        """Requests of each DP rank that have begun."""
        return [len(rank.running) for rank in self._scheduler.ranks]

    def free_tokens(self, kept: float) -> list[float]:
        """Tokens that the cache of each DP rank has room for, beside what its requests hold and this share of their outputs to come.

        Requests that wait count with their prompts.
        """
        free = []
        for rank in self._scheduler.ranks:
            taken = 0.0
            for request in (*rank.running, *rank.waiting):
                made = len(request.token_ids) - request.num_prompt_tokens
                taken += request.num_prompt_tokens + made + kept * (request.max_tokens - made)
            free.append(self._cache_tokens - taken)
        return free

    def takes(self, prompts: list[Served]) -> int:
        """How many of these prompts, in their order, the cache has room for until all requests have ended, with no more than they need.

        SGLang's rule for requests whose ends are known (`add_one_req_ignore_eos` of its srt/managers/schedule_policy.py): whoever is
        nearest to its end gives its tokens back first, and until then all make as many. Prompts go to the emptiest DP rank.
        """
        held = []
        for rank in self._scheduler.ranks:
            states = []
            for request in (*rank.running, *rank.waiting):
                made = len(request.token_ids) - request.num_prompt_tokens
                states.append((request.max_tokens - made, len(request.token_ids)))
            held.append(sorted(states))
        count = 0
        for served in prompts:
            states = min(held, key=len)
            bisect.insort(states, (float(served.asked.output), float(served.asked.prompt)))
            free = self._cache_tokens - sum(occupied for _, occupied in states)
            for at, (left, occupied) in enumerate(states):
                if free <= (left + 1) * (len(states) - at) and (count or not self.idle):
                    return count
                free += occupied
            count += 1
        return count

    def add(self, served: Served, now: float) -> None:
        """Queue a request."""
        asked, name = served.asked, str(self._count)
        # Only the shared part may be found in the cache: what follows is each request's own from its first token on.
        tokens = [_SHARED_TOKEN] * asked.shared + [_OWN_TOKEN + self._count] * (asked.prompt - asked.shared)
        output = 1 if self._one_token else asked.output
        self._scheduler.add(Request(name, tokens, asked.prompt, _PARAMS, output, 0, arrival_time=now))
        self._serving[name] = served
        self._count += 1

    def begin(self, now: float) -> float:
        """Start a step; give its seconds."""
        self._plan = self._scheduler.schedule(now)
        seconds = self._prices.seconds([_work(rank, self._waits(rank)) for rank in self._plan.ranks])
        decodes = sum(len(rank.decodes) for rank in self._plan.ranks if not self._waits(rank))
        if decodes:
            # Where decodes waited for prompts, their next token comes later by that.
            self.gaps.append((now - self._stalled, seconds + self._stalled, decodes))
            self._stalled = 0.0
        elif any(rank.decodes for rank in self._plan.ranks):
            self._stalled += seconds
        return seconds

    def _waits(self, rank: RankPlan) -> bool:
        """Whether a rank's decodes wait for its prompts in this step."""
        return not self._mixes and bool(rank.prefills)

    def end(self, now: float) -> list[Served]:
        """Enter the step's tokens; give the requests that finished."""
        done = []
        for request, _, reason in self._scheduler.update(
            self._plan, [_results(rank, self._waits(rank), self._made) for rank in self._plan.ranks], now
        ):
            if reason is not None:
                served = self._serving.pop(request.request_id)
                served.first, served.finished = request.first_token_time, now
                done.append(served)
        return done


def steps_of(output: int, made: float) -> int:
    """Steps that make so many tokens: the first by the prompt, then `made` each."""
    return output if made == 1 else 1 + math.ceil((output - 1) / made)


def _work(rank: RankPlan, waits: bool) -> RankWork:
    decodes, prefills = [] if waits else rank.decodes, rank.prefills
    context = sum(row.start for row in decodes) + len(decodes)
    prompts = pairs = cached = 0
    for _, start, length, _ in prefills:
        prompts += length
        pairs += length * (start + (length + 1) / 2)
        cached += start
    return RankWork(len(decodes), context, prompts, pairs, cached)


class Decoder:
    """One instance that only decodes: requests come with their caches and run to their end in a slot of the emptiest rank."""

    def __init__(self, prices: Fastest, ranks: int, *, seqs: int, made: float = 1.0):
        self._prices, self._seqs, self._made = prices, seqs, made
        self._decodes, self._context = [0] * ranks, [0] * ranks
        self._waiting: deque[Served] = deque()
        self._ends: list[tuple[int, int, int, Served]] = []
        self._steps = self._count = 0
        self.gaps: list[tuple[float, float, int]] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._ends and not self._waiting

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return len(self._ends) + len(self._waiting)

    def add(self, served: Served, now: float) -> None:
        """Queue a request whose cache has arrived."""
        self._waiting.append(served)

    def begin(self, now: float) -> float:
        """Admit while slots are free, and start a step; give its seconds."""
        while self._waiting and min(self._decodes) < self._seqs:
            served = self._waiting.popleft()
            rank = min(range(len(self._decodes)), key=lambda r: (self._decodes[r], self._context[r]))
            self._decodes[rank] += 1
            self._context[rank] += served.asked.prompt + 1 - self._made
            served.first = now
            steps = max(1, steps_of(served.asked.output, self._made) - 1)
            heapq.heappush(self._ends, (self._steps + steps, self._count, rank, served))
            self._count += 1
        for rank, decodes in enumerate(self._decodes):
            self._context[rank] += decodes * self._made
        ranks = [RankWork(d, c) for d, c in zip(self._decodes, self._context, strict=True)]
        seconds = self._prices.seconds(ranks)
        self.gaps.append((now, seconds, len(self._ends)))
        return seconds

    def end(self, now: float) -> list[Served]:
        """Enter the step's tokens; give the requests that finished."""
        self._steps += 1
        done = []
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, rank, served = heapq.heappop(self._ends)
            served.finished = now
            self._decodes[rank] -= 1
            steps = max(1, steps_of(served.asked.output, self._made) - 1)
            self._context[rank] -= served.asked.prompt + 1 + (steps - 1) * self._made
            done.append(served)
        return done

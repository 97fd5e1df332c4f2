"""Requests of a simulation, the instances that serve them on virtual time, and the prices of their steps.

`SimulatedEngine` runs the engine's own scheduler; `Decoder` is a decode engine. `StepPrices` prices their steps (`StepModel.step`).
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import RankPlan, Request, StepPlan
from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.plan.step import RankWork, StepModel
from dsjax.plan.workload import Lengths, Workload


@dataclass(frozen=True)
class OfferedLoad:
    """Either a rate or a concurrency."""

    rate: float | None  # requests per second, open loop
    concurrency: int | None  # requests in flight; a new one replaces each finished one at once
    # shape of the gamma distribution of inter-arrival times, as in `vllm bench serve`: 1 is Poisson, less is burstier, infinity is even
    burstiness: float = 1.0

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} in flight"
        kind = "Poisson" if self.burstiness == 1 else f"burstiness {self.burstiness:g}"
        return f"{self.rate:.3g} requests/s, {kind}"


@dataclass(slots=True, eq=False)
class Served:
    """One request: its lengths in tokens, and when it was served."""

    number: int
    arrival: float  # time in seconds
    prompt: int
    shared: int  # prompt tokens found in the prefix cache
    output: int
    kind: str = ""  # name of its class in the workload
    first: float = 0.0  # time of the first token, in seconds
    finished: float = 0.0  # time of the last token, in seconds


def requests(load: OfferedLoad, work: Workload, longest: int, seed: int) -> Iterator[Served]:
    """Generate requests without end. The same seed gives the same requests for every plan. longest: limit of prompt + output tokens."""
    gap_rng, prompt_rng, output_rng, kind_rng = (np.random.default_rng((seed, stream)) for stream in range(4))
    now = 0.0
    shares = [one.share for one in work.kinds]
    for number in itertools.count():
        if load.rate is not None:
            even = math.isinf(load.burstiness)
            now += 1 / load.rate if even else float(gap_rng.gamma(load.burstiness, 1 / (load.rate * load.burstiness)))
        kind = work.kinds[int(kind_rng.choice(len(shares), p=shares)) if work.classes else 0]
        output = min(_length(kind.output, output_rng), longest - 2)
        prompt = min(_length(kind.input, prompt_rng), longest - output)
        yield Served(number, now, prompt, math.floor(prompt * work.prefix_hit), output, kind.name)


def _length(lengths: Lengths, source: np.random.Generator) -> int:
    """Sample a log-normal or uniform length with the given mean and coefficient of variation; at least 1."""
    mean, variation = lengths.mean, lengths.variation
    if not variation:
        return max(1, round(mean))
    if lengths.even:
        half_width = math.sqrt(3) * variation * mean
        return max(1, round(source.uniform(mean - half_width, mean + half_width)))
    log_variance = math.log(1 + variation**2)
    return max(1, round(source.lognormal(math.log(mean) - log_variance / 2, math.sqrt(log_variance))))


_SHARED_TOKEN, _OWN_TOKEN, _PARAMS = 1, 2, SamplingParams()
_ONE_TOKEN, _NONE = RowResult((0,)), RowResult()
_CONTEXTS_PER_OCTAVE = 64
"""A rank's mean decode context is rounded to one of this many values per octave, within 0.55 %, so that cached prices can be reused."""


class StepPrices:
    """Central estimates of step times. With several models (with and without two-batch overlap), the shortest time of a step counts.

    paces: by model, a dry run's timeline ÷ the model's estimate, for steps with prompts and for pure decode steps (`Instance.pace`).
    through: `Instance.staged` with pipeline parallelism. The planner's allowances for uneven prompts and contexts are left out, because
    the simulation models the unevenness itself.
    """

    def __init__(
        self,
        models: Sequence[StepModel],
        drafts: int = 0,
        paces: Sequence[tuple[float, float]] | None = None,
        through: Callable[[float, float, bool], float] | None = None,
    ):
        self._models = list(zip(models, paces or [(1.0, 1.0)] * len(models), strict=True))
        self._drafts, self._through = drafts, through

    def seconds(self, ranks: Sequence[RankWork]) -> float:
        """Return the seconds of a step with this work on each DP rank (idle ranks included); 0 without work."""
        ranks = [_rounded(rank) if rank.decodes else rank for rank in ranks]
        tokens = max(rank.decodes * (1 + self._drafts) + rank.prompts for rank in ranks)
        if not tokens:
            return 0.0
        step = min(self._paced(model, ranks, *paces) for model, paces in self._models)
        decode = not any(rank.prompts for rank in ranks)
        return step if self._through is None else self._through(step, tokens, decode)

    def _paced(self, model: StepModel, ranks: list[RankWork], prompts: float, decodes: float) -> float:
        """Return the seconds of a step with one model. prompts, decodes: the paces of the two.

        If they differ, scale prompts alone and decodes alone by their paces, and what computing both together saves by the smaller pace.
        """
        together = model.seconds(model.step(ranks, drafts=self._drafts))
        if prompts == decodes == 1.0:
            return together
        parts = [RankWork(*rank[:2]) for rank in ranks], [rank._replace(decodes=0, context=0) for rank in ranks]
        alone = [model.seconds(model.step(part, drafts=self._drafts)) if any(map(any, part)) else 0.0 for part in parts]
        saved = sum(alone) - together
        return decodes * alone[0] + prompts * alone[1] - min(prompts, decodes) * saved


def _rounded(rank: RankWork) -> RankWork:
    context_per_row = rank.context / rank.decodes
    if context_per_row > 0:
        context_per_row = 2 ** (round(_CONTEXTS_PER_OCTAVE * math.log2(context_per_row)) / _CONTEXTS_PER_OCTAVE)
    return rank._replace(context=rank.decodes * context_per_row)


@dataclass(eq=False)
class SimulatedEngine:
    """One instance under the engine's scheduler: aggregated serving, or a prefill engine if `one_token`."""

    prices: StepPrices
    scheduler: Scheduler
    one_token: bool = False
    made: float = 1.0  # mean tokens per request and decode step; more than one with drafts
    # whether a rank computes prompts and decodes in one step; otherwise its decodes wait while it has prompts
    mixes: bool = True
    # (begin, seconds, decodes) of each step with decodes; `seconds` is the time between tokens, including steps in which all decodes waited
    gaps: list[tuple[float, float, int]] = field(default_factory=list)
    _plan: StepPlan | None = None
    _stalled: float = 0.0  # seconds for which decodes have waited for prompts since the last step with decodes
    _serving: dict[str, Served] = field(default_factory=dict)  # unfinished requests by id

    @property
    def idle(self) -> bool:
        """Whether it has no request."""
        return not self._serving

    @property
    def all_ranks_busy(self) -> bool:
        """Whether every DP rank has a running request."""
        return all(rank.running for rank in self.scheduler.ranks)

    def add(self, served: Served) -> None:
        """Queue a request."""
        name = str(served.number)
        # Only the shared part may hit the prefix cache: every token after it is unique to the request.
        tokens = [_SHARED_TOKEN] * served.shared + [_OWN_TOKEN + served.number] * (served.prompt - served.shared)
        output = 1 if self.one_token else served.output
        self.scheduler.add(Request(name, tokens, served.prompt, _PARAMS, output, 0, arrival_time=served.arrival))
        self._serving[name] = served

    def begin(self, now: float) -> float:
        """Start a step and return its seconds."""
        self._plan = self.scheduler.schedule(now)
        ranks = [_work(rank, self._waits(rank)) for rank in self._plan.ranks]
        seconds = self.prices.seconds(ranks)
        if decodes := sum(work.decodes for work in ranks):
            # If decodes waited for prompts, the wait delays their next token.
            self.gaps.append((now - self._stalled, seconds + self._stalled, decodes))
            self._stalled = 0.0
        elif any(rank.decodes for rank in self._plan.ranks):
            self._stalled += seconds
        return seconds

    def end(self, now: float) -> list[Served]:
        """Record the step's tokens and return the finished requests."""
        done, results = [], []
        for rank in self._plan.ranks:
            if self._waits(rank) or self.made == 1:
                decoded = [_NONE if self._waits(rank) else _ONE_TOKEN] * len(rank.decodes)
            else:
                decoded = [_tokens_of_a_step(row.request.num_output_tokens, self.made) for row in rank.decodes]
            results.append(RankResults(decoded, [_ONE_TOKEN if row.sampled else _NONE for row in rank.prefills]))
        for request, _, reason in self.scheduler.update(self._plan, results, now):
            if reason is not None:
                served = self._serving.pop(request.request_id)
                served.first = request.first_token_time
                served.finished = now
                done.append(served)
        return done

    def _waits(self, rank: RankPlan) -> bool:
        """Whether a rank's decodes wait for its prompts in this step."""
        return not self.mixes and bool(rank.prefills)


def _work(rank: RankPlan, waits: bool) -> RankWork:
    decodes = [] if waits else rank.decodes
    prompts = pairs = cached = ended = 0
    for _, start, length, sampled in rank.prefills:
        prompts += length
        pairs += length * (start + (length + 1) / 2)
        cached += start
        ended += sampled
    return RankWork(len(decodes), sum(row.start for row in decodes) + len(decodes), prompts, pairs, cached, ended)


def _tokens_of_a_step(before: int, tokens_per_step: float) -> RowResult:
    """Return a request's next step in whole tokens, `tokens_per_step` on average. before: tokens so far; prefill made the first."""
    if not before:
        return _ONE_TOKEN
    steps_done = max(0, math.ceil((before - 1) / tokens_per_step - 1e-9))
    return RowResult((0,) * math.floor(tokens_per_step * (steps_done + 1) - (before - 1) + 1e-9))


class Decoder:
    """One decode engine: requests arrive with their KV caches, and each keeps a slot of the least loaded rank until it ends.

    made, gaps: as in `SimulatedEngine`. seqs: slots per rank.
    """

    def __init__(self, prices: StepPrices, ranks: int, *, seqs: int, made: float = 1.0):
        self._prices, self._max_num_seqs, self._made = prices, seqs, made
        self._decodes = [0] * ranks  # running requests of each rank
        self._context = [0.0] * ranks  # positions that they attend to in the current step
        self._waiting = deque[Served]()
        self._steps = 0
        self._ends: list[tuple[int, int, int, float, Served]] = []  # heap: last step, number, rank, last context
        self.gaps: list[tuple[float, float, int]] = []

    @property
    def idle(self) -> bool:
        """Whether it has no request."""
        return not (self._ends or self._waiting)

    def add(self, served: Served) -> None:
        """Queue a request whose cache has arrived."""
        self._waiting.append(served)

    def begin(self, now: float) -> float:
        """Admit requests while slots are free, start a step and return its seconds."""
        tokens_per_step = self._made
        while self._waiting and min(self._decodes) < self._max_num_seqs:
            served = self._waiting.popleft()
            served.first = now
            rank = min(range(len(self._decodes)), key=lambda r: (self._decodes[r], self._context[r]))
            num_steps = max(1, math.ceil((served.output - 1) / tokens_per_step))
            first_context = served.prompt + 1
            self._decodes[rank] += 1
            self._context[rank] += first_context - tokens_per_step  # the loop below adds it back
            last_context = first_context + (num_steps - 1) * tokens_per_step
            heapq.heappush(self._ends, (self._steps + num_steps, served.number, rank, last_context, served))
        for rank, decodes in enumerate(self._decodes):
            self._context[rank] += decodes * tokens_per_step
        seconds = self._prices.seconds([RankWork(*work) for work in zip(self._decodes, self._context, strict=True)])
        self.gaps.append((now, seconds, len(self._ends)))
        return seconds

    def end(self, now: float) -> list[Served]:
        """Return the requests that finished with this step."""
        self._steps += 1
        done = []
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, rank, last_context, served = heapq.heappop(self._ends)
            served.finished = now
            self._decodes[rank] -= 1
            self._context[rank] -= last_context
            done.append(served)
        return done

"""`Service`: a candidate's instances with their clocks, and the KV caches on their way between prefill and decode."""

import heapq
import math

from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.plan.candidate import Candidate, transfer_seconds, transfers_at_once
from dsjax.plan.instance import Instance
from dsjax.plan.network import exposed_transfer
from dsjax.plan.simulation.service import Decoder, Served, SimulatedEngine, StepPrices

_PAGE = 16
"""Slots of a page, as `dsjax serve` has them by default."""
_HOLD_STEPS = 50
"""Steps for which prompts are held back at most: `attention_dp_config.timeout_iters` of TensorRT-LLM."""


class _Clocked:
    """An instance that begins a step whenever it has work and none is running.

    ahead: a step is planned when the one before begins, so that what arrives during one step waits for the next one too, unless
    there is none. together: prompts wait until there are so many of them, a DP rank has no request, or `_HOLD_STEPS` have passed. until:
    the end of the running step. requests: running and waiting.
    """

    def __init__(self, instance: SimulatedEngine | Decoder, ahead: bool = False, together: int = 1):
        self.instance, self.until, self._ahead, self._together = instance, math.inf, ahead, together
        self._arrived, self._planned, self._held = list[Served](), list[Served](), list[Served]()
        self.requests = self._waited = 0

    def add(self, served: Served, now: float) -> None:
        self.requests += 1
        if math.isinf(self.until):
            self.instance.add(served)
            self._begin(now)
        elif self._ahead:
            self._arrived.append(served)
        else:
            self.instance.add(served)

    def advance(self) -> list[Served]:
        done = self.instance.end(self.until)
        self.requests -= len(done)
        self._admit(self._planned)
        self._planned, self._arrived = self._arrived, []
        if self.instance.idle:
            self._admit(self._planned)
            self._planned = []
        self._begin(self.until)
        return done

    def _admit(self, arrived: list[Served]) -> None:
        self._held += arrived
        if 0 < len(self._held) < self._together and self._waited < _HOLD_STEPS - 1 and self.instance.all_ranks_busy:
            self._waited += 1
            return
        for served in self._held:
            self.instance.add(served)
        self._held, self._waited = [], 0

    def _begin(self, now: float) -> None:
        self.until = math.inf if self.instance.idle else now + self.instance.begin(now)


class Service:
    """What plays a candidate: one of its aggregated instances, or all of a separated service.

    A prompt goes to the prefill instance with the fewest tokens waiting, then its KV cache, over the link that is free first, to the
    decode instance with the fewest requests. longest: most tokens of a request.
    """

    def __init__(self, candidate: Candidate, longest: int):
        decode, tokens, seqs = candidate.decode, candidate.prefill_tokens, max(1, math.ceil(candidate.batch))
        made = decode.options.tokens_a_step
        self._moving: list[tuple[float, int, Served]] = []
        if candidate.mode == "aggregated":
            engine = _engine(decode, candidate.batch, tokens, longest)
            together = decode.replicas if decode.options.engine.holds_prompts else 1
            self._decode = self._prefill = [_Clocked(engine, True, together)]
            return
        prefill = candidate.prefill
        # The prefill side holds a step's prompts and those before them in the queue, no more.
        batch = 4 * max(1.0, tokens / prefill.workload.computed)
        self._prefill = [
            _Clocked(_engine(prefill, batch, tokens, longest, one_token=True)) for _ in range(candidate.prefill_count)
        ]
        prices = _prices(decode)
        self._decode = [
            _Clocked(Decoder(prices, decode.replicas, seqs=seqs, made=made), True) for _ in range(candidate.count)
        ]
        ways = transfers_at_once(prefill, candidate.prefill_count, decode, candidate.count)
        self._transfer = transfer_seconds(decode, prefill)
        self._hidden = (1 - exposed_transfer()) * self._transfer
        self._free = [-math.inf] * max(1, int(ways))  # when each link can take the next cache
        self._busy = self._transfer * len(self._free) / ways

    def add(self, served: Served, now: float) -> None:
        """A request arrives."""
        min(self._prefill, key=lambda one: one.instance.scheduler.waiting_tokens).add(served, now)

    def next_time(self) -> float:
        """The nearest end of a step or of a transfer; infinite while idle."""
        moved = self._moving[0][0] if self._moving else math.inf
        return min(moved, *(one.until for one in (*self._prefill, *self._decode)))

    def advance(self) -> list[Served]:
        """End one step or transfer; give the requests that finished."""
        now = self.next_time()
        for one in self._decode:
            if one.until == now:
                return one.advance()
        for one in self._prefill:
            if one.until == now:
                for served in one.advance():
                    self._move(served, now)
                return []
        served = heapq.heappop(self._moving)[2]
        min(self._decode, key=lambda one: one.requests).add(served, now)
        return []

    def _move(self, served: Served, now: float) -> None:
        """Send a cache. Where a link was free, all but the exposed share has travelled while later layers were computed."""
        begin = max(heapq.heappop(self._free), now - self._hidden)
        heapq.heappush(self._free, begin + self._busy)
        heapq.heappush(self._moving, (begin + self._transfer, served.number, served))

    def gaps(self) -> list[tuple[float, float, int]]:
        """(begin, seconds, decodes) of all decoding steps."""
        return [gap for one in self._decode for gap in one.instance.gaps]


def _engine(
    instance: Instance, batch: float, tokens: float, longest: int, *, one_token: bool = False
) -> SimulatedEngine:
    """tokens: most prompt tokens of a step. Decodes are in the engine's budget too, so that it is larger by them, as in a recipe."""
    options, cache = instance.options, int(instance.memory.cache_tokens)
    seqs, chunk = max(1, math.ceil(batch)), math.ceil(tokens)
    step_tokens = max(seqs, chunk) if one_token else chunk + seqs
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=step_tokens,
        prefill_chunk=chunk,
        max_prefill_rows=step_tokens,
        page_size=_PAGE,
        pages_per_rank=max(2, cache // _PAGE + 1),
        max_model_len=min(longest, cache),
        prefix_caching=instance.workload.prefix_hit > 0,
    )
    scheduler, made = Scheduler(config, instance.replicas), 1.0 if one_token else options.tokens_a_step
    return SimulatedEngine(_prices(instance), scheduler, one_token, made, options.engine.mixes)


def _prices(instance: Instance) -> StepPrices:
    """Prices of an instance's steps, by all models of its steps."""
    models = instance.step_models()
    paces = [tuple(instance.pace(decode, one.overlap) for decode in (False, True)) for one in models]
    through = instance.staged if instance.layout.mesh.pp_size > 1 else None
    return StepPrices(models, instance.options.drafts, paces, through)

"""`Service`: a candidate's instances with their clocks, and the KV caches on their way between prefill and decode."""

import heapq
import math

from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.plan.candidate import Candidate, concurrent_transfers, transfer_seconds
from dsjax.plan.instance import Instance
from dsjax.plan.network import exposed_transfer
from dsjax.plan.simulation.service import Decoder, Served, SimulatedEngine, StepPrices

_PAGE = 16
"""Token slots per page, the default of `dsjax serve`."""
_HOLD_STEPS = 50
"""Most steps for which prompts are held back: `attention_dp_config.timeout_iters` of TensorRT-LLM."""


class _Clocked:
    """An instance that starts a step whenever it has work and no step is running.

    ahead: plan a step when the previous one starts, so that a request that arrives during a step also waits for the next step, if there
    is one. together: hold prompts until `together` have arrived, a DP rank has no request, or `_HOLD_STEPS` steps have passed. until: end
    of the running step, seconds. requests: number of running and waiting requests.
    """

    def __init__(self, instance: SimulatedEngine | Decoder, ahead: bool = False, together: int = 1):
        self.instance = instance
        self.until = math.inf
        self._ahead = ahead
        self._together = together
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
        self._planned = self._arrived
        self._arrived = []
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
        self._held = []
        self._waited = 0

    def _begin(self, now: float) -> None:
        self.until = math.inf if self.instance.idle else now + self.instance.begin(now)


class Service:
    """Simulation of a candidate: one of its aggregated instances, or a whole separated service.

    A prompt goes to the prefill instance with the fewest waiting tokens. Its KV cache then goes over the first free link to the decode
    instance with the fewest requests. longest: most tokens of a request.
    """

    def __init__(self, candidate: Candidate, longest: int):
        decode = candidate.decode
        tokens = candidate.prefill_tokens
        seqs = max(1, math.ceil(candidate.batch))
        tokens_per_step = decode.options.tokens_a_step
        self._moving: list[tuple[float, int, Served]] = []
        if candidate.mode == "aggregated":
            engine = _engine(decode, candidate.batch, tokens, longest)
            together = decode.replicas if decode.options.engine.holds_prompts else 1
            self._decode = self._prefill = [_Clocked(engine, ahead=True, together=together)]
            return
        prefill = candidate.prefill
        # A prefill instance only holds the prompts of a step and those ahead of them in the queue.
        batch = 4 * max(1.0, tokens / prefill.workload.computed)
        self._prefill = [
            _Clocked(_engine(prefill, batch, tokens, longest, one_token=True)) for _ in range(candidate.prefill_count)
        ]
        prices = _prices(decode)
        self._decode = [
            _Clocked(Decoder(prices, decode.replicas, seqs=seqs, made=tokens_per_step), ahead=True)
            for _ in range(candidate.count)
        ]
        ways = concurrent_transfers(prefill, candidate.prefill_count, decode, candidate.count)
        self._transfer = transfer_seconds(decode, prefill)
        self._hidden = (1 - exposed_transfer()) * self._transfer
        self._free = [-math.inf] * max(1, int(ways))  # when each link can take the next cache
        self._busy = self._transfer * len(self._free) / ways

    def add(self, served: Served, now: float) -> None:
        """Add a request that arrives at `now`."""
        min(self._prefill, key=lambda one: one.instance.scheduler.waiting_tokens).add(served, now)

    def next_time(self) -> float:
        """Return the next end of a step or transfer; infinite while idle."""
        transfer_end = self._moving[0][0] if self._moving else math.inf
        return min(transfer_end, *(clocked.until for clocked in (*self._prefill, *self._decode)))

    def advance(self) -> list[Served]:
        """End one step or transfer and return the finished requests."""
        now = self.next_time()
        for clocked in self._decode:
            if clocked.until == now:
                return clocked.advance()
        for clocked in self._prefill:
            if clocked.until == now:
                for served in clocked.advance():
                    self._move(served, now)
                return []
        served = heapq.heappop(self._moving)[2]
        min(self._decode, key=lambda clocked: clocked.requests).add(served, now)
        return []

    def _move(self, served: Served, now: float) -> None:
        """Send a KV cache. If a link was free, all but the exposed share was already sent while later layers were computed."""
        begin = max(heapq.heappop(self._free), now - self._hidden)
        heapq.heappush(self._free, begin + self._busy)
        heapq.heappush(self._moving, (begin + self._transfer, served.number, served))

    def gaps(self) -> list[tuple[float, float, int]]:
        """Return (begin, seconds, decodes) of all decode steps."""
        return [gap for clocked in self._decode for gap in clocked.instance.gaps]


def _engine(
    instance: Instance, batch: float, tokens: float, longest: int, *, one_token: bool = False
) -> SimulatedEngine:
    """Return an engine with at most `tokens` prompt tokens per step. Its token budget also has room for the decodes, as in recipes."""
    options = instance.options
    cache = int(instance.memory.cache_tokens)
    seqs = max(1, math.ceil(batch))
    chunk = math.ceil(tokens)
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
    scheduler = Scheduler(config, instance.replicas)
    tokens_per_step = 1.0 if one_token else options.tokens_a_step
    return SimulatedEngine(_prices(instance), scheduler, one_token, tokens_per_step, options.engine.mixes)


def _prices(instance: Instance) -> StepPrices:
    """Return the step prices of an instance, from all of its step models."""
    models = instance.step_models()
    paces = [tuple(instance.pace(decode, model.overlap) for decode in (False, True)) for model in models]
    staged_seconds = instance.staged if instance.layout.mesh.pp_size > 1 else None
    return StepPrices(models, instance.options.drafts, paces, staged_seconds)

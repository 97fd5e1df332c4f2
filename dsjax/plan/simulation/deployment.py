"""A candidate's instances with their clocks: one aggregated instance, or all of a separated service with its transfers."""

from __future__ import annotations

import heapq
import math
from typing import Protocol

from dsjax.plan.candidate import Candidate, transfer_seconds
from dsjax.plan.instance import Instance
from dsjax.plan.network import exposed_transfer
from dsjax.plan.simulation.admission import Admission, Lobby
from dsjax.plan.simulation.prices import Fastest, Staged
from dsjax.plan.simulation.service import Decoder, Served, SimulatedEngine


class Deployment(Protocol):
    """Something that serves requests on virtual time."""

    def add(self, served: Served, now: float) -> None:
        """A request arrives."""

    def next_time(self) -> float:
        """When something happens next; infinite while idle."""

    def advance(self) -> list[Served]:
        """Let it happen; give the requests that finished."""

    def gaps(self) -> list[tuple[float, float, int]]:
        """(begin, seconds, decodes) of all decoding steps."""


class _Clocked:
    """An instance that begins a step whenever it has work and none is running. until: the end of the running step.

    ahead: a step is planned when the one before begins, so that what arrives during one step waits for the next one too, unless
    there is none. lobby: where prompts wait that the engine's rule of admission keeps from its scheduler; None where it keeps none.
    """

    def __init__(self, instance: SimulatedEngine | Decoder, ahead: bool = False, lobby: Lobby | None = None):
        self.instance, self.until, self._ahead, self._lobby = instance, math.inf, ahead, lobby
        self._arrived: list[tuple[Served, float]] = []
        self._planned: list[tuple[Served, float]] = []

    def add(self, served: Served, now: float) -> None:
        if not math.isinf(self.until):
            if self._ahead:
                self._arrived.append((served, now))
            elif self._lobby is not None:
                self._planned.append((served, now))
            else:
                self.instance.add(served, now)
            return
        self.instance.add(served, now)
        self._begin(now)

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return self.instance.requests + len(self._planned) + len(self._arrived)

    def advance(self) -> list[Served]:
        done = self.instance.end(self.until)
        self._admit(self._planned)
        self._planned, self._arrived = self._arrived, []
        if self.instance.idle:
            self._admit(self._planned)
            self._planned = []
        self._begin(self.until)
        return done

    def _admit(self, arrived: list[tuple[Served, float]]) -> None:
        """Give prompts to the scheduler, through the lobby where there is one."""
        if self._lobby is not None:
            self._lobby.enter(arrived)
            arrived = self._lobby.leave(self.instance)
        for served, when in arrived:
            self.instance.add(served, when)

    def _begin(self, now: float) -> None:
        self.until = math.inf if self.instance.idle else now + self.instance.begin(now)


def _engine(
    instance: Instance, batch: float, tokens: float, longest: int, *, one_token: bool = False
) -> SimulatedEngine:
    """tokens: most prompt tokens of a step. Decodes are in the engine's budget too, so that it is larger by them, as in a recipe."""
    work = instance.workload
    seqs, chunk = max(1, math.ceil(batch)), math.ceil(tokens)
    step_tokens = max(seqs, chunk) if one_token else chunk + seqs
    prices = _prices(instance, step_tokens, 0 if one_token else instance.options.drafts)
    cache = int(instance.memory.cache_tokens)
    return SimulatedEngine(
        prices,
        instance.replicas,
        seqs=seqs,
        step_tokens=step_tokens,
        chunk=chunk,
        cache_tokens=cache,
        longest=min(longest, cache),
        sharing=work.prefix_hit > 0,
        one_token=one_token,
        made=1.0 if one_token else instance.options.tokens_a_step,
        mixes=instance.options.engine.mixes,
    )


def _prices(instance: Instance, most_tokens: int, drafts: int) -> Fastest | Staged:
    """Made once for all loads that an instance is played under. With several stages they have what these add to a
    step of all layers."""
    key = ("prices", most_tokens, drafts)
    if key not in instance.steps:
        models = instance.step_models()
        paces = [tuple(_ratio(instance.pace(decode, one.overlap)) for decode in (False, True)) for one in models]
        made = Fastest(models, most_tokens, drafts, paces, instance.options.drafts > 0)
        instance.steps[key] = made if instance.stage is None else Staged(made, instance, drafts)
    return instance.steps[key]


def _ratio(pace: float | None) -> float:
    return 1.0 if pace is None else pace


def admission(instance: Instance, step_tokens: float) -> Admission:
    """The rule of an instance's engine, with so many tokens of a DP rank in a step, decodes among them.

    Prompts are held back for balance only where there are several DP ranks.
    """
    engine = instance.options.engine
    holds = engine.hold_steps if engine.holds_prompts and instance.replicas > 1 else 0
    fill = engine.fill if instance.replicas == 1 else (0, 0.0)
    return Admission(
        engine.poll_steps, holds, fill, step_tokens, 1 + instance.options.drafts, engine.keeps, engine.knows_ends
    )


class Aggregated:
    """One instance: the others get as much and do the same."""

    def __init__(self, candidate: Candidate, longest: int):
        engine = _engine(candidate.decode, candidate.batch, candidate.prefill_tokens, longest)
        rule = admission(candidate.decode, candidate.prefill_tokens + max(1, math.ceil(candidate.batch)))
        self._clocked = _Clocked(engine, candidate.decode.ahead, None if rule.is_open else Lobby(rule))

    def add(self, served: Served, now: float) -> None:
        """Queue it."""
        self._clocked.add(served, now)

    def next_time(self) -> float:
        """End of the running step."""
        return self._clocked.until

    def advance(self) -> list[Served]:
        """End the step and begin the next."""
        return self._clocked.advance()

    def gaps(self) -> list[tuple[float, float, int]]:
        """Gaps between tokens of the instance."""
        return self._clocked.instance.gaps


class SeparatedService:
    """All instances of a separated service. A prompt goes to the prefill instance with the fewest tokens waiting, its cache then
    to the decode instance with the fewest requests; the transfer takes what the mean-value answer has for it."""

    def __init__(self, candidate: Candidate, longest: int):
        rows = max(1.0, candidate.prefill_tokens / candidate.prefill.workload.computed)
        # The prefill side holds a step's prompts and those before them in the queue, no more.
        self._prefill = [
            _Clocked(_engine(candidate.prefill, 4 * rows, candidate.prefill_tokens, longest, one_token=True))
            for _ in range(candidate.prefill_count)
        ]
        seqs = max(1, math.ceil(candidate.batch))
        prices = _prices(candidate.decode, seqs, candidate.decode.options.drafts)
        replicas = candidate.decode.replicas
        self._decode = [
            _Clocked(
                Decoder(prices, replicas, seqs=seqs, made=candidate.decode.options.tokens_a_step),
                candidate.decode.ahead,
            )
            for _ in range(candidate.count)
        ]
        self._transfer = exposed_transfer() * transfer_seconds(candidate.decode, candidate.prefill)
        self._moving: list[tuple[float, int, Served]] = []

    def add(self, served: Served, now: float) -> None:
        """Queue its prompt."""
        min(self._prefill, key=lambda one: one.instance.waiting_tokens).add(served, now)

    def next_time(self) -> float:
        """The nearest end of a step or of a transfer."""
        moved = self._moving[0][0] if self._moving else math.inf
        return min(moved, *(one.until for one in self._prefill), *(one.until for one in self._decode))

    def advance(self) -> list[Served]:
        """End one step or transfer."""
        now = self.next_time()
        for one in self._decode:
            if one.until == now:
                return one.advance()
        for one in self._prefill:
            if one.until == now:
                for served in one.advance():
                    heapq.heappush(self._moving, (now + self._transfer, served.number, served))
                return []
        served = heapq.heappop(self._moving)[2]
        min(self._decode, key=lambda one: one.requests).add(served, now)
        return []

    def gaps(self) -> list[tuple[float, float, int]]:
        """Gaps between tokens of the decode side."""
        return [gap for one in self._decode for gap in one.instance.gaps]


def deployment(candidate: Candidate, longest: int) -> Deployment:
    """What plays a candidate. longest: most tokens of a request."""
    return Aggregated(candidate, longest) if candidate.mode == "aggregated" else SeparatedService(candidate, longest)

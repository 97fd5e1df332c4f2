"""`Candidate`: a deployment with its figures, aggregated or with prefill and decode disaggregated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import DRAWS, as_json, assumption, samples, spread, through
from dsjax.plan.instance import Instance
from dsjax.plan.memory import cache_bytes_per_token, window_page_bytes
from dsjax.plan.network import cache_transfer, exposed_transfer
from dsjax.plan.prompts import own_load, own_step, prompts_beside_decodes
from dsjax.plan.workload import Objective

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64

_MAX_ITERATIONS = 30
"""Most iterations until a step and the prompts that arrive during it settle; a few suffice below the highest rate."""
_BISECTION_STEPS = 14
_ADMISSION_STEPS = 1.5
"""Decode steps before the one that admits a new request: half of the current step, and the scheduled one."""
MAX_UTILISATION = 0.85
"""Highest utilisation of prefill instances: above it, small changes of the load let queues grow without bound."""


@dataclass(frozen=True)
class Candidate:
    """A deployment: `count` instances that decode (aggregated ones also prefill), and `prefill_count` that prefill.

    ttft, tpot: mean seconds. draws: throughput, TPOT and TTFT in each draw, if it has intervals.
    """

    mode: str
    decode: Instance
    count: int
    batch: float  # running requests of a DP rank
    prefill: Instance
    prefill_count: int
    prefill_tokens: float
    ttft: float
    tpot: float
    throughput: float  # output tokens per second of the deployment
    draws: Float64[np.ndarray, "D 3"] | None = field(default=None, compare=False, repr=False)

    @property
    def sides(self) -> list[tuple[Instance, int]]:
        """(instance, number of them): decode instances, then prefill instances if they are separate."""
        apart = [(self.prefill, self.prefill_count)] if self.mode == "separated" else []
        return [(self.decode, self.count), *apart]

    @cached_property
    def devices(self) -> int:
        """Devices of all instances."""
        return sum(instance.layout.devices * count for instance, count in self.sides)

    @property
    def row(self) -> tuple:
        """Key of its row in a table: mode, both layouts, and the ratio of prefill to decode instances."""
        most = math.gcd(self.prefill_count, self.count)
        ratio = (self.prefill_count // most, self.count // most) if self.mode == "separated" else ()
        return (self.mode, self.decode.layout, self.prefill.layout, ratio)

    @property
    def per_device(self) -> float:
        """Output tokens per second per device."""
        return through(self.throughput, lambda rate: rate / self.devices)

    @property
    def per_user(self) -> float:
        """Output tokens per second per user."""
        return through(self.tpot, lambda seconds: 1.0 / seconds)

    @property
    def cost(self) -> float | None:
        """Price of a million output tokens, in the currency of the devices' hourly price; None if a device has no price."""
        per_hour = 0.0
        for instance, count in self.sides:
            price = instance.cluster.hardware.price_per_hour
            if price is None:
                return None
            per_hour += price * instance.layout.devices * count
        return through(self.throughput, lambda rate: per_hour / 3600 * 1e6 / rate)

    @property
    def concurrency(self) -> float:
        """Requests that decode concurrently; if disaggregated, the maximum, reached when prefill keeps up."""
        return self.batch * self.decode.replicas * self.count

    def meets(self, objective: Objective, sure: bool = False) -> bool:
        """Whether the estimates meet the objectives. sure: whether the unfavourable ends of the intervals meet them."""
        return not self.misses(objective, sure)

    def misses(self, objective: Objective, sure: bool = False) -> dict[str, float]:
        """Missed objective → factor by which it is missed, above 1."""
        missed = {}
        if (bound := objective.ttft) is not None and (ratio := (self.ttft.high if sure else self.ttft) / bound) > 1:
            missed["ttft"] = ratio
        if (bound := objective.tpot) is not None and (ratio := (self.tpot.high if sure else self.tpot) / bound) > 1:
            missed["tpot"] = ratio
        rate = self.throughput
        if (bound := objective.throughput) is not None and (ratio := bound / (rate.low if sure else rate)) > 1:
            missed["throughput"] = ratio
        return missed

    def name(self) -> str:
        """`4 × dp=8`, or `2 × dp=8 | 1 × dp=16` with prefill first."""
        hosts = self.decode.cluster.prefill is not None
        sides = [f"{n} × {i.layout}" + (f" {i.cluster.hardware.key}" if hosts else "") for i, n in self.sides]
        return " | ".join(sides[::-1]) if self.mode == "separated" else f"{self.count} × {self.decode.layout}"

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`, times in seconds.

        `expert_mesh` is null without AFD, `cost_per_million_output_tokens` without a price. Disaggregated deployments have `prefill`.
        `batch_per_dp_rank` counts running requests, `cache_tokens_per_dp_rank` usable slots.
        """
        decode, layout = self.decode, self.decode.layout
        fields: dict[str, Any] = {
            "mode": self.mode,
            "mesh": str(layout.mesh),
            "expert_mesh": f"ep={layout.experts}" if layout.experts else None,
            "kind": layout.kind,
            "redundant_experts": layout.redundant,
            "instances": self.count,
            "devices": self.devices,
            "batch_per_dp_rank": decode.requests(self.batch),
            "two_batch_overlap": decode.overlapped(self.batch),
            "ttft_s": as_json(self.ttft),
            "tpot_s": as_json(self.tpot),
            "output_tokens_per_s": as_json(self.throughput),
            "output_tokens_per_s_device": as_json(self.per_device),
            "tokens_per_s_user": as_json(self.per_user),
            "cost_per_million_output_tokens": as_json(self.cost) if self.cost else None,
            "weight_bytes_per_device": decode.memory.weights_total,
            "cache_tokens_per_dp_rank": decode.cache_tokens.to_json(),
            "max_batch_per_dp_rank": decode.max_batch,
        }
        if self.mode == "separated":
            fields["prefill"] = {
                "mesh": str(self.prefill.layout.mesh),
                "redundant_experts": self.prefill.layout.redundant,
                "instances": self.prefill_count,
                "tokens_per_step": self.prefill_tokens,
                "hardware": self.prefill.cluster.hardware.key,
            }
        return fields


def frontier(candidates: list[Candidate]) -> list[Candidate]:
    """Return the Pareto front of tokens/s per device against tokens/s per user, in ascending order of tokens/s per user."""
    front: list[Candidate] = []
    most = 0.0
    for candidate in sorted(candidates, key=lambda c: (-1.0 / c.tpot, -c.throughput / c.devices)):
        each = candidate.throughput / candidate.devices
        if each > most:
            front.append(candidate)
            most = each
    return front[::-1]


def aggregated(instance: Instance, count: int, batch: float, tokens: float) -> Candidate:
    """Aggregated serving: prompts and decodes share the steps.

    TPOT: a decode step plus the time that prompts add. TTFT: the steps of the request's own prompt with decodes, after the current steps
    and the queue, which is M/D/1 with a load of at most 0.95. With a given concurrency a new request replaces each finished one, and no
    other request waits.
    """
    output, work, made = instance.workload.output.mean, instance.workload, instance.options.tokens_a_step
    decode = instance.decode_step(batch)
    others, step = prompts_beside_decodes(instance, batch, tokens)
    tpot = decode / made + others
    chunks, mean = max(1.0, work.computed / tokens), tpot * made
    if work.concurrency is None:
        whole = step + decode
        busy = min(own_load(instance, batch, tokens) * whole / mean, 0.95)
        ttft = whole * chunks + whole * busy / (2 * (1 - busy)) + mean * _ADMISSION_STEPS
    else:
        ttft = (own_step(instance, batch, tokens) + decode) * chunks + mean * (_ADMISSION_STEPS + 0.5)
    ttft += assumption("front door")
    users = batch * instance.replicas * count
    throughput = users * output / (ttft + tpot * max(output - 1, 0))
    return Candidate("aggregated", instance, count, batch, instance, count, tokens, ttft, tpot, throughput)


def recompute(
    candidate: Candidate,
    cluster: Cluster | None = None,
    shared: dict | None = None,
    batch: float | None = None,
    concurrency: float | None = None,
) -> Candidate:
    """Recompute a deployment: on another cluster, with another batch or concurrency, or in the current draw.

    shared: common prices of deployments on that cluster; pass the same dict for all of them.
    """
    cluster, shared = cluster or candidate.decode.cluster, {} if shared is None else shared
    batch, tokens = candidate.batch if batch is None else batch, candidate.prefill_tokens
    decode = candidate.decode.on(cluster, shared, concurrency)
    if candidate.mode == "aggregated":
        return aggregated(decode, candidate.count, batch, tokens)
    if cluster.prefill is not None:
        cluster, shared = cluster.prefill, shared.setdefault("prefill", {})
    pool = prefill_pool(candidate.prefill.on(cluster, shared, concurrency), tokens)
    return separated(pool, candidate.prefill_count, decode, candidate.count, batch, interpolate=False)


def with_intervals(candidate: Candidate, draws: int = DRAWS) -> Candidate:
    """Add intervals to the TTFT, TPOT and throughput of a deployment."""
    return all_with_intervals([candidate], draws)[0]


def all_with_intervals(candidates: Sequence[Candidate], draws: int = DRAWS) -> list[Candidate]:
    """Add intervals to deployments of one search, which share prices in each draw."""

    def compute(some: Sequence[Candidate]) -> list[float]:
        shared: dict = {}
        again = [recompute(candidate, shared=shared) for candidate in some]
        return [figure for one in again for figure in (one.throughput, one.tpot, one.ttft)]

    seen = samples(lambda: compute(candidates), draws).reshape(draws, len(candidates), 3)
    found = []
    for at, candidate in enumerate(candidates):
        throughput, tpot, ttft = spread(lambda one=candidate: compute([one]), seen[:, at])
        found.append(dataclasses.replace(candidate, ttft=ttft, tpot=tpot, throughput=throughput, draws=seen[:, at]))
    return found


@dataclass(frozen=True)
class PrefillPool:
    """A prefill instance with steps of at most `tokens` tokens a DP rank. known: results of `seconds_at`, which the search repeats."""

    instance: Instance
    tokens: float
    rate: float  # requests per second with full steps
    seconds: float  # of a prompt in full steps
    alone: float  # of a prompt with no other on its rank
    known: dict[float, float] = field(default_factory=dict, compare=False, repr=False)

    def seconds_at(self, rate: float) -> float:
        """Return the seconds of a prompt at `rate` requests per second. Each step takes the prompts that arrived during the previous one.

        The result is the fixed point of `seconds = f(fullest rank's share of rate × seconds)`, with f linear from one prompt per rank to
        a full step.
        """
        if rate not in self.known:
            self.known[rate] = self._fixed_point(rate)
        return self.known[rate]

    def _fixed_point(self, rate: float) -> float:
        work, ranks, full, alone = self.instance.workload, self.instance.replicas, self.seconds, self.alone
        computed, variation, most = work.computed, work.input.variation, self.tokens
        if computed >= most or full <= alone:
            return full
        # Tokens of the fullest rank, from one prompt to a full step. The router spreads whole prompts evenly, so the fullest rank has
        # `(ranks - 1) ÷ 2 ranks` of a prompt above the mean. The largest of n normal variables is about √(2 ln n) standard deviations
        # above their mean.
        rounding, share, seconds = (ranks - 1) / (2 * ranks), 0.0, 0.0
        for _ in range(_MAX_ITERATIONS):
            before, seconds = seconds, alone + share * (full - alone)
            if seconds - before < 1e-3 * alone:
                break
            each = rate * seconds / ranks
            fullest = max(each + rounding, 1.0)
            if variation and (prompts := rate * seconds) > 1:
                fullest += math.sqrt(2 * math.log(min(prompts, ranks)) * max(each, 1.0)) * variation
            share = (min(computed * fullest, most) - computed) / (most - computed)
        return alone * (1 - share) + full * share


def prefill_pool(instance: Instance, tokens: float) -> PrefillPool:
    """Return the prefill pool of an instance with steps of `tokens` tokens."""
    rate = instance.replicas / instance.prompt_seconds(tokens)
    steps = max(1.0, instance.workload.computed / tokens)
    alone = instance.prefill_step(min(instance.workload.computed, tokens)) * steps
    return PrefillPool(instance, tokens, rate, instance.prefill_step(tokens) * steps, alone)


def separated(
    pool: PrefillPool,
    prefill_count: int,
    instance: Instance,
    count: int,
    batch: float,
    seconds: Callable[[float], float] | None = None,
    *,
    interpolate: bool = True,
) -> Candidate:
    """Disaggregated serving: prefill and decode on separate instances, with KV cache transfer between them.

    The rate is the lowest that prefill, transfer (each at most 85 % utilised) and decode sustain. If decode is not the bottleneck, fewer
    than `batch` requests per rank decode concurrently. A given concurrency closes the loop: of `batch` requests per rank, some decode and
    the others prefill; by Little's law, each number is the rate × the time spent there. seconds: batch → seconds of a decode step; None:
    the priced step. interpolate: interpolate the step if prefill limits the batch,
    which is faster and up to 6 % off.
    """
    seconds, work = seconds or instance.decode_step, instance.workload
    is_closed_loop, slots = work.concurrency is not None, instance.replicas * count
    steps = max(work.output.mean - 1, 1.0) / instance.options.tokens_a_step
    can_arrive = _sustained_rate(pool, prefill_count, instance, count)
    running, step, can_decode = batch, 0.0, math.inf
    if not is_closed_loop:
        step = seconds(batch)
        can_decode = batch * slots / (step * steps)
    if can_decode > can_arrive:
        # Bisect the number of decoding requests: they finish at the rate that prefill and transfer sustain, or in a closed loop at the
        # rate at which exactly the other requests prefill.
        low, high, curve = 0.0, batch, instance.decode_curve
        for _ in range(_BISECTION_STEPS):
            running = (low + high) / 2
            step = curve(instance.rows(running))
            rate = running * slots / (steps * step)
            full = rate >= can_arrive
            if is_closed_loop and not full:
                first = first_token(pool, prefill_count, instance, step, rate)
                full = running * slots + rate * first > batch * slots
            low, high = (low, running) if full else (running, high)
        running = low if is_closed_loop else high
        step = curve(instance.rows(running)) if interpolate and running != batch else seconds(running)
    if is_closed_loop:
        can_decode = running * slots / (step * steps)
    rate = min(can_decode, can_arrive)
    if is_closed_loop:
        ttft = (batch - running) * slots / rate
    else:
        ttft = first_token(pool, prefill_count, instance, step, rate)
    ends = ttft, step / instance.options.tokens_a_step, rate * work.output.mean
    return Candidate("separated", instance, count, batch, pool.instance, prefill_count, pool.tokens, *ends)


def first_token(pool: PrefillPool, prefill_count: int, instance: Instance, step: float, rate: float) -> float:
    """Return the TTFT in seconds at `rate` requests per second with decode steps of `step` seconds. The TTFT grows with both."""
    most = MAX_UTILISATION if instance.workload.concurrency is None else 0.95
    prompt, busy = pool.seconds_at(rate / prefill_count), min(most, rate / (pool.rate * prefill_count))
    exposed = exposed_transfer() * transfer_seconds(instance, pool.instance)
    return assumption("front door") + exposed + step * _ADMISSION_STEPS + prompt + prompt * busy / (2 * (1 - busy))


def transfer_seconds(instance: Instance, prefill: Instance) -> float:
    """Return the seconds to transfer a request's KV cache from its prefill instance to a decoding DP rank."""
    options, prompt = instance.options, instance.workload.input.mean
    sender = prefill.cluster if instance.cluster.prefill is not None else None
    # In dsjax one device of a DP rank pulls the pages and passes them on to the others.
    own = options.engine.name == "dsjax"
    links = 1 if own else instance.layout.mesh.tp_size

    def price() -> float:
        about = instance.config, options.precision, options.drafts > 0
        size = cache_bytes_per_token(*about) * prompt + window_page_bytes(*about)
        return cache_transfer(instance.cluster, size / links, sender, own)

    return instance.kept("transfer", price)


def transfers_at_once(prefill: Instance, prefill_count: int, instance: Instance, count: int) -> float:
    """Return the number of concurrent KV cache transfers: one per DP rank in dsjax, else as many as the smaller side's devices carry."""
    own, tp = instance.options.engine.name == "dsjax", instance.layout.mesh.tp_size
    sides = ((prefill, prefill_count), (instance, count))
    return min(number * (one.replicas if own else one.layout.devices / tp) for one, number in sides)


def _sustained_rate(pool: PrefillPool, prefill_count: int, instance: Instance, count: int) -> float:
    """Return the requests per second that prefill and transfer sustain."""
    most = MAX_UTILISATION if instance.workload.concurrency is None else 1.0
    transfer_rate = transfers_at_once(pool.instance, prefill_count, instance, count) / transfer_seconds(
        instance, pool.instance
    )
    return most * min(pool.rate * prefill_count, transfer_rate)

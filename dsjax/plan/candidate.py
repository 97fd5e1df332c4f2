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
from dsjax.plan.operator_tables import cached_in
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
    """A deployment: `count` instances that decode (aggregated ones also prefill), and `prefill_count` that prefill."""

    mode: str
    decode: Instance
    count: int
    batch: float  # running requests of a DP rank
    prefill: Instance
    prefill_count: int
    prefill_tokens: float
    ttft: float  # mean seconds
    tpot: float  # mean seconds
    throughput: float  # output tokens per second of the deployment
    # throughput, TPOT and TTFT in each draw, if it has intervals
    draws: Float64[np.ndarray, "D 3"] | None = field(default=None, compare=False, repr=False)

    @property
    def sides(self) -> list[tuple[Instance, int]]:
        """(instance, number of them): decode instances, then prefill instances if they are separate."""
        decode = (self.decode, self.count)
        return [decode, (self.prefill, self.prefill_count)] if self.mode == "separated" else [decode]

    @cached_property
    def devices(self) -> int:
        """Devices of all instances."""
        return sum(instance.layout.devices * count for instance, count in self.sides)

    @property
    def key(self) -> tuple:
        """Key of the candidate's row in a table: mode, both layouts, and the ratio of prefill to decode instances."""
        divisor = math.gcd(self.prefill_count, self.count)
        ratio = (self.prefill_count // divisor, self.count // divisor) if self.mode == "separated" else ()
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
        ttft, tpot, throughput = self.ttft, self.tpot, self.throughput
        if sure:
            ttft, tpot, throughput = ttft.high, tpot.high, throughput.low
        factors = {}
        if objective.ttft is not None:
            factors["ttft"] = ttft / objective.ttft
        if objective.tpot is not None:
            factors["tpot"] = tpot / objective.tpot
        if objective.throughput is not None:
            factors["throughput"] = objective.throughput / throughput
        return {name: factor for name, factor in factors.items() if factor > 1}

    def name(self) -> str:
        """`4 × dp=8`, or `2 × dp=8 | 1 × dp=16` with prefill first."""
        if self.mode == "aggregated":
            return f"{self.count} × {self.decode.layout}"
        sides = [f"{self.prefill_count} × {self.prefill.layout}", f"{self.count} × {self.decode.layout}"]
        if self.decode.cluster.prefill is not None:  # each side has its own kind of device
            sides[0] += f" {self.prefill.cluster.hardware.key}"
            sides[1] += f" {self.decode.cluster.hardware.key}"
        return " | ".join(sides)

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`, times in seconds.

        `expert_mesh` is null without AFD, `cost_per_million_output_tokens` without a price. Disaggregated deployments have `prefill`.
        `batch_per_dp_rank` counts running requests, `cache_tokens_per_dp_rank` usable slots.
        """
        decode = self.decode
        layout = decode.layout
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
    highest = 0.0
    for candidate in sorted(candidates, key=lambda c: (-1.0 / c.tpot, -c.throughput / c.devices)):
        per_device = candidate.throughput / candidate.devices
        if per_device > highest:
            front.append(candidate)
            highest = per_device
    return front[::-1]


def aggregated(instance: Instance, count: int, batch: float, tokens: float) -> Candidate:
    """Aggregated serving: prompts and decodes share the steps.

    TPOT: a decode step plus the time that prompts add. TTFT: the steps of the request's own prompt with decodes, after the current steps
    and the queue, which is M/D/1 with a load of at most 0.95. With a given concurrency a new request replaces each finished one, and no
    other request waits.
    """
    work = instance.workload
    output = work.output.mean
    tokens_per_step = instance.options.tokens_a_step
    decode = instance.decode_step(batch)
    prompts_per_token, prompts_per_step = prompts_beside_decodes(instance, batch, tokens)
    tpot = decode / tokens_per_step + prompts_per_token
    chunks = max(1.0, work.computed / tokens)
    mean_step = tpot * tokens_per_step
    if work.concurrency is None:
        mixed_step = prompts_per_step + decode
        busy = min(own_load(instance, batch, tokens) * mixed_step / mean_step, 0.95)
        ttft = mixed_step * chunks + mixed_step * busy / (2 * (1 - busy)) + mean_step * _ADMISSION_STEPS
    else:
        ttft = (own_step(instance, batch, tokens) + decode) * chunks + mean_step * (_ADMISSION_STEPS + 0.5)
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
    cluster = cluster or candidate.decode.cluster
    shared = {} if shared is None else shared
    batch = candidate.batch if batch is None else batch
    tokens = candidate.prefill_tokens
    decode = candidate.decode.on(cluster, shared, concurrency)
    if candidate.mode == "aggregated":
        return aggregated(decode, candidate.count, batch, tokens)
    if cluster.prefill is not None:
        cluster = cluster.prefill
        shared = shared.setdefault("prefill", {})
    pool = prefill_pool(candidate.prefill.on(cluster, shared, concurrency), tokens)
    return separated(pool, candidate.prefill_count, decode, candidate.count, batch, interpolate=False)


def with_intervals(candidate: Candidate, draws: int = DRAWS) -> Candidate:
    """Add intervals to the TTFT, TPOT and throughput of a deployment."""
    return all_with_intervals([candidate], draws)[0]


def all_with_intervals(candidates: Sequence[Candidate], draws: int = DRAWS) -> list[Candidate]:
    """Add intervals to deployments of one search, which share prices in each draw."""

    def figures(chosen: Sequence[Candidate]) -> list[float]:
        shared: dict = {}
        recomputed = [recompute(candidate, shared=shared) for candidate in chosen]
        return [figure for c in recomputed for figure in (c.throughput, c.tpot, c.ttft)]

    all_draws = samples(lambda: figures(candidates), draws).reshape(draws, len(candidates), 3)
    results = []
    for index, candidate in enumerate(candidates):
        own = all_draws[:, index]
        throughput, tpot, ttft = spread(lambda candidate=candidate: figures([candidate]), own)
        results.append(dataclasses.replace(candidate, ttft=ttft, tpot=tpot, throughput=throughput, draws=own))
    return results


@dataclass(frozen=True)
class PrefillPool:
    """A prefill instance with steps of at most `tokens` tokens a DP rank."""

    instance: Instance
    tokens: float
    rate: float  # requests per second with full steps
    seconds: float  # of a prompt in full steps
    alone: float  # of a prompt with no other on its rank
    _cache: dict = field(default_factory=dict, compare=False, repr=False)  # results of `seconds_at`

    @cached_in("_cache")
    def seconds_at(self, rate: float) -> float:
        """Return the seconds of a prompt at `rate` requests per second. Each step takes the prompts that arrived during the previous one.

        The result is the fixed point of `seconds = f(fullest rank's share of rate × seconds)`, with f linear from one prompt per rank to
        a full step.
        """
        work, ranks = self.instance.workload, self.instance.replicas
        full, alone = self.seconds, self.alone
        computed, variation = work.computed, work.input.variation
        if computed >= self.tokens or full <= alone:
            return full
        # Tokens of the fullest rank, from one prompt to a full step. The router spreads whole prompts evenly, so the fullest rank has
        # `(ranks - 1) ÷ 2 ranks` of a prompt above the mean. The largest of n normal variables is about √(2 ln n) standard deviations
        # above their mean.
        rounding = (ranks - 1) / (2 * ranks)
        share = 0.0
        seconds = 0.0
        for _ in range(_MAX_ITERATIONS):
            previous = seconds
            seconds = alone + share * (full - alone)
            if seconds - previous < 1e-3 * alone:
                break
            per_rank = rate * seconds / ranks
            fullest = max(per_rank + rounding, 1.0)
            if variation and (prompts := rate * seconds) > 1:
                fullest += math.sqrt(2 * math.log(min(prompts, ranks)) * max(per_rank, 1.0)) * variation
            share = (min(computed * fullest, self.tokens) - computed) / (self.tokens - computed)
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
    the others prefill; by Little's law, each number is the rate × the time spent there.

    seconds: batch → seconds of a decode step; None: the priced step. interpolate: interpolate the step if prefill limits the batch, which
    is faster and up to 6 % off.
    """
    seconds = seconds or instance.decode_step
    work = instance.workload
    is_closed_loop = work.concurrency is not None
    ranks = instance.replicas * count
    steps = max(work.output.mean - 1, 1.0) / instance.options.tokens_a_step
    supply_rate = _sustained_rate(pool, prefill_count, instance, count)

    def decode_rate(running: float, step: float) -> float:
        return running * ranks / (step * steps)

    def are_too_many(running: float, step: float) -> bool:
        """Whether `running` requests finish faster than prefill and transfer sustain or, in a closed loop, leave too few for prefill."""
        rate = decode_rate(running, step)
        if not is_closed_loop or rate >= supply_rate:
            return rate >= supply_rate
        ttft = time_to_first_token(pool, prefill_count, instance, step, rate)
        return running * ranks + rate * ttft > batch * ranks

    running = batch
    step = 0.0
    rate = math.inf
    if not is_closed_loop:
        step = seconds(batch)
        rate = decode_rate(batch, step)
    if rate > supply_rate:
        low, high = 0.0, batch
        curve = instance.decode_curve
        for _ in range(_BISECTION_STEPS):
            middle = (low + high) / 2
            too_many = are_too_many(middle, curve(instance.rows(middle)))
            low, high = (low, middle) if too_many else (middle, high)
        running = low if is_closed_loop else high
        step = curve(instance.rows(running)) if interpolate and running != batch else seconds(running)
        rate = min(decode_rate(running, step), supply_rate) if is_closed_loop else supply_rate
    if is_closed_loop:
        ttft = (batch - running) * ranks / rate
    else:
        ttft = time_to_first_token(pool, prefill_count, instance, step, rate)
    figures = ttft, step / instance.options.tokens_a_step, rate * work.output.mean
    return Candidate("separated", instance, count, batch, pool.instance, prefill_count, pool.tokens, *figures)


def time_to_first_token(pool: PrefillPool, prefill_count: int, instance: Instance, step: float, rate: float) -> float:
    """Return the TTFT in seconds at `rate` requests per second with decode steps of `step` seconds. The TTFT grows with both."""
    max_busy = MAX_UTILISATION if instance.workload.concurrency is None else 0.95
    prompt = pool.seconds_at(rate / prefill_count)
    busy = min(max_busy, rate / (pool.rate * prefill_count))
    exposed = exposed_transfer() * transfer_seconds(instance, pool.instance)
    return assumption("front door") + exposed + step * _ADMISSION_STEPS + prompt + prompt * busy / (2 * (1 - busy))


def transfer_seconds(instance: Instance, prefill: Instance) -> float:
    """Return the seconds to transfer a request's KV cache from its prefill instance to a decoding DP rank."""
    options = instance.options
    prompt = instance.workload.input.mean
    sender = prefill.cluster if instance.cluster.prefill is not None else None
    # In dsjax one device of a DP rank pulls the pages and passes them on to the others.
    is_dsjax = options.engine.name == "dsjax"
    links = 1 if is_dsjax else instance.layout.mesh.tp_size

    def price() -> float:
        cache = instance.config, options.precision, options.drafts > 0
        size = cache_bytes_per_token(*cache) * prompt + window_page_bytes(*cache)
        return cache_transfer(instance.cluster, size / links, sender, is_dsjax)

    return instance.kept("transfer", price)


def concurrent_transfers(prefill: Instance, prefill_count: int, instance: Instance, count: int) -> float:
    """Return the number of concurrent KV cache transfers: one per DP rank in dsjax, else as many as the smaller side's devices carry."""
    is_dsjax = instance.options.engine.name == "dsjax"
    tp = instance.layout.mesh.tp_size
    sides = ((prefill, prefill_count), (instance, count))
    return min(n * (side.replicas if is_dsjax else side.layout.devices / tp) for side, n in sides)


def _sustained_rate(pool: PrefillPool, prefill_count: int, instance: Instance, count: int) -> float:
    """Return the requests per second that prefill and transfer sustain."""
    utilisation = MAX_UTILISATION if instance.workload.concurrency is None else 1.0
    transfers = concurrent_transfers(pool.instance, prefill_count, instance, count)
    transfer_rate = transfers / transfer_seconds(instance, pool.instance)
    return utilisation * min(pool.rate * prefill_count, transfer_rate)

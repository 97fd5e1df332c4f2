"""Candidates: a way to deploy, with its figures. Aggregated serving, and prefill separated from decode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64

from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import DRAWS, as_json, samples, spread, through
from dsjax.plan.host_time import front_door
from dsjax.plan.instance import Instance
from dsjax.plan.network import cache_transfer, exposed_transfer
from dsjax.plan.prompts import own_load, own_step, prompts_beside_decodes
from dsjax.plan.workload import Objective

_SETTLE = 30
"""Rounds in which a step and what arrives during it settle: at most a few, except near the rate that cannot be kept up with."""
_HALVINGS = 14
_BUSY = 0.85
"""Most of the time that prefill instances are kept busy: above, queues grow without bound for small changes of the load."""


@dataclass(frozen=True)
class Candidate:
    """A deployment: `count` instances that decode (and, aggregated, prefill too), and `prefill_count` that prefill.

    batch: running requests of a DP rank. ttft, tpot: mean seconds. throughput: output tokens a second of the whole. draws: of what is
    shown, throughput, TPOT and TTFT in each draw.
    """

    mode: str
    decode: Instance
    count: int
    batch: float
    prefill: Instance
    prefill_count: int
    prefill_tokens: float
    ttft: float
    tpot: float
    throughput: float
    draws: Float64[np.ndarray, "D 3"] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def devices(self) -> int:
        """Devices in use."""
        decode_devices = self.decode.layout.devices * self.count
        return decode_devices + (self.prefill.layout.devices * self.prefill_count if self.mode == "separated" else 0)

    @property
    def row(self) -> tuple:
        """The row of a table that it stands in: the pair of layouts and the ratio of prefill to decode instances."""
        most = math.gcd(self.prefill_count, self.count) if self.mode == "separated" else 0
        ratio = (self.prefill_count // most, self.count // most) if most else ()
        return (self.mode, self.decode.layout, self.prefill.layout, ratio)

    @property
    def per_device(self) -> float:
        """Output tokens a second a device."""
        return through(self.throughput, lambda rate: rate / self.devices)

    @property
    def cost(self) -> float | None:
        """Price of a million output tokens, in the currency of the devices' price an hour; None where that is not given."""
        decode_devices = self.decode.layout.devices * self.count
        sides = ((self.decode, decode_devices), (self.prefill, self.devices - decode_devices))
        prices = [(side.cluster.hardware.price_per_hour, devices) for side, devices in sides if devices]
        if self.decode.layout.experts and (beside := self.decode.cluster.experts) is not None:
            experts = self.decode.layout.experts * self.count
            prices = [
                (prices[0][0], decode_devices - experts),
                (beside.hardware.price_per_hour, experts),
            ]
        if any(price is None for price, _ in prices):
            return None
        total = sum(price * devices for price, devices in prices)
        return through(self.throughput, lambda rate: total / 3600 * 1e6 / rate)

    @property
    def per_user(self) -> float:
        """Tokens a second that a user sees."""
        return through(self.tpot, lambda seconds: 1.0 / seconds)

    @property
    def concurrency(self) -> float:
        """Requests that decode at once; of a separated deployment the room for them, of which prefill may fill a part."""
        return self.batch * self.decode.replicas * self.count

    def meets(self, objective: Objective, sure: bool = False) -> bool:
        """Whether the objectives hold at the middle estimate, or at the unfavourable end of the interval."""
        return not self.misses(objective, sure)

    def misses(self, objective: Objective, sure: bool = False) -> dict[str, float]:
        """Objective → how many times too slow: above 1."""
        missed = {}
        for name, bound in (("ttft", objective.ttft), ("tpot", objective.tpot)):
            figure = getattr(self, name)
            if bound is not None:
                missed[name] = (figure.high if sure else figure) / bound
        if objective.throughput is not None:
            missed["throughput"] = objective.throughput / (self.throughput.low if sure else self.throughput)
        return {name: ratio for name, ratio in missed.items() if ratio > 1.0}

    def name(self) -> str:
        """`4 × dp=8`, or `2 × dp=8 | 1 × dp=16` with prefill before the bar."""
        decode = f"{self.count} × {self.decode.layout}"
        if self.mode == "aggregated":
            return decode
        first = f"{self.prefill_count} × {self.prefill.layout}"
        if self.decode.cluster.prefill is None:
            return f"{first} | {decode}"
        return f"{first} {self.prefill.cluster.hardware.key} | {decode} {self.decode.cluster.hardware.key}"

    def to_json(self) -> dict[str, Any]:
        """Stable fields; figures as `Figure.to_json`."""
        fields: dict[str, Any] = {
            "mode": self.mode,
            "mesh": str(self.decode.layout.mesh),
            "expert_mesh": f"ep={self.decode.layout.experts}" if self.decode.layout.experts else None,
            "kind": self.decode.layout.kind,
            "redundant_experts": self.decode.layout.redundant,
            "instances": self.count,
            "devices": self.devices,
            "batch_per_dp_rank": self.decode.requests(self.batch),
            "two_batch_overlap": self.decode.overlapped(self.batch),
            "ttft_s": as_json(self.ttft),
            "tpot_s": as_json(self.tpot),
            "output_tokens_per_s": as_json(self.throughput),
            "output_tokens_per_s_device": as_json(self.per_device),
            "tokens_per_s_user": as_json(self.per_user),
            "cost_per_million_output_tokens": as_json(self.cost) if self.cost else None,
            "weight_bytes_per_device": self.decode.memory.weights_total,
            "cache_tokens_per_dp_rank": self.decode.cache_tokens.to_json(),
            "max_batch_per_dp_rank": self.decode.max_batch,
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
    """Pareto front of tokens a second a device against tokens a second a user, by the user's rate ascending."""
    front: list[Candidate] = []
    most = 0.0
    for candidate in sorted(candidates, key=lambda c: (-1.0 / c.tpot, -c.throughput / c.devices)):
        each = candidate.throughput / candidate.devices
        if not front or each > most:
            front.append(candidate)
            most = each
    return front[::-1]


def aggregated(instance: Instance, count: int, batch: float, tokens: float) -> Candidate:
    """Serving whose steps have prompts and decodes together.

    TPOT: a decode step, and what prompts add to it. TTFT: the steps that a request's own prompt takes beside decodes, after those in
    progress, and after what waits before it as in an M/D/1 queue whose load is kept below 0.95. With a given concurrency each request that
    ends is replaced by the next one, and nothing else waits.
    """
    output, work = instance.workload.output.mean, instance.workload
    decode = instance.decode_step(batch)
    others, step = prompts_beside_decodes(instance, batch, tokens)
    tpot = decode / instance.options.tokens_a_step + others
    chunks = max(1.0, work.computed / tokens)
    if work.concurrency is None:
        whole, mean = step + decode, tpot * instance.options.tokens_a_step
        busy = min(own_load(instance, batch, tokens) * whole / mean, 0.95)
        ttft = whole * chunks + whole * busy / (2 * (1 - busy)) + mean * _passing(instance)
    else:
        under_way = tpot * instance.options.tokens_a_step * (_passing(instance) + 0.5)
        ttft = own_step(instance, batch, tokens) * chunks + decode * chunks + under_way
    ttft += front_door()
    users = batch * instance.replicas * count
    throughput = users * output / (ttft + tpot * max(output - 1, 0))
    return Candidate("aggregated", instance, count, batch, instance, count, tokens, ttft, tpot, throughput)


def priced(candidate: Candidate) -> Candidate:
    """Compute the figures of a deployment from its instances, in the current draw."""
    if candidate.mode == "aggregated":
        return aggregated(candidate.decode, candidate.count, candidate.batch, candidate.prefill_tokens)
    pool = prefill_pool(candidate.prefill, candidate.prefill_tokens)
    return separated(pool, candidate.prefill_count, candidate.decode, candidate.count, candidate.batch, between=False)


def moved(
    candidate: Candidate,
    cluster: Cluster | None = None,
    shared: dict | None = None,
    batch: float | None = None,
    concurrency: float | None = None,
) -> Candidate:
    """Compute a deployment again: on another cluster, with another batch or concurrency, or in the current draw.

    Nothing that was priced before is kept. shared: prices that deployments on that cluster have in common; pass the same dict to all.
    """
    cluster, shared = cluster or candidate.decode.cluster, {} if shared is None else shared
    first, beside = cluster, shared
    if candidate.mode != "aggregated" and cluster.prefill is not None:
        first, beside = cluster.prefill, shared.setdefault("prefill", {})
    return priced(
        dataclasses.replace(
            candidate,
            decode=candidate.decode.on(cluster, shared, concurrency),
            prefill=candidate.prefill.on(first, beside, concurrency),
            batch=candidate.batch if batch is None else batch,
        )
    )


def with_intervals(candidate: Candidate, draws: int = DRAWS) -> Candidate:
    """Add intervals to the TTFT, TPOT and throughput of a deployment."""

    def compute() -> tuple[float, float, float]:
        again = moved(candidate)
        return again.throughput, again.tpot, again.ttft

    seen = samples(compute, draws)
    throughput, tpot, ttft = spread(compute, seen)
    return dataclasses.replace(candidate, ttft=ttft, tpot=tpot, throughput=throughput, draws=seen)


@dataclass(frozen=True)
class PrefillPool:
    """An instance that only prefills, in steps of at most `tokens` a DP rank.

    rate: requests a second with full steps; seconds: of a prompt in full steps; alone: of a prompt with no other on its rank.
    shares: what `share_at` has found; the search asks two times in three for a rate that it has asked for before.
    """

    instance: Instance
    tokens: float
    rate: float
    seconds: float
    alone: float
    shares: dict[float, float | None] = field(default_factory=dict, compare=False, repr=False)

    def seconds_at(self, rate: float) -> float:
        """Seconds of a prompt at so many requests a second of the instance: a step takes what arrived in the one before.

        Tokens and seconds of such a step settle where `seconds = f(fullest rank's share of rate × seconds)`; f is linear from
        one prompt a rank to a full step.
        """
        share = self.share_at(rate)
        full, alone = self.seconds, self.alone
        return full if share is None else alone * (1 - share) + full * share

    @cached_property
    def _settling(self) -> tuple[float, int, float]:
        """(new tokens of a prompt, ranks, variation of prompts), which every step that settles hangs on."""
        work = self.instance.workload
        return work.computed, self.instance.replicas, work.input.variation

    def share_at(self, rate: float) -> float | None:
        """How full a step is: 0 with one prompt a rank, 1 full; None where a step cannot be other than full."""
        if rate not in self.shares:
            self.shares[rate] = self._share_at(rate)
        return self.shares[rate]

    def _share_at(self, rate: float) -> float | None:
        computed, ranks, variation = self._settling
        full, alone = self.seconds, self.alone
        if computed >= self.tokens or full <= alone:
            return None
        # Tokens of the fullest rank, from one prompt to a full step. The router spreads prompts evenly, and they are whole, which adds
        # `(ranks - 1) ÷ 2 ranks` of one on average; the largest of n normal variables is about √(2 ln n) standard deviations above
        # their mean. Written out, without `min` and `max`: the search settles some hundred thousand steps.
        most, rounding, rise, enough = self.tokens, (ranks - 1) / (2 * ranks), full - alone, 1e-3 * alone
        share = seconds = 0.0
        for _ in range(_SETTLE):
            before, seconds = seconds, alone + share * rise
            if seconds - before < enough:
                break
            each = rate * seconds / ranks
            fullest = each + rounding
            if fullest < 1.0:
                fullest = 1.0
            if variation and (prompts := rate * seconds) > 1:
                deviations = math.sqrt(2 * math.log(prompts if prompts < ranks else ranks))
                fullest += deviations * variation * math.sqrt(each if each > 1.0 else 1.0)
            tokens = computed * fullest
            share = ((tokens if tokens < most else most) - computed) / (most - computed)
        return share


def prefill_pool(instance: Instance, tokens: float) -> PrefillPool:
    """`static_ctx` as a rate."""
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
    between: bool = True,
) -> Candidate:
    """Prefill and decode on instances of their own; the latent cache travels between them.

    The rate is the smallest of what the two sides and the transfer sustain, prefill and transfer at 85 % at most; where that is not
    decode's, fewer than `batch` requests of a rank decode at once. With a given concurrency the loop is closed: of `batch` requests a
    rank some decode and the others are at their prompts, and by Little's law all of them are the rate × their stay. seconds: of a decode
    step of a batch, or as it is priced. between: a batch that prefill leaves no room for is priced between those that are tried, which is
    faster, and up to 6 % off.
    """
    ends = separated_times(pool, prefill_count, instance, count, batch, seconds, between=between)
    return Candidate("separated", instance, count, batch, pool.instance, prefill_count, pool.tokens, *ends)


def separated_times(
    pool: PrefillPool,
    prefill_count: int,
    instance: Instance,
    count: int,
    batch: float,
    seconds: Callable[[float], float] | None = None,
    *,
    between: bool = True,
) -> tuple[float, float, float]:
    """The TTFT, the TPOT and the throughput of `separated`."""
    seconds = seconds or instance.decode_step
    output, work, made = instance.workload.output.mean, instance.workload, instance.options.tokens_a_step
    closed = work.concurrency is not None
    decoding_at_once = _decoding(pool, prefill_count, instance, count, batch, seconds)
    exactly = decoding_at_once == batch or not between
    step = seconds(decoding_at_once) if exactly else instance.decode_curve(instance.rows(decoding_at_once))
    tpot = step / made
    users = decoding_at_once * instance.replicas * count
    room, full = (decoding_at_once, step) if closed else (batch, seconds(batch))
    outputs = max(output - 1, 1.0) / made
    can_decode = room * instance.replicas * count / (full * outputs)
    rate = min(can_decode, _arriving(pool, prefill_count, instance, count))
    if closed:
        ttft = (batch * instance.replicas * count - users) / rate
    else:
        ttft = first_token(pool, prefill_count, instance, step, rate)
    return ttft, tpot, rate * output


def first_token(pool: PrefillPool, prefill_count: int, instance: Instance, step: float, rate: float) -> float:
    """Seconds to the first token at so many requests a second, beside decode steps of so many seconds. It grows with both."""
    most = _BUSY if instance.workload.concurrency is None else 0.95
    prompt, busy = pool.seconds_at(rate / prefill_count), min(most, rate / (pool.rate * prefill_count))
    exposed = exposed_transfer() * transfer_seconds(instance, pool.instance)
    return front_door() + exposed + step * _passing(instance) + prompt + prompt * busy / (2 * (1 - busy))


def _decoding(
    pool: PrefillPool,
    prefill_count: int,
    instance: Instance,
    count: int,
    batch: float,
    seconds: Callable[[float], float],
) -> float:
    """Requests of a rank that decode, where it has room for `batch`, or `batch` of each are in a closed loop: by Little's law.

    So many that decode leave at a rate that prefill and the transfer keep up with; in a closed loop, at one at which prompts take so
    long that the rest of the loop is full.
    """
    slots, closed = instance.replicas * count, instance.workload.concurrency is not None
    outputs = max(instance.workload.output.mean - 1, 1.0) / instance.options.tokens_a_step
    most = _arriving(pool, prefill_count, instance, count)
    if not closed and batch * slots / (outputs * seconds(batch)) <= most:
        return batch
    low, high, curve = 0.0, batch, instance.decode_curve
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        step = curve(instance.rows(middle))
        rate = middle * slots / (outputs * step)
        full = rate >= most
        if closed and not full:
            first = first_token(pool, prefill_count, instance, step, rate)
            full = middle * slots + rate * first > batch * slots
        low, high = (low, middle) if full else (middle, high)
    return low if closed else high


def transfer_seconds(instance: Instance, prefill: Instance) -> float:
    """Seconds in which one request's cache travels to one replica from where its prompt was computed."""
    if "transfer" not in instance.steps:
        size = instance.memory.cache_per_token * instance.workload.input.mean
        sender = prefill.cluster if instance.cluster.prefill is not None else None
        # In dsjax one device of a replica pulls the pages and hands them to the others.
        own = instance.options.engine.name == "dsjax"
        links = 1 if own else instance.layout.mesh.tp_size
        instance.steps["transfer"] = cache_transfer(instance.cluster, size / links, sender, own)
    return instance.steps["transfer"]


def _ways(pool: PrefillPool, prefill_count: int, instance: Instance, count: int) -> float:
    """Caches that travel at once: one of each dsjax replica; of other engines as many as all devices of the smaller side carry."""
    own, tp = instance.options.engine.name == "dsjax", instance.layout.mesh.tp_size
    sides = ((pool.instance, prefill_count), (instance, count))
    return min(number * (one.replicas if own else one.layout.devices / tp) for one, number in sides)


def _arriving(pool: PrefillPool, prefill_count: int, instance: Instance, count: int) -> float:
    """Requests a second that prefill and the transfer keep up with."""
    most = _BUSY if instance.workload.concurrency is None else 1.0
    moved = _ways(pool, prefill_count, instance, count) / transfer_seconds(instance, pool.instance)
    return most * min(pool.rate * prefill_count, moved)


def _passing(instance: Instance) -> float:
    """Decode steps that pass before one that takes in what arrives at any time: half of the one in progress, and the planned one."""
    return 1.5 if instance.ahead else 0.5

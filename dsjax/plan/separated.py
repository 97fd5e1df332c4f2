"""Search for disaggregated deployments: pairs of a prefill pool and a decode instance, and how many of each share the devices."""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from dsjax.plan.candidate import MAX_UTILISATION, Candidate, PrefillPool, prefill_pool, separated, time_to_first_token
from dsjax.plan.instance import Instance
from dsjax.plan.question import Question, batch_divisor
from dsjax.plan.rules import refuse
from sharding.mesh import MeshSpec

_POOLS, _DECODERS = 6, 400
"""Most pools kept at each end of an instance size's Pareto front (over all sizes, four times as many), and most decode instances."""
_BISECTED = 60
"""Number of decode instances whose batch is bisected when there are many devices."""
_MOST_REDUCED, _BISECTION_STEPS = 400, 16  # of `_smaller_batches`: deployments, and steps for each


class Decoder(NamedTuple):
    """A decode-only instance, its batch (requests per DP rank) and its rate (finished requests per second)."""

    instance: Instance
    batch: float
    rate: float

    @property
    def each(self) -> float:
        """Requests per second per device."""
        return self.rate / self.instance.layout.devices


class Sizes(NamedTuple):
    """Devices that a prefill and a decode instance occupy."""

    prefill: int
    decode: int


def separated_candidates(question: Question, fitting: list[Instance], prefilling: list[Instance]) -> list[Candidate]:
    """Return every pairing of prefill pools with decode instances that may be the best.

    fitting: instances that fit into memory; prefilling: instances that may compute prompts. Raise `UserError` if none has a pinned mesh.
    """
    pins, ttft_bound, concurrency = question.options.pins, question.objective.ttft, question.workload.concurrency
    prefilling = _pinned(prefilling, pins.prefill_mesh, "--prefill-mesh")
    decoding = _pinned(fitting, pins.decode_mesh, "--decode-mesh")
    if question.devices < 2 and question.cluster.prefill is None:
        return []
    decoders = _decoders(question, decoding, prefilling)
    candidates = []
    late = []  # (pool, candidate) pairs that miss the TTFT
    tried = set()
    for pool in _pools(question, prefilling):
        for decoder in decoders:
            for prefill_count, decode_count in _splits(question, pool, decoder):
                instance = decoder.instance
                batch = decoder.batch if concurrency is None else concurrency / (instance.replicas * decode_count)
                key = (id(pool), prefill_count, id(instance), decode_count, batch)
                if batch > instance.max_batch or key in tried:
                    continue
                tried.add(key)
                candidates.append(separated(pool, prefill_count, instance, decode_count, batch))
                if concurrency is None and ttft_bound is not None and candidates[-1].ttft > ttft_bound:
                    late.append((pool, candidates[-1]))
    return candidates + _smaller_batches(question, late)


def _pinned(fitting: list[Instance], mesh: MeshSpec | None, flag: str) -> list[Instance]:
    """Return the instances with the pinned mesh; raise `UserError` if no layout that fits has it."""
    pinned = [instance for instance in fitting if mesh in (None, instance.layout.mesh)]
    meshes = {instance.layout.mesh for instance in fitting} if mesh is not None else ()
    near = sorted(meshes, key=lambda m: (abs(m.num_devices - mesh.num_devices), m.tp_size != mesh.tp_size))[:4]
    refuse("pinned", flag=flag, mesh=mesh, found=pinned, near=near)
    return pinned


def _pools(question: Question, fitting: list[Instance]) -> list[PrefillPool]:
    """Return the Pareto front of each instance size: pools that no other beats in rate and in prompt time, alone and in full steps."""
    bound = question.objective.ttft
    by_size: dict[int, list[PrefillPool]] = {}
    for instance in fitting:
        for index, step_tokens in enumerate(instance.prefill_sizes()):
            pool = prefill_pool(instance, step_tokens)
            if bound is None or pool.alone <= bound or index == 0:
                by_size.setdefault(instance.layout.devices, []).append(pool)
    kept = []
    for pools in by_size.values():
        front: list[PrefillPool] = []
        for pool in sorted(pools, key=lambda p: -p.rate):
            if not any(p.seconds <= pool.seconds and p.alone <= pool.alone for p in front):
                front.append(pool)
        # Without a TTFT bound only the rate counts; with one, also keep pools with a lower rate and a shorter prompt time.
        kept += front[:1] if bound is None else front[:_POOLS] + front[max(_POOLS, len(front) - _POOLS) :]
    kept.sort(key=lambda p: _sort_key(question, MAX_UTILISATION * p.rate, p.instance))
    return kept if question.is_small else kept[: 4 * _POOLS]


def _sort_key(question: Question, rate: float, instance: Instance) -> float:
    """Return the sort key of instances, best first: devices that serve a given rate, else requests per second per device, negated."""
    if question.workload.rate is not None:
        return math.ceil(_target_rate(question) / rate) * instance.layout.devices
    return -rate / instance.layout.devices


def _target_rate(question: Question) -> float:
    """Return the requests per second to serve, if a rate is given."""
    return question.all_objectives.throughput / question.workload.output.mean


def _decoders(question: Question, decoding: list[Instance], prefilling: list[Instance]) -> list[Decoder]:
    """Return the decode instances and batches to pair."""
    output_tokens = max(question.workload.output.mean - 1, 1.0)  # after the first token

    def decoder(instance: Instance, batch: float) -> Decoder:
        return Decoder(instance, batch, batch * instance.replicas / (instance.tpot(batch) * output_tokens))

    every = [decoder(i, batch) for i in decoding for batch in _decode_batches(question, prefilling, i)]
    # Keep the fastest of each instance size and each range of batches, whose ends differ by a factor of √2.
    best = _best(every, lambda d: (d.instance.layout.devices, round(2 * math.log2(d.batch))))
    if question.is_small:
        # If prefill is the bottleneck, decode batches do not fill up. Also pair each layout's largest batch, whatever its rate.
        largest = {id(d.instance): d for d in sorted(every, key=lambda d: d.batch)}
        known = {(id(d.instance), d.batch) for d in best}
        best += [d for key, d in largest.items() if (key, d.batch) not in known]
    elif question.objective.tpot is not None:
        # Bisect only for the best: there are a thousand layouts.
        top = sorted(best, key=lambda d: _sort_key(question, d.rate, d.instance))[:_BISECTED]
        every += [decoder(i, _largest_batch(question, i)) for i in {id(d.instance): d.instance for d in top}.values()]
    # For each instance size, also keep the one with the highest rate per device, with whatever batch.
    return best + _best(every, lambda d: d.instance.layout.devices)


def _best(decoders: list[Decoder], group) -> list[Decoder]:
    """Return the decoder with the highest rate per device of each group, best first, at most `_DECODERS`."""
    best: dict = {}
    for decoder in sorted(decoders, key=lambda d: -d.each):
        best.setdefault(group(decoder), decoder)
    return list(best.values())[:_DECODERS]


def _decode_batches(question: Question, prefilling: list[Instance], instance: Instance) -> list[float]:
    """Return batches that meet the TPOT objective, on few devices also the largest such batch; or the likely batch of a concurrency."""
    bound, concurrency = question.objective.tpot, question.workload.concurrency
    if concurrency is not None:
        if concurrency > instance.max_batch * instance.replicas * most_decode_instances(question, prefilling, instance):
            return []
        # Assume that three quarters of the devices decode, with at least one instance.
        likely_count = max(1, 3 * question.devices // (4 * instance.layout.devices))
        return [min(concurrency / (instance.replicas * likely_count), float(instance.max_batch))]
    tried = [float(batch) for batch in question.batches_to_try(instance)]
    if bound is None:
        return tried
    meeting = {batch for batch in tried if instance.tpot(batch) <= bound}
    if question.is_small:
        meeting.add(_largest_batch(question, instance))
    return sorted(meeting) or [1.0]


def _largest_batch(question: Question, instance: Instance) -> float:
    """Return the largest batch whose decode step alone meets the TPOT objective, by bisection; 1 if none does."""
    bound = question.objective.tpot
    tried = question.batches_to_try(instance)
    low = max((b for b in tried if instance.tpot(float(b)) <= bound), default=0)
    if not low:
        return 1.0
    parts = batch_divisor(instance, 1)  # bisect in steps of 1 / parts, about one user of the instance
    users = range(low * parts, next((b for b in tried if b > low), low + 1) * parts)
    return users[bisect.bisect_left(users, True, 1, key=lambda n: instance.tpot(n / parts) > bound) - 1] / parts


def _splits(question: Question, pool: PrefillPool, decoder: Decoder) -> list[tuple[int, int]]:
    """Return (prefill instances, decode instances) that balance both sides on the available devices, rounded both ways."""
    sizes = Sizes(question.occupied_devices(pool.instance), question.occupied_devices(decoder.instance))
    devices, work = question.devices, question.workload
    pins, prefill_hosts = question.options.pins, question.cluster.prefill
    max_decode = _decode_room(question, sizes, 1)
    if max_decode < 1:
        return []
    if work.rate is not None:
        max_prefill = (prefill_hosts.num_devices if prefill_hosts else devices) // sizes.prefill
        prefill_count, decode_count = _fewest(question, pool, decoder, max_prefill)
        if decode_count <= _decode_room(question, sizes, prefill_count):  # else balance both sides
            return [(prefill_count, decode_count)]
    prefill_per_decode = decoder.rate / (MAX_UTILISATION * pool.rate)
    if prefill_hosts is None and work.concurrency is not None:
        return _shared_devices(question, sizes, _prefill_shares(devices, sizes.prefill))
    if prefill_hosts is None:
        balanced = prefill_per_decode * (devices / (sizes.decode + prefill_per_decode * sizes.prefill))
        return _shared_devices(question, sizes, {max(1, math.floor(balanced)), math.ceil(balanced)})
    # Each side has its own hosts. Try all decode instances that fit (also fewer if a concurrency is given), each with enough prefill
    # instances to keep up, one more, and all of them.
    divisors = (1,) if work.concurrency is None or pins.decode_count else (1, 2, 4, 8)
    pairs = []
    all_prefill = prefill_hosts.num_devices // sizes.prefill
    for decode_count in sorted({max(1, (pins.decode_count or max_decode) // divisor) for divisor in divisors}):
        enough = math.ceil(prefill_per_decode * decode_count)
        tried = {min(all_prefill, max(1, enough)), min(all_prefill, enough + 1), all_prefill}
        pairs += [(count, decode_count) for count in sorted({pins.prefill_count} if pins.prefill_count else tried)]
    return [
        (count, decode_count) for count, decode_count in pairs if decode_count <= _decode_room(question, sizes, count)
    ]


def _fewest(question: Question, pool: PrefillPool, decoder: Decoder, most: int) -> tuple[int, int]:
    """Return the fewest (prefill instances, decode instances) that serve a given rate, or the pinned counts. If even `most` prefill
    instances miss the TTFT, return `most` + 1 of them."""
    rate = _target_rate(question)
    pins = question.options.pins
    bound = question.objective.ttft
    instance = decoder.instance
    prefill_count = math.ceil(rate / (MAX_UTILISATION * pool.rate))
    if bound is not None:
        step = instance.decode_step(decoder.batch)
        counts = range(prefill_count, most + 1)
        prefill_count += bisect.bisect_left(
            counts, True, key=lambda count: time_to_first_token(pool, count, instance, step, rate) <= bound
        )
    return pins.prefill_count or prefill_count, pins.decode_count or math.ceil(rate / decoder.rate)


def _decode_room(question: Question, sizes: Sizes, prefill_count: int) -> int:
    """Return how many decode instances fit beside the prefill instances."""
    hosts = question.cluster.prefill
    if hosts is None:
        return (question.devices - prefill_count * sizes.prefill) // sizes.decode
    return question.devices // sizes.decode if prefill_count * sizes.prefill <= hosts.num_devices else 0


def _prefill_shares(devices: int, size: int) -> set[int]:
    """Return the numbers of prefill instances to try for a given concurrency: one eighth to three quarters of the devices."""
    return {max(1, devices * share // (size * 8)) for share in (1, 2, 4, 6)}


def _shared_devices(question: Question, sizes: Sizes, prefill_counts: set[int]) -> list[tuple[int, int]]:
    """Return (prefill instances, decode instances) that fit, for these numbers of prefill instances and slightly larger ones."""
    pins = question.options.pins
    # If the TTFT does not allow prefill instances to be that busy, add one or two more.
    prefill_counts = {count + more for count in prefill_counts for more in (0, 1, 2)}
    if pins.prefill_count is not None:
        prefill_counts = {pins.prefill_count}
    elif pins.decode_count is not None:
        prefill_counts.add(max(1, (question.devices - pins.decode_count * sizes.decode) // sizes.prefill))
    pairs = []
    for count in sorted(prefill_counts):
        room = _decode_room(question, sizes, count)
        if 1 <= (pins.decode_count or room) <= room:
            pairs.append((count, pins.decode_count or room))
    return pairs


def most_decode_instances(question: Question, prefilling: Sequence[Instance], instance: Instance) -> int:
    """Return the most decode instances of a layout that fit beside the `prefilling` ones for a given concurrency, or 0."""
    most = 0
    for prefill_size in {question.occupied_devices(one) for one in prefilling}:
        sizes = Sizes(prefill_size, question.occupied_devices(instance))
        has_own_hosts = question.cluster.prefill is not None
        counts = {1} if has_own_hosts else _prefill_shares(question.devices, prefill_size)
        most = max(most, *(count for _, count in _shared_devices(question, sizes, counts)), 0)
    return most


def _smaller_batches(question: Question, late: list[tuple[PrefillPool, Candidate]]) -> list[Candidate]:
    """Reduce the batch of the fastest deployments that miss the TTFT because prefill is too busy, until they meet it.

    The batch is found with interpolated decode steps; the result is then priced exactly.
    """
    bound = question.objective.ttft
    reduced = []
    seen = set()
    for pool, candidate in sorted(late, key=lambda pair: -pair[1].throughput)[:_MOST_REDUCED]:
        instance = candidate.decode
        counts = (candidate.prefill_count, candidate.count)
        key = (id(pool), id(instance), *counts)
        if key in seen or pool.alone > bound:
            continue
        seen.add(key)
        low, high = 0.0, candidate.batch
        curve = lambda batch, one=instance: one.decode_curve(one.rows(batch))  # noqa: E731
        for _ in range(_BISECTION_STEPS):
            middle = (low + high) / 2
            meets = separated(pool, counts[0], instance, counts[1], middle, curve).ttft <= bound
            low, high = (middle, high) if meets else (low, middle)
        # Round down to whole users, unless prefill has its own hosts: no other split then makes up for a user lost to rounding.
        divisor = batch_divisor(instance, counts[1]) if instance.cluster.prefill is None else 1 << 24
        if batch := math.floor(low * divisor) / divisor:
            reduced.append(separated(pool, counts[0], instance, counts[1], batch))
    return reduced

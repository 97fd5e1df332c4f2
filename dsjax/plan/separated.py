"""Separated services: prefill pools and decode instances, and how many of each share the devices."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate, PrefillPool, first_token, prefill_pool, separated, separated_times
from dsjax.plan.instance import Instance
from dsjax.plan.pools import devices_kept
from dsjax.plan.question import FEW_DEVICES, Question, users_told_apart
from sharding.mesh import MeshSpec

_POOLS, _DECODERS = 6, 400
"""Best prefill pools and decode instances that are paired; below the best of their size, others cannot win a pair."""
_BISECTED = 60
_RELIEVED, _HALVINGS = 400, 16
"""On many devices, decode instances whose batch is bisected."""


def separated_candidates(question: Question, fitting: list[Instance], prefilling: list[Instance]) -> list[Candidate]:
    """Every way to pair prefill pools with decode instances that may be the best, with middle values only.

    fitting: instances that fit into memory; prefilling: those that may compute prompts, the same ones unless the cluster has two kinds.

    Raises:
        UserError: a mesh was given that is none of theirs.
    """
    pins = question.options.pins
    prefilling = _pinned(prefilling, pins.prefill_mesh, "--prefill-mesh")
    decoding = _pinned(fitting, pins.decode_mesh, "--decode-mesh")
    if question.devices < 2 and question.cluster.prefill is None:
        return []
    chosen = _pools(question, prefilling)
    points = [(i, b) for i in decoding for b in _decode_batches(question, prefilling, i)]
    rate = {(id(i), b): b * i.replicas / i.tpot(b) / i.layout.devices for i, b in points}
    decoders = _best(points, lambda p: rate[id(p[0]), p[1]], lambda p: (p[0].layout.devices, _rung(p[1])), _DECODERS)
    if question.devices > FEW_DEVICES and question.objective.tpot is not None:
        # Bisected for the best only: there are a thousand layouts.
        each = 1 / max(question.workload.output.mean - 1, 1.0)
        top = sorted(decoders, key=lambda p: _worth(question, rate[id(p[0]), p[1]] * p[0].layout.devices * each, p[0]))[
            :_BISECTED
        ]
        more = [(i, _largest_batch(question, i)) for i in {id(i): i for i, _ in top}.values()]
        points += more
        rate |= {(id(i), b): b * i.replicas / i.tpot(b) / i.layout.devices for i, b in more}
    if question.devices <= FEW_DEVICES:
        # Where prefill holds back, fewer requests decode than a batch has room for: then each layout's largest counts, not the best rate.
        largest = {id(i): (i, b) for i, b in sorted(points, key=lambda p: p[1])}
        decoders += [point for point in largest.values() if point not in decoders]
    # Of each size the fastest layout at the largest batch that keeps the objective, whatever rung it stands on.
    decoders += _best(points, lambda p: rate[id(p[0]), p[1]], lambda p: p[0].layout.devices, _DECODERS)
    candidates, late, tried = [], [], set()
    for pool in chosen:
        for instance, batch in decoders:
            for left, right in _splits(question, pool, instance, batch):
                users = question.workload.concurrency
                here = batch if users is None else users / (instance.replicas * right)
                key = (id(pool), left, id(instance), right, here)
                if here > instance.max_batch or key in tried:
                    continue
                tried.add(key)
                candidates.append(separated(pool, left, instance, right, here))
                bound = question.objective.ttft
                if users is None and bound is not None and candidates[-1].ttft > bound:
                    late.append((pool, candidates[-1]))
    return candidates + _relieved(question, late)


def _pinned(fitting: list[Instance], mesh: MeshSpec | None, flag: str) -> list[Instance]:
    """Those of the mesh that was given.

    Raises:
        UserError: no layout that fits has it.
    """
    if mesh is None:
        return fitting
    pinned = [instance for instance in fitting if instance.layout.mesh == mesh]
    if not pinned:
        near = sorted(
            {i.layout.mesh for i in fitting},
            key=lambda m: (abs(m.num_devices - mesh.num_devices), m.tp_size != mesh.tp_size),
        )
        raise UserError(
            f"{flag} {mesh} is no layout that fits here; nearest are {', '.join(str(m) for m in near[:4]) or 'none: nothing fits'}"
        )
    return pinned


def _pools(question: Question, fitting: list[Instance]) -> list[PrefillPool]:
    """For each size of an instance those that no other beats: in prompts a second, and in a prompt's time alone and in full steps."""
    bound = question.objective.ttft
    best: dict[int, list[PrefillPool]] = {}
    for instance in fitting:
        for size in instance.prefill_sizes():
            pool = prefill_pool(instance, size)
            if bound is not None and pool.alone > bound and size > instance.prefill_sizes()[0]:
                continue
            best.setdefault(instance.layout.devices, []).append(pool)
    kept = []
    for pools in best.values():
        pools.sort(key=lambda p: -p.rate)
        front: list[PrefillPool] = []
        for pool in pools:
            better = (p for p in front if p.seconds <= pool.seconds and p.alone <= pool.alone)
            if next(better, None) is None:
                front.append(pool)
        # Without a bound on the TTFT only the rate counts; with one, slower but sooner ones too.
        kept += front[:1] if bound is None else front[:_POOLS] + front[max(_POOLS, len(front) - _POOLS) :]
    kept.sort(key=lambda p: _worth(question, 0.85 * p.rate, p.instance))
    return kept if question.devices <= FEW_DEVICES else kept[: 4 * _POOLS]


def _worth(question: Question, rate: float, instance: Instance) -> float:
    """What instances are sorted by: with a given rate by the devices that serve it, else by requests a second of a device; best first."""
    if question.workload.rate is not None:
        return math.ceil(_wanted(question) / rate) * instance.layout.devices
    return -rate / instance.layout.devices


def _wanted(question: Question) -> float:
    """Requests a second, where a rate is given."""
    return question.bounds.throughput / question.workload.output.mean


def _fewest(
    question: Question, pool: PrefillPool, instance: Instance, batch: float, served: float, room: int
) -> tuple[int, int]:
    """(prefill instances, decode instances) that a given rate takes: the fewest, unless they are pinned.

    served: requests a second of a decode instance. room: prefill instances at most, one more where so many break the TTFT.
    """
    rate, pins, bound = _wanted(question), question.options.pins, question.objective.ttft
    step, left = instance.decode_step(batch), math.ceil(rate / (0.85 * pool.rate))
    if bound is not None:
        counts = range(left, room + 1)
        left += bisect.bisect_left(counts, True, key=lambda n: first_token(pool, n, instance, step, rate) <= bound)
    return pins.prefill_count or left, pins.decode_count or math.ceil(rate / served)


def _rung(batch: float) -> int:
    """Batches that are compared with each other: within a factor of the square root of two."""
    return round(2 * math.log2(batch))


def _decode_batches(question: Question, prefilling: list[Instance], instance: Instance) -> list[float]:
    """Batches that keep the objective, the largest of all among them, found by bisection between two that were tried."""
    bound = question.objective.tpot
    wanted = question.workload.concurrency
    if wanted is not None:
        # Three quarters of the devices decode, or as many instances as ever do.
        most = most_decode_instances(question, prefilling, instance)
        if not most or wanted > instance.max_batch * instance.replicas * most:
            return []
        usual = max(1, 3 * question.devices // (4 * instance.layout.devices))
        return [min(wanted / (instance.replicas * usual), float(instance.max_batch))]
    if bound is None:
        return [float(b) for b in question.rungs(instance)]
    held = [float(b) for b in question.rungs(instance) if instance.tpot(float(b)) <= bound]
    if question.devices <= FEW_DEVICES:
        held.append(_largest_batch(question, instance))
    return sorted(set(held)) or [1.0]


def _largest_batch(question: Question, instance: Instance) -> float:
    """The largest batch whose decode step alone keeps the TPOT's objective, by bisection; 1 where none does."""
    bound, tried = question.objective.tpot, question.rungs(instance)
    low = max((b for b in tried if instance.tpot(float(b)) <= bound), default=0)
    high = next((b for b in tried if b > low), low + 1)
    ranks = users_told_apart(instance, 1)
    low, high = low * ranks, high * ranks
    while low and high - low > 1:
        middle = (low + high) // 2
        if instance.tpot(middle / ranks) <= bound:
            low = middle
        else:
            high = middle
    return max(low / ranks, 1.0)


def _best(items: list, rate, group, most: int) -> list:
    """The item with the highest rate of each group; of those the `most` best."""
    best: dict = {}
    for item in sorted(items, key=rate, reverse=True):
        best.setdefault(group(item), item)
    return sorted(best.values(), key=rate, reverse=True)[:most]


def _splits(question: Question, pool: PrefillPool, instance: Instance, batch: float) -> list[tuple[int, int]]:
    """(prefill instances, decode instances) that balance both sides, rounded both ways, on the devices at hand."""
    prefill_devices, other = (devices_kept(question, one) for one in (pool.instance, instance))
    devices, work = question.devices, question.workload
    if question.cluster.prefill is not None:
        return _both_kinds(question, pool, instance, batch)
    if prefill_devices + other > devices:
        return []
    if work.concurrency is not None:
        return _beside_each_other(question, prefill_devices, other, _shares(devices, prefill_devices))
    served = batch * instance.replicas / (instance.tpot(batch) * max(work.output.mean - 1, 1.0))
    if work.rate is not None:
        left, right = _fewest(question, pool, instance, batch, served, devices // prefill_devices)
        if left * prefill_devices + right * other <= devices:
            return [(left, right)]
    needed = served / (0.85 * pool.rate)  # prefill instances for each decode instance
    rights = devices / (other + needed * prefill_devices)
    lefts = {max(1, math.floor(needed * rights)), math.ceil(needed * rights)}
    return _beside_each_other(question, prefill_devices, other, lefts)


def _shares(devices: int, first_devices: int) -> set[int]:
    """Numbers of prefill instances that are tried for a number of requests in flight: an eighth of the devices to three quarters."""
    return {max(1, devices * share // (first_devices * 8)) for share in (1, 2, 4, 6)}


def _beside_each_other(question: Question, first_devices: int, other: int, lefts: set[int]) -> list[tuple[int, int]]:
    """(prefill instances, decode instances) for these numbers of prefill instances and a few more, as far as they fit and are not pinned.

    first_devices, other: devices that a prefill instance keeps, and a decode instance.
    """
    devices, pins = question.devices, question.options.pins
    # Where the TTFT forbids prefill to be as busy, one or two more instances of it relieve the rest.
    lefts = lefts | {left + more for left in lefts for more in (1, 2)}
    if pins.prefill_count is not None:
        lefts = {pins.prefill_count}
    elif pins.decode_count is not None:
        lefts |= {max(1, (devices - pins.decode_count * other) // first_devices)}
    pairs = []
    for left in sorted(lefts):
        room = (devices - left * first_devices) // other
        right = room if pins.decode_count is None else min(pins.decode_count, room + 1)
        if 1 <= right <= room and right == (pins.decode_count or right):
            pairs.append((left, right))
    return pairs


def most_decode_instances(question: Question, prefilling: Sequence[Instance], instance: Instance) -> int:
    """The most instances of a layout that ever decode for a number of requests in flight, beside some of these that compute prompts.

    0 where none may: they do not fit, or not in the numbers that are pinned.
    """
    other, pins, first = devices_kept(question, instance), question.options.pins, question.cluster.prefill
    if first is not None:
        room = max((first.num_devices // devices_kept(question, i) for i in prefilling), default=0)
        most = question.devices // other if room >= (pins.prefill_count or 1) else 0
        return most if pins.decode_count is None else pins.decode_count * (pins.decode_count <= most)
    return max(
        (
            right
            for prefill_devices in {devices_kept(question, i) for i in prefilling}
            for _, right in _beside_each_other(
                question, prefill_devices, other, _shares(question.devices, prefill_devices)
            )
        ),
        default=0,
    )


def _both_kinds(question: Question, pool: PrefillPool, instance: Instance, batch: float) -> list[tuple[int, int]]:
    """Splits where each side has hosts of its own: all decode instances that fit, or fewer where a load is given, and of prefill
    instances those that keep up with them, one more, and all."""
    prefill_devices, other = (devices_kept(question, one) for one in (pool.instance, instance))
    first, pins = question.cluster.prefill, question.options.pins
    most_left, most_right = first.num_devices // prefill_devices, question.devices // other
    work = question.workload
    if not most_left or not most_right:
        return []
    rights = {most_right} if work.concurrency is None else {max(1, most_right // part) for part in (1, 2, 4, 8)}
    if pins.decode_count is not None:
        rights = {pins.decode_count} if pins.decode_count <= most_right else set()
    each = batch * instance.replicas / (instance.tpot(batch) * max(work.output.mean - 1, 1.0))
    if work.rate is not None:
        left, right = _fewest(question, pool, instance, batch, each, most_left)
        if left <= most_left and right <= most_right:
            return [(left, right)]
    splits = []
    for right in sorted(rights):
        needed = math.ceil(each * right / (0.85 * pool.rate))
        lefts = {min(most_left, max(1, needed)), min(most_left, needed + 1), most_left}
        if pins.prefill_count is not None:
            lefts = {pins.prefill_count} if pins.prefill_count <= most_left else set()
        splits += [(left, right) for left in sorted(lefts)]
    return splits


def _relieved(question: Question, late: list[tuple[PrefillPool, Candidate]]) -> list[Candidate]:
    """Reduce the batch of deployments that miss the TTFT because prefill is too busy, until they meet it.

    Only the `_RELIEVED` deployments with the highest throughput are tried. The batch is found with interpolated decode steps; the result is
    then priced exactly.
    """
    bound, found, seen = question.objective.ttft, [], set()
    for pool, busy in sorted(late, key=lambda one: -one[1].throughput)[:_RELIEVED]:
        instance, left, right = busy.decode, busy.prefill_count, busy.count
        key = (id(pool), left, id(instance), right)
        if key in seen or pool.alone > bound:
            continue
        seen.add(key)
        low, high, curve = 0.0, busy.batch, lambda batch, one=instance: one.decode_curve(one.rows(batch))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            kept = separated_times(pool, left, instance, right, middle, curve)[0] <= bound
            low, high = (middle, high) if kept else (low, middle)
        # Where prefill has hosts of its own, no other split makes up for a user who is rounded away.
        users = users_told_apart(instance, right) if instance.cluster.prefill is None else 1 << 24
        if batch := math.floor(low * users) / users:
            found.append(separated(pool, left, instance, right, batch))
    return found

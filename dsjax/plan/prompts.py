"""Prompts beside decodes in aggregated serving: who waits for whom when replicas get their prompts one by one."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence

from dsjax.plan.figure import assumed, is_drawing
from dsjax.plan.instance import Instance

ADP_BALANCE = "TensorRT-LLM tech blog 10, ADP Balance Strategy: an iteration takes as long as its slowest rank"
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Shares of replicas with prompts that are priced; between them seconds are straight."""


def prompts_beside_decodes(instance: Instance, batch: float, tokens: float) -> tuple[float, float]:
    """(seconds that prompts add to each token of a running request, seconds that they add to a step that has any).

    In a step each request gets a token, so `batch × replicas ÷ output` requests end and as many prompts take their places:
    a Poisson number, spread evenly by the router. A step that has any lasts as long as its fullest replica
    computes, `⌈prompts ÷ replicas⌉` of them; the other replicas wait, idle but for their experts. The low end is an engine that
    holds prompts back until every replica has a whole step of them, and with such an engine (`Engine.holds_prompts`) the value.

    tokens: most prompt tokens of a replica in a step; longer prompts come as chunks. The second figure is what they add to a step of
    decodes.
    """
    work, made = instance.workload, instance.options.tokens_a_step
    ranks = instance.layout.unit.mesh.dp_size
    chunks = math.ceil(work.computed / tokens)
    size = work.computed / chunks
    arriving = batch * ranks * made / work.output.mean * chunks
    share, deepest = _steps_with_prompts(arriving, ranks)
    most = max(1, int(tokens / size + 1e-9))
    depth = max(1.0, min(deepest, most))
    filled = arriving / share / (ranks * deepest)
    busy = _between_shares(filled)
    step = _between_whole(depth, lambda count: _prefill(instance, count * size, busy))
    added = _between_whole(depth, lambda count: _added(instance, batch, count * size, busy))
    steps = share * deepest / depth
    each = (added * min(steps, 1.0) + step * max(0.0, steps - 1)) / made
    holds = instance.options.engine.holds_prompts and ranks > 1
    if not holds and not is_drawing():
        return each, added
    together = instance.prompt_seconds(tokens) * (batch / work.output.mean)
    source = f"replicas wait for the one with most prompts ({ADP_BALANCE}); low end: prompts of all replicas at once"
    usual = together if holds else each
    ends = (usual, min(usual, together), max(usual, each) if holds else usual)
    return assumed(*ends, "prompts, mean of all steps", source, "s"), added


def own_load(instance: Instance, batch: float, tokens: float) -> float:
    """Prefill utilisation of a replica: its prompt tokens in a step ÷ the most that a step may take."""
    work, made = instance.workload, instance.options.tokens_a_step
    chunks = math.ceil(work.computed / tokens)
    most = max(1, int(tokens / (work.computed / chunks) + 1e-9))
    return batch * made / work.output.mean * chunks / most


def _added(instance: Instance, batch: float, tokens: float, busy: _Between) -> float:
    """Seconds that a step of decodes takes longer with so many prompt tokens beside them on a replica, on `busy` of the replicas.

    One program computes both: its decodes read no weights of their own, take what prompt tokens take, and attend to their contexts;
    where the prompts alone leave the device waiting for launches, they fill that. It is never longer than both alone, which an engine
    takes that has no such program (`Engine.mixes`).
    """
    alone = _prefill(instance, tokens, busy)
    if not instance.options.engine.mixes:
        return alone
    key = ("saved", batch, tokens, busy)
    if key not in instance.steps:
        instance.steps[key] = _saved(instance, batch, tokens, busy)
    saved = min(instance.steps[key], alone)
    return alone - max(saved, 0.0)


def _saved(instance: Instance, batch: float, tokens: float, busy: _Between) -> float:
    """Seconds of a step of decodes that it does not take beside prompts; below zero where it saves nothing.

    Tokens that are verified are computed as prompts' are, and drafts are made whatever else the step has. Where programs take longer than
    their operations (`Instance.pace`), what both kinds have in common is saved at the pace of the faster one.
    """
    (low, high, way), batch = busy, instance.rows(batch)
    kinds = ((False, instance.halved(tokens)), (True, instance.overlapped(batch)))
    paces = [1.0 if (pace := instance.pace(*kind)) is None else pace for kind in kinds]
    slack = (1 - way) * instance.launch_slack(tokens, low) + way * instance.launch_slack(tokens, high)
    verified = batch * (1 + instance.options.drafts)
    beside = _seconds_of_more(instance, tokens, verified) / paces[0] + instance.decode_attention(batch)
    beside += instance.drafting(batch)
    return min(paces) * (instance.decode_step(batch) / paces[1] - max(0.0, beside - slack))


def _seconds_of_more(instance: Instance, tokens: float, others: float) -> float:
    """Seconds that `others` more tokens add to a prefill step of `tokens`, which reads the weights anyway.

    They are interpolated linearly between steps of `tokens`, of twice and four times as many, and so on.
    """
    added, before = 0.0, _computing(instance, tokens)
    while others > 0:
        after, here = _computing(instance, 2 * tokens), min(others, tokens)
        added += (after - before) * here / tokens
        tokens, before, others = 2 * tokens, after, others - here
    return added


def _computing(instance: Instance, tokens: float) -> float:
    """Seconds of a prefill step of `tokens`, without what the device waits for launches."""
    pace = instance.pace(False, instance.halved(tokens))
    return instance.prefill_step(tokens) - instance.launch_slack(tokens) * (1.0 if pace is None else pace)


_Between = tuple[float, float, float]
"""Two of `_SHARES`, and how far from the first to the second."""


def _between_shares(share: float) -> _Between:
    if share <= _SHARES[0]:
        return _SHARES[0], _SHARES[0], 0.0
    if share >= _SHARES[-1]:
        return _SHARES[-1], _SHARES[-1], 0.0
    at = bisect.bisect_left(_SHARES, share)
    low, high = _SHARES[at - 1], _SHARES[at]
    return low, high, (share - low) / (high - low)


def _prefill(instance: Instance, tokens: float, busy: _Between) -> float:
    """Seconds of a step of so many prompt tokens on a share of the replicas."""
    low, high, way = busy
    step = instance.prefill_step(tokens, high)
    return step if low == high else instance.prefill_step(tokens, low) * (1 - way) + step * way


def _between_whole(depth: float, seconds: Callable[[int], float]) -> float:
    """Seconds at a number of prompts that is a mean of whole ones."""
    whole = int(depth)
    figure = seconds(whole)
    return figure if depth == whole else figure * (whole + 1 - depth) + seconds(whole + 1) * (depth - whole)


def own_step(instance: Instance, batch: float, tokens: float) -> float:
    """Seconds of the prompts in the step that takes a request's own, where each finished request is replaced by the next one.

    Its prompt arrives at the end of a step, with those of all other requests that ended in it. Seen from one of them they are one
    and a Poisson number, so that the fullest replica has `⌈(1 + n) ÷ replicas⌉`.
    """
    work, made = instance.workload, instance.options.tokens_a_step
    ranks = instance.layout.unit.mesh.dp_size
    chunks = math.ceil(work.computed / tokens)
    size = work.computed / chunks
    arriving = batch * ranks * made / work.output.mean * chunks
    deepest = _depth_of_one(arriving, ranks)
    busy = _between_shares((1 + arriving) / (ranks * deepest))
    depth = max(1.0, min(deepest, max(1, int(tokens / size + 1e-9))))
    return _between_whole(depth, lambda count: _added(instance, batch, count * size, busy))


def best_step(instance: Instance, batch: float, sizes: Sequence[float]) -> float:
    """The size of a step's prompts, of these, with which a token waits least for them.

    Small steps let more replicas have a chunk at the same time, large ones compute a token for less.
    """
    return min(sizes, key=lambda size: prompts_beside_decodes(instance, batch, size)[0])


@functools.cache
def _steps_with_prompts(mean: float, ranks: int) -> tuple[float, float]:
    """(probability of at least one, expected `⌈n ÷ ranks⌉` where there is one) of a Poisson number n."""
    if mean > 30:  # never none; the rounding up adds half a prompt on average, less half a rank's share
        return 1.0, mean / ranks + (ranks - 1) / (2 * ranks)
    some = -math.expm1(-mean)
    # E⌈n/ranks⌉ is the sum over j of P(n > j · ranks).
    chance, below, total, edge = math.exp(-mean), 0.0, 0.0, 0
    for count in range(int(mean + 12 * math.sqrt(mean) + 20) + 1):
        below += chance
        if count == edge:
            total += max(0.0, 1 - below)
            edge += ranks
        chance *= mean / (count + 1)
    return some, total / some


@functools.cache
def _depth_of_one(mean: float, ranks: int) -> float:
    """Expected `⌈(1 + n) ÷ ranks⌉` of a Poisson number n."""
    if mean > 30:
        return (1 + mean) / ranks + (ranks - 1) / (2 * ranks)
    # The sum over j of P(1 + n > j · ranks), of which the first is 1.
    chance, below, total, edge = math.exp(-mean), 0.0, 1.0, ranks
    for count in range(int(mean + 12 * math.sqrt(mean) + 20) + 1):
        if count == edge:
            total += max(0.0, 1 - below)
            edge += ranks
        below += chance
        chance *= mean / (count + 1)
    return total

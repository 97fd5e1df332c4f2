"""Prompts beside decodes in aggregated serving: who waits for whom when replicas get their prompts one by one."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from dsjax.plan.figure import Figure, Kind
from dsjax.plan.instance import Instance

ADP_BALANCE = "TensorRT-LLM tech blog 10, ADP Balance Strategy: an iteration takes as long as its slowest rank"
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Shares of replicas that are priced; the next larger one stands for those between."""


def prompts_beside_decodes(instance: Instance, batch: float, tokens: float) -> tuple[Figure, Figure]:
    """(seconds that prompts add to each token of a running request, seconds of a step's prompts where it has any).

    In a step each request gets a token, so `batch × replicas ÷ output` requests end and as many prompts take their places:
    a Poisson number, spread evenly by the router. A step that has any lasts as long as its fullest replica
    computes, `⌈prompts ÷ replicas⌉` of them; the other replicas wait, idle but for their experts. The low end is an engine that
    holds prompts back until every replica has a whole step of them.

    tokens: most prompt tokens of a replica in a step; longer prompts come as chunks.
    """
    work, made = instance.workload, instance.options.tokens_a_step.value
    ranks = instance.layout.unit.mesh.dp_size
    chunks = math.ceil(work.computed / tokens)
    size = work.computed / chunks
    arriving = batch * ranks * made / work.output.mean * chunks
    share, deepest = _steps_with_prompts(arriving, ranks)
    most = max(1, int(tokens / size + 1e-9))
    depth = max(1.0, min(deepest, most))
    filled = arriving / share / (ranks * deepest)
    busy = next(s for s in _SHARES if s >= min(filled, 1.0) - 1e-9)
    whole = int(depth)
    step = instance.prefill_step(whole * size, busy)
    if depth > whole:
        step = step * (whole + 1 - depth) + instance.prefill_step((whole + 1) * size, busy) * (depth - whole)
    each = step * (share * deepest / depth / made)
    together = instance.prompt_seconds(tokens) * (batch / work.output.mean)
    low = min(each.low, together.low)
    source = f"replicas wait for the one with most prompts ({ADP_BALANCE}); low end: prompts of all replicas at once"
    kinds = each.kinds | Kind.ASSUMPTION
    found = Figure(
        each.value, low, each.high, kinds, name="prompts, mean of all steps", source=source, parts=each.parts
    )
    return found.named("prompts of other requests, for each token", "s"), step


def quick_prompts(instance: Instance, batch: float, tokens: float) -> tuple[float, float]:
    """The middle values of `prompts_beside_decodes`, without intervals and derivations: the search asks for very many."""
    work, made = instance.workload, instance.options.tokens_a_step.value
    ranks = instance.layout.unit.mesh.dp_size
    chunks = math.ceil(work.computed / tokens)
    size = work.computed / chunks
    arriving = batch * ranks * made / work.output.mean * chunks
    share, deepest = _steps_with_prompts(arriving, ranks)
    depth = max(1.0, min(deepest, max(1, int(tokens / size + 1e-9))))
    filled = arriving / share / (ranks * deepest)
    busy = next(s for s in _SHARES if s >= min(filled, 1.0) - 1e-9)
    whole = int(depth)
    step = instance.prefill_step(whole * size, busy).value
    if depth > whole:
        step = step * (whole + 1 - depth) + instance.prefill_step((whole + 1) * size, busy).value * (depth - whole)
    return step * share * deepest / depth / made, step


def best_step(instance: Instance, batch: float, sizes: Sequence[float]) -> float:
    """The size of a step's prompts, of these, with which a token waits least for them.

    Small steps let more replicas have a chunk at the same time, large ones compute a token for less.
    """
    return min(sizes, key=lambda size: quick_prompts(instance, batch, size)[0])


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

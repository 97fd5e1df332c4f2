"""Time that prompts add to decode steps in aggregated serving, where all DP ranks wait for the fullest one."""

import bisect
import functools
import math
from collections.abc import Callable

import numpy as np

from dsjax.plan.figure import assumed, is_drawing
from dsjax.plan.instance import Instance

ADP_BALANCE = "TensorRT-LLM tech blog 10, ADP Balance Strategy: an iteration takes as long as its slowest rank"
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Shares of the DP ranks with prompts for which steps are priced; others are interpolated linearly."""


def prompts_beside_decodes(instance: Instance, batch: float, tokens: float) -> tuple[float, float]:
    """Return (seconds that prompts add to each token of a running request, seconds that they add to a decode step with prompts).

    Each request gets a token in a step, so `batch × ranks ÷ output` requests end and as many prompts replace them: a Poisson number, spread
    evenly by the router. A step with prompts lasts as long as its fullest DP rank, which has `⌈prompts ÷ ranks⌉`. The low end assumes an
    engine that holds prompts back until every rank has a full step of them; for such an engine (`Engine.holds_prompts`), the low end is the
    estimate. tokens: most prompt tokens of a rank in a step; longer prompts are chunked.
    """
    ranks = instance.layout.unit.mesh.dp_size
    size, most, arriving = _chunks(instance, batch, tokens, ranks)
    share = -math.expm1(-arriving)
    deepest = _fullest(arriving, ranks) / share
    busy = arriving / share / (ranks * deepest)
    depth = max(1.0, min(deepest, most))
    added = _between_whole(depth, lambda count: _added(instance, batch, count * size, busy))
    steps = share * deepest / depth
    waited = added * min(steps, 1.0)
    if steps > 1:
        waited += (steps - 1) * _between_whole(depth, lambda count: _prefill(instance, count * size, busy))
    waited /= instance.options.tokens_a_step
    holds = instance.options.engine.holds_prompts and ranks > 1
    if not holds and not is_drawing():
        return waited, added
    together = instance.prompt_seconds(tokens) * (batch / instance.workload.output.mean)
    source = f"replicas wait for the one with most prompts ({ADP_BALANCE}); low end: prompts of all replicas at once"
    usual = together if holds else waited
    ends = (usual, min(usual, together), max(usual, waited))
    return assumed(*ends, "prompts, mean of all steps", source, "s"), added


def own_step(instance: Instance, batch: float, tokens: float) -> float:
    """Return the seconds of all prompts in the step that computes a request's own prompt, in a closed loop.

    The prompt arrives at the end of a step, with the prompts of all requests that replace finished ones: 1 + n prompts with a Poisson
    number n, so the fullest DP rank has `⌈(1 + n) ÷ ranks⌉`.
    """
    ranks = instance.layout.unit.mesh.dp_size
    size, most, arriving = _chunks(instance, batch, tokens, ranks)
    deepest = _fullest(arriving, ranks, 1)
    busy = (1 + arriving) / (ranks * deepest)
    return _between_whole(max(1.0, min(deepest, most)), lambda count: _added(instance, batch, count * size, busy))


def own_load(instance: Instance, batch: float, tokens: float) -> float:
    """Return the prefill utilisation of a DP rank: its prompt tokens in a step ÷ the maximum of a step."""
    _, most, arriving = _chunks(instance, batch, tokens, 1)
    return arriving / most


def _chunks(instance: Instance, batch: float, tokens: float, ranks: int) -> tuple[float, int, float]:
    """Return (tokens of a chunk, most chunks of a DP rank in a step, chunks that arrive in a step for this many ranks)."""
    work = instance.workload
    chunks = math.ceil(work.computed / tokens)
    size = work.computed / chunks
    arriving = batch * ranks * instance.options.tokens_a_step / work.output.mean * chunks
    return size, max(1, int(tokens / size + 1e-9)), arriving


def _added(instance: Instance, batch: float, tokens: float, busy: float) -> float:
    """Seconds that `tokens` prompt tokens add to a decode step of a DP rank, on `busy` of the ranks.

    One program computes both: decodes share the weight reads, cost as much as prompt tokens, attend to their contexts, and use the time in
    which prompts alone would wait for launches. The program takes at most as long as two separate steps; an engine without mixed steps
    (`Engine.mixes`) runs these.
    """
    alone = _prefill(instance, tokens, busy)
    if not instance.options.engine.mixes:
        return alone
    saved = instance.kept(("saved", batch, tokens, busy), lambda: _saved(instance, batch, tokens, busy))
    return alone - max(min(saved, alone), 0.0)


def _saved(instance: Instance, batch: float, tokens: float, busy: float) -> float:
    """Seconds that a mixed step saves compared with separate steps; below zero if it saves nothing.

    Verified tokens cost as much as prompt tokens, and mixing does not change the cost of drafting. If programs take longer than their
    operations (`Instance.pace`), shared work is saved at the pace of the faster program.
    """
    batch = instance.rows(batch)
    paces = [instance.pace(False, instance.halved(tokens)), instance.pace(True, instance.overlapped(batch))]
    slack = _over_shares(busy, lambda share: instance.launch_slack(tokens, share))
    added = _seconds_of_more(instance, tokens, batch * (1 + instance.options.drafts)) / paces[0]
    added += instance.decode_attention(batch) + instance.drafting(batch)
    return min(paces) * (instance.decode_step(batch) / paces[1] - max(0.0, added - slack))


def _seconds_of_more(instance: Instance, tokens: float, other_tokens: float) -> float:
    """Return the seconds that `other_tokens` more tokens add to a prefill step of `tokens` tokens, without launches and weight reads.

    Interpolated linearly between steps of `tokens`, twice and four times as many, and so on.
    """

    def computing(tokens: float) -> float:
        pace = instance.pace(False, instance.halved(tokens))
        return instance.prefill_step(tokens) - instance.launch_slack(tokens) * pace

    added = 0.0
    before = computing(tokens)
    while other_tokens > 0:
        after = computing(2 * tokens)
        step_tokens = min(other_tokens, tokens)
        added += (after - before) * step_tokens / tokens
        tokens = 2 * tokens
        before = after
        other_tokens -= step_tokens
    return added


def _prefill(instance: Instance, tokens: float, busy: float) -> float:
    """Seconds of a prefill step of `tokens` tokens on a share of the DP ranks."""
    return _over_shares(busy, lambda share: instance.prefill_step(tokens, share))


def _over_shares(share: float, seconds: Callable[[float], float]) -> float:
    """Seconds at a share of the DP ranks, linear between `_SHARES` and constant beyond them."""
    share = min(max(share, _SHARES[0]), _SHARES[-1])
    index = bisect.bisect_left(_SHARES, share)
    if share == _SHARES[index]:
        return seconds(share)
    low, high = _SHARES[index - 1], _SHARES[index]
    way = (share - low) / (high - low)
    return seconds(low) * (1 - way) + seconds(high) * way


def _between_whole(depth: float, seconds: Callable[[int], float]) -> float:
    """Seconds at a mean number of prompts, linear between whole numbers."""
    floor = int(depth)
    figure = seconds(floor)
    return figure if depth == floor else figure * (floor + 1 - depth) + seconds(floor + 1) * (depth - floor)


@functools.cache
def _fullest(mean: float, ranks: int, own_requests: int = 0) -> float:
    """Return the expected `⌈(own_requests + n) ÷ ranks⌉` for a Poisson number n. own_requests: 0 or 1."""
    if mean > 30:  # rounding up adds half a prompt on average, less half a rank's share
        return (own_requests + mean) / ranks + (ranks - 1) / (2 * ranks)
    counts = np.arange(1, int(mean + 12 * math.sqrt(mean) + 20) + 1)
    below = np.cumsum(np.cumprod([math.exp(-mean), *(mean / counts)]))
    # The sum over j of P(own_requests + n > j · ranks). With one of its own, the first term is 1.
    return own_requests + sum(np.maximum(0.0, 1 - below[own_requests * (ranks - 1) :: ranks]).tolist())

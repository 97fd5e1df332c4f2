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
"""Shares of the DP ranks with prompts at which step times are computed; others are interpolated linearly."""


def prompts_beside_decodes(instance: Instance, batch: float, tokens: float) -> tuple[float, float]:
    """Return (seconds that prompts add per token of a running request, seconds that they add to a decode step with prompts).

    A chunk is a prompt, or a part of at most `tokens` tokens of a longer one. As many prompts arrive as requests end, so the number n of
    chunks that arrive in a step is Poisson. The router spreads chunks evenly. A step lasts as long as its fullest DP rank, which has
    `⌈n ÷ ranks⌉` chunks, but at most `tokens` tokens. The low end assumes that prompts are held back until every rank has a full step of
    them; for engines that do this (`Engine.holds_prompts`), it is the estimate.
    """
    ranks = instance.layout.unit.mesh.dp_size
    size, max_chunks, arriving = _chunks(instance, batch, tokens, ranks)
    probability = -math.expm1(-arriving)
    fullest = _fullest(arriving, ranks) / probability
    busy = arriving / probability / (ranks * fullest)
    chunks = max(1.0, min(fullest, max_chunks))
    added = _between_whole(chunks, lambda count: _added(instance, batch, count * size, busy))
    prompt_steps = probability * fullest / chunks
    waited = added * min(prompt_steps, 1.0)
    if prompt_steps > 1:
        waited += (prompt_steps - 1) * _between_whole(chunks, lambda count: _prefill(instance, count * size, busy))
    waited /= instance.options.tokens_a_step
    holds = instance.options.engine.holds_prompts and ranks > 1
    if not holds and not is_drawing():
        return waited, added
    held_back = instance.prompt_seconds(tokens) * (batch / instance.workload.output.mean)
    source = f"replicas wait for the one with most prompts ({ADP_BALANCE}); low end: prompts of all replicas at once"
    estimate = held_back if holds else waited
    ends = (estimate, min(estimate, held_back), max(estimate, waited))
    return assumed(*ends, "prompts, mean of all steps", source, "s"), added


def own_step(instance: Instance, batch: float, tokens: float) -> float:
    """Return the seconds that prompts add to a step that computes a chunk of a request's own prompt, in a closed loop.

    A client sends its next prompt when its request ends, at the end of a step. So do the other clients whose requests end: n more chunks,
    Poisson. The fullest DP rank then has `⌈(1 + n) ÷ ranks⌉` chunks.
    """
    ranks = instance.layout.unit.mesh.dp_size
    size, max_chunks, arriving = _chunks(instance, batch, tokens, ranks)
    fullest = _fullest(arriving, ranks, 1)
    busy = (1 + arriving) / (ranks * fullest)
    return _between_whole(max(1.0, min(fullest, max_chunks)), lambda count: _added(instance, batch, count * size, busy))


def own_load(instance: Instance, batch: float, tokens: float) -> float:
    """Return the prefill utilisation of a DP rank: the chunks that arrive for it in a step ÷ the most that fit in a step."""
    _, max_chunks, arriving = _chunks(instance, batch, tokens, 1)
    return arriving / max_chunks


def _chunks(instance: Instance, batch: float, tokens: float, ranks: int) -> tuple[float, int, float]:
    """Return (tokens of a chunk, most chunks of a DP rank in a step, mean number of chunks that arrive in a step for `ranks` ranks)."""
    work = instance.workload
    chunks = math.ceil(work.computed / tokens)
    size = work.computed / chunks
    arriving = batch * ranks * instance.options.tokens_a_step / work.output.mean * chunks
    return size, max(1, int(tokens / size + 1e-9)), arriving


def _added(instance: Instance, batch: float, tokens: float, busy: float) -> float:
    """Seconds that `tokens` prompt tokens per rank add to a decode step, if a share `busy` of the DP ranks has prompts.

    A mixed step is one program: decodes share the weight reads, cost as much as prompt tokens, attend to their contexts, and use the time
    in which prompts alone would wait for launches. It takes at most as long as two separate steps. An engine without mixed steps
    (`Engine.mixes`) runs separate steps.
    """
    alone = _prefill(instance, tokens, busy)
    if not instance.options.engine.mixes:
        return alone
    saved = instance.kept(("saved", batch, tokens, busy), lambda: _saved(instance, batch, tokens, busy))
    return alone - max(min(saved, alone), 0.0)


def _saved(instance: Instance, batch: float, tokens: float, busy: float) -> float:
    """Seconds that a mixed step saves compared with a prefill step and a decode step; not positive if it saves nothing.

    Verified tokens cost as much as prompt tokens, and mixing does not change the cost of drafting. If programs take longer than the sum of
    their operations (`Instance.pace`; `paces` is prefill, decode), the saving is taken at the smaller pace.
    """
    batch = instance.rows(batch)
    paces = [instance.pace(False, instance.halved(tokens)), instance.pace(True, instance.overlapped(batch))]
    slack = _over_shares(busy, lambda share: instance.launch_slack(tokens, share))
    decodes = _seconds_of_more(instance, tokens, batch * (1 + instance.options.drafts)) / paces[0]
    decodes += instance.decode_attention(batch) + instance.drafting(batch)
    return min(paces) * (instance.decode_step(batch) / paces[1] - max(0.0, decodes - slack))


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
    """Seconds of a prefill step with `tokens` tokens on each DP rank that has prompts, a share `busy` of all."""
    return _over_shares(busy, lambda share: instance.prefill_step(tokens, share))


def _over_shares(share: float, seconds: Callable[[float], float]) -> float:
    """Evaluate `seconds` at a share of the DP ranks: interpolated linearly between `_SHARES`, constant beyond them."""
    share = min(max(share, _SHARES[0]), _SHARES[-1])
    index = bisect.bisect_left(_SHARES, share)
    if share == _SHARES[index]:
        return seconds(share)
    low, high = _SHARES[index - 1], _SHARES[index]
    weight = (share - low) / (high - low)
    return seconds(low) * (1 - weight) + seconds(high) * weight


def _between_whole(depth: float, seconds: Callable[[int], float]) -> float:
    """Evaluate `seconds` at a mean number of chunks: interpolated linearly between the whole numbers around `depth`."""
    floor = int(depth)
    at_floor = seconds(floor)
    return at_floor if depth == floor else at_floor * (floor + 1 - depth) + seconds(floor + 1) * (depth - floor)


@functools.cache
def _fullest(mean: float, ranks: int, own_requests: int = 0) -> float:
    """Return the mean of `⌈(own_requests + n) ÷ ranks⌉` for a Poisson number n with this mean. own_requests: 0 or 1."""
    if mean > 30:  # rounding up adds half a prompt on average, less half a rank's share
        return (own_requests + mean) / ranks + (ranks - 1) / (2 * ranks)
    counts = np.arange(1, int(mean + 12 * math.sqrt(mean) + 20) + 1)
    cdf = np.cumsum(np.cumprod([math.exp(-mean), *(mean / counts)]))
    # The sum over j ≥ 0 of P(own_requests + n > j · ranks), where cdf[i] is P(n ≤ i). With own_requests = 1, the first term is 1.
    return own_requests + sum(np.maximum(0.0, 1 - cdf[own_requests * (ranks - 1) :: ranks]).tolist())

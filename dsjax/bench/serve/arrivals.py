"""When requests are due: gaps from a gamma distribution around a rate."""

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which `count` requests are due; the first at 0.

    The gaps are gamma distributed with mean 1 / rate and shape `burstiness`, vLLM's meaning: 1 is a Poisson process, less
    is burstier, more is more even (their coefficient of variation is 1 / √burstiness; infinite: all gaps equal). The gaps
    are then scaled so that the `count - 1` of them take exactly (count - 1) / rate seconds, as vLLM scales its own: the
    offered rate is the one asked for with every seed.

    Args:
        count: number of requests.
        rate: requests a second; infinite: all at once.
        burstiness: more than 0.
        seed: same seed, same times.
    """
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count - 1, 1 / rate)
    else:
        gaps = np.random.default_rng([seed, _STREAM]).gamma(burstiness, 1 / (rate * burstiness), count - 1)
        # A shape far below 1 can draw gaps that are all 0 in floating point: then they are taken as even.
        gaps = gaps / gaps.sum() * (count - 1) / rate if gaps.any() else np.full(count - 1, 1 / rate)
    return [0.0, *np.cumsum(gaps).tolist()]


_STREAM = 0xA881
"""Keeps the draws of arrivals apart from those of lengths and prompts under the same seed."""

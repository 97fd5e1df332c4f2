"""`OfferedLoad`: when requests arrive, at a rate or with a fixed number in flight; their lengths are drawn from the workload."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dsjax.plan.workload import Lengths, Workload


@dataclass(frozen=True)
class OfferedLoad:
    """rate: requests a second, arriving on their own; or concurrency: requests in flight, each finished one replaced at once.

    burstiness: shape of the gamma distribution of the times between arrivals, as `vllm bench serve` has it: 1 is Poisson, less is
    burstier, infinity is even.
    """

    rate: float | None
    concurrency: int | None
    burstiness: float = 1.0

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} in flight"
        kind = "Poisson" if self.burstiness == 1 else f"burstiness {self.burstiness:g}"
        return f"{self.rate:.3g} requests/s, {kind}"


@dataclass(slots=True, eq=False)
class Served:
    """One request. arrival, first, finished: seconds of its arrival, first and last token. shared: prompt tokens that are in the cache."""

    number: int
    arrival: float
    prompt: int
    shared: int
    output: int
    kind: str = ""
    first: float = 0.0
    finished: float = 0.0


def requests(load: OfferedLoad, work: Workload, longest: int, seed: int) -> Iterator[Served]:
    """Endless; the same seed gives the same requests, whatever serves them. longest: most tokens of a request."""
    times, prompts, outputs, kinds = (np.random.default_rng((seed, stream)) for stream in range(4))
    now, shares = 0.0, [one.share for one in work.kinds]
    for number in itertools.count():
        if load.rate is not None:
            even = math.isinf(load.burstiness)
            now += 1 / load.rate if even else float(times.gamma(load.burstiness, 1 / (load.rate * load.burstiness)))
        kind = work.kinds[int(kinds.choice(len(shares), p=shares)) if work.classes else 0]
        output = min(_length(kind.output, outputs), longest - 2)
        prompt = min(_length(kind.input, prompts), longest - output)
        yield Served(number, now, prompt, math.floor(prompt * work.prefix_hit), output, kind.name)


def _length(lengths: Lengths, source: np.random.Generator) -> int:
    """Log-normal, or even, with the given mean and coefficient of variation; at least 1."""
    mean, variation = lengths.mean, lengths.variation
    if not variation:
        return max(1, round(mean))
    if lengths.even:
        half = math.sqrt(3) * variation * mean
        return max(1, round(source.uniform(mean - half, mean + half)))
    spread = math.log(1 + variation**2)
    return max(1, round(source.lognormal(math.log(mean) - spread / 2, math.sqrt(spread))))

"""How unevenly experts are used, and what the busiest rank therefore has to do."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsjax.errors import UserError
from dsjax.plan.figure import Figure, Kind

DRIFT = (0.26, 0.1, 0.45)
"""Of the experts' unevenness, the share that a balancer does not foresee: value, low, high.

Low: the same page as `DEFAULT_SKEW`'s, where the balancer had seen the very load that it served (the fullest of 32 ranks 0.109 above
the mean, of which chance has a part). High: what aiconfigurator takes for SGLang with its balancer (popularity drawn from a power
law of 0.6, four fifths of the tokens), the fullest of 32 ranks about half above the mean. Between them the geometric mean of what
remains, which is an assumption.
"""


@dataclass(frozen=True)
class Skew:
    """Coefficient of variation (standard deviation ÷ mean) of tokens per expert in a layer: value, low, high.

    measured: read from a trace, not assumed.
    """

    variation: float
    low: float
    high: float
    source: str
    measured: bool = False

    def slowest(self, ep: int, slots: int, rows: float, balanced: bool) -> Figure:
        """Load of the busiest of `ep` ranks ÷ the mean, averaged over layers; 1 ÷ balancedness.

        slots: experts on a rank; rows: mean rows of a rank, whose chance variation comes on top; balanced: with redundant
        experts, placed by an earlier load, so that only its drift is felt. The expected largest of `ep` normal
        variables is about √(2 ln ep) standard deviations; a rank's variation is its experts' ÷ √slots.
        """
        if ep == 1:
            return Figure(1.0)
        reach = math.sqrt(2 * math.log(ep))
        shares = DRIFT if balanced else (1.0, 1.0, 1.0)
        ends = []
        for variation, share in zip((self.variation, self.low, self.high), shares, strict=True):
            spread = math.sqrt((variation * share) ** 2 / slots + (1 / rows if rows > 0 else 0))
            ends.append(min(1 + reach * spread, ep))
        uniform = self.high == 0
        kind = Kind.EXACT if uniform else Kind.ASSUMPTION if balanced or not self.measured else Kind.MEASURED
        return Figure(*ends, kind, name="busiest rank ÷ mean", source=self.source)

    def touched(self, tokens: float, top_k: int, experts: int) -> float:
        """Experts of a layer that at least one of so many tokens goes to: the sum over experts of 1 - (1 - p)^tokens.

        Popularity is taken log-normal with this coefficient of variation, at its quantiles.
        """
        return _touched(self.variation, tokens, top_k, experts)


@functools.lru_cache(maxsize=100_000)
def _touched(variation: float, tokens: float, top_k: int, experts: int) -> float:
    shares = _popularity(variation, experts) * top_k
    # No expert can have more than every token.
    return float(np.sum(-np.expm1(tokens * np.log1p(-np.minimum(shares, 1 - 1e-9)))))


@functools.cache
def _popularity(variation: float, experts: int) -> np.ndarray:
    """Shares of experts, adding up to 1, with about this coefficient of variation."""
    spread = math.sqrt(math.log(1 + variation**2))
    normal = statistics.NormalDist()
    each = np.exp([spread * normal.inv_cdf((rank + 0.5) / experts) for rank in range(experts)])
    return each / each.sum()


@functools.cache
def zipf_variation(exponent: float, experts: int = 256) -> float:
    """Coefficient of variation of popularity ∝ rank^-exponent."""
    popularity = np.arange(1, experts + 1, dtype=float) ** -exponent
    return float(popularity.std() / popularity.mean())


def counts_variation(counts: Sequence[Sequence[float]] | np.ndarray) -> tuple[float, float, float]:
    """(mean, least, largest) over layers of the coefficient of variation of `counts [layers, experts]`."""
    table = np.atleast_2d(np.asarray(counts, float))
    each = table.std(axis=1) / table.mean(axis=1)
    return float(each.mean()), float(each.min()), float(each.max())


DEFAULT_SKEW = Skew(
    1.28,
    zipf_variation(0.3),
    2.19,
    "TensorRT-LLM tech blog 4, table 1: R1 on one translation data set, 164.1 of 128 tokens an expert; from rank^-0.3 (mixed "
    "data, assumed) to aiconfigurator's power law of 1.01",
)
UNIFORM = Skew(0.0, 0.0, 0.0, "every expert as likely")


def read_skew(text: str) -> Skew:
    """`default`, `uniform`, `zipf:S`, or a JSON file of tokens per expert, `[experts]` or `[layers][experts]`.

    Raises:
        UserError: none of these, or a file that does not hold such counts.
    """
    if text == "default":
        return DEFAULT_SKEW
    if text == "uniform":
        return UNIFORM
    if text.startswith("zipf:"):
        try:
            variation = zipf_variation(float(text[5:]))
        except ValueError as error:
            raise UserError(f"--expert-skew {text!r}: expected zipf:S with a number S, for example zipf:0.3") from error
        return Skew(variation, variation, variation, f"given: popularity ∝ rank^-{text[5:]}")
    try:
        loaded = json.loads(Path(text).read_text(encoding="utf-8"))
        counts = loaded["tokens_per_expert"] if isinstance(loaded, dict) else loaded
        table = np.atleast_2d(np.asarray(counts, float))
        if table.ndim != 2 or table.shape[1] < 2 or np.any(table < 0) or np.any(table.sum(axis=1) == 0):
            raise ValueError(f"an array of shape {table.shape}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--expert-skew {text!r}: {error}; expected default, uniform, zipf:S, or a JSON file with tokens per expert as "
            '[layers][experts], alone or under "tokens_per_expert"'
        ) from error
    return Skew(*counts_variation(table), f"trace {text}", measured=True)

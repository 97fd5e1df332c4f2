"""How unevenly experts are used, and what the busiest rank therefore has to do."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsjax.errors import UserError
from dsjax.plan.figure import Figure, Kind

DRIFT = (0.5, 0.2, 0.9)
"""Of the experts' unevenness, the share that a balancer does not foresee: value, low, high (assumption)."""


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
    zipf_variation(0.3),
    zipf_variation(0.1),
    zipf_variation(0.5),
    "assumption: popularity ∝ rank^-0.3, from -0.1 to -0.5",
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

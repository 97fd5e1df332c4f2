"""How unevenly experts are used, and what the busiest rank therefore has to do."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsjax.errors import UserError, why_unreadable
from dsjax.plan.balancing import Loads, Placed, Slots, beforehand, busiest, drawn, drifted, moved, quantiles
from dsjax.plan.figure import assumed, ends, is_drawing, measured

DRIFT = ends("drift of the experts' load")
"""Share of the spread of the experts' loads that a balancer has not seen when it places them: value, low, high."""
BUSIEST = "busiest rank ÷ mean"


@dataclass(frozen=True)
class Skew:
    """Coefficient of variation (standard deviation ÷ mean) of tokens per expert in a layer: value, low, high.

    trace: the recorded layers that it was measured in; of two recordings, a balancer had seen the first.
    """

    variation: float
    low: float
    high: float
    source: str
    trace: Loads | None = field(default=None, compare=False, repr=False)

    def slowest(self, slots: Slots, experts: int, rows: float, balanced: bool) -> float:
        """Load of the busiest rank ÷ the mean, averaged over layers; 1 ÷ balancedness.

        rows: mean of a rank; balanced: experts are placed by an earlier load, else as the engine starts. Chance comes on top as squares
        add: the expected largest of n normal variables is about √(2 ln n) standard deviations.
        """
        if slots.ranks == 1:
            return 1.0
        chance = 2 * math.log(slots.ranks) / rows if rows > 0 else 0.0
        uniform = self.high == 0
        placed = (1.0, 1.0, 1.0) if uniform else self._placed(slots, experts, balanced)
        value, low, high = (min(1 + math.sqrt((end - 1) ** 2 + chance), slots.ranks) for end in placed)
        if uniform or not is_drawing():
            return value
        seen = self.trace is not None and self._tells(experts, balanced)
        return (measured if seen else assumed)(value, min(value, low), max(value, high), BUSIEST, self.source)

    def moved(self, slots: Slots, experts: int) -> float:
        """Share of all slots that gets another expert from one window to the next; 0 where experts are used evenly."""
        if slots.ranks == 1 or self.high == 0:
            return 0.0
        known = self._beforehand(slots.told_apart, experts, True)
        return known.moved if known else moved(self._loads(experts, self.variation, DRIFT[0]), slots.told_apart)

    def _beforehand(self, slots: Slots, experts: int, balanced: bool) -> Placed | None:
        """What was placed beforehand: where this is the default skew of a model with as many experts as V3."""
        return beforehand().get((slots, balanced)) if self == DEFAULT_SKEW and experts == 256 else None

    def _placed(self, slots: Slots, experts: int, balanced: bool) -> Sequence[float]:
        """What the placement leaves of the unevenness, at the middle and at both ends of what is known."""
        slots = slots.told_apart if balanced else slots._replace(groups=1, hosts=1)
        if placed := self._beforehand(slots, experts, balanced):
            return placed[:3]
        if self._traced(experts) and self._tells(experts, balanced):
            return busiest((self.trace,), slots, balanced)[0]
        drifts = DRIFT if balanced else (0.0, 0.0, 0.0)
        loads = tuple(map(self._loads, [experts] * 3, (self.variation, self.low, self.high), drifts))
        return [mean for mean, _, _ in busiest(loads, slots, balanced)]

    def _loads(self, experts: int, variation: float, drift: float) -> Loads:
        return drifted(self.trace, drift) if self._traced(experts) else drawn(variation, experts, drift)

    def _traced(self, experts: int) -> bool:
        return self.trace is not None and self.trace.seen.shape[1] == experts

    def _tells(self, experts: int, balanced: bool) -> bool:
        """Whether a trace tells the loads: a balancer's drift is told by two recordings of as many experts."""
        return not balanced or (self._traced(experts) and self.trace.served is not self.trace.seen)

    def touched(self, tokens: float, top_k: int, experts: int) -> float:
        """Experts of a layer that at least one of so many tokens goes to: the sum over experts of 1 - (1 - p)^tokens.

        Popularity is taken log-normal with this coefficient of variation, at its quantiles.
        """
        return _touched(self.variation, tokens, top_k, experts)

    def most_touched(self, tokens: float, top_k: int, experts: int, slots: int, ranks: int) -> float:
        """Those of the rank that has most of them, where each of so many ranks has `slots`: it is waited for.

        A rank's number is taken as normal with the spread of as many draws without putting back, and the largest of n such variables at its
        median (Blom, Statistical estimates and transformed beta-variables, 1958).
        """
        share = min(1.0, self.touched(tokens, top_k, experts) / experts)
        mean = slots * share
        if ranks == 1:
            return mean
        spread = math.sqrt(mean * (1 - share) * (1 - 1 / ranks))
        largest = statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return min(slots, tokens * top_k, mean + spread * largest)


@functools.lru_cache(maxsize=100_000)
def _touched(variation: float, tokens: float, top_k: int, experts: int) -> float:
    return -float(np.expm1(tokens * _unpicked(variation, top_k, experts)).sum())


@functools.cache
def _unpicked(variation: float, top_k: int, experts: int) -> np.ndarray:
    """Logarithm of the chance, for each expert, that a token does not go to it."""
    each = np.exp(math.sqrt(math.log(1 + variation**2)) * quantiles(experts))
    # No expert can have more than every token.
    return np.log1p(-np.minimum(each / each.sum() * top_k, 1 - 1e-9))


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

    Two files, `EARLIER.json,LATER.json`, are a window that a balancer has seen and the one that it then served.

    Raises:
        UserError: none of these, or a file that does not hold such counts.
    """
    if text in ("default", "uniform"):
        return DEFAULT_SKEW if text == "default" else UNIFORM
    wrong = f"--expert-skew {text!r}:"
    if text.startswith("zipf:"):
        try:
            exponent = float(text[5:])
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent < math.inf:
            raise UserError(f"{wrong} expected zipf:S with a number S of 0 or more, for example zipf:0.3")
        return Skew(*[zipf_variation(exponent)] * 3, f"given: popularity ∝ rank^-{text[5:]}")
    files = [text] if Path(text).exists() or text.count(",") != 1 else text.split(",")
    tables = [_read_trace(file) for file in files]
    seen, served = tables[0], tables[-1]
    if seen.shape != served.shape:
        raise UserError(
            f"{wrong} {files[0]} has {seen.shape[0]} layers of {seen.shape[1]} experts, {files[1]} has {served.shape[0]} of "
            f"{served.shape[1]}; expected two recordings of one model"
        )
    used = (seen.sum(axis=1) > 0) & (served.sum(axis=1) > 0)
    if not used.any():
        raise UserError(f"{wrong} no layer has a token; expected counts of a server that has answered requests")
    seen = seen[used]
    trace = Loads(seen, seen if len(files) == 1 else served[used])
    return Skew(*counts_variation(trace.served), f"trace {text}", trace)


def _read_trace(file: str) -> np.ndarray:
    """Counts `[layers, experts]`, alone or as one of the fields in which dsjax and others write them."""
    try:
        loaded = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(loaded, dict):
            loaded = loaded.get("logical_load", loaded.get("tokens_per_expert"))
        table = np.atleast_2d(np.asarray(loaded, float))
        if table.ndim != 2 or table.shape[1] < 2 or not np.all(np.isfinite(table)) or np.any(table < 0):
            raise ValueError(f"found an array of shape {table.shape}")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--expert-skew {file!r}: {why_unreadable(error)}; expected default, uniform, zipf:S, or a JSON file with tokens per expert as "
            '[layers][experts], alone, under "logical_load" as dsjax serve records them, or under "tokens_per_expert"'
        ) from error
    return table

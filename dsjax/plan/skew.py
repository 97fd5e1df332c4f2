"""Skew of expert loads, and the load of the busiest rank under an expert placement.

Nothing about placements is fitted: the planner runs the engine's own policies (`sharding/balancing.py`) on the loads it plans for.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dsjax.engine.experts.eplb import EplbConfig
from dsjax.errors import UserError, why_unreadable
from dsjax.plan.figure import assumed, ends, is_drawing, measured
from dsjax.plan.rules import refuse
from dsjax.toml_files import bundled_text
from sharding.balancing import by_host, rank_loads, rebalance

if TYPE_CHECKING:
    from jaxtyping import Float, Int

STEP_INTERVAL = EplbConfig().step_interval
"""Steps between two rebalances, unless `--eplb-config` says otherwise."""
_DRAWS = 24
"""Number of layers to draw if no trace is given; the mean over them of the busiest rank's load is then within about 3 %."""
_MANY_RANKS = 128
"""Above this many ranks, only the first `_DRAWS // 3` layers are placed: each layer is then a larger sample."""
PLACEMENTS = "placements.csv"
"""File in `configs` with results for the default skew, precomputed by `tools/make_placements.py`: a search needs hundreds."""


@dataclass(frozen=True, eq=False)
class Loads:
    """Tokens of each expert `[layers, experts]`: as seen by the balancer, and as served with the resulting placement."""

    seen: Float[np.ndarray, "L E"]
    served: Float[np.ndarray, "L E"]


class Slots(NamedTuple):
    """Slots for experts: ranks of the EP group, physical slots over all ranks, groups of the router, hosts of the ranks."""

    ranks: int
    physical: int
    groups: int
    hosts: int

    @property
    def normalized(self) -> Slots:
        """Set groups and hosts to 1 if the balancer ignores them, so that equivalent slots are placed only once."""
        return self if by_host("auto", self.groups, self.hosts) else self._replace(groups=1, hosts=1)


class Imbalance(NamedTuple):
    """Busiest rank ÷ mean rank: estimate, and both ends of its interval."""

    value: float
    low: float
    high: float


@functools.cache
def precomputed_placements() -> dict[tuple[Slots, bool], Imbalance]:
    """Return (slots of 256 experts as `normalized`, whether experts are placed by load) → result for the default skew."""
    text = bundled_text(PLACEMENTS)
    rows = list(csv.reader(text.splitlines()))[1:]
    return {(Slots(*map(int, row[:4])), row[4] == "1"): Imbalance(*map(float, row[5:])) for row in rows}


@functools.cache
def quantiles(experts: int) -> Float[np.ndarray, " E"]:
    """Return quantiles of a standard normal variable, one for each expert."""
    return np.array([statistics.NormalDist().inv_cdf((rank + 0.5) / experts) for rank in range(experts)])


@functools.cache
def drawn(variation: float, experts: int, drift: float) -> Loads:
    """Return deterministic loads of `_DRAWS` layers, log-normal over experts with this coefficient of variation.

    drift: share of the spread of the served loads that the balancer has not seen.
    """
    rng = np.random.default_rng(0)
    log_loads = quantiles(experts)
    log_loads = log_loads * (math.sqrt(math.log(1 + variation**2)) / log_loads.std())
    before, new = (np.stack([rng.permutation(log_loads) for _ in range(_DRAWS)]) for _ in range(2))
    return Loads(np.exp(before), np.exp(_drift(before, new, drift)))


@functools.cache
def drifted(trace: Loads, drift: float) -> Loads:
    """Return a trace with its loads as served after `drift`. Unchanged if the trace has a second recording, or without drift."""
    if drift == 0 or trace.served is not trace.seen:
        return trace
    # Count an expert without tokens as half a token, so that it has a logarithm.
    before = np.log(np.maximum(trace.seen, 0.5))
    layer_means = before.mean(axis=1, keepdims=True)
    new = np.random.default_rng(0).permuted(before, axis=1)
    return Loads(trace.seen, np.exp(layer_means + _drift(before - layer_means, new - layer_means, drift)))


def _drift(before: np.ndarray, new: np.ndarray, drift: float) -> np.ndarray:
    """Return logarithms of the served loads: √(1 - drift²) of `before` plus `drift` of `new`, which keeps the spread."""
    return math.sqrt(1 - drift**2) * before + drift * new


@functools.lru_cache(maxsize=4096)
def busiest(every: tuple[Loads, ...], slots: Slots, balanced: bool) -> list[tuple[float, float, float]]:
    """Return, for each of several loads, the busiest rank's served load ÷ the mean rank's: (mean over layers, least, most).

    balanced: place experts by the loads seen; else as the engine starts, without loads. Sampling noise is not included.
    """
    if slots.ranks > _MANY_RANKS:
        every = tuple(Loads(loads.seen[: _DRAWS // 3], loads.served[: _DRAWS // 3]) for loads in every)
    # Place all loads together: the policies take all layers at once.
    if balanced:
        sizes = {"n_physical": slots.physical, "ranks": slots.ranks, "groups": slots.groups, "hosts": slots.hosts}
        placed_LP = rebalance(np.concatenate([loads.seen for loads in every]), **sizes)
    else:
        placed_LP = _static(every[0].seen.shape[1], slots)
    loads_LR = rank_loads(np.concatenate([loads.served for loads in every]), placed_LP, slots.ranks)
    borders = np.cumsum([len(loads.served) for loads in every])[:-1]
    ratios = np.split(loads_LR.max(axis=1) / loads_LR.mean(axis=1), borders)
    return [(float(ratio.mean()), float(ratio.min()), float(ratio.max())) for ratio in ratios]


def _static(experts: int, slots: Slots) -> Int[np.ndarray, "1 P"]:
    """Return the placement without loads, as `Placement.with_redundancy` does: that imports JAX, which planning can do without."""
    if slots.physical == experts:
        return np.arange(experts)[None]
    return rebalance(np.ones((1, experts)), n_physical=slots.physical, ranks=slots.ranks)


DRIFT = ends("drift of the experts' load")
"""Share of the spread of expert loads that a balancer has not seen when it places the experts: value, low, high."""
BUSIEST = "busiest rank ÷ mean"


@dataclass(frozen=True)
class Skew:
    """Coefficient of variation (standard deviation ÷ mean) of tokens per expert in a layer: value, low, high."""

    variation: float
    low: float
    high: float
    source: str
    # the recorded layers it was measured on; of two recordings, the balancer has seen the first
    trace: Loads | None = field(default=None, compare=False, repr=False)

    def slowest(self, slots: Slots, experts: int, rows: float, balanced: bool) -> float:
        """Return the load of the busiest rank ÷ the mean, averaged over layers; 1 ÷ balancedness.

        rows: mean rows per rank; balanced: experts are placed by an earlier load, else as the engine starts. Sampling noise is added in
        quadrature: the expected largest of n normal variables is about √(2 ln n) standard deviations.
        """
        if slots.ranks == 1:
            return 1.0
        noise_squared = 2 * math.log(slots.ranks) / rows if rows > 0 else 0.0
        is_uniform = self.high == 0
        imbalance = (1.0, 1.0, 1.0) if is_uniform else self._placed(slots, experts, balanced)
        value, low, high = (min(1 + math.sqrt((end - 1) ** 2 + noise_squared), slots.ranks) for end in imbalance)
        if is_uniform or not is_drawing():
            return value
        kind = measured if self._determines(experts, balanced) else assumed
        return kind(value, min(value, low), max(value, high), BUSIEST, self.source)

    def _placed(self, slots: Slots, experts: int, balanced: bool) -> Sequence[float]:
        """Return the busiest rank ÷ mean rank after placement, without sampling noise: estimate, low, high."""
        slots = slots.normalized if balanced else slots._replace(groups=1, hosts=1)
        entry = precomputed_placements().get((slots, balanced)) if self == DEFAULT_SKEW and experts == 256 else None
        if entry:
            return entry
        if self._determines(experts, balanced):
            return busiest((self.trace,), slots, balanced)[0]
        drifts = DRIFT if balanced else (0.0, 0.0, 0.0)
        loads = tuple(map(self._loads, [experts] * 3, (self.variation, self.low, self.high), drifts))
        return [mean for mean, _, _ in busiest(loads, slots, balanced)]

    def _loads(self, experts: int, variation: float, drift: float) -> Loads:
        return drifted(self.trace, drift) if self._has_trace(experts) else drawn(variation, experts, drift)

    def _has_trace(self, experts: int) -> bool:
        return self.trace is not None and self.trace.seen.shape[1] == experts

    def _determines(self, experts: int, balanced: bool) -> bool:
        """Whether a trace with this number of experts suffices, without an assumed drift: a balancer needs two recordings."""
        return self._has_trace(experts) and (not balanced or self.trace.served is not self.trace.seen)

    def touched(self, tokens: float, top_k: int, experts: int) -> float:
        """Return the number of experts of a layer that get at least one of `tokens`: the sum over experts of 1 - (1 - p)^tokens.

        Popularity is assumed log-normal with this coefficient of variation, at its quantiles.
        """
        return _touched(self.variation, tokens, top_k, experts)

    def most_touched(self, tokens: float, top_k: int, experts: int, slots: int, ranks: int) -> float:
        """Return the number of touched experts on the rank with the most; the others wait for it. slots: of each of `ranks` ranks.

        The number per rank is approximated as normal, with the spread of draws without replacement; the largest of n such variables is
        taken at its median (Blom, Statistical estimates and transformed beta-variables, 1958).
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
    """Return, for each expert, the logarithm of the probability that a token does not go to it."""
    popularity = np.exp(math.sqrt(math.log(1 + variation**2)) * quantiles(experts))
    # An expert can get at most every token.
    return np.log1p(-np.minimum(popularity / popularity.sum() * top_k, 1 - 1e-9))


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
    """Parse `default`, `uniform`, `zipf:S`, or a JSON file of tokens per expert, `[experts]` or `[layers][experts]`.

    Two files, `EARLIER.json,LATER.json`, are the window that the balancer has seen and the window it then serves.

    Raises:
        UserError: the text is none of these, or a file does not hold such counts.
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
    seen = tables[0]
    served = tables[-1]
    refuse("trace", given=text, seen=seen, served=served)
    has_tokens = (seen.sum(axis=1) > 0) & (served.sum(axis=1) > 0)
    seen = seen[has_tokens]
    trace = Loads(seen, seen if len(files) == 1 else served[has_tokens])
    return Skew(*counts_variation(trace.served), f"trace {text}", trace)


def _read_trace(file: str) -> np.ndarray:
    """Read counts `[layers, experts]`, alone or in one of the JSON fields that dsjax and others use."""
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

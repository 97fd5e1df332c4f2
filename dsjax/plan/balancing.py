"""What a placement of experts makes of their uneven use: the busiest rank, and how many experts move from window to window.

Nothing here is fitted: the policies that the engine runs (`sharding/balancing.py`) are run on the loads that are planned for.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dsjax.engine.experts.eplb import EplbConfig
from sharding.balancing import by_host, experts_moved, keep_in_place, rank_loads, rebalance

if TYPE_CHECKING:
    from jaxtyping import Float, Int

STEP_INTERVAL = EplbConfig().step_interval
"""Steps between two rebalances, unless `--eplb-config` says otherwise."""
_DRAWS = 24
"""Layers that are drawn where no trace is given; the busiest rank's mean over them is then within about 3 %."""
_MANY_RANKS = 128
"""Above which a third of the layers is placed, and one layer is moved: a layer of so many ranks is as large a sample."""
PLACEMENTS = "placements.csv"
"""Below `configs`: what the default skew comes to, run beforehand by `tools/make_placements.py`: a search asks for hundreds."""


@dataclass(frozen=True, eq=False)
class Loads:
    """Tokens of each expert `[layers, experts]`: seen by the balancer, and served with the placement that it makes of them."""

    seen: Float[np.ndarray, "L E"]
    served: Float[np.ndarray, "L E"]


class Slots(NamedTuple):
    """Where experts may lie: ranks of the EP group, physical slots over all of them, groups of the router, hosts of the ranks."""

    ranks: int
    physical: int
    groups: int
    hosts: int

    @property
    def told_apart(self) -> Slots:
        """Use groups and hosts of 1 where the balancer does not look at them, so that alike places are placed once."""
        return self if by_host("auto", self.groups, self.hosts) else self._replace(groups=1, hosts=1)


class Placed(NamedTuple):
    """Busiest rank ÷ mean rank at the middle and at both ends of what is known, and the share of slots that move from window to window."""

    value: float
    low: float
    high: float
    moved: float


@functools.cache
def beforehand() -> dict[tuple[Slots, bool], Placed]:
    """(slots of 256 experts as `told_apart`, whether experts are placed by their load) → what the default skew makes of them."""
    text = (importlib.resources.files("configs") / PLACEMENTS).read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))[1:]
    return {(Slots(*map(int, row[:4])), row[4] == "1"): Placed(*map(float, row[5:])) for row in rows}


@functools.cache
def quantiles(experts: int) -> Float[np.ndarray, " E"]:
    """Of a standard normal variable, one for each expert."""
    return np.array([statistics.NormalDist().inv_cdf((rank + 0.5) / experts) for rank in range(experts)])


@functools.cache
def drawn(variation: float, experts: int, drift: float) -> Loads:
    """Loads of `_DRAWS` layers, log-normal over experts with this coefficient of variation; always the same ones.

    drift: the share of the spread that the balancer has not seen.
    """
    rng, each = np.random.default_rng(0), quantiles(experts)
    each = each * (math.sqrt(math.log(1 + variation**2)) / each.std())
    before, new = (np.stack([rng.permutation(each) for _ in range(_DRAWS)]) for _ in range(2))
    return Loads(np.exp(before), np.exp(_drift(before, new, drift)))


@functools.cache
def drifted(trace: Loads, drift: float) -> Loads:
    """A recorded load as what was seen, and what is served after so much drift; the trace itself where it has both, or without drift."""
    if drift == 0 or trace.served is not trace.seen:
        return trace
    # An expert without a token is taken as half a token's worth, so that it has a logarithm.
    before = np.log(np.maximum(trace.seen, 0.5))
    middle = before.mean(axis=1, keepdims=True)
    new = np.random.default_rng(0).permuted(before, axis=1)
    return Loads(trace.seen, np.exp(middle + _drift(before - middle, new - middle, drift)))


def _drift(before: np.ndarray, new: np.ndarray, drift: float) -> np.ndarray:
    """Logarithms of what is served, as uneven as what was seen: √(1 - drift²) of that, and drift of something new of the same spread."""
    return math.sqrt(1 - drift**2) * before + drift * new


@functools.lru_cache(maxsize=4096)
def busiest(every: tuple[Loads, ...], slots: Slots, balanced: bool) -> list[tuple[float, float, float]]:
    """Load of the busiest rank ÷ the mean rank's, of each of several loads as they are served: (mean over layers, least, most).

    balanced: experts are placed by what was seen; else as the engine starts, by no load. Chance is not in it.
    """
    if slots.ranks > _MANY_RANKS:
        every = tuple(Loads(one.seen[: _DRAWS // 3], one.served[: _DRAWS // 3]) for one in every)
    # Placed together: the policies take all layers at once.
    if balanced:
        placed_LP = _balanced(np.concatenate([one.seen for one in every]), slots)
    else:
        placed_LP = _static(every[0].seen.shape[1], slots)
    loads_LR = rank_loads(np.concatenate([one.served for one in every]), placed_LP, slots.ranks)
    ends = np.cumsum([len(one.served) for one in every])[:-1]
    ratios = np.split(loads_LR.max(axis=1) / loads_LR.mean(axis=1), ends)
    return [(float(each.mean()), float(each.min()), float(each.max())) for each in ratios]


@functools.lru_cache(maxsize=4096)
def moved(loads: Loads, slots: Slots) -> float:
    """Share of all slots that gets another expert when experts are placed anew by what was served."""
    few = slice(_DRAWS // 6 if slots.ranks <= _MANY_RANKS else 1)  # some thousand slots are enough for a share
    old_LP, new_LP = _balanced(loads.seen[few], slots), _balanced(loads.served[few], slots)
    kept_LP = keep_in_place(old_LP, new_LP, slots.ranks, slots.told_apart.hosts)
    return float(experts_moved(old_LP, kept_LP).mean()) / slots.physical


def _balanced(load_LE: np.ndarray, slots: Slots) -> Int[np.ndarray, "L P"]:
    return rebalance(load_LE, n_physical=slots.physical, ranks=slots.ranks, groups=slots.groups, hosts=slots.hosts)


def _static(experts: int, slots: Slots) -> Int[np.ndarray, "1 P"]:
    """`Placement.with_redundancy` without a load; its file brings JAX in, which a plan with published kernels does without."""
    if slots.physical == experts:
        return np.arange(experts)[None]
    return rebalance(np.ones((1, experts)), n_physical=slots.physical, ranks=slots.ranks)

"""Intervals that hold 9 of 10 measurements that nobody had looked at: conformal calibration on predictions that were committed blind.

A figure's own interval comes from the ranges of what was assumed, and on blind predictions it held six of ten. Here its ends are moved
by what blind predictions of the same kind and distance missed by (split conformal prediction with asymmetric ends: Romano, Patterson and
Candès, Conformalized quantile regression, 2019, section 2; groups by Vovk, Conditional validity of inductive conformal predictors, 2012),
and of the intervals that hold so many the shortest is taken.
The score of a prediction is the logarithm of measured ÷ predicted in units of the logarithm of its own end on that side.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsjax.plan.figure import Figure

if TYPE_CHECKING:
    from dsjax.plan.candidate import Candidate

LEVEL = 0.9
"""Share of measurements that an interval is to hold."""
RATE, TPOT, TTFT, TTFT_MEDIAN, TTFT_P99 = "rate", "tpot", "ttft", "ttft_median", "ttft_p99"
HOST, WIDE, FAR, DRAFTS = "one host", "several hosts", "another device or engine", "with drafts"
"""Distance from what tables of operations were measured on: one host of the same die, groups over several of them, anything else; and
plans with drafts, whose share that is accepted no table has, and which stand for nothing but themselves."""
LATEST = "other dates"
NEWEST = ("scripts", LATEST)
"""Rounds that the model as it is has predicted, or one that is little older, of one public history. Conformal prediction asks that what it
learns from and what it is asked about come from one predictor: a group that has enough predictions of these rounds rests on them alone,
and older models' errors widen it no longer. `LATEST` took the dates that were left, most of which a newer version of the engine had
replaced within days; only both together are the history's runs as they came."""
LEAST = math.ceil(2 / (1 - LEVEL)) - 1
"""Predictions that a group needs before both of its ends are defined."""
_SMALLEST = 0.02
"""Least half width of an interval, in logarithms: a prediction without a range of its own has no unit to be scored in."""


@dataclass(frozen=True)
class Blind:
    """One prediction that was committed before its measurement was read. kind and distance: as the names above have them.

    round: predictions that were committed together; run: what was measured at once, which has several figures.
    """

    round: str
    run: str
    kind: str
    distance: str
    figure: Figure
    measured: float

    @property
    def score(self) -> float:
        """How far the measurement lies from the prediction, in half widths of its own interval; below 0 where it is lower."""
        off = math.log(self.measured / self.figure.value)
        return off / _half(self.figure, off)

    @property
    def inside(self) -> bool:
        """Whether the prediction's own interval had it."""
        return self.figure.low <= self.measured <= self.figure.high


def _half(figure: Figure, side: float) -> float:
    """Width of an interval on one side of its value, in logarithms."""
    end = figure.high if side > 0 else figure.low
    return max(_SMALLEST, abs(math.log(end / figure.value)))


@dataclass(frozen=True)
class Calibration:
    """Half widths by which an interval's ends are moved: `low` downwards of the value (negative), `high` upwards.

    count: blind predictions that it rests on; of: which, in words.
    """

    low: float
    high: float
    count: int
    of: str

    def interval(self, figure: Figure) -> tuple[float, float]:
        """The ends that hold `LEVEL` of measurements; the value lies between them."""
        ends = [figure.value * math.exp(score * _half(figure, score)) for score in (self.low, self.high)]
        return min(ends[0], figure.value), max(ends[1], figure.value)


def calibrate(blind: Sequence[Blind], kind: str, distance: str) -> Calibration:
    """The calibration of a kind of figure at a distance: by its own group, or where that is too small by the kind, then by all.

    Its own group is that of the newest rounds, or where these have too few, that of all rounds. Where a larger group stands in, the ends
    reach at least as far as every prediction of the own one missed by.

    Raises:
        ValueError: there are fewer than `LEAST` blind predictions in all.
    """
    near = [b for b in blind if b.distance != DRAFTS or distance == DRAFTS]
    own = [b for b in near if (b.kind, b.distance) == (kind, distance)]
    groups = (
        (f"{kind}, {distance}, newest rounds", [b for b in own if b.round in NEWEST]),
        (f"{kind}, {distance}", own),
        (f"{kind}, any distance", [b for b in near if b.kind == kind]),
        (f"any figure, {distance}", [b for b in near if b.distance == distance]),
        ("any figure", near),
    )
    for name, group in groups:
        if len(group) >= LEAST:
            reached = [] if name.startswith(f"{kind}, {distance}") else [b.score for b in own]
            low, high = _shortest(group)
            return Calibration(min(low, 0.0, *reached), max(high, 0.0, *reached), len(group), name)
    raise ValueError(f"{len(blind)} blind predictions, expected at least {LEAST}")


def _shortest(group: Sequence[Blind]) -> tuple[float, float]:
    """Ends of the shortest run of scores that has `LEVEL` of them, by what the ends come to with the group's median half widths.

    Misses are lopsided: a first token comes late far more often than early, and equal tails would follow the few that came latest. One
    score more than the level asks for is held, as choosing the run by the same scores costs about one.
    """
    scores = sorted(b.score for b in group)
    held = min(len(scores), math.ceil((len(scores) + 1) * LEVEL) + 1)
    halves = [statistics.median(_half(b.figure, side) for b in group) for side in (-1, 1)]

    def reach(score: float) -> float:
        return score * halves[score > 0]

    at = min(range(len(scores) - held + 1), key=lambda first: reach(scores[first + held - 1]) - reach(scores[first]))
    return scores[at], scores[at + held - 1]


@functools.cache
def blind_predictions() -> tuple[Blind, ...]:
    """`configs/blind_predictions.csv`, which `tools/blind_rounds.py` writes."""
    text = (importlib.resources.files("configs") / "blind_predictions.csv").read_text(encoding="utf-8")
    return tuple(
        Blind(
            row["round"],
            row["run"],
            row["kind"],
            row["distance"],
            Figure(*(float(row[end]) for end in ("predicted", "low", "high"))),
            float(row["measured"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


@functools.cache
def calibration(kind: str, distance: str) -> Calibration:
    """By all blind predictions that there are."""
    return calibrate(blind_predictions(), kind, distance)


def distance_of(candidate: Candidate) -> str:
    """How far a deployment is from what tables of operations were measured on."""
    sides = (candidate.prefill, candidate.decode)
    if any(not (s.cluster.hardware.same_die or s.cluster.hardware.is_blackwell) for s in sides):
        return FAR
    if candidate.decode.options.engine.name == "dsjax" or candidate.decode.options.measured is not None:
        return FAR
    if candidate.decode.options.drafts:
        return DRAFTS
    return WIDE if any(s.layout.devices > s.cluster.devices_per_host for s in sides) else HOST


def ends(known: Calibration, figure: Figure) -> dict[str, Any]:
    """Stable fields: the ends that hold 9 of 10, the group that they rest on, and its size."""
    low, high = known.interval(figure)
    return {"low": low, "high": high, "by": known.of, "predictions": known.count}


def calibrated(candidate: Candidate) -> dict[str, Any]:
    """Stable fields for the winner: the ends of its rate and TPOT that hold 9 of 10, the group that they rest on, its size.

    Blind rounds played their loops, whose rate and TPOT the mean-value answer has within a few percent. Its TTFT is that of steady state,
    which no benchmark reports and no blind prediction was of: `simulation/reported.py` has those that are.
    """
    distance = distance_of(candidate)
    figures = (("output_tokens_per_s", RATE, candidate.throughput), ("tpot_s", TPOT, candidate.tpot))
    found = {name: ends(calibration(kind, distance), figure) for name, kind, figure in figures}
    return {"level": LEVEL, "distance": distance, **found}

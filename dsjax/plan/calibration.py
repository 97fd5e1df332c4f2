"""Intervals that hold 9 of 10 measurements that nobody had looked at: conformal calibration on predictions that were committed blind.

A figure's own interval comes from the ranges of what was assumed, and on blind predictions it held six of ten. Here its ends are moved
by what blind predictions of the same kind and distance missed by (split conformal prediction with asymmetric ends: Romano, Patterson and
Candès, Conformalized quantile regression, 2019, section 2; groups by Vovk, Conditional validity of inductive conformal predictors, 2012),
and of the intervals that hold so many the shortest is taken.
The score of a prediction is the logarithm of measured ÷ predicted in units of the logarithm of its own end on that side, which is
softened by a constant (Papadopoulos and Haralambous, Reliable prediction intervals with regression neural networks, 2011): how wide an own
interval is says little of how far a prediction is off, and a miss of a narrow one would widen all others by its multiple.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import math
import statistics
from collections.abc import Iterable, Sequence
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
plans with drafts, whose share that is accepted no table has."""
LONGER, SENT = "longer prompts than said", "prompts as most likely sent"
"""Runs of a benchmark whose client most likely sent prompts five times as long as its results say (tools/plan_data/inferencex.py),
predicted with the prompts that they say, and with those that were sent."""
COLD = "engine not warmed up"
"""P99 of the TTFT of runs in which nothing had warmed the engine up: the first request of each user waited for what was compiled then."""
ALONE = (DRAFTS, LONGER, SENT, COLD)
"""Distances whose predictions stand for nothing but themselves: no other group borrows from them."""
LATEST = "drafts again"
NEWEST = ("other dates", "last runs", LATEST, "all left")
"""Rounds that the model as it is has predicted, or one that is little older, of one public history. Conformal prediction asks that what it
learns from and what it is asked about come from one predictor: a group that has enough predictions of `LATEST` rests on it alone,
or else on these, and older models' errors widen it no longer. That it comes first was settled before its results were read:
until then TensorRT-LLM with drafts had been predicted with a fault of the simulator, and SGLang with what its source says otherwise.
*All left* is newer and no group rests on it alone, which was settled before its results were read as well: nearly all of its settings had
been measured at another date."""
SOFTENED = 0.5
"""Added in quadrature to a prediction's own half width, in logarithms, before a miss is divided by it. Of 0, 0.1, 0.2, 0.35, 0.5, 1 and no
division at all it has the best interval score (Gneiting and Raftery, 2007) where earlier rounds alone make the intervals of *scripts* and
of *other dates*; it was chosen before the results of *last runs* were read (tools/blind_rounds.py of commit 69443ce0)."""
_SMALLEST = 0.02
"""Least half width of an interval, in logarithms, before it is softened: a prediction without a range of its own has none."""
LEAST = math.ceil(2 / (1 - LEVEL)) - 1
"""Predictions that a group needs before both of its ends are defined."""


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

    def score(self, softened: float = SOFTENED) -> float:
        """How far the measurement lies from the prediction, in softened half widths; below 0 where it is lower."""
        off = self._off
        return off / math.hypot(self.half_widths[off > 0], softened)

    @functools.cached_property
    def _off(self) -> float:
        return math.log(self.measured / self.figure.value)

    @functools.cached_property
    def half_widths(self) -> tuple[float, float]:
        """Half widths of the prediction's own interval below and above its value, in logarithms."""
        return _half_width(self.figure, -1), _half_width(self.figure, 1)

    @property
    def inside(self) -> bool:
        """Whether the prediction's own interval had it."""
        return self.figure.low <= self.measured <= self.figure.high


def _half_width(figure: Figure, side: float) -> float:
    """Half width of an interval on one side of its value, in logarithms."""
    end = figure.high if side > 0 else figure.low
    return max(_SMALLEST, abs(math.log(end / figure.value)))


@dataclass(frozen=True)
class Calibration:
    """Units by which an interval's ends are moved: `low` downwards of the value (negative), `high` upwards.

    count: blind predictions that it rests on; of: which, in words. softened: what its units were softened by.
    """

    low: float
    high: float
    count: int
    of: str
    softened: float = SOFTENED

    def interval(self, figure: Figure) -> tuple[float, float]:
        """The ends that hold `LEVEL` of measurements; the value lies between them."""
        scores = (self.low, self.high)
        units = [math.hypot(_half_width(figure, score), self.softened) for score in scores]
        ends = [figure.value * math.exp(score * unit) for score, unit in zip(scores, units, strict=True)]
        return min(ends[0], figure.value), max(ends[1], figure.value)


def calibrate(blind: Sequence[Blind], kind: str, distance: str, softened: float = SOFTENED) -> Calibration:
    """The calibration of a kind of figure at a distance, by the group that `calibrated_by` finds.

    Where a larger group than its own stands in, the ends reach at least as far as every prediction of the own one missed by.

    Raises:
        ValueError: there are fewer than `LEAST` blind predictions in all.
    """
    name, group = calibrated_by(blind, kind, distance)
    stands_in = () if name.startswith(f"{kind}, {distance}") else blind
    reached = [b.score(softened) for b in stands_in if b.kind == kind and b.distance == distance]
    low, high = _shortest(group, softened)
    return Calibration(min(low, 0.0, *reached), max(high, 0.0, *reached), len(group), name, softened)


def calibrated_by(blind: Sequence[Blind], kind: str, distance: str) -> tuple[str, list[Blind]]:
    """(name, predictions) of the first group that is large enough: its own, that of the kind, that of the distance, all.

    Its own group is that of the latest round, or where this has too few, that of the newest rounds, and then that of all.

    Raises:
        ValueError: there are fewer than `LEAST` blind predictions in all.
    """

    def near(b: Blind) -> bool:
        return b.distance not in ALONE or b.distance == distance

    own = [b for b in blind if b.kind == kind and b.distance == distance]
    groups: tuple[tuple[str, Iterable[Blind]], ...] = (
        (f"{kind}, {distance}, newest round", (b for b in own if b.round == LATEST)),
        (f"{kind}, {distance}, newest rounds", (b for b in own if b.round in NEWEST)),
        (f"{kind}, {distance}", own),
        (f"{kind}, any distance", (b for b in blind if b.kind == kind and near(b))),
        (f"any figure, {distance}", (b for b in blind if b.distance == distance)),
        ("any figure", (b for b in blind if near(b))),
    )
    for name, members in groups:
        if len(group := list(members)) >= LEAST:
            return name, group
    raise ValueError(f"{len(blind)} blind predictions, expected at least {LEAST}")


def _shortest(group: Sequence[Blind], softened: float) -> tuple[float, float]:
    """Ends of the shortest run of scores that has `LEVEL` of them, by what the ends come to with the group's median units.

    Misses are lopsided: a first token comes late far more often than early, and equal tails would follow the few that came latest. One
    score more than the level asks for is held, as choosing the run by the same scores costs about one.
    """
    scores = sorted(b.score(softened) for b in group)
    held = min(len(scores), math.ceil((len(scores) + 1) * LEVEL) + 1)
    units = [statistics.median(math.hypot(b.half_widths[side], softened) for b in group) for side in (0, 1)]

    def reach(score: float) -> float:
        return score * units[score > 0]

    at = min(range(len(scores) - held + 1), key=lambda first: reach(scores[first + held - 1]) - reach(scores[first]))
    return scores[at], scores[at + held - 1]


@functools.cache
def blind_predictions() -> tuple[Blind, ...]:
    """`configs/blind_predictions.csv`, which `tools/plan_score.py` scores."""
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

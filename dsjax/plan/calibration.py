"""What blind predictions missed by: the correction and the interval of a figure, and the interval of a ratio of two.

A blind prediction was committed before its measurement was read (docs/plan-validation.md). A figure's correction is the median of
measured ÷ predicted over blind predictions of the same kind and distance, and its 90 % interval lies between their 5 % and 95 % quantiles,
widened to whole observations as split conformal prediction does (Vovk, Gammerman and Shafer, Algorithmic learning in a random world, 2005).
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsjax.plan.figure import LEVEL, Figure, Kind

if TYPE_CHECKING:
    from dsjax.plan.candidate import Candidate

RATE, TPOT, TTFT, TTFT_MEDIAN, TTFT_P99 = "rate", "tpot", "ttft", "ttft_median", "ttft_p99"
HOST, WIDE, FAR, DRAFTS = "one host", "several hosts", "another device or engine", "with drafts"
"""Distance from what tables of operations were measured on: one host of the same die, groups over several of them, anything else; and
plans with drafts, whose share that is accepted no table has."""
LONGER, SENT = "longer prompts than said", "prompts as most likely sent"
"""Runs of a benchmark whose client most likely sent prompts five times as long as its results say, predicted with the prompts that they
say, and with those that were sent."""
COLD = "engine not warmed up"
"""P99 of the TTFT of runs in which nothing had warmed the engine up: the first request of each user waited for what was compiled then."""
ALONE = (DRAFTS, LONGER, SENT, COLD)
"""Distances whose predictions stand for nothing but themselves: no other group borrows from them."""
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
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Logarithm of measured ÷ predicted."""
        return math.log(self.measured / self.predicted)


@dataclass(frozen=True)
class Calibration:
    """Quantiles of measured ÷ predicted: the ends that hold `LEVEL`, and the median.

    count: predictions; of: which, in words; errors: logarithms of measured ÷ predicted, of ratios.
    """

    low: float
    median: float
    high: float
    count: int
    of: str
    errors: Sequence[float] = ()

    def interval(self, predicted: float) -> Figure:
        """The corrected prediction with its interval."""
        kinds = getattr(predicted, "kinds", Kind.EXACT) | Kind.MEASURED
        return Figure(predicted * self.median, predicted * self.low, predicted * self.high, kinds)


def calibrate(blind: Sequence[Blind], kind: str, distance: str) -> Calibration:
    """The calibration of a kind of figure at a distance, by the first group that is large enough: its own, that of its kind, all.

    Raises:
        ValueError: there are fewer than `LEAST` blind predictions in all.
    """

    def near(b: Blind) -> bool:
        return b.distance not in ALONE or b.distance == distance

    groups = {
        f"{kind}, {distance}": [b for b in blind if b.kind == kind and b.distance == distance],
        f"{kind}, any distance": [b for b in blind if b.kind == kind and near(b)],
        "any figure": [b for b in blind if near(b)],
    }
    for name, group in groups.items():
        if len(group) >= LEAST:
            low, median, high = (math.exp(error) for error in _quantiles([b.error for b in group]))
            return Calibration(low, median, high, len(group), name)
    raise ValueError(f"{len(blind)} blind predictions, expected at least {LEAST}")


def calibrate_ratio(blind: Sequence[Blind], kind: str, distance: str | None) -> Calibration:
    """What ratios of two predictions missed by: two runs of one round, engine and distance, whose common error cancels.

    Runs of one engine and source begin with the same letters. distance: of both, where there are enough runs at it; else those of all
    that stand for others count. count: runs.
    """
    own = [b for b in blind if b.kind == kind and b.distance == distance]
    blind = own if len(own) >= LEAST else [b for b in blind if b.distance not in ALONE]
    alike: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for b in blind:
        if b.kind == kind:
            alike[b.round, b.run.rstrip("0123456789"), b.distance].append(b.error)
    pairs = [
        (a - b) * sign for group in alike.values() for a, b in itertools.combinations(group, 2) for sign in (-1, 1)
    ]
    low, _, high = (math.exp(error) for error in _quantiles(pairs))
    count = sum(len(group) for group in alike.values() if len(group) > 1)
    return Calibration(low, 1.0, high, count, f"ratios of two, {kind}", pairs)


def _quantiles(errors: Sequence[float]) -> tuple[float, float, float]:
    ranked = sorted(errors)
    outside = max(1, math.floor((len(ranked) + 1) * (1 - LEVEL) / 2))
    return ranked[outside - 1], statistics.median(ranked), ranked[-outside]


@functools.cache
def blind_predictions() -> tuple[Blind, ...]:
    """`configs/blind_predictions.csv`."""
    text = (importlib.resources.files("configs") / "blind_predictions.csv").read_text(encoding="utf-8")
    return tuple(
        Blind(
            *(row[name] for name in ("round", "run", "kind", "distance")),
            float(row["predicted"]),
            float(row["measured"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


@functools.cache
def calibration(kind: str, distance: str) -> Calibration:
    """Return the calibration of a kind at a distance, by all blind predictions."""
    return calibrate(blind_predictions(), kind, distance)


@functools.cache
def ratio_calibration(kind: str, distance: str | None) -> Calibration:
    """Return the calibration of ratios of a kind, by all blind predictions."""
    return calibrate_ratio(blind_predictions(), kind, distance)


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


def ends(known: Calibration, predicted: float) -> dict[str, Any]:
    """Stable fields: the corrected prediction, by which factor it was corrected, the ends that hold 90 %, and what they rest on."""
    figure = known.interval(predicted)
    corrected = {"corrected": float(figure), "correction": known.median}
    return {**corrected, "low": figure.low, "high": figure.high, "by": known.of, "predictions": known.count}


def calibrated(candidate: Candidate) -> dict[str, Any]:
    """Stable fields for the winner: its rate and TPOT as `ends` has them.

    Blind rounds played their loops, whose rate and TPOT the mean-value answer has within a few percent. Its TTFT is that of steady state,
    which no benchmark reports and no blind prediction was of: `simulation/reported.py` has those that are.
    """
    distance = distance_of(candidate)
    figures = (("output_tokens_per_s", RATE, candidate.throughput), ("tpot_s", TPOT, candidate.tpot))
    found = {name: ends(calibration(kind, distance), figure) for name, kind, figure in figures}
    return {"level": LEVEL, "distance": distance, **found}

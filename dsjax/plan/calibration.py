"""Calibration by the errors of blind predictions: the correction and interval of a figure, and the interval of a ratio of two.

A blind prediction was committed before its measurement was read (docs/plan-validation.md). A figure's correction is the median of
measured ÷ predicted over blind predictions of the same kind and distance, and its 90 % interval lies between their 5 % and 95 % quantiles,
widened to whole observations as split conformal prediction does (Vovk, Gammerman and Shafer, Algorithmic learning in a random world, 2005).
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsjax.config import load_config
from dsjax.plan.figure import LEVEL, Figure, Kind
from dsjax.toml_files import bundled_text

if TYPE_CHECKING:
    from dsjax.plan.candidate import Candidate

RATE, TPOT, TTFT, TTFT_MEDIAN, TTFT_P99 = "rate", "tpot", "ttft", "ttft_median", "ttft_p99"
HOST, WIDE, FAR, DRAFTS = "one host", "several hosts", "another device or engine", "with drafts"
"""Distance of a blind prediction from the devices of the operator tables: one host with the same die, groups over several such hosts,
anything else; and runs with drafts, whose acceptance rate is in no table."""
UNSEEN = "nothing like it was measured"
"""Distance of plans with a property that no blind prediction had (`unseen`): they have no group and take the widest ends."""
LONGER = "longer prompts than said"
ALONE = (DRAFTS, LONGER, "prompts as most likely sent", "engine not warmed up")
"""Distances whose predictions no other group borrows. Two are of a benchmark whose client most likely sent prompts five times as long as
its results say, predicted as said and as sent; one is the P99 TTFT of a cold engine."""
LEAST = math.ceil(2 / (1 - LEVEL)) - 1
"""Fewest predictions of a group for which both ends of its interval are defined."""
_PROMPTS, _OUTPUTS = (512, 2 * 8192), (400, 2 * 8192)
"""Ranges of mean prompt and output tokens: half the least to twice the most of `configs/blind_predictions.csv`, except single runs."""
_SIZES = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "moe_intermediate_size",
)
"""Fields that distinguish a model's step from that of DeepSeek-V3 and R1, the models of all blind predictions."""


@dataclass(frozen=True)
class Blind:
    """A prediction committed before its measurement was read."""

    round: str  # predictions committed together
    run: str  # what was measured at once
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
    """Quantiles of measured ÷ predicted over `count` predictions."""

    low: float
    median: float
    high: float
    count: int
    of: str  # which predictions these are
    errors: Sequence[float] = ()  # logarithms, for ratios

    def interval(self, predicted: float) -> Figure:
        """Return the corrected prediction with its interval."""
        kinds = getattr(predicted, "kinds", Kind.EXACT) | Kind.MEASURED
        return Figure(predicted * self.median, predicted * self.low, predicted * self.high, kinds)


def calibrate(blind: Sequence[Blind], kind: str, distance: str) -> Calibration:
    """Calibrate a kind of figure at a distance by the first group that is large enough: its own, its kind at any distance, all.

    `UNSEEN` takes the median of its kind, and the lowest and the highest end at any distance.

    Raises:
        ValueError: there are fewer than `LEAST` blind predictions in all.
    """
    near = [b for b in blind if b.distance not in ALONE or b.distance == distance]
    groups = {
        f"{kind}, {distance}": [b for b in blind if b.kind == kind and b.distance == distance],
        f"{kind}, any distance": [b for b in near if b.kind == kind],
        "any figure": near,
    }
    name, group = next(((name, group) for name, group in groups.items() if len(group) >= LEAST), ("", []))
    if not group:
        raise ValueError(f"{len(blind)} blind predictions, expected at least {LEAST}")
    low, median, high = (math.exp(error) for error in _quantiles([b.error for b in group]))
    if distance != UNSEEN:
        return Calibration(low, median, high, len(group), name)
    others = [calibrate(blind, kind, one) for one in (HOST, WIDE, DRAFTS)]
    ends = min(low, *(one.low for one in others)), median, max(high, *(one.high for one in others))
    return Calibration(*ends, len(group), f"{kind}, widest ends: {UNSEEN}")


def calibrate_ratio(blind: Sequence[Blind], kind: str, distance: str | None) -> Calibration:
    """Calibrate ratios of two runs of one round, engine and distance, whose common error cancels. If this distance has too few runs, use
    all distances except `ALONE`. Runs of one engine and source begin with the same letters."""
    blind = [b for b in blind if b.kind == kind]
    same_distance = [b for b in blind if b.distance == distance]
    alike: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for b in same_distance if len(same_distance) >= LEAST else [b for b in blind if b.distance not in ALONE]:
        alike[b.round, b.run.rstrip("0123456789"), b.distance].append(b.error)
    pairs = [a - b for group in alike.values() for a, b in itertools.permutations(group, 2)]
    low, _, high = (math.exp(error) for error in _quantiles(pairs))
    count = sum(len(group) for group in alike.values() if len(group) > 1)
    return Calibration(low, 1.0, high, count, f"ratios of two, {kind}", pairs)


def _quantiles(errors: Sequence[float]) -> tuple[float, float, float]:
    ranked = sorted(errors)
    outside = max(1, math.floor((len(ranked) + 1) * (1 - LEVEL) / 2))
    return ranked[outside - 1], statistics.median(ranked), ranked[-outside]


@functools.cache
def blind_predictions() -> tuple[Blind, ...]:
    """Return the rows of `configs/blind_predictions.csv`."""
    text = bundled_text("blind_predictions.csv")
    return tuple(
        Blind(row["round"], row["run"], row["kind"], row["distance"], float(row["predicted"]), float(row["measured"]))
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


def unseen(candidate: Candidate) -> list[str]:
    """Return, in words, the properties of a deployment that no blind prediction had."""
    decode = candidate.decode
    work, options, config = decode.workload, decode.options, decode.config
    usual = load_config("deepseek-v3")
    sides = [instance for instance, _ in candidate.sides]
    chips = [instance.cluster.hardware for instance, _ in candidate.sides]
    other_chips = {chip.name for chip in chips if not (chip.same_die or chip.is_blackwell)}
    situations = {
        "a model of other sizes than DeepSeek-V3's": any(getattr(config, n) != getattr(usual, n) for n in _SIZES),
        "dsjax on a GPU or TPU": options.engine.name == "dsjax",
        " and ".join(sorted(other_chips)): bool(other_chips),
        "modules of your own measurement": options.measured is not None,
        f"weights in {options.precision.name}": options.precision.name in ("bf16", "int8"),
        f"prompts of {work.input.mean:,.0f} tokens": not _PROMPTS[0] <= work.input.mean <= _PROMPTS[1],
        f"outputs of {work.output.mean:,.0f} tokens": not _OUTPUTS[0] <= work.output.mean <= _OUTPUTS[1],
        "prompts that are found in the cache": work.prefix_hit > 0,
        "several stages": any(s.layout.mesh.pp_size > 1 for s in sides),
        "attention and experts apart": any(s.layout.experts for s in sides),
        "two half batches that overlap": not decode.layout.experts and decode.overlapped(candidate.batch),
    }
    return [situation for situation, applies in situations.items() if applies]


def distance_of(candidate: Candidate) -> str:
    """Return the distance of a deployment from what was measured."""
    if unseen(candidate):
        return UNSEEN
    if candidate.decode.options.drafts:
        return DRAFTS
    wide = any(instance.layout.devices > instance.cluster.devices_per_host for instance, _ in candidate.sides)
    return WIDE if wide else HOST


def ends(calibration: Calibration, predicted: float) -> dict[str, Any]:
    """Return stable fields: the corrected prediction, its correction factor, the 90 % interval, and the predictions behind it."""
    figure = calibration.interval(predicted)
    corrected = {"corrected": float(figure), "correction": calibration.median}
    return {**corrected, "low": figure.low, "high": figure.high, "by": calibration.of, "predictions": calibration.count}


def calibrated(candidate: Candidate) -> dict[str, Any]:
    """Return the winner's fields: rate and TPOT as from `ends`, the interval's `level`, and what is `unseen` in blind predictions.

    Blind rounds simulated their closed loops; the mean-value estimate gives the same rate and TPOT within a few percent. Its TTFT is that
    of steady state, which no benchmark reports and no blind prediction covers; `simulation/outcome.py` has the TTFTs that they cover.
    """
    distance = distance_of(candidate)
    figures = (("output_tokens_per_s", RATE, candidate.throughput), ("tpot_s", TPOT, candidate.tpot))
    intervals = {name: ends(calibration(kind, distance), figure) for name, kind, figure in figures}
    return {"level": LEVEL, "distance": distance, "unseen": unseen(candidate), **intervals}

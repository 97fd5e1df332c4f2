"""All public measured points by set, and what docs/plan-validation.md shows of them: scores, the rows that decide, and a CSV of all."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from dsjax.plan.drafting import FIRST
from tools.plan_data.drafts import RANDOM_ACCEPTANCE
from tools.plan_data.drafts import points_of_today as drafts_of_today
from tools.plan_data.inferencex import RUNS, Run, inferencex_points, points_of_today
from tools.plan_data.inferencex_apart import apart_points
from tools.plan_data.tpu import tpu_points
from tools.plan_data.unseen import further_points, unseen_points
from tools.plan_data.validation import Point, points
from tools.plan_data.validation_score import KINDS, rates, score

_R = TypeVar("_R")
TODAY, COMMITTED = "today", "committed"
COLUMNS = (
    "set",
    "point",
    "what",
    "source",
    "unit",
    "prediction",
    "measured",
    "predicted",
    "low",
    "high",
    "error_percent",
    "inside",
    "counted",
    "note",
)
DECIDING = (
    ("known", "3 (4K)"),
    ("known", "4"),
    ("known", "8 (64)"),
    ("looked for", "D"),
    ("looked for", "J"),
    ("one machine", "P"),
    ("one machine", "T"),
    ("one host of 2026", "X21"),
    ("one host of 2026", "X27"),
    ("wide EP", "W13"),
    ("wide EP", "W17"),
)
"""Points whose errors say where the model holds and where it fails, by the name of their set."""


@dataclass(frozen=True)
class PointSet:
    """Points that were looked for together.

    prediction: whether the shown prediction is the model's of today, or the one committed before the values were read. parts: name of a
    part to its points.
    """

    name: str
    prediction: str
    points: list[Point]
    parts: dict[str, list[Point]]


def _known() -> PointSet:
    every = points()
    counted = {name: [p for p in every if p.comparable and p.kind == kind] for kind, name in KINDS.items()}
    return PointSet("known", TODAY, every, {"all but TTFT": rates(every)} | counted)


def _one_machine() -> PointSet:
    every = further_points()
    parts = {
        "all": every,
        "software of March 2025 (K to R)": [p for p in every if p.key not in "ST"],
        "of autumn 2025 (S, T)": [p for p in every if p.key in "ST"],
    }
    return PointSet("one machine", COMMITTED, every, parts)


_RUN_PARTS: dict[str, Callable[[Run], bool]] = {
    "all": lambda _: True,
    "SGLang": lambda run: run.engine == "sglang",
    "TensorRT-LLM": lambda run: run.engine == "trt",
    "up to 16 users": lambda run: run.users <= 16,
    "32 users and more": lambda run: run.users > 16,
}


def _parts(every: list[Point], runs: tuple[_R, ...], tests: dict[str, Callable[[_R], bool]]) -> dict[str, list[Point]]:
    pairs = list(zip(every, runs, strict=True))
    return {name: [point for point, run in pairs if holds(run)] for name, holds in tests.items()}


def _drafts(acceptance: float) -> PointSet:
    every = drafts_of_today(acceptance)
    return PointSet(f"drafts, first accepted {acceptance:g}", TODAY, every, {"all": every})


def _tpus() -> PointSet:
    every = tpu_points()
    return PointSet("TPUs", TODAY, every, {"all": every})


@cache
def point_sets() -> tuple[PointSet, ...]:
    """The sets in the page's order. The runs of one host appear twice: as predicted beforehand, and as predicted today."""
    looked_for, committed, today, apart = unseen_points(), inferencex_points(), points_of_today(), apart_points()
    return (
        _known(),
        PointSet("looked for", TODAY, looked_for, {"all": looked_for}),
        _one_machine(),
        PointSet("one host of 2026", COMMITTED, committed, {"all": committed}),
        PointSet("one host of 2026", TODAY, today, _parts(today, RUNS, _RUN_PARTS)),
        PointSet("wide EP", COMMITTED, apart, {"all": apart}),
        *(_drafts(acceptance) for acceptance in (FIRST, RANDOM_ACCEPTANCE)),
        _tpus(),
    )


def score_table() -> str:
    """Markdown: the score of each set and of its parts."""
    lines = [
        "| set | prediction | points | mean absolute error | mean error | inside | median high ÷ low |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in point_sets():
        for number, (part, counted) in enumerate(one.parts.items()):
            name = part if number else f"**{one.name}**" + ("" if part == "all" else f", {part}")
            lines.append(f"| {name} | {'' if number else one.prediction} | {score(counted).cells()} |")
    return "\n".join(lines)


def deciding_table() -> str:
    """Markdown: the points of `DECIDING`, those of one host as the model predicts them today."""
    by_key = {(one.name, point.key): point for one in point_sets() for point in one.points}
    lines = ["| # | what | measured | predicted | interval | error |", "|---|---|---|---|---|---|"]
    for key in DECIDING:
        point = by_key[key]
        low, value, high = (_number(end) for end in (point.figure.low, point.figure.value, point.figure.high))
        outside = "" if point.inside else ", outside"
        lines.append(
            f"| {point.key} | {point.what} | {_number(point.measured)} {point.unit} | {value} | {low} – {high} | "
            f"{point.error:+.0%}{outside} |"
        )
    return "\n".join(lines)


def median_of_wide_ep() -> float:
    """Median of |predicted ÷ measured - 1| of the runs with wide EP, whose mean a few runs decide."""
    return statistics.median(abs(point.error) for point in apart_points())


def csv_text() -> str:
    """Every point with every prediction of it, one a line, in the columns of `COLUMNS`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in point_sets():
        for point in one.points:
            writer.writerow(_csv_row(one, point))
    return text.getvalue()


def _csv_row(one: PointSet, point: Point) -> list[str]:
    figure = point.figure
    numbers = [f"{value:.5g}" for value in (point.measured, figure.value, figure.low, figure.high)]
    return [
        one.name,
        point.key,
        point.what.replace("`", ""),
        point.source,
        point.unit,
        one.prediction,
        *numbers,
        f"{100 * point.error:+.1f}",
        "yes" if point.inside else "no",
        "yes" if point.comparable else "no",
        point.caveat,
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

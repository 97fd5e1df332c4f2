"""How far off the model is on measured points, and with tables of operations left out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from dsjax.plan.operator_tables import BUNDLED, TABLES
from tools.plan_data.validation import Point, points

KINDS = {
    "prefill": "prefill rates",
    "decode": "decode rates",
    "serving": "serving rates",
    "gain": "gains",
    "ttft": "TTFT",
}


@dataclass(frozen=True)
class Score:
    """How well counted points were predicted.

    The fields are how many there are, the mean of |predicted ÷ measured - 1|, the mean of predicted ÷ measured - 1, the share inside, and
    the median width.
    """

    count: int
    error: float
    bias: float
    covered: float
    width: float

    def cells(self) -> str:
        """Write the cells of a Markdown table."""
        return f"{self.count} | {self.error:.1%} | {self.bias:+.1%} | {self.covered:.0%} | {self.width:.2f}"


def score(counted: list[Point]) -> Score:
    """Score points, of which there must be one at least."""
    return Score(
        len(counted),
        mean_absolute_error(counted),
        statistics.mean(p.error for p in counted),
        sum(p.inside for p in counted) / len(counted),
        statistics.median(p.figure.high / p.figure.low for p in counted),
    )


def rates(every: list[Point]) -> list[Point]:
    """The points that are counted: comparable ones, each run once, TTFT apart."""
    return [point for point in every if point.comparable and point.kind != "ttft"]


def mean_absolute_error(counted: list[Point]) -> float:
    """Mean of |predicted ÷ measured - 1|."""
    return statistics.mean(abs(point.error) for point in counted)


def leave_one_out() -> str:
    """Markdown: the counted points with each table of operations left out in turn, and with all of them."""
    lines = ["| without | mean absolute error | mean error | inside |", "|---|---|---|---|"]
    # TTFT needs a simulation each, and is not counted here.
    for name, left in (
        ("nothing", ()),
        *((f"`{table}.csv`", (table,)) for table in TABLES),
        ("any of them: the tables of the projects' READMEs alone", TABLES),
    ):
        found = score(rates(points(BUNDLED.without(*left) if left else BUNDLED)))
        lines.append(f"| {name} | {found.error:.1%} | {found.bias:+.1%} | {found.covered:.0%} |")
    return "\n".join(lines)

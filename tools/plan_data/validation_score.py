"""How far off the model is on measured points: scores, and the Markdown tables of docs/plan-validation.md."""

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
    """Of counted points: how many, mean of |predicted ÷ measured - 1|, mean of predicted ÷ measured - 1, share inside, median width."""

    count: int
    error: float
    bias: float
    covered: float
    width: float

    def cells(self) -> str:
        """Of a Markdown table."""
        return f"{self.count} | {self.error:.1%} | {self.bias:+.1%} | {self.covered:.0%} | {self.width:.2f}"


def score(counted: list[Point]) -> Score:
    """Of at least one point."""
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


def rows(every: list[Point]) -> list[str]:
    """A Markdown table of points."""
    lines = ["| # | what | measured | predicted | interval | error | |", "|---|---|---|---|---|---|---|"]
    for point in every:
        figure, shown = point.figure, "inside" if point.inside else "outside"
        shown = (
            shown + (f"; {point.caveat}" if point.caveat else "")
            if point.comparable
            else f"not counted: {point.caveat}"
        )
        lines.append(
            f"| {point.key} | {point.what} ({point.source}) | {_number(point.measured)} {point.unit} | {_number(figure.value)} | "
            f"{_number(figure.low)} – {_number(figure.high)} | {point.error:+.0%} | {shown} |"
        )
    return lines


def summary(every: list[Point]) -> list[str]:
    """A Markdown table: all counted points, and each kind."""
    lines = [
        "| | points | mean absolute error | mean error | inside | median high ÷ low |",
        "|---|---|---|---|---|---|",
    ]
    lines.append(f"| **all but TTFT** | {score(rates(every)).cells()} |")
    for kind, name in KINDS.items():
        counted = [p for p in every if p.comparable and p.kind == kind]
        if counted:
            lines.append(f"| {name} | {score(counted).cells()} |")
    return lines


def table() -> str:
    """Markdown: every point, predicted beside measured, the interval, the error; then the means."""
    every = points()
    return "\n".join([*rows(every), "", *summary(every)])


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


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

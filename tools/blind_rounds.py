"""Writes configs/blind_predictions.csv: every prediction that was committed before its measurement was read, which `dsjax plan`
calibrates its intervals by. Prints what the newest round came to beside what was aimed at, and then every round.

    python tools/blind_rounds.py
"""

import argparse
import csv
import io
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.plan.calibration import (
    DRAFTS,
    FAR,
    HOST,
    LATEST,
    NEWEST,
    RATE,
    TPOT,
    TTFT,
    TTFT_MEDIAN,
    TTFT_P99,
    WIDE,
    Blind,
    calibrate,
)
from dsjax.plan.figure import Figure
from tools.plan_data import inferencex, inferencex_apart
from tools.plan_data.apart_loops import distance as apart_distance
from tools.plan_data.apart_loops import rows as apart_rows
from tools.plan_data.closed_loops import rows
from tools.plan_data.drafts import rows as draft_rows
from tools.plan_data.history import distance as history_distance
from tools.plan_data.history import rows as history_rows
from tools.plan_data.other_dates import distance as other_distance
from tools.plan_data.other_dates import rows as other_rows
from tools.plan_data.other_dates import setting_of
from tools.plan_data.tpu import rows as tpu_rows
from tools.plan_data.unseen import FURTHER, MEASURED, SAID

DATA = ROOT / "configs" / "blind_predictions.csv"
COLUMNS = ("round", "run", "kind", "distance", "predicted", "low", "high", "measured")
_WORDS = {
    RATE: "rates",
    TPOT: "time a token",
    TTFT: "TTFT as reported, mean",
    TTFT_MEDIAN: "TTFT as reported, median",
    TTFT_P99: "TTFT as reported, P99",
}


def blind() -> Iterator[Blind]:
    """All of them, by round."""
    distances = dict.fromkeys("FG", HOST) | dict.fromkeys("ABCDEHI", WIDE) | {"J": FAR}
    for key, ends in SAID.items():
        kind = TPOT if key in "HI" else RATE
        yield Blind("looked for", key, kind, distances[key], Figure(*ends), float(MEASURED[key]))
    for key, (*ends, measured) in FURTHER.items():
        # vLLM of March 2025 is not an engine of the tables; two of autumn 2025 are.
        yield Blind("one machine", key, RATE, HOST if key in "ST" else FAR, Figure(*ends), measured)
    for number, (*ends, measured) in enumerate(inferencex.COMMITTED, 1):
        yield Blind("one host of 2026", f"X{number}", RATE, HOST, Figure(*ends), measured)
    for number, (*ends, measured) in enumerate(inferencex_apart.COMMITTED, 1):
        yield Blind("wide EP", f"W{number}", RATE, WIDE, Figure(*ends), measured)
    for row in rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            yield Blind("closed loops", row["key"], row["metric"], HOST, figure, float(row["measured"]))
    for row in apart_rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            measured = float(row["measured"])
            yield Blind("separated", row["key"], row["metric"], apart_distance(row), figure, measured)
    for row in draft_rows():
        figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
        yield Blind("drafts", row["key"], row["metric"], DRAFTS, figure, float(row["measured"]))
    for row in history_rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            name = "drafts apart" if row["key"].startswith("D") else "scripts"
            yield Blind(name, row["key"], row["metric"], history_distance(row), figure, float(row["measured"]))
    for row in other_rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            run, measured = setting_of(row["key"]), float(row["measured"])
            yield Blind("other dates", run, row["metric"], other_distance(row), figure, measured)
    for row in tpu_rows():
        if row["seen"] == "0":
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            yield Blind("TPUs", row["key"], row["metric"], FAR, figure, float(row["measured"]))


def csv_text() -> str:
    """The file's text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for b in blind():
        numbers = (f"{value:.5g}" for value in (b.figure.value, b.figure.low, b.figure.high, b.measured))
        writer.writerow((b.round, b.run, b.kind, b.distance, *numbers))
    return text.getvalue()


@dataclass(frozen=True)
class Aim:
    """What blind figures should come to: in words, as bounds, and how it is measured of a group of predictions."""

    words: str
    least: float
    most: float
    of: Callable[[list[Blind]], float]
    form: str

    def reached(self, group: list[Blind]) -> bool:
        """Whether the group's figure lies within the bounds."""
        return self.least <= self.of(group) <= self.most


def aims(every: list[Blind]) -> tuple[Aim, ...]:
    """The aims, whose calibrated intervals are made from `every` prediction but those of the run that is asked about.

    Before the newest round's results were read there were only older ones to calibrate by: `before` has intervals made by these alone.
    """
    older = [b for b in every if b.round != LATEST]

    def before(group: list[Blind]) -> list[tuple[float, float]]:
        return [calibrate(older, b.kind, b.distance).interval(b.figure) for b in group]

    def left_out(group: list[Blind]) -> list[tuple[float, float]]:
        return held_out(every, group)

    inside, narrow = "calibrated intervals hold 85 to 95 %", "their median width is at most 1.9"
    alone = "by older rounds alone: "
    return (
        Aim(inside, 0.85, 0.95, lambda group: _held(group, left_out(group)), ".1%"),
        Aim(narrow, 1, 1.9, lambda group: _width(left_out(group)), ".2f"),
        Aim(alone + inside, 0.85, 0.95, lambda group: _held(group, before(group)), ".1%"),
        Aim(alone + narrow, 1, 1.9, lambda group: _width(before(group)), ".2f"),
        Aim("rates and TPOT: mean absolute error at most 14 %", 0, 0.14, lambda group: mean_error(group, RATE, TPOT), ".1%"),
        Aim(
            "raw TTFT (mean, median and P99): mean absolute error at most 35 %", 0, 0.35,
            lambda group: mean_error(group, TTFT, TTFT_MEDIAN, TTFT_P99), ".1%",
        ),
    )  # fmt: skip


def aims_table() -> str:
    """Markdown: each aim, what the newest round came to, that without runs with drafts, and whether it is reached."""
    every = list(blind())
    newest = [b for b in every if b.round == LATEST]
    plain = [b for b in newest if b.distance != DRAFTS]
    lines = [
        f"| aim | newest round ({len(newest)} figures) | without drafts ({len(plain)}) | verdict |",
        "|---|---|---|---|",
    ]
    for aim in aims(every):
        cells = [format(aim.of(group), aim.form) for group in (newest, plain)]
        verdict = "reached" if aim.reached(newest) else "**missed**"
        if aim.reached(plain) != aim.reached(newest):
            verdict += "; without drafts " + ("reached" if aim.reached(plain) else "missed")
        lines.append(f"| {aim.words} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


def mean_error(group: Iterable[Blind], *kinds: str) -> float:
    """Mean of |predicted ÷ measured - 1| of these kinds of figures."""
    return statistics.mean(abs(b.figure.value / b.measured - 1) for b in group if b.kind in kinds)


def _held(group: list[Blind], ends: list[tuple[float, float]]) -> float:
    """Share of measurements that lie within these intervals."""
    return sum(low <= b.measured <= high for b, (low, high) in zip(group, ends, strict=True)) / len(group)


def _width(ends: Iterable[tuple[float, float]]) -> float:
    """Median of high ÷ low."""
    return statistics.median(high / low for low, high in ends)


def _cells(group: list[Blind], ends: list[tuple[float, float]]) -> str:
    """Coverage and median width of these intervals."""
    return f"{_held(group, ends):.0%} | {_width(ends):.2f}"


def held_out(every: list[Blind], group: list[Blind]) -> list[tuple[float, float]]:
    """Calibrated intervals of a group, each by all predictions but those of its own run.

    A round older than those that the planner calibrates by is held by such rounds alone, and the older of these by no later one.
    """
    found = []
    before_latest = [o for o in every if o.round != LATEST]
    old = [o for o in every if o.round not in NEWEST]
    for b in group:
        known = every if b.round == LATEST else before_latest if b.round in NEWEST else old
        others = [o for o in known if o.run != b.run]
        found.append(calibrate(others, b.kind, b.distance).interval(b.figure))
    return found


def table() -> str:
    """Markdown: errors of blind predictions by round and by kind, what their own intervals held, and what calibrated ones hold."""
    every = list(blind())
    lines = [
        "| blind predictions | | mean absolute error | mean error | own interval: inside | width | calibrated: inside | width |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def row(name: str, group: list[Blind]) -> None:
        errors = [b.figure.value / b.measured - 1 for b in group]
        own = _cells(group, [(b.figure.low, b.figure.high) for b in group])
        made = _cells(group, held_out(every, group))
        size = mean_error(group, *_WORDS)
        lines.append(f"| {name} | {len(group)} | {size:.1%} | {statistics.mean(errors):+.1%} | {own} | {made} |")

    newest = [b for b in every if b.round == LATEST]
    for of, mark in ((newest, "newest: "), ([b for b in every if b.round != LATEST], "older: ")):
        if not of:
            continue
        row(f"**{mark}all**", of)
        for kind, words in _WORDS.items():
            for distance in (HOST, WIDE, FAR, DRAFTS):
                group = [b for b in of if (b.kind, b.distance) == (kind, distance)]
                if group:
                    row(f"{mark}{words}, {distance}", group)
    for name in dict.fromkeys(b.round for b in every):
        row(f"**{name}**", [b for b in every if b.round == name])
    row("**all**", every)
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    DATA.write_text(csv_text(), encoding="utf-8")
    print(aims_table(), table(), sep="\n\n")

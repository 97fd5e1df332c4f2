"""Writes configs/blind_predictions.csv: every prediction that was committed before its measurement was read, which `dsjax plan`
calibrates its intervals by. Prints what the newest round came to beside what was aimed at, and then every round.

    python tools/blind_rounds.py
"""

import argparse
import csv
import functools
import io
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.plan.calibration import (
    COLD,
    DRAFTS,
    FAR,
    HOST,
    LATEST,
    LEAST,
    LEVEL,
    LONGER,
    NEWEST,
    RATE,
    SENT,
    SOFTENED,
    TPOT,
    TTFT,
    TTFT_MEDIAN,
    TTFT_P99,
    WIDE,
    Blind,
    Calibration,
    calibrate,
)
from dsjax.plan.figure import Figure
from tools.plan_data import all_left, inferencex, inferencex_apart
from tools.plan_data.apart_loops import distance as apart_distance
from tools.plan_data.apart_loops import rows as apart_rows
from tools.plan_data.closed_loops import rows
from tools.plan_data.drafts import distance as draft_distance
from tools.plan_data.drafts import rows as draft_rows
from tools.plan_data.drafts_again import distance as again_distance
from tools.plan_data.drafts_again import rows as again_rows
from tools.plan_data.drafts_again import setting_of as again_setting
from tools.plan_data.history import distance as history_distance
from tools.plan_data.history import rows as history_rows
from tools.plan_data.last_runs import distance as last_distance
from tools.plan_data.last_runs import rows as last_rows
from tools.plan_data.last_runs import setting_of as last_setting
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


@functools.cache
def blind() -> tuple[Blind, ...]:
    """All of them, by round."""
    return tuple(_read())


def _read() -> Iterator[Blind]:
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
        yield Blind("drafts", row["key"], row["metric"], draft_distance(row), figure, float(row["measured"]))
    for row in history_rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            name = "drafts apart" if row["key"].startswith("D") else "scripts"
            yield Blind(name, row["key"], row["metric"], history_distance(row), figure, float(row["measured"]))
    for row in other_rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            run, measured = setting_of(row["key"]), float(row["measured"])
            yield Blind("other dates", run, row["metric"], history_distance(row), figure, measured)
    for row in last_rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            run, measured = last_setting(row["key"]), float(row["measured"])
            yield Blind("last runs", run, row["metric"], last_distance(row), figure, measured)
    for row in again_rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            run, measured = again_setting(row["key"]), float(row["measured"])
            yield Blind("drafts again", run, row["metric"], again_distance(row), figure, measured)
    for row in all_left.rows():
        if row["measured"]:
            figure = Figure(*(float(row[end]) for end in ("predicted", "low", "high")))
            run, measured = all_left.setting_of(row["key"]), float(row["measured"])
            yield Blind("all left", run, row["metric"], all_left.distance(row), figure, measured)
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


def aims(every: Sequence[Blind]) -> tuple[Aim, ...]:
    """The aims, whose calibrated intervals are made from `every` prediction but those of the run that is asked about.

    Before a round's results were read there were only older ones to calibrate by: `before` has intervals made by these alone.
    """

    @functools.cache
    def by_older(name: str, kind: str, distance: str) -> Calibration:
        return calibrate(earlier(every, name), kind, distance)

    def before(group: list[Blind]) -> list[tuple[float, float]]:
        return [by_older(b.round, b.kind, b.distance).interval(b.figure) for b in group]

    left_out = LeftOut(every)
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


def earlier(every: Sequence[Blind], name: str) -> list[Blind]:
    """Predictions of the rounds before that one."""
    rounds = list(dict.fromkeys(b.round for b in every))
    before = set(rounds[: rounds.index(name)])
    return [b for b in every if b.round in before]


@functools.cache
def aims_table() -> str:
    """Markdown: each aim, what the two newest rounds came to and parts of them, and whether each of the two has reached it."""
    every = blind()
    newest, last = ([b for b in every if b.round == name] for name in (NEWEST[-1], LATEST))
    warm = [b for b in newest if b.distance != COLD]
    plain = [b for b in last if b.distance not in (LONGER, SENT, DRAFTS)]
    lines = [
        f"| aim | *{NEWEST[-1]}* ({len(newest)} figures) | but P99 of cold engines ({len(warm)}) | *{LATEST}* ({len(last)}) "
        f"| without drafts, prompts as said ({len(plain)}) | reached |",
        "|---|---|---|---|---|---|",
    ]
    for aim in aims(every):
        cells = [format(aim.of(group), aim.form) for group in (newest, warm, last, plain)]
        reached = [name for name, group in ((NEWEST[-1], newest), (LATEST, last)) if aim.reached(group)]
        verdict = "in both" if len(reached) == 2 else f"in *{reached[0]}*" if reached else "**no**"
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


class LeftOut:
    """Calibrated intervals of predictions, each by all predictions but those of its own run. Keeps the calibrations that it has made.

    A round older than those that the planner calibrates by is held by such rounds alone. Of these, the first two are held by each other
    and by older ones, and each after them by no later one.
    """

    def __init__(self, every: Sequence[Blind]):
        self._every, self._known = every, {}
        self._made: dict[tuple[object, ...], Calibration] = {}

    def __call__(self, group: Sequence[Blind]) -> list[tuple[float, float]]:
        """Return the interval of each prediction of the group."""
        return [self._calibration(b).interval(b.figure) for b in group]

    def _calibration(self, b: Blind) -> Calibration:
        later = NEWEST if b.round not in NEWEST else NEWEST[max(2, NEWEST.index(b.round) + 1) :]
        about = later, b.run, b.kind, b.distance
        if about not in self._made:
            if later not in self._known:
                self._known[later] = [o for o in self._every if o.round not in later]
            others = [o for o in self._known[later] if o.run != b.run]
            self._made[about] = calibrate(others, b.kind, b.distance)
        return self._made[about]


def interval_score(b: Blind, ends: tuple[float, float]) -> float:
    """Width of an interval in logarithms, and 2 ÷ (1 - level) times what the measurement lies outside by (Gneiting and Raftery, 2007).

    Its mean is least for the intervals that hold as many as they say and are no wider than they must be.
    """
    low, high = (math.log(end / b.measured) for end in ends)
    return high - low + 2 / (1 - LEVEL) * max(0.0, low, -high)


@functools.cache
def methods_table() -> str:
    """Markdown: of each round, what intervals hold that the rounds before it alone make, with units as wide as own intervals and softened.

    Prompts that were longer than said and cold engines are left out, as no way to score foresees them.
    """
    every = [b for b in blind() if b.distance not in (LONGER, SENT, COLD)]
    names = list(dict.fromkeys(b.round for b in every))
    lines = [
        "| round | figures | own width as unit: inside | width | interval score | softened: inside | width | interval score |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for at, name in enumerate(names):
        before, group = [b for b in every if b.round in names[:at]], [b for b in every if b.round == name]
        if min(len(before), len(group)) < LEAST:
            continue
        cells = []
        for softened in (0.0, SOFTENED):
            made = {about: calibrate(before, *about, softened) for about in {(b.kind, b.distance) for b in group}}
            ends = [made[b.kind, b.distance].interval(b.figure) for b in group]
            score = statistics.mean(interval_score(b, each) for b, each in zip(group, ends, strict=True))
            cells.append(f"{_cells(group, ends)} | {score:.2f}")
        lines.append(f"| {name} | {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table() -> str:
    """Markdown: errors of blind predictions by round and by kind, what their own intervals held, and what calibrated ones hold."""
    every = blind()
    left_out = LeftOut(every)
    lines = [
        "| blind predictions | | mean absolute error | mean error | own interval: inside | width | calibrated: inside | width |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def row(name: str, group: list[Blind]) -> None:
        errors = [b.figure.value / b.measured - 1 for b in group]
        own = _cells(group, [(b.figure.low, b.figure.high) for b in group])
        made = _cells(group, left_out(group))
        size = mean_error(group, *_WORDS)
        lines.append(f"| {name} | {len(group)} | {size:.1%} | {statistics.mean(errors):+.1%} | {own} | {made} |")

    newest, last = ([b for b in every if b.round == name] for name in (NEWEST[-1], LATEST))
    older = [b for b in every if b.round not in NEWEST[2:]]
    for of, mark in ((newest, f"{NEWEST[-1]}: "), (last, f"{LATEST}: "), (older, "older: ")):
        if not of:
            continue
        row(f"**{mark}all**", of)
        for kind, words in _WORDS.items():
            for distance in (HOST, WIDE, FAR, DRAFTS, LONGER, SENT, COLD):
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
    print(aims_table(), table(), methods_table(), sep="\n\n")

"""Score blind predictions of the planner: errors, and what intervals hold that older rounds alone make.

    python tools/plan_score.py                  # configs/blind_predictions.csv, which `dsjax plan` calibrates its intervals with
    python tools/plan_score.py --page           # write this table into docs/plan-validation.md
    python tools/plan_score.py REPLAYED.csv     # predictions of today's planner (tools/plan_data/replay.py)

A round is a set of predictions that were committed before any of its measurements was read. Each round is scored with intervals that only
rounds before it make, as a user's next deployment is. The interval score of one prediction is the width of its interval in logarithms and
20 times the distance by which the measurement lies outside (Gneiting and Raftery, 2007): the lower, the better.

To add a round:

1. Write the settings of runs whose results nobody has read into NEW.csv, with the columns of configs/blind_predictions.csv, a row for each
   kind of figure, and `predicted`, `low`, `high`, `measured` empty. tools/plan_data/replay.py says what the columns of settings mean.
2. `python -m tools.plan_data.replay NEW-PREDICTED.csv --rows NEW.csv --played`, and commit the result.
3. Enter `measured`, append the rows to configs/blind_predictions.csv, run `python tools/plan_score.py --page`, and commit.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.plan.calibration import (
    DRAFTS,
    HOST,
    LEAST,
    LEVEL,
    LONGER,
    RATE,
    TPOT,
    TTFT,
    TTFT_MEDIAN,
    TTFT_P99,
    WIDE,
    Blind,
    calibrate,
)

DATA, PAGE = ROOT / "configs" / "blind_predictions.csv", ROOT / "docs" / "plan-validation.md"
BEGIN, END = "<!-- python tools/plan_score.py --page -->\n", "<!-- end -->"
KINDS = {RATE: "rate", TPOT: "TPOT", TTFT: "TTFT, mean", TTFT_MEDIAN: "TTFT, median", TTFT_P99: "TTFT, P99"}
ON_THE_PAGE = r"\*\*.*|(rate|TPOT|TTFT, median), (one host|several hosts|with drafts|another device or engine)"
"""Names of the groups that the page shows."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Run(Blind):
    """A blind prediction, with the device and the weights of its run, such as `b200` and `fp4`."""

    device: str = ""
    weights: str = ""


def read(path: Path = DATA) -> list[Run]:
    """The predictions of a file, round after round."""
    with path.open(encoding="utf-8", newline="") as lines:
        return [_blind(row) for row in csv.DictReader(lines)]


def _blind(row: dict[str, str]) -> Run:
    names = (row[name] for name in ("round", "run", "kind", "distance"))
    about = (row.get(name, "") for name in ("device", "weights"))
    return Run(*names, float(row["predicted"]), float(row["measured"]), *about)


def by_older_rounds(blind: Sequence[Blind]) -> list[tuple[Blind, Interval | None]]:
    """Each prediction with the interval that `dsjax plan` would give it if there were older rounds alone; None where these are too few.

    Rounds are in the order in which they were committed.
    """
    rounds = list(dict.fromkeys(b.round for b in blind))
    older = {name: [b for b in blind if b.round in rounds[:at]] for at, name in enumerate(rounds)}
    make = functools.cache(lambda name, kind, distance: calibrate(older[name], kind, distance))
    found = []
    for b in blind:
        figure = make(b.round, b.kind, b.distance).interval(b.predicted) if len(older[b.round]) >= LEAST else None
        found.append((b, figure and (figure.low, figure.high)))
    return found


def interval_score(measured: float, interval: Interval) -> float:
    """Width of an interval in logarithms, and 2 ÷ (1 - level) times what the measurement lies outside by."""
    low, high = (math.log(end / measured) for end in interval)
    return high - low + 2 / (1 - LEVEL) * max(0.0, low, -high)


@dataclass(frozen=True)
class Score:
    """How well a group was predicted.

    count: predictions. error, bias: mean of |predicted ÷ measured - 1| and of predicted ÷ measured - 1. Of those that have an interval:
    inside, the share of measurements in it; width, the median of high ÷ low; score, the mean interval score. NaN where none has one.
    """

    count: int
    error: float
    bias: float
    inside: float
    width: float
    score: float

    @classmethod
    def of(cls, group: Iterable[tuple[Blind, Interval | None]]) -> Score:
        """Score predictions with their intervals, of which there must be one at least."""
        group = list(group)
        errors = [b.predicted / b.measured - 1 for b, _ in group]
        known = [(b.measured, interval) for b, interval in group if interval]
        held, widths, scores = [math.nan], [math.nan], [math.nan]
        if known:
            held = [low <= measured <= high for measured, (low, high) in known]
            widths = [high / low for _, (low, high) in known]
            scores = [interval_score(*one) for one in known]
        return cls(
            len(group),
            statistics.mean(map(abs, errors)),
            statistics.mean(errors),
            statistics.mean(held),
            statistics.median(widths),
            statistics.mean(scores),
        )

    def cells(self) -> str:
        """The cells of a Markdown table."""
        intervals = f"{self.inside:.0%} | {self.width:.2f} | {self.score:.2f}"
        if math.isnan(self.score):
            intervals = "– | – | –"
        return f"{self.count} | {self.error:.1%} | {self.bias:+.1%} | {intervals}"


def groups(blind: Sequence[Blind]) -> dict[str, Callable[[Blind], bool]]:
    """Groups in the order of a table: the headline figures, rounds, kinds at a distance, and all."""
    found: dict[str, Callable[[Blind], bool]] = {
        "**rates and TPOT**": lambda b: b.kind in (RATE, TPOT) and b.distance != LONGER,
        "**TTFT**": lambda b: b.kind not in (RATE, TPOT) and b.distance != LONGER,
    }
    for name in dict.fromkeys(b.round for b in blind):
        found[f"*{name}*"] = lambda b, name=name: b.round == name
    for kind, words in KINDS.items():
        for distance in sorted({b.distance for b in blind if b.kind == kind}):
            found[f"{words}, {distance}"] = lambda b, about=(kind, distance): (b.kind, b.distance) == about
    return found | {"all": lambda _: True}


def by_device(blind: Sequence[Run], least: int = 1) -> dict[str, Callable[[Run], bool]]:
    """Groups of TPOT by device, weights and distance that have `least` predictions or more."""
    found: dict[str, Callable[[Run], bool]] = {}
    count = Counter(
        (b.device, b.weights, b.distance) for b in blind if b.kind == TPOT and b.distance in (HOST, WIDE, DRAFTS)
    )
    for about in sorted(about for about in count if count[about] >= least):
        device, weights, distance = about
        name = f"TPOT, {device.upper()} in {weights.upper()}, {distance}"
        found[name] = lambda b, about=about: b.kind == TPOT and (b.device, b.weights, b.distance) == about
    return found


def table(blind: Sequence[Run], whole: bool = True) -> str:
    """Markdown: the score of each group. whole: also rounds, and groups that the page leaves out."""
    lines = [
        "| | figures | mean absolute error | mean error | inside | width | interval score |",
        "|---|---|---|---|---|---|---|",
    ]
    pairs = by_older_rounds(blind)
    shown = {name: holds for name, holds in groups(blind).items() if whole or re.fullmatch(ON_THE_PAGE, name)}
    for name, holds in (shown | by_device(blind, 1 if whole else LEAST)).items():
        if group := [pair for pair in pairs if holds(pair[0])]:
            lines.append(f"| {name} | {Score.of(group).cells()} |")
    return "\n".join(lines)


def page() -> str:
    """The page as it is, with today's table in it."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(read(), whole=False)}\n\n{END}{tail}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DATA, metavar="FILE.csv", help="what is scored")
    parser.add_argument("--page", action="store_true", help="write the table into docs/plan-validation.md")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(table(read(given.file)))

"""Writes configs/blind_predictions.csv: every prediction that was committed before its measurement was read, which `dsjax plan`
calibrates its intervals by.

    python tools/blind_rounds.py
"""

import argparse
import csv
import io
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.plan.calibration import (
    DRAFTS,
    FAR,
    HOST,
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


def _cells(group: list[Blind], ends: Iterable[tuple[float, float]]) -> str:
    """Coverage and median width of these intervals."""
    pairs = list(zip(group, ends, strict=True))
    held = sum(low <= b.measured <= high for b, (low, high) in pairs) / len(pairs)
    return f"{held:.0%} | {statistics.median(high / low for _, (low, high) in pairs):.2f}"


def held_out(every: list[Blind], group: list[Blind]) -> list[tuple[float, float]]:
    """Calibrated intervals of a group, each by all predictions but those of its own run; an older round's by older rounds alone."""
    found = []
    older = [o for o in every if o.round not in NEWEST]
    for b in group:
        known = every if b.round in NEWEST else older
        others = [o for o in known if (o.round, o.run) != (b.round, b.run) and o.run != b.run]
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
        size = statistics.mean(map(abs, errors))
        lines.append(f"| {name} | {len(group)} | {size:.1%} | {statistics.mean(errors):+.1%} | {own} | {made} |")

    newest = [b for b in every if b.round in NEWEST]
    for of, mark in ((newest, "newest: "), ([b for b in every if b.round not in NEWEST], "older: ")):
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
    print(table())

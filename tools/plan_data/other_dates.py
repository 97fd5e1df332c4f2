"""Runs of InferenceX on one host at dates that no round had, played as its scripts play them: predictions first, results afterwards.

    python -m tools.plan_data.other_dates predict benchmarks-history.json benchmarks.json    # reads settings and dates, none of the metrics
    python -m tools.plan_data.other_dates enter benchmarks-history.json benchmarks.json      # writes the published columns beside them

The rule was set before a number was read: DeepSeek-R1 on H200, B200 and B300, prefill and decode together, with and without drafts, answers
of 1,024 tokens and up to 32 users (longer loops take hours to play), since 2026-01-14: each setting of the history at its two newest
dates that no round had. Most settings had been predicted at another date, of another version of the engine; what that date measured is
known, what these measured is not. Everything else is as in history.py, and how engines start is in protocol.py.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from dsjax.plan.calibration import DRAFTS, HOST
from tools.plan_data import history
from tools.plan_data.drafts import run_of
from tools.plan_data.protocol import protocol

DATA = Path(__file__).parent / "other_dates.csv"
SINCE, OUTPUT, MOST_USERS, DATES = "2026-01-14", 1024, 32, 2
METRICS = ("rate", "tpot", "ttft_median", "ttft_p99")
COLUMNS = history.COLUMNS


def chosen(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Choose the runs of the rule with their keys, in an order that no metric decides. O1a and O1b are one setting at two dates."""
    had = {_identity(result) for result in newest} | {_identity(result) for _, result in history.chosen(past, newest)}
    had |= {_identity(result) for result in history.with_drafts([*past, *newest])}
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for result in past:
        setting, date = _identity(result)
        if _is_wanted(result) and (setting, date) not in had:
            found.setdefault(setting, {})[date] = result
    return [
        (f"O{number}{mark}", of_setting[date])
        for number, (_, of_setting) in enumerate(sorted(found.items()), 1)
        for mark, date in zip("ab", sorted(of_setting)[-DATES:], strict=False)
    ]


def _identity(result: dict[str, Any]) -> tuple[tuple, str]:
    return (*(result[name] for name in history.SETTINGS), result["spec_method"], result["disagg"]), result["date"]


def _is_wanted(result: dict[str, Any]) -> bool:
    """Whether a result is of the rule, but for the dates that rounds had."""
    return (
        result["model"] == "dsr1"
        and result["hardware"] in ("h200", "b200", "b300")
        and result["framework"] in ("sglang", "trt")
        and not result["disagg"]
        and not result["is_multinode"]
        and result["date"] >= SINCE
        and result["osl"] == OUTPUT
        and result["conc"] <= MOST_USERS
    )


def predict(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Predictions of them all."""
    made, known = [], {}
    for key, result in chosen(past, newest):
        run, drafts = run_of(result)
        drafts = drafts if result["spec_method"] == "mtp" else 0
        played = run, drafts, protocol(run, result["date"], drafts)
        if played not in known:
            known[played] = history.predictions(run, result["date"], drafts)
        said = {metric: known[played][metric] for metric in METRICS}
        made += history.lines_of(key, result["date"], run, run.mesh, drafts, said)
        print(key, run.name, flush=True)
    return made


def enter(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The predictions as they are, with what was measured."""
    return history.measured(rows(), dict(chosen(past, newest)))


def mean_value_today() -> dict[str, tuple[float, float]]:
    """By metric of the runs without drafts: the median of the mean-value answer ÷ what was played, and its mean absolute error.

    The TTFT is set beside the reported median.
    """
    found: dict[str, list[tuple[float, float]]] = {"rate": [], "tpot": [], "ttft_median": []}
    alone = (row for row in rows() if row["drafts"] == "0")
    said: dict[tuple, dict[str, float]] = {}
    for _, rows_of in itertools.groupby(alone, lambda row: row["key"]):
        metrics = {row["metric"]: row for row in rows_of}
        row = metrics["rate"]
        setting = history.run_of_row(row), protocol(history.run_of_row(row), row["date"])
        if setting not in said:
            answer, _ = history.deployment_of(setting[0], row["date"], 0)
            rate = answer.throughput.value / answer.decode.layout.devices
            said[setting] = {"rate": rate, "tpot": answer.tpot.value * 1e3, "ttft_median": answer.ttft.value * 1e3}
        for metric, value in said[setting].items():
            played, measured = (float(metrics[metric][name]) for name in ("predicted", "measured"))
            found[metric].append((value / played, abs(value / measured - 1)))
    return {
        metric: (statistics.median(one for one, _ in each), statistics.mean(error for _, error in each))
        for metric, each in found.items()
    }


SLOW_VERSIONS = {("h200", "2026-05-13"), ("b300", "2026-05-13"), ("b200", "2026-05-15"), ("b300", "2026-04-17")}
"""Devices and dates at which InferenceX had SGLang 0.5.11, the last one 0.5.10.post1 (its nvidia-master.yaml). Found in the results."""


def is_faulty(row: dict[str, str]) -> bool:
    """Whether a run is of a version of SGLang that computed prompts several times more slowly than those before and after it."""
    return row["engine"] == "sglang" and (row["device"], row["date"]) in SLOW_VERSIONS


def setting_of(key: str) -> str:
    """The key without its date: runs of one setting are left out together where intervals are tried, as they are alike."""
    return key.rstrip("ab")


def distance(row: dict[str, str]) -> str:
    """How far a row is from what tables of operations were measured on, in the words of dsjax/plan/calibration.py."""
    return DRAFTS if row["drafts"] != "0" else HOST


def rows() -> list[dict[str, str]]:
    """The file's."""
    with DATA.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("predict", "enter"):
        sys.exit(__doc__)
    loaded = [json.loads(Path(file).read_text(encoding="utf-8")) for file in sys.argv[2:]]
    filled = {"predict": predict, "enter": enter}[sys.argv[1]](*loaded)
    with DATA.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(filled)

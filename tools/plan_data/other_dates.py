"""Runs of InferenceX on one host at dates that no round had, played as its scripts play them: predictions first, results afterwards.

    python -m tools.plan_data.other_dates predict benchmarks-history.json benchmarks.json    # reads settings and dates, none of the metrics
    python -m tools.plan_data.other_dates enter benchmarks-history.json benchmarks.json      # writes the published columns beside them
    python -m tools.plan_data.other_dates today     # plays runs whose prompts were longer than said, with such, into other_dates_today.csv

The rule was set before a number was read: DeepSeek-R1 on H200, B200 and B300, prefill and decode together, with and without drafts, answers
of 1,024 tokens and up to 32 users (longer loops take hours to play), since 2026-01-14: each setting of the history at its two newest
dates that no round had. Most settings had been predicted at another date, of another version of the engine; what that date measured is
known, what these measured is not. Everything else is as in history.py, and how engines start is in protocol.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from dsjax.plan.calibration import HOST, LONGER
from tools.plan_data import files, history
from tools.plan_data.drafts import run_of
from tools.plan_data.protocol import protocol, sent_by

DATA = Path(__file__).parent / "other_dates.csv"
TODAY = Path(__file__).parent / "other_dates_today.csv"
SINCE, OUTPUT, MOST_USERS, DATES = "2026-01-14", 1024, 32, 2
METRICS = ("rate", "tpot", "ttft_median", "ttft_p99")
COLUMNS = history.COLUMNS


def chosen(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Choose the runs of the rule with their keys, in an order that no metric decides. O1a and O1b are one setting at two dates."""
    wanted = [one for one in past if is_on_one_host(one) and one["osl"] == OUTPUT and one["conc"] <= MOST_USERS]
    return [
        (f"O{number}{mark}", of_setting[date])
        for number, of_setting in enumerate(by_setting(wanted, had_before(past, newest)), 1)
        for mark, date in zip("ab", sorted(of_setting)[-DATES:], strict=False)
    ]


def had_before(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> set[tuple[tuple, str]]:
    """Identities of the runs that earlier rounds had."""
    runs = [*newest, *(result for _, result in history.chosen(past, newest)), *history.with_drafts([*past, *newest])]
    return set(map(identity, runs))


def by_setting(wanted: list[dict[str, Any]], had: set[tuple[tuple, str]]) -> list[dict[str, dict[str, Any]]]:
    """Runs that no round had by date, one mapping for each setting, in the order of settings."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for result in wanted:
        setting, date = identity(result)
        if (setting, date) not in had:
            found.setdefault(setting, {})[date] = result
    return [of_setting for _, of_setting in sorted(found.items())]


def identity(result: dict[str, Any]) -> tuple[tuple, str]:
    """A result's settings, and its date."""
    return (*(result[name] for name in history.SETTINGS), result["spec_method"], result["disagg"]), result["date"]


def is_on_one_host(result: dict[str, Any]) -> bool:
    """Whether a result is of DeepSeek-R1 on one host of a device that is played, prefill and decode together, since `SINCE`."""
    return (
        result["model"] == "dsr1"
        and result["hardware"] in ("h200", "b200", "b300")
        and result["framework"] in ("sglang", "trt")
        and not result["disagg"]
        and not result["is_multinode"]
        and result["date"] >= SINCE
    )


def predict(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Predictions of them all."""
    return predictions_of(chosen(past, newest))


def predictions_of(runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, str]]:
    """Lines of a round's file for these runs on one host; runs that are played alike are played once.

    A run whose prompts were most likely longer than it says (protocol.py) is played with prompts of such a length.
    """
    made, known = [], {}
    for key, result in runs:
        run, drafts = run_of(result)
        drafts = drafts if result["spec_method"] == "mtp" else 0
        sent = sent_by(run, result["date"])
        played = sent, drafts, protocol(run, result["date"], drafts)
        if played not in known:
            known[played] = history.predictions(sent, result["date"], drafts)
        said = {metric: known[played][metric] for metric in METRICS}
        made += history.lines_of(key, result["date"], run, run.mesh, drafts, said)
        print(key, run.name, flush=True)
    return made


def enter(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The predictions as they are, with what was measured."""
    return history.measured(rows(), dict(chosen(past, newest)))


@functools.cache
def mean_value_today() -> dict[str, tuple[float, float]]:
    """By metric of the runs without drafts: the median of the mean-value answer ÷ what was played, and its mean absolute error.

    Runs that were sent longer prompts than they say are left out. The TTFT is set beside the reported median.
    """
    found: dict[str, list[tuple[float, float]]] = {"rate": [], "tpot": [], "ttft_median": []}
    alone = (row for row in rows() if history.distance(row) == HOST)
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


def today() -> list[dict[str, str]]:
    """Rows of `TODAY`: runs of which a longer prompt than they say was sent, as the model of today plays such prompts."""
    long = [row for row in rows() if history.distance(row) == LONGER]
    made = []
    for key, group in itertools.groupby(long, lambda row: row["key"]):
        metrics = list(group)
        run, date = history.run_of_row(metrics[0]), metrics[0]["date"]
        said = history.predictions(sent_by(run, date), date, int(metrics[0]["drafts"]))
        made += [{"key": key, "metric": row["metric"], "today": f"{said[row['metric']].value:.4g}"} for row in metrics]
    return made


def today_rows() -> list[dict[str, str]]:
    """The rows of `TODAY`, with what was predicted and measured."""
    return files.with_today(rows(), TODAY)


def setting_of(key: str) -> str:
    """The key without its date: runs of one setting are left out together where intervals are tried, as they are alike."""
    return key.rstrip("ab")


def rows() -> list[dict[str, str]]:
    """The file's."""
    return files.read(DATA)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=2, enter=2, today=0)
    if command == "today":
        files.write(TODAY, files.TODAY_COLUMNS, today())
        raise SystemExit
    loaded = [json.loads(Path(file).read_text(encoding="utf-8")) for file in given]
    filled = {"predict": predict, "enter": enter}[command](*loaded)
    files.write(DATA, COLUMNS, filled)

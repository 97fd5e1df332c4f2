"""The runs of InferenceX on one host that no round had, played as its scripts play them: predictions first, results entered afterwards.

    python -m tools.plan_data.last_runs predict benchmarks-history.json benchmarks.json    # reads settings and dates, none of the metrics
    python -m tools.plan_data.last_runs enter benchmarks-history.json benchmarks.json      # writes the published columns beside them
    python -m tools.plan_data.last_runs today     # plays the runs with drafts and prompts as said again, into last_runs_today.csv

The rule was set before a number was read: DeepSeek-R1 on H200, B200 and B300, prefill and decode together, with and without drafts, since
2026-01-14, every run of the history that no earlier round had: other dates of settings that were predicted before, most of them with more
users than other_dates.py plays or with answers of 8,192 tokens. Runs whose prompts were most likely five times as long as they say
(protocol.py) are played with such prompts. Everything else is as in other_dates.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsjax.plan.calibration import DRAFTS, LONGER, SENT
from tools.plan_data import files, history, other_dates
from tools.plan_data.other_dates import by_setting, had_before, identity, is_on_one_host
from tools.plan_data.protocol import protocol

DATA = Path(__file__).parent / "last_runs.csv"
TODAY = Path(__file__).parent / "last_runs_today.csv"


def chosen(past: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Choose the runs of the rule with their keys, in an order that no metric decides. P1a and P1b are one setting at two dates."""
    had = had_before(past, newest) | {identity(result) for _, result in other_dates.chosen(past, newest)}
    return [
        (f"P{number}{mark}", of_setting[date])
        for number, of_setting in enumerate(by_setting(list(filter(is_on_one_host, past)), had), 1)
        for mark, date in zip("abcdefgh", sorted(of_setting), strict=False)
    ]


def setting_of(key: str) -> str:
    """The key without its date: runs of one setting are left out together where intervals are tried, as they are alike."""
    return key.rstrip("abcdefgh")


def distance(row: dict[str, str]) -> str:
    """How far a row is from what tables of operations were measured on, in the words of dsjax/plan/calibration.py."""
    found = history.distance(row)
    return SENT if found == LONGER else found


def today() -> Iterator[dict[str, str]]:
    """Rows of `TODAY`: the runs with drafts as the model of today plays them, which has been changed since their results were read."""
    drafting = [row for row in rows() if distance(row) == DRAFTS]
    known = {}
    for key, group in itertools.groupby(drafting, lambda row: row["key"]):
        metrics = list(group)
        run, date, drafts = history.run_of_row(metrics[0]), metrics[0]["date"], int(metrics[0]["drafts"])
        played = run, drafts, protocol(run, date, drafts)
        if played not in known:
            known[played] = history.predictions(run, date, drafts)
        print(key, run.name, flush=True)
        for row in metrics:
            yield {"key": key, "metric": row["metric"], "today": f"{known[played][row['metric']].value:.4g}"}


def today_rows() -> list[dict[str, str]]:
    """The rows of `TODAY`, with what was predicted and measured."""
    return files.with_today(rows(), TODAY)


def rows() -> list[dict[str, str]]:
    """The file's."""
    return files.read(DATA)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=2, enter=2, today=0)
    if command == "today":
        files.write(TODAY, files.TODAY_COLUMNS, today())
        raise SystemExit
    runs = chosen(*(json.loads(Path(file).read_text(encoding="utf-8")) for file in given))
    filled = other_dates.predictions_of(runs) if command == "predict" else history.measured(rows(), dict(runs))
    files.write(DATA, history.COLUMNS, filled)

"""All runs of InferenceX on NVIDIA's devices that no round had: predictions first, results entered afterwards.

    python -m tools.plan_data.all_left predict FILE FILE FILE FILE    # reads settings and dates, none of the metrics
    python -m tools.plan_data.all_left enter FILE FILE FILE FILE      # writes the published columns beside them

The files are those of drafts_again.py. The rule was set before a number was read: DeepSeek-R1, each setting at its two newest dates that
no round had. *J*: on one host of H200, B200 or B300, prefill and decode together; what is left is of before 2026-01-14. *K*: prefill and
decode apart, where settings and numbers of devices agree (apart_loops.py) and a recipe says how many are drafted, if any are. After this
round no run of DeepSeek-R1 in these files is left but further dates of its settings and those that cannot be played.

*J* is played as other_dates.py plays runs; *K* is played request by request whatever its number of users, with the requests at once that
its recipe says. Most settings had been predicted at another date, whose measurement is known; `is_new` says which had not.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dsjax.plan.calibration import COLD
from dsjax.plan.figure import Figure
from tools.plan_data import apart_loops, drafts_again, files, history, last_runs, other_dates
from tools.plan_data.closed_loops import played
from tools.plan_data.drafts import RANDOM_ACCEPTANCE
from tools.plan_data.inferencex_apart import ApartRun
from tools.plan_data.other_dates import by_setting, had_before, identity
from tools.plan_data.protocol import WARM_SINCE
from tools.plan_data.recipe_limits import limits

DATA = Path(__file__).parent / "all_left.csv"
DATES = 2


def had(*results: list[dict[str, Any]]) -> set[tuple[tuple, str]]:
    """Identities of the runs that a round before this one had."""
    past, newest, *_ = results
    before = [*other_dates.chosen(past, newest), *last_runs.chosen(past, newest), *drafts_again.chosen(*results)]
    return had_before(past, newest) | {identity(result) for _, result in before}


def chosen(*results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Choose the runs of the rule with their keys, in an order that no metric decides. J1a and J1b are one setting at two dates."""
    known = had(*results)
    runs = [result for file in results for result in file]
    return [
        (f"{mark}{number}{letter}", of_setting[date])
        for mark, wanted in (("J", is_on_one_host), ("K", is_apart))
        for number, of_setting in enumerate(by_setting(list(filter(wanted, runs)), known), 1)
        for letter, date in zip("ab", sorted(of_setting)[-DATES:], strict=False)
    ]


def is_new(result: dict[str, Any], known: set[tuple[tuple, str]]) -> bool:
    """Whether no round had this setting at any date."""
    setting, _ = identity(result)
    return all(setting != other for other, _ in known)


def is_on_one_host(result: dict[str, Any]) -> bool:
    """Whether a result is of the rule's *J*, whatever rounds had."""
    return other_dates.is_on_one_host({**result, "date": other_dates.SINCE})


def is_apart(result: dict[str, Any]) -> bool:
    """Whether a result is of the rule's *K*, whatever rounds had."""
    return (
        result["model"] == "dsr1"
        and result["disagg"]
        and result["hardware"] in apart_loops.CLUSTERS
        and result["framework"] in apart_loops.ENGINES
        and apart_loops.agrees(result)
        and (result["spec_method"] == "none" or limits(apart_loops.run_of(result), "mtp") is not None)
    )


def apart_predictions(run: ApartRun, date: str, drafting: str) -> tuple[dict[str, Figure], int]:
    """(rate and time a token of a run with prefill and decode apart, drafts a step)."""
    most, drafts = limits(run, drafting) or (math.inf, 0)
    operators = apart_loops.operators_of(run, date)
    found = apart_loops.deployment(run, most, drafts, RANDOM_ACCEPTANCE, operators=operators)
    seen = played(found, run.users)
    rate = found.throughput / (found.decode.layout.devices * found.count)
    shares = seen.tokens_per_s / found.throughput.value, seen.tpot.p50 / found.tpot.value
    return {"rate": rate * shares[0], "tpot": found.tpot * (shares[1] * 1e3)}, drafts


def predict(*results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Predictions of them all; runs that are played alike are played once."""
    runs = chosen(*results)
    made = []
    known: dict[tuple, tuple[dict[str, Figure], int]] = {}
    for key, result in runs:
        if key[0] == "K":
            run, date = apart_loops.run_of(result), result["date"]
            alike = run, apart_loops.operators_of(run, date), result["spec_method"]
            if alike not in known:
                known[alike] = apart_predictions(run, date, result["spec_method"])
            said, drafts = known[alike]
            mesh = " + ".join(f"{count} x {side}" for count, side in (run.prefill, run.decode))
            made += history.lines_of(key, date, run, mesh, drafts, said)
            print(key, run.name, flush=True)
    return other_dates.predictions_of([(key, result) for key, result in runs if key[0] == "J"]) + made


def enter(*results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The predictions as they are, with what was measured."""
    return history.measured(rows(), dict(chosen(*results)))


def distance(row: dict[str, str]) -> str:
    """How far a row is from what tables of operations were measured on, in the words of dsjax/plan/calibration.py.

    That cold engines are a group of their own was settled after their results had been read.
    """
    cold = row["metric"] == "ttft_p99" and row["date"] < WARM_SINCE
    return COLD if cold else history.distance(row)


def setting_of(key: str) -> str:
    """The key without its date: runs of one setting are left out together where intervals are tried, as they are alike."""
    return key.rstrip("ab")


def rows() -> list[dict[str, str]]:
    """The file's."""
    return files.read(DATA)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=4, enter=4)
    loaded = [json.loads(Path(file).read_text(encoding="utf-8")) for file in given]
    filled = {"predict": predict, "enter": enter}[command](*loaded)
    files.write(DATA, history.COLUMNS, filled)

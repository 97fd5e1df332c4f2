"""Further runs of InferenceX, played with its scripts' own settings: predictions first, results entered afterwards.

    python -m tools.plan_data.history predict benchmarks-history.json benchmarks.json    # reads settings and dates, none of the metrics
    python -m tools.plan_data.history enter benchmarks-history.json benchmarks.json      # writes the published columns beside them
    python -m tools.plan_data.history today [KEY ...]     # plays runs of one host again, into history_today.csv

The rule was set before a number was read. *A*: DeepSeek-R1 on H200, B200 and B300, prefill and decode together, no drafts: each setting
of the history (vngcloud/InferenceX-app, commit 7fe6d62) that is not in `benchmarks.json`, of its last date. *B*: the TTFT of the runs
with drafts of `benchmarks.json`, of which only rates and times a token had been predicted. *C*: DeepSeek-R1 with prefill and decode apart
and no drafts: each setting of the history that no round had, of its first date, where settings and numbers of devices
agree (apart_loops.py). *D*: the same with drafts, of both files, where a recipe of TensorRT-LLM says how many (recipe_limits.py).

What is played is what closed_loops.py plays, with what the scripts say of each run (protocol.py): most tokens in a step, the steps
between two looks for new prompts, how long TensorRT-LLM holds prompts back, and whether the engine was warmed up. Where it was not, the
first request of each user waits as it is assumed there. *C* and *D* are played up to 320 users, with as many requests at once on a DP
rank as the recipe says, and beyond that are the mean-value answer. The history has medians and no means.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dsjax.plan.calibration import DRAFTS, HOST, LONGER, RATE
from dsjax.plan.candidate import Candidate, aggregated
from dsjax.plan.figure import Figure, assumed
from dsjax.plan.simulation.reported import WARM, reported
from tools.plan_data import apart_loops, files
from tools.plan_data.apart_loops import chosen as apart_runs
from tools.plan_data.apart_loops import rows as apart_rows
from tools.plan_data.apart_loops import settings_of
from tools.plan_data.closed_loops import COLD, REQUESTS_A_USER, deployment, played
from tools.plan_data.drafts import RANDOM_ACCEPTANCE, SETTINGS, run_of
from tools.plan_data.drafts import chosen as with_drafts
from tools.plan_data.inferencex import Run
from tools.plan_data.inferencex_apart import ApartRun
from tools.plan_data.protocol import has_long_prompts, protocol, sent_by
from tools.plan_data.recipe_limits import limits

DATA = Path(__file__).parent / "history.csv"
TODAY = Path(__file__).parent / "history_today.csv"
PLAYED_USERS = 320
METRICS = {
    "rate": ("output_tput_per_gpu", 1.0),
    "tpot": ("median_tpot", 1e3),
    "ttft": ("mean_ttft", 1e3),
    "ttft_median": ("median_ttft", 1e3),
    "ttft_p99": ("p99_ttft", 1e3),
}
"""What is predicted: its column in InferenceX's results and what it is multiplied by (ms; rates are tokens a second a device)."""
APART_COLUMNS = apart_loops.COLUMNS[1:9]
OF_A, OF_B, OF_C = ("rate", "tpot", "ttft_median", "ttft_p99"), ("ttft", "ttft_median", "ttft_p99"), ("rate", "tpot")
COLUMNS = (
    "key", "date", "device", "engine", "weights", "prompt", "output", "users", "mesh", "drafts", "metric", "predicted", "low", "high",
    "measured",
)  # fmt: skip


def chosen(history: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Choose the runs of the rule with their keys, in an order that no metric decides."""
    known = {_setting(result) for result in newest if _is_plain(result)}
    last: dict[tuple, dict[str, Any]] = {}
    for result in filter(_is_plain, history):
        key = _setting(result)
        if key not in known and (key not in last or result["date"] >= last[key]["date"]):
            last[key] = result
    plain = [(f"U{number}", last[key]) for number, key in enumerate(sorted(last), 1)]
    drafting = [(f"R{number}", result) for number, result in enumerate(with_drafts(newest), 1)]
    before = {tuple(row[name] for name in APART_COLUMNS) for row in apart_rows()}
    apart = [result for run, result in apart_runs(history) if settings_of(run) not in before]
    further = {}
    for result in (*history, *newest):
        if is_apart_with_drafts(result) and limits(apart_loops.run_of(result), "mtp"):
            further.setdefault(apart_loops.run_of(result), result)
    return [
        *plain,
        *drafting,
        *((f"S{number}", result) for number, result in enumerate(apart, 1)),
        *((f"D{number}", result) for number, result in enumerate(further.values(), 1)),
    ]


def is_apart_with_drafts(result: dict[str, Any]) -> bool:
    """Whether a result is of DeepSeek-R1 with prefill and decode apart and with drafts, on devices that are known here."""
    return (
        result["model"] == "dsr1"
        and result["disagg"]
        and result["spec_method"] == "mtp"
        and result["hardware"] in apart_loops.CLUSTERS
        and result["framework"] in apart_loops.ENGINES
        and apart_loops.agrees(result)
    )


def _setting(result: dict[str, Any]) -> tuple:
    return tuple(result[name] for name in SETTINGS)


def _is_plain(result: dict[str, Any]) -> bool:
    """Whether a result is of DeepSeek-R1 on one host of NVIDIA's with everything in one engine, without drafts."""
    return (
        result["model"] == "dsr1"
        and result["hardware"] in ("h200", "b200", "b300")
        and not result["disagg"]
        and not result["is_multinode"]
        and result["spec_method"] == "none"
    )


def deployment_of(run: Run, date: str, drafts: int) -> tuple[Candidate, tuple[float, float, float]]:
    """(the deployment that is played of a run of that day, seconds that a user's first request waits longer and their ends)."""
    rule = protocol(run, date, drafts)
    plain = deployment(dataclasses.replace(run, tables=rule.tables), rule, drafts)
    batch = min(plain.batch, rule.running / plain.decode.replicas)
    first = WARM if rule.warm else rule.cold or COLD
    if not drafts:
        return dataclasses.replace(plain, batch=batch), first
    options = dataclasses.replace(plain.decode.options, drafts=drafts, acceptance=RANDOM_ACCEPTANCE)
    instance = dataclasses.replace(plain.decode, options=options, steps={})
    return aggregated(instance, 1, batch, rule.step_tokens), first


def predictions(run: Run, date: str, drafts: int = 0) -> dict[str, Figure]:
    """By the names of `METRICS`: what is played, with the relative ends of the mean-value answer of one prompt or token."""
    found, first = deployment_of(run, date, drafts)
    seen = played(found, run.users)
    cold = assumed(*first, "a user's first prompt", "point 8, and X26 to X34", "s")
    made = reported(found, seen, REQUESTS_A_USER, cold)
    return {
        kind: figure / found.decode.layout.devices if kind == RATE else figure * 1e3 for kind, figure in made.items()
    }


def apart_predictions(run: ApartRun, drafting: str) -> tuple[dict[str, Figure], int]:
    """(predictions of a run with prefill and decode apart by the names of `METRICS`, drafts a step)."""
    most, drafts = limits(run, drafting) or (math.inf, 0)
    found = apart_loops.deployment(run, most, drafts, RANDOM_ACCEPTANCE)
    rate = found.throughput / (found.decode.layout.devices * found.count)
    if run.users > PLAYED_USERS:
        return {"rate": rate, "tpot": found.tpot * 1e3}, drafts
    seen = played(found, run.users)
    shares = seen.tokens_per_s / found.throughput.value, seen.tpot.p50 / found.tpot.value
    return {"rate": rate * shares[0], "tpot": found.tpot * (shares[1] * 1e3)}, drafts


def distance(row: dict[str, str]) -> str:
    """How far a row is from what tables of operations were measured on, in the words of dsjax/plan/calibration.py."""
    if " + " not in row["mesh"]:
        longer = has_long_prompts(run_of_row(row), row["date"])
        return LONGER if longer else DRAFTS if row["drafts"] != "0" else HOST
    if row["drafts"] != "0":
        return DRAFTS
    prefill, decode = row["mesh"].split(" + ")
    return apart_loops.distance({"device": row["device"], "prefill": prefill, "decode": decode})


def predict(history: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Predictions of them all."""
    made = []
    for key, result in chosen(history, newest):
        drafts = 0
        if key[0] in "SD":
            run = apart_loops.run_of(result)
            (said, drafts), metrics = apart_predictions(run, result["spec_method"]), OF_C
            mesh = " + ".join(f"{count} x {side}" for count, side in (run.prefill, run.decode))
        else:
            run, drafts = run_of(result)
            drafts = drafts if key.startswith("R") else 0
            said, metrics, mesh = predictions(run, result["date"], drafts), OF_B if drafts else OF_A, run.mesh
        made += lines_of(key, result["date"], run, mesh, drafts, {metric: said[metric] for metric in metrics})
        print(key, run.name, flush=True)
    return made


def lines_of(
    key: str, date: str, run: Run | ApartRun, mesh: str, drafts: int, said: dict[str, Figure]
) -> list[dict[str, str]]:
    """A run's predictions by metric, as lines of a round's file; what was measured is not entered yet."""
    told = (run.device, run.engine, run.weights, run.prompt, run.output, run.users, mesh, drafts)
    lines = []
    for metric, figure in said.items():
        ends = [f"{end:.4g}" for end in (figure.value, figure.low, figure.high)]
        lines.append(dict(zip(COLUMNS, map(str, (key, date, *told, metric, *ends, "")), strict=True)))
    return lines


def enter(history: list[dict[str, Any]], newest: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The predictions as they are, with what was measured."""
    return measured(rows(), dict(chosen(history, newest)))


def measured(predicted: list[dict[str, str]], results: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Lines of a round's file, into each of which what its run measured was entered. results: by the keys of runs."""
    for row in predicted:
        column, factor = METRICS[row["metric"]]
        row["measured"] = f"{results[row['key']]['metrics'][column] * factor:.4g}"
    return predicted


def today(keys: Sequence[str]) -> Iterator[dict[str, str]]:
    """Rows of `TODAY`: *A* and *B* as the model of today plays them, which has been changed since their measured values were read.

    keys: of these runs alone; none are all, the largest of which take hours.
    """
    for key, group in itertools.groupby(rows(), lambda row: row["key"]):
        metrics = list(group)
        row = metrics[0]
        run, drafts = run_of_row(row), int(row["drafts"])
        if key[0] not in "UR" or (keys and key not in keys):
            continue
        said = predictions(sent_by(run, row["date"]), row["date"], drafts)
        for one in metrics:
            yield {"key": key, "metric": one["metric"], "today": f"{said[one['metric']].value:.4g}"}


def run_of_row(row: dict[str, str]) -> Run:
    """The run on one host that a row is of."""
    lengths = (int(row[name]) for name in ("prompt", "output", "users"))
    return Run(row["device"], row["engine"], row["weights"], *lengths, row["mesh"])


def today_rows() -> list[dict[str, str]]:
    """The rows of *A* and *B* that were played again, with `today` beside what was predicted and measured."""
    return files.with_today(rows(), TODAY)


def drafts_apart_today(acceptance: float) -> dict[str, float]:
    """Mean absolute errors, by metric, of *D* as the model of today predicts it: the mean-value answer, first draft accepted so often."""
    errors: dict[str, list[float]] = {metric: [] for metric in OF_C}
    said: dict[str, dict[str, float]] = {}
    for row in rows():
        if row["key"].startswith("D"):
            if row["key"] not in said:
                found = _apart_with_drafts(row, acceptance)
                rate = found.throughput.value / (found.decode.layout.devices * found.count)
                said[row["key"]] = {"rate": rate, "tpot": found.tpot.value * 1e3}
            errors[row["metric"]].append(abs(said[row["key"]][row["metric"]] / float(row["measured"]) - 1))
    return {metric: statistics.mean(each) for metric, each in errors.items()}


def _apart_with_drafts(row: dict[str, str], acceptance: float) -> Candidate:
    """A run of *D* as a deployment, by its row."""
    sides = [(int(count), mesh) for count, _, mesh in (side.partition(" x ") for side in row["mesh"].split(" + "))]
    lengths = (int(row[name]) for name in ("prompt", "output", "users"))
    run = ApartRun(row["device"], row["engine"], row["weights"], *lengths, *sides)
    return apart_loops.deployment(run, *limits(run, "mtp"), acceptance)


def rows() -> list[dict[str, str]]:
    """The file's."""
    return files.read(DATA)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=2, enter=2, today=None)
    if command == "today":
        files.write(TODAY, files.TODAY_COLUMNS, today(given))
        raise SystemExit
    loaded = [json.loads(Path(file).read_text(encoding="utf-8")) for file in given]
    filled = {"predict": predict, "enter": enter}[command](*loaded)
    files.write(DATA, COLUMNS, filled)

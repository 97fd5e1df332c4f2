"""Runs of InferenceX that no round had, most of them with drafts: predictions first, results entered afterwards.

    python -m tools.plan_data.drafts_again predict FILE FILE FILE FILE    # reads settings and dates, none of the metrics
    python -m tools.plan_data.drafts_again enter FILE FILE FILE FILE      # writes the published columns beside them
    python -m tools.plan_data.drafts_again today      # plays SGLang's runs with attention DP again, into drafts_again_today.csv

The files are `benchmarks-history.json` and `benchmarks.json` of vngcloud/InferenceX-app at commit 7fe6d62 and both at commit cac6246,
whose history has runs that the later copy has not. The rule was set before a number was read. *E*: DeepSeek-R1 on one host since
2026-01-14, with and without drafts, that only the older copy has. *F*: the TTFT of the runs on one host with drafts of which nothing but
rate and time a token had been predicted (drafts.py). *G*: DeepSeek-R1 on NVIDIA's devices with prefill and decode apart and with drafts,
every date that no round had, where settings and numbers of devices agree (apart_loops.py) and a recipe says how many are drafted. No run
of SGLang with prefill and decode apart and drafts had been predicted before.

*E* and *F* are played as other_dates.py plays runs; *G* is played request by request whatever its number of users.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dsjax.plan.calibration import LONGER, SENT
from dsjax.plan.engine import ABSORBS_BELOW, PUBLISHED
from dsjax.plan.figure import Figure
from dsjax.plan.operations import FLASHINFER_FP8_RATE
from tools.plan_data import apart_loops, files, history, last_runs, other_dates
from tools.plan_data.closed_loops import played
from tools.plan_data.drafts import RANDOM_ACCEPTANCE
from tools.plan_data.drafts import chosen as with_drafts
from tools.plan_data.inferencex_apart import ApartRun
from tools.plan_data.other_dates import by_setting, had_before, identity, is_on_one_host
from tools.plan_data.recipe_limits import limits

DATA = Path(__file__).parent / "drafts_again.csv"
TODAY = Path(__file__).parent / "drafts_again_today.csv"
TTFT_ALONE, APART = ("ttft_median", "ttft_p99"), ("rate", "tpot")


class Recipe(NamedTuple):
    """What a recipe of SGLang says: drafts a step, requests of a DP rank that decode at once, prompt tokens of a DP rank in a step.

    overlapped: whether `SGLANG_ENABLE_SPEC_V2` is set. `--max-running-requests` and `--chunked-prefill-size` are divided by the DP ranks
    of an instance (sglang/srt/server_args.py, srt/managers/scheduler.py).
    """

    drafts: int
    running: int
    step: int
    overlapped: bool = True


_SPLIT_SINCE = "2026-06-01"
"""Since then FP4 on B200 with prompts of 8,192 has recipes of its own."""
RECIPES = {
    # NVIDIA/srt-slurm, commit 5063eb43, recipes/b200-fp8/**/mtp.
    ("b200", "fp8", 1024, 1024, "dp=8", "2 x dp=8"): Recipe(1, 64, 4096),
    ("b200", "fp8", 1024, 1024, "dp=8", "5 x dp=8"): Recipe(2, 64, 4096),
    ("b200", "fp8", 1024, 1024, "tp=8", "1 x tp=8"): Recipe(2, 512, 32768),
    ("b200", "fp8", 1024, 1024, "tp=8", "3 x tp=8"): Recipe(2, 512, 32768),
    ("b200", "fp8", 8192, 1024, "dp=8", "1 x dp=8"): Recipe(2, 64, 4096),
    ("b200", "fp8", 8192, 1024, "tp=8", "1 x tp=8"): Recipe(2, 512, 32768),
    ("b200", "fp8", 8192, 1024, "tp=8", "6 x tp=8"): Recipe(2, 512, 32768),
    # The same, recipes/b200-fp4/**/mtp.
    ("b200", "fp4", 1024, 1024, "dp=4", "1 x dp=8"): Recipe(2, 128, 8192),
    ("b200", "fp4", 1024, 1024, "dp=4", "5 x tp=8"): Recipe(2, 512, 8192),
    ("b200", "fp4", 1024, 1024, "dp=4", "6 x tp=8"): Recipe(2, 512, 8192),
    ("b200", "fp4", 8192, 1024, "tp=4,ep=1", "1 x tp=8,ep=1"): Recipe(2, 512, 32768),
    # The same, recipes/h100/**/mtp and recipes/h200.
    ("h100", "fp8", 1024, 1024, "tp=16,ep=1", "1 x dp=16"): Recipe(2, 4, 2048, False),
    ("h100", "fp8", 1024, 1024, "tp=16,ep=1", "2 x tp=16,ep=1"): Recipe(2, 128, 2048),
    ("h100", "fp8", 1024, 8192, "tp=16,ep=1", "1 x dp=16"): Recipe(2, 4, 2048),
    ("h100", "fp8", 1024, 8192, "tp=16,ep=1", "2 x tp=16,ep=1"): Recipe(2, 64, 2048),
    ("h100", "fp8", 8192, 1024, "tp=16,ep=1", "1 x dp=16"): Recipe(2, 4, 2048),
    ("h100", "fp8", 8192, 1024, "tp=16,ep=1", "1 x tp=16,ep=1"): Recipe(2, 128, 2048),
    ("h200", "fp8", 1024, 1024, "tp=8,ep=1", "9 x tp=8,ep=1"): Recipe(2, 64, 163840),
    ("h200", "fp8", 1024, 1024, "dp=8", "6 x dp=8"): Recipe(2, 16, 8192),
    ("h200", "fp8", 8192, 1024, "tp=8,ep=1", "1 x dp=8"): Recipe(2, 24, 163840),
    ("h200", "fp8", 8192, 1024, "tp=8,ep=1", "3 x tp=8,ep=1"): Recipe(2, 32, 32768),
    ("h200", "fp8", 8192, 1024, "tp=8,ep=1", "6 x tp=8,ep=1"): Recipe(2, 16, 32768),
    ("h200", "fp8", 8192, 1024, "tp=8,ep=1", "7 x tp=8,ep=1"): Recipe(2, 2, 32768),
}
"""(device, weights, prompt, output, mesh of a prefill instance, decode instances) → what the recipe says."""
SPLIT = {
    # SemiAnalysisAI/InferenceX, commit 263aace86, benchmarks/multi_node/srt-slurm-recipes/sglang/dsr1/b200-fp4/8k1k/disagg/mtp.
    ("b200", "fp4", 8192, 1024, "tp=4,ep=1", "1 x tp=8,ep=1"): Recipe(3, 512, 24576),
    ("b200", "fp4", 8192, 1024, "tp=4,ep=1", "3 x tp=8,ep=1"): Recipe(3, 512, 24576),
    ("b200", "fp4", 8192, 1024, "tp=4,ep=1", "5 x tp=8,ep=1"): Recipe(3, 512, 24576),
    ("b200", "fp4", 8192, 1024, "dp=4", "1 x dp=8"): Recipe(2, 256, 6144),
}


def recipe_of(run: ApartRun, date: str) -> Recipe | None:
    """What the recipe of a run of that day says; None where none is known."""
    key = (run.device, run.weights, run.prompt, run.output, run.prefill[1], f"{run.decode[0]} x {run.decode[1]}")
    return (SPLIT.get(key) if date >= _SPLIT_SINCE else None) or RECIPES.get(key)


def chosen(*files: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Choose the runs of the rule with their keys, in an order that no metric decides. G1a and G1b are one setting at two dates."""
    past, newest, *older = files
    had = had_before(past, newest) | {identity(result) for _, result in other_dates.chosen(past, newest)}
    had |= {identity(result) for _, result in last_runs.chosen(past, newest)}
    before = [*older[0], *older[1]]
    alone = by_setting(list(filter(is_on_one_host, before)), had | set(map(identity, [*past, *newest])))
    rated = {identity(result) for result in with_drafts(newest)}
    ttft = [result for result in with_drafts([*past, *newest]) if identity(result) not in rated]
    done = {identity(result) for key, result in history.chosen(past, newest) if key.startswith("D")}
    apart = by_setting([result for result in (*past, *newest, *before) if is_apart(result)], done)
    return [
        *_dated("E", alone),
        *((f"F{number}", result) for number, result in enumerate(ttft, 1)),
        *_dated("G", apart),
    ]


def _dated(mark: str, settings: list[dict[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{mark}{number}{letter}", of_setting[date])
        for number, of_setting in enumerate(settings, 1)
        for letter, date in zip("abcdefgh", sorted(of_setting), strict=False)
    ]


def is_apart(result: dict[str, Any]) -> bool:
    """Whether a result is of the rule's *G*, whatever rounds had."""
    if not history.is_apart_with_drafts(result):
        return False
    run = apart_loops.run_of(result)
    return (recipe_of(run, result["date"]) if run.engine == "sglang" else limits(run, "mtp")) is not None


def apart_predictions(run: ApartRun, date: str, gathers: bool = False) -> tuple[dict[str, Figure], int]:
    """(rate and time a token of a run with prefill and decode apart, drafts a step). gathers: as of `Engine`, of SGLang."""
    if run.engine == "trt":
        most, drafts = limits(run, "mtp")
        found = apart_loops.deployment(run, most, drafts, RANDOM_ACCEPTANCE)
    else:
        drafts, most, step, overlapped = recipe_of(run, date)
        rate = FLASHINFER_FP8_RATE if run.weights == "fp8" else None
        below = ABSORBS_BELOW["sglang"]
        engine = dataclasses.replace(PUBLISHED, mixes=False, absorbs_below=below, fp8_rate=rate, gathers=gathers)
        host = "overlapped" if overlapped else "serial"
        found = apart_loops.deployment(run, most, drafts, RANDOM_ACCEPTANCE, engine=engine, host=host, step=step)
    seen = played(found, run.users)
    rate = found.throughput / (found.decode.layout.devices * found.count)
    shares = seen.tokens_per_s / found.throughput.value, seen.tpot.p50 / found.tpot.value
    return {"rate": rate * shares[0], "tpot": found.tpot * (shares[1] * 1e3)}, drafts


def predict(*files: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Predictions of them all; runs that are played alike are played once."""
    runs = chosen(*files)
    made = other_dates.predictions_of([(key, result) for key, result in runs if key[0] in "EF"])
    made = [row for row in made if row["key"][0] == "E" or row["metric"] in TTFT_ALONE]
    known: dict[tuple[ApartRun, Recipe | None], tuple[dict[str, Figure], int]] = {}
    for key, result in runs:
        if key[0] == "G":
            run, date = apart_loops.run_of(result), result["date"]
            alike = run, recipe_of(run, date)
            if alike not in known:
                known[alike] = apart_predictions(run, date)
            said, drafts = known[alike]
            mesh = " + ".join(f"{count} x {side}" for count, side in (run.prefill, run.decode))
            made += history.lines_of(key, date, run, mesh, drafts, said)
            print(key, run.name, flush=True)
    return made


def enter(*files: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The predictions as they are, with what was measured."""
    return history.measured(rows(), dict(chosen(*files)))


def today() -> Iterator[dict[str, str]]:
    """Rows of `TODAY`: SGLang's runs of *G* with attention DP on a side, whose recipes have no all-to-all, with tokens that are gathered.

    The model has been changed since their results were read.
    """
    known: dict[tuple[ApartRun, Recipe | None], dict[str, Figure]] = {}
    for key, group in itertools.groupby(rows(), lambda row: row["key"]):
        metrics = list(group)
        row = metrics[0]
        if not key.startswith("G") or row["engine"] != "sglang" or "dp=" not in row["mesh"]:
            continue
        sides = [(int(count), mesh) for count, _, mesh in (side.partition(" x ") for side in row["mesh"].split(" + "))]
        lengths = (int(row[name]) for name in ("prompt", "output", "users"))
        run = ApartRun(row["device"], row["engine"], row["weights"], *lengths, *sides)
        alike = run, recipe_of(run, row["date"])
        if alike not in known:
            known[alike] = apart_predictions(run, row["date"], gathers=True)[0]
        print(key, run.name, flush=True)
        for one in metrics:
            yield {"key": key, "metric": one["metric"], "today": f"{known[alike][one['metric']].value:.4g}"}


def today_rows() -> list[dict[str, str]]:
    """The rows of `TODAY`, with what was predicted and measured."""
    return files.with_today(rows(), TODAY)


def setting_of(key: str) -> str:
    """The key without its date: runs of one setting are left out together where intervals are tried, as they are alike."""
    return key.rstrip("abcdefgh")


def distance(row: dict[str, str]) -> str:
    """How far a row is from what tables of operations were measured on, in the words of dsjax/plan/calibration.py."""
    found = history.distance(row)
    return SENT if found == LONGER else found


def rows() -> list[dict[str, str]]:
    """The file's."""
    return files.read(DATA)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=4, enter=4, today=0)
    if command == "today":
        files.write(TODAY, files.TODAY_COLUMNS, today())
        raise SystemExit
    loaded = [json.loads(Path(file).read_text(encoding="utf-8")) for file in given]
    filled = {"predict": predict, "enter": enter}[command](*loaded)
    files.write(DATA, history.COLUMNS, filled)

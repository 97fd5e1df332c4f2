"""Closed loops of InferenceX on one host with drafts by the MTP module: predictions first, its results entered afterwards.

    python -m tools.plan_data.drafts predict benchmarks-history.json benchmarks.json    # reads the runs' settings and none of their metrics
    python -m tools.plan_data.drafts enter benchmarks-history.json benchmarks.json      # writes the published columns beside them

No run with drafts had been predicted before. The rule was set before a number was read: DeepSeek-R1 on H200, B200 and B300, prefill and
decode together, `spec_method` mtp, each setting once, of its last date. By the scripts (SemiAnalysisAI/InferenceX, `*_mtp.sh`) SGLang
drafts two tokens, TensorRT-LLM three, and one where attention is data parallel. How many are accepted is not published: what is assumed
is the planner's own 0.85. Lengths are from 0.8 to 1 times the given ones; the answer is the mean-value one.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

from dsjax.plan.calibration import DRAFTS, LONGER
from dsjax.plan.candidate import aggregated
from dsjax.plan.figure import Figure
from tools.plan_data import files
from tools.plan_data.closed_loops import STEP_TOKENS, deployment
from tools.plan_data.inferencex import LENGTHS_SHARE, SOURCE, Run
from tools.plan_data.protocol import has_long_prompts
from tools.plan_data.validation import Point

DATA = Path(__file__).parent / "drafts.csv"
METRICS = {"rate": ("output_tput_per_gpu", 1.0), "tpot": ("median_tpot", 1e3)}
"""Columns of the results; the history has no means of a token's time, so that medians of requests are taken of all."""
COLUMNS = (
    "key", "device", "engine", "weights", "prompt", "output", "users", "mesh", "drafts", "date", "metric", "predicted", "low", "high",
    "measured",
)  # fmt: skip
SETTINGS = (
    "hardware",
    "framework",
    "precision",
    "isl",
    "osl",
    "conc",
    "decode_tp",
    "decode_ep",
    "decode_dp_attention",
)


def chosen(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose of these results those of the rule, each setting once, in an order that no metric decides."""
    last: dict[tuple, dict[str, Any]] = {}
    for result in results:
        if (
            result["model"] == "dsr1"
            and result["hardware"] in ("h200", "b200", "b300")
            and not result["disagg"]
            and not result["is_multinode"]
            and result["spec_method"] == "mtp"
        ):
            key = tuple(result[name] for name in SETTINGS)
            if key not in last or result["date"] >= last[key]["date"]:
                last[key] = result
    return [last[key] for key in sorted(last)]


def run_of(result: dict[str, Any]) -> tuple[Run, int]:
    """(the run, drafts a step)."""
    width, ep, apart = result["decode_tp"], result["decode_ep"], result["decode_dp_attention"]
    mesh = f"dp={width}" if apart else f"tp={width},ep={ep}"
    engine = result["framework"]
    run = Run(result["hardware"], engine, result["precision"], result["isl"], result["osl"], result["conc"], mesh)
    return run, 2 if engine == "sglang" else 1 if apart else 3


def predict(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Predictions of them all."""
    made = []
    for number, result in enumerate(chosen(results), 1):
        run, drafts = run_of(result)
        plain = deployment(run)
        instance = dataclasses.replace(
            plain.decode, options=dataclasses.replace(plain.decode.options, drafts=drafts), steps={}
        )
        found = aggregated(instance, 1, plain.batch, STEP_TOKENS)
        for metric, figure in (("rate", found.throughput / found.devices), ("tpot", found.tpot * 1e3)):
            ends = [f"{end:.4g}" for end in (figure.value, figure.low, figure.high)]
            told = (run.device, run.engine, run.weights, run.prompt, run.output, run.users, run.mesh, drafts)
            cells = (f"V{number}", *told, result["date"], metric, *ends, "")
            made.append(dict(zip(COLUMNS, map(str, cells), strict=True)))
    return made


def enter(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The predictions as they are, with what was measured."""
    entered = rows()
    by_key = {f"V{number}": result for number, result in enumerate(chosen(results), 1)}
    for row in entered:
        column, factor = METRICS[row["metric"]]
        row["measured"] = f"{by_key[row['key']]['metrics'][column] * factor:.4g}"
    return entered


RANDOM_ACCEPTANCE = 0.70
"""Chance that the first draft is accepted where prompts are random tokens: measured of DeepSeek-V4-Flash at temperature 1
(vllm-project/vllm pull request 41044), whose one module is trained and used as R1's. Of R1 on random prompts nothing is published."""


def today(row: dict[str, str], acceptance: float) -> tuple[Figure, Figure]:
    """(rate, ms a token) of a run as the model of today predicts it, which has been changed since the measured values were read.

    TensorRT-LLM's scripts allow a step one prompt (`MAX_NUM_TOKENS`: the prompt, 64, and the tokens that are verified).
    """
    told = [row[name] for name in ("device", "engine", "weights")]
    run = Run(*told, *(int(row[name]) for name in ("prompt", "output", "users")), row["mesh"])
    plain = deployment(run)
    options = dataclasses.replace(plain.decode.options, drafts=int(row["drafts"]), acceptance=acceptance)
    instance = dataclasses.replace(plain.decode, options=options, steps={})
    most = min(STEP_TOKENS, LENGTHS_SHARE * run.prompt) if run.engine == "trt" else STEP_TOKENS
    found = aggregated(instance, 1, plain.batch, most)
    return found.throughput / found.devices, found.tpot * 1e3


@cache
def points_of_today(acceptance: float) -> list[Point]:
    """The rates of these runs."""
    found = []
    for row in rows():
        if row["metric"] == "rate":
            rate, name = (
                today(row, acceptance)[0],
                f"{row['device'].upper()}, {row['engine']}, {row['mesh']}, {row['users']} users",
            )
            figure = partial(_same, rate)
            found.append(Point(row["key"], name, SOURCE, "tokens/s", float(row["measured"]), figure, "serving"))
    return found


def _same(figure: Figure) -> Figure:
    return figure


def distance(row: dict[str, str]) -> str:
    """How far a row is from what tables of operations were measured on, in the words of dsjax/plan/calibration.py."""
    run = Run(
        row["device"], row["engine"], row["weights"], *(int(row[n]) for n in ("prompt", "output", "users")), row["mesh"]
    )
    return LONGER if has_long_prompts(run, row["date"]) else DRAFTS


def rows() -> list[dict[str, str]]:
    """The file's."""
    return files.read(DATA)


if __name__ == "__main__":
    command, given = files.arguments(__doc__, predict=2, enter=2)
    loaded = [result for path in given for result in json.loads(Path(path).read_text(encoding="utf-8"))]
    filled = {"predict": predict, "enter": enter}[command](loaded)
    files.write(DATA, COLUMNS, filled)

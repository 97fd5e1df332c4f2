"""Public launches of DeepSeek models, some of which ran out of memory, beside what `dsjax plan fit` says of them.

The rule (`dsjax/plan/fit.py`) was committed before the launches were looked for, and its verdict on each (`said`, `left_gb`) before its
outcome (`fitted`, `happened`) was entered. Columns of the CSV: `thread` below https://github.com/; `device` of `DEVICES`; `precision` of
the planner or `w4afp8`; `stages` of a pipeline, whose mesh is one stage's; `prefill_tokens` of a DP rank in a step; `longest` request;
`sampled`, `graphs`, `deepep`, `mtp` as `Launch` has them. Left out are launches whose options are not given, versions of vLLM before 0.7.1
with long requests (their cache is not the latent one), other engines, AWQ and GGUF.
"""

import csv
import dataclasses
import functools
from pathlib import Path

from dsjax.config import load_config
from dsjax.plan.fit import Launch, Verdict, fit
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import BF16, PRECISIONS, Precision
from tools.plan_data import files

CSV = Path(__file__).with_name("fit_incidents.csv")
SECOND = Path(__file__).with_name("fit_incidents_second.csv")
"""Further launches, which the rule as it was changed after the first ones had not been held against."""
DRY_RUNS = Path(__file__).with_name("fit_dryruns.csv")
"""What a device holds before a step by `dsjax dryrun`, of the launches whose options dsjax has (fit_dryruns.py)."""
SITE = "https://github.com/"
DEVICES = {
    "90 GiB": 92160,
    "B200": 183359,
    "H100": 81559,
    "H20": 97871,
    "H20-3e": 143771,
    "H200": 143771,
    "L40": 46068,
    "RTX PRO 6000": 97887,
    "RTX 4090": 24564,
}
"""MiB of a device, as nvidia-smi shows them."""
W4AFP8 = dataclasses.replace(PRECISIONS["fp8"], name="w4afp8", expert=0.5 + 2 / 128, mlp_bytes=PRECISIONS["fp8"].linear)
"""Routed experts in four bits with a bf16 scale for 128, everything else in FP8."""


def rows(file: Path = CSV) -> list[dict[str, str]]:
    """The launches of a file."""
    return files.read(file)


def judge(row: dict[str, str]) -> Verdict:
    """What the rule says of a launch today."""
    config = load_config(row["model"])
    launch = Launch(
        engine=row["engine"],
        device_bytes=DEVICES[row["device"]] * 2**20,
        fraction=float(row["fraction"]),
        prefill_tokens=int(row["prefill_tokens"]),
        longest=int(row["longest"]),
        sampled=int(row["sampled"]),
        graphs=row["graphs"] == "1",
        deepep=row["deepep"] == "1",
        mtp=row["mtp"] == "1",
        stages=int(row.get("stages") or 1),
    )
    return fit(config, parse_layout(row["mesh"], int(row.get("redundant") or 0), config), _precision(row), launch)


def _precision(row: dict[str, str]) -> Precision:
    chosen = W4AFP8 if row["precision"] == W4AFP8.name else PRECISIONS[row["precision"]]
    return dataclasses.replace(chosen, cache={"bf16": BF16, "fp8": 1.0}[row["cache"]])


def right(row: dict[str, str], words: str) -> bool:
    """Whether a verdict in these words is what happened."""
    return (row["fitted"] == "yes") == ("not" not in words)


def score(file: Path = CSV) -> dict[str, tuple[int, int]]:
    """(right, counted) of the verdicts that were committed first, and of today's; by outcome too."""
    counted = [row for row in rows(file) if row["fitted"]]
    found = {}
    for name, said in (("committed", lambda row: row["said"]), ("today", lambda row: judge(row).words)):
        for which in ("all", "yes", "no"):
            group = [row for row in counted if which in ("all", row["fitted"])]
            found[f"{name}, {which}"] = (sum(right(row, said(row)) for row in group), len(group))
    return found


@functools.cache
def held() -> dict[str, int]:
    """Least bytes of a device that a launch takes, by its key, of those that were run through `dsjax dryrun`.

    They are weights and state, and of vLLM, which does not start without, the cache of the longest request.
    """
    engines = {row["key"]: row["engine"] for row in (*rows(), *rows(SECOND))}
    with DRY_RUNS.open(encoding="utf-8", newline="") as lines:
        return {
            row["key"]: int(row["weights"]) + int(row["state"]) + int(row["cache"]) * (engines[row["key"]] == "vllm")
            for row in csv.DictReader(lines)
        }


def room(row: dict[str, str]) -> float:
    """Bytes that weights and cache may take of a device: the fraction's share, and of TensorRT-LLM, whose fraction is of what weights
    leave, the whole."""
    return DEVICES[row["device"]] * 2**20 * (1.0 if row["engine"] == "tensorrt-llm" else float(row["fraction"]))


def dry_run_score() -> dict[str, tuple[int, int]]:
    """(right, counted) of what the dry run's exact bytes say of both files' launches, by outcome: whether they lie in the room."""
    counted = [row for row in (*rows(), *rows(SECOND)) if row["fitted"] and row["key"] in held()]
    found = {}
    for which in ("yes", "no"):
        group = [row for row in counted if row["fitted"] == which]
        found[which] = (sum((held()[row["key"]] <= room(row)) == (which == "yes") for row in group), len(group))
    return found


def _dry_run(row: dict[str, str]) -> str:
    if row["key"] not in held():
        return "–"
    over = held()[row["key"]] > room(row)
    wrong = row["fitted"] and over == (row["fitted"] == "yes")
    return f"{held()[row['key']] / 1e9:.1f} of {room(row) / 1e9:.1f} GB{', too large' * over}{' ✗' if wrong else ''}"


def table(file: Path = CSV) -> str:
    """Markdown: each launch of a file with the verdict that was committed, today's, the dry run's bytes, and what happened."""
    lines = ["| # | launch | said | today | dry run | what happened |", "|---|---|---|---|---|---|"]
    for row in rows(file):
        today = judge(row)
        left = min(condition.left.value for condition in today.conditions) / 1e9
        mark = "" if not row["fitted"] or right(row, row["said"]) else " ✗"
        name = row["thread"].removeprefix("SemiAnalysisAI/InferenceX/blob/main/benchmarks/single_node/")
        name = (
            name.replace("/issues/", "#").replace("/pull/", "#").partition("/")[2]
            if "/" in name
            else f"InferenceX {name}"
        )
        drafts = ", MTP" if row["mtp"] == "1" else ""
        what = f"{row['engine']} {row['version']}, {row['model']} {row['precision']}{drafts}, {row['devices']} × {row['device']}"
        lines.append(
            f"| {row['key']} | [{name}]({SITE}{row['thread']}): {what}, `{row['mesh']}`, fraction {row['fraction']} | {row['said']}{mark} "
            f"| {left:+.1f} GB | {_dry_run(row)} | {row['happened']} |"
        )
    return "\n".join(lines)

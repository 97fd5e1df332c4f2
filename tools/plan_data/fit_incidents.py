"""Public launches of DeepSeek models, some of which ran out of memory, beside what `dsjax plan fit` says of them.

    python -m tools.plan_data.fit_incidents

The rule (`dsjax/plan/fit.py`) was committed before the launches were looked for, and its verdict on each (`said`, `left_gb`) before its
outcome (`fitted`, `happened`) was entered. N1 to N12 were judged after the rule had been changed by what M1 to M28 showed. Columns of the
CSV: `thread` below https://github.com/; `device` of `DEVICES`; `precision` of the planner or `w4afp8`; `stages` of a pipeline, 1
in all; `prefill_tokens` of a DP rank in a step; `longest` request; `sampled`, `graphs`, `deepep`, `mtp` as `Launch` has them.
Left out are launches whose options are not given, vLLM before 0.7.1 with long requests (its cache is not the latent one), other engines,
AWQ and GGUF.
"""

import argparse
import csv
import dataclasses
from pathlib import Path

from dsjax.config import load_config
from dsjax.plan.fit import Launch, Verdict, fit
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import BF16, PRECISIONS, Precision

DATA = Path(__file__).with_suffix(".csv")
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
W4AFP8 = dataclasses.replace(PRECISIONS["fp8"], name="w4afp8", expert=0.5 + 2 / 128, packs_mlp=False)
"""Routed experts in four bits with a bf16 scale for 128, everything else in FP8."""


def rows() -> list[dict[str, str]]:
    """The launches."""
    with DATA.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def judge(row: dict[str, str]) -> Verdict:
    """What the rule says of a launch today."""
    config = load_config(row["model"])
    launch = Launch(
        engine=row["engine"],
        device_bytes=DEVICES[row["device"]] * 2**20,
        fraction=float(row["fraction"]),
        **{name: int(row[name]) for name in ("prefill_tokens", "longest", "sampled")},
        **{name: row[name] == "1" for name in ("graphs", "deepep", "mtp")},
    )
    return fit(config, parse_layout(row["mesh"], int(row["redundant"]), config), _precision(row), launch)


def _precision(row: dict[str, str]) -> Precision:
    chosen = W4AFP8 if row["precision"] == W4AFP8.name else PRECISIONS[row["precision"]]
    return dataclasses.replace(chosen, cache={"bf16": BF16, "fp8": 1.0}[row["cache"]])


def is_right(row: dict[str, str], words: str) -> bool:
    """Whether a verdict in these words is what happened."""
    return (row["fitted"] == "yes") == ("not" not in words)


def score(outcome: str = "") -> dict[str, tuple[int, int]]:
    """(right, counted) of the verdicts that were committed first, and of today's. outcome: `yes` or `no`, only of launches that fitted or
    that failed."""
    counted = [row for row in rows() if row["fitted"] and outcome in ("", row["fitted"])]
    verdicts = {"committed": lambda row: row["said"], "today": lambda row: judge(row).words}
    return {name: (sum(is_right(row, said(row)) for row in counted), len(counted)) for name, said in verdicts.items()}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for row in rows():
        print(
            f"{row['key']:4} said: {row['said']:14} today: {judge(row).words:14} fitted: {row['fitted'] or '?':4} {row['happened']}"
        )
    for outcome, name in (("", "all"), ("yes", "fitted"), ("no", "failed")):
        print(f"{name}: right of counted {score(outcome)}")

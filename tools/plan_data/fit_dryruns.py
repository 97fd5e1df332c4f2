"""The launches of fit_incidents.py whose options dsjax has itself, through `dsjax dryrun`: what each device holds before a step begins.

    python -m tools.plan_data.fit_dryruns        # writes fit_dryruns.csv; half a minute for each launch

The program is compiled for the CPU, because the compiler for GPUs is not at hand: weights, the cache of one longest request on each DP rank
and the step's state are exact there, and a step's temporaries are not an accelerator's, so that they are left out. These are the least
that a launch takes: one that is too large by them is too large, and of any other nothing follows but that they have room.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tools.plan_data import files
from tools.plan_data.fit_incidents import DRY_RUNS, SECOND, rows

COLUMNS = ("key", "weights", "cache", "state")


def command(row: dict[str, str], report: str) -> list[str] | None:
    """The arguments of `dsjax dryrun` for a launch; None where dsjax has no such weights or layout.

    report: the file that it writes.
    """
    if row["precision"] not in ("fp8", "bf16") or int(row.get("stages") or 1) > 1:
        return None
    options = {
        "--model": row["model"],
        "--mesh": row["mesh"],
        "--target": "cpu",
        "--weights": {"bf16": "auto", "fp8": "fp8"}[row["precision"]],
        "--kv-cache-dtype": {"bf16": "bfloat16", "fp8": "fp8"}[row["cache"]],
        "--batch": "1",
        "--context": row["longest"],
        "--json": report,
    }
    if int(row.get("redundant") or 0):
        options["--redundant-experts"] = row["redundant"]
    if row["mtp"] == "1":
        options["--speculative-config"] = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    return [part for pair in options.items() for part in pair]


def run(row: dict[str, str]) -> dict[str, int] | None:
    """`COLUMNS` of a launch by `dsjax dryrun`; None where dsjax has no such launch, for a reason that goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments = command(row, str(report))
        if arguments is None:
            return None
        call = [sys.executable, "-m", "dsjax.dryrun", *arguments]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            print(row["key"], *done.stderr.strip().splitlines()[-1:], file=sys.stderr, flush=True)
            return None
        return _bytes_of(row["key"], json.loads(report.read_text(encoding="utf-8"))["device_bytes"])


def _bytes_of(key: str, found: dict) -> dict[str, int]:
    state = found["state"] + found["inputs"] + found["staging"]
    return dict(zip(COLUMNS, (key, found["weights_total"], found["cache"], state), strict=True))


def write(found: Iterable[dict[str, int] | None]) -> None:
    """Write the file, without launches that dsjax does not have."""
    files.write(DRY_RUNS, COLUMNS, filter(None, found))


if __name__ == "__main__":
    files.parser_of(__doc__).parse_args()
    write(map(run, (*rows(), *rows(SECOND))))

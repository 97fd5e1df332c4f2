"""What InferenceX's recipes of TensorRT-LLM say of separated runs: most requests of a DP rank that decode at once, and drafts a step.

    python -m tools.plan_data.recipe_limits FOLDER       # the repository's configs as YAML files, of as many days as there are

The results do not have these; the names of the recipes that `configs/nvidia-master.yaml` of SemiAnalysisAI/InferenceX lists do, such as
`ctx1_gen4_tep8_batch32_eplb0_mtp0.yaml`, together with the users of each. `recipe_limits.csv` is of commit 843c6254 and of the days
before 2025-12-20, 2026-02-05, 2026-02-20, 2026-03-28 and 2026-05-25. Nothing here was taken from a result.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tools.plan_data import files
from tools.plan_data.apart_loops import ENGINES, mesh_of, settings_of
from tools.plan_data.inferencex_apart import ApartRun

DATA = Path(__file__).parent / "recipe_limits.csv"
COLUMNS = (
    "device",
    "engine",
    "weights",
    "prompt",
    "output",
    "users",
    "prefill",
    "decode",
    "drafting",
    "batch",
    "drafts",
)
_NAMED = re.compile(r"_batch(\d+)_eplb\d+_mtp(\d)")
_GIVEN = re.compile(r"DECODE_MAX_BATCH_SIZE=(\d+)")


def _searched(path: Path) -> Iterator[tuple[str, dict[str, Any], int, int, dict[str, Any]]]:
    """(name, entry, prompt, output, one point of its search) of DeepSeek-R1 with prefill and decode apart."""
    import yaml

    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if entry.get("model-prefix") == "dsr1" and entry.get("disagg") and entry["framework"] in ENGINES:
            lengths = entry.get("seq-len-configs") or (entry.get("scenarios") or {}).get("fixed-seq-len") or ()
            for one in lengths:
                for point in one["search-space"]:
                    if "prefill" in point:
                        yield name, entry, one["isl"], one["osl"], point


def read(folder: Path) -> Iterator[tuple[str, ...]]:
    """The rows of these files, in order, each once."""
    found = set()
    for path in sorted(folder.glob("*.yaml")):
        for name, entry, prompt, output, point in _searched(path):
            sides = [point["prefill"], point["decode"]]
            text = " ".join(str(line) for side in sides for line in side.get("additional-settings") or ())
            named, given = _NAMED.search(text), _GIVEN.search(text)
            if not (named or given):
                continue
            batch, drafts = named.groups() if named else (given[1], "0")
            drafting = point.get("spec-decoding", "none")
            if not named and drafting != "none":
                continue
            meshes = [
                "{} x {}".format(
                    *mesh_of(side["num-worker"], side["num-worker"] * side["tp"], side["ep"], bool(side["dp-attn"]))
                )
                for side in sides
            ]
            told = (name.split("-")[2], ENGINES[entry["framework"]], entry["precision"], str(prompt), str(output))
            found |= {(*told, str(users), *meshes, drafting, batch, drafts) for users in point["conc-list"]}
    yield from sorted(found)


@cache
def _limits() -> dict[tuple[str, ...], tuple[int, int]]:
    with DATA.open(encoding="utf-8", newline="") as lines:
        return {
            tuple(row[name] for name in COLUMNS[:9]): (int(row["batch"]), int(row["drafts"]))
            for row in csv.DictReader(lines)
        }


def limits(run: ApartRun, drafting: str = "none") -> tuple[int, int] | None:
    """(requests of a DP rank that decode at once at most, drafts a step) of a run; None where no recipe is known."""
    return _limits().get((*settings_of(run), drafting))


if __name__ == "__main__":
    parser = files.parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    made = [dict(zip(COLUMNS, row, strict=True)) for row in read(folder)]
    if not made:
        parser.error(f"{folder} has no YAML file with such a recipe")
    files.write(DATA, COLUMNS, made)

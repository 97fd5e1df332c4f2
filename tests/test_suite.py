"""How the suite is made: which tests are whose (`tools/tests_of.py`), and which programs are kept (`conftest.py`)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests_of import ENGINE, files_of, named_in

from dsjax.engine.program_cache.folder import ProgramFolder
from dsjax.engine.schedule import rank
from dsjax.model.step import ModelStep
from sharding import sums

HERE = Path(__file__).parent
ROOT = HERE.parent

MODULES = [path.relative_to(ROOT) for path in sorted((ROOT / ENGINE).rglob("*.py")) if path.name != "__init__.py"]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ENGINE)))
def test_each_module_of_the_engine_has_tests_of_its_name_or_is_named_in_some(module):
    assert files_of(module), f"no test file is named after {module}, or names it in its docstring"


def test_tests_name_modules_that_exist():
    named = {name for names in named_in(ROOT / "tests" / ENGINE).values() for name in names if name.endswith(".py")}
    elsewhere = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert sorted(name for name in named - elsewhere if not (ROOT / ENGINE / name).exists()) == []


def test_a_modules_tests_are_those_of_its_name_and_those_that_name_it(tmp_path):
    room = tmp_path / "tests" / ENGINE / "schedule"
    room.mkdir(parents=True)
    (room / "test_pages.py").touch()
    (room / "test_rank.py").write_text('"""Ranks. These are the tests of `schedule/pages.py` too."""\n')
    pages, rank, other = (ENGINE / "schedule" / name for name in ("pages.py", "rank.py", "other.py"))
    names = [[path.name for path in files_of(module, tmp_path)] for module in (pages, rank, other)]
    assert names == [["test_pages.py", "test_rank.py"], ["test_rank.py"], []]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ((time, "monotonic", time.monotonic), True),
        ((rank, "Rank", rank.Rank), True),
        ((sums, "tree_sum", None), False),
        ((ModelStep, "lower", None), False),
        (("dsjax.model.step.ModelStep.hidden", None), False),
    ],
    ids=str,
)
def test_only_a_change_of_traced_code_turns_the_folder_of_programs_off(monkeypatch, change, kept):
    before = ProgramFolder.read
    monkeypatch.setattr(*change, raising=False)
    assert (ProgramFolder.read is before) == kept


def test_the_seconds_that_order_the_files_are_of_files_that_exist():
    seconds = json.loads((HERE / "seconds.json").read_text())
    assert len(seconds) > 50
    assert [path for path in seconds if not (ROOT / path).is_file()] == []


def test_every_name_is_defined_somewhere():
    """Ruff's own rule is off: it takes the dimension letters of `Float[Array, "B T D"]` for names. Outside of strings it is right."""
    options = ["--isolated", "--select=F821", "--output-format=json", "--exit-zero"]
    ruff = [sys.executable, "-m", "ruff", "check", *options, "dsjax", "sharding", "tools", "tests"]
    ran = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=True)
    undefined = []
    for one in json.loads(ran.stdout):
        path, row, column = one["filename"], one["location"]["row"], one["location"]["column"]
        if Path(path).read_text().splitlines()[row - 1][: column - 1].count('"') % 2 == 0:
            undefined.append(f"{path}:{row}: {one['message']}")
    assert undefined == []


@pytest.mark.parametrize("asked", ["on the command line", "by the process that started this one", "not at all"])
def test_with_servings_compilation_no_flag_of_the_tests_is_left(asked):
    arguments = ["--serving-compilation"] if asked == "on the command line" else []
    environment = {name: value for name, value in os.environ.items() if name != "DSJAX_SERVING_COMPILATION"}
    if asked == "by the process that started this one":
        environment["DSJAX_SERVING_COMPILATION"] = "1"
    code = "from quick_compilation import QUICK_COMPILATION; print(len(QUICK_COMPILATION))"
    ran = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(ran, cwd=HERE, env=environment, capture_output=True, text=True, timeout=240)
    assert (int(found.stdout) > 0) == (asked == "not at all"), found.stderr

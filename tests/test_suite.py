"""How the suite is made: which tests are whose (`tools/tests_of.py`), how many processes share it, in which order, which programs are kept.

The latter are in `conftest.py` beside this file.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture
def suite(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))


@pytest.mark.parametrize(
    ("arguments", "asked", "processes"),
    [
        ([HERE], (), 5),
        ([HERE / "dsjax" / "plan", HERE / "sharding"], (), 5),
        ([__file__], (), 0),
        ([f"{__file__}::test_a", f"{__file__}::test_b"], (), 0),
        ([HERE / "dsjax" / "top"], (), 0),  # one file
        ([__file__, HERE / "sharding" / "test_mesh.py"], (), 2),
        ([HERE], ("-m", "gpu"), 0),
    ],
)
def test_there_are_as_many_processes_as_there_is_to_share(suite, monkeypatch, arguments, asked, processes):
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(suite, "most_processes", lambda: 5)
    config = SimpleNamespace(args=list(map(str, arguments)), invocation_params=SimpleNamespace(args=asked))
    assert suite.pytest_xdist_auto_num_workers(config) == processes


@pytest.mark.parametrize(
    ("quota", "limit", "processes"),
    [
        ("max 100000", "max", 5),
        ("200000 100000", "max", 3),
        ("50000 100000", "max", 2),
        ("max 100000", str(9 * 2**30), 2),
        (None, None, 5),
    ],
)
def test_a_container_s_cores_and_memory_bound_the_processes(suite, monkeypatch, tmp_path, quota, limit, processes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**24}.__getitem__)
    for name, text in (("cpu.max", quota), ("memory.max", limit)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    assert suite.most_processes(tmp_path) == processes


def test_programs_of_a_week_ago_are_deleted(suite, tmp_path):
    for name, days in (("old", 8), ("new", 6)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    suite.drop_old_programs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("target", "name", "value", "kept"),
    [
        (time, "monotonic", time.monotonic, True),
        (rank, "Rank", rank.Rank, True),
        (sums, "tree_sum", None, False),
        (ModelStep, "lower", None, False),
        ("dsjax.model.step.ModelStep.hidden", None, None, False),
    ],
    ids=str,
)
def test_only_a_change_of_traced_code_turns_the_folder_of_programs_off(monkeypatch, target, name, value, kept):
    before = ProgramFolder.read
    if isinstance(target, str):
        monkeypatch.setattr(target, value)
    else:
        monkeypatch.setattr(target, name, value, raising=False)
    assert (ProgramFolder.read is before) == kept


def test_the_longest_files_come_first_and_whole_and_slow_ones_of_unknown_length_before_them(suite):
    def item(file: str, name: str, slow: bool = False):
        return SimpleNamespace(path=ROOT / file, name=name, get_closest_marker=lambda _: slow or None)

    items = [
        item("a", "1"),
        item("b", "2"),
        item("b", "3", slow=True),
        item("b", "4"),
        item("c", "5"),
        item("d/e", "6", slow=True),
        item("f", "7"),
    ]
    names = [each.name for each in suite.longest_first(items, {"d/e": 2, "c": 30, "gone": 70}, ROOT)]
    assert names == ["2", "3", "4", "5", "6", "1", "7"]


def test_the_seconds_that_order_the_files_are_of_files_that_exist(suite):
    seconds = json.loads(suite.SECONDS.read_text())
    assert len(seconds) > 50
    assert [path for path in seconds if not (ROOT / path).is_file()] == []


def test_every_name_is_defined_somewhere():
    """Ruff's own rule is off: it takes the dimension letters of `Float[Array, "B T D"]` for names. Outside of strings it is right."""
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F821",
        "--output-format",
        "json",
        "--exit-zero",
    ]
    ran = subprocess.run(
        [*ruff, "dsjax", "sharding", "tools", "tests"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = {}
    undefined = []
    for one in json.loads(ran.stdout):
        path, row, column = one["filename"], one["location"]["row"], one["location"]["column"]
        line = lines.setdefault(path, Path(path).read_text().splitlines())[row - 1]
        if line[: column - 1].count('"') % 2 == 0:
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

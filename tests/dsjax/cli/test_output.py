"""Tables and help pages show all they have at any width; a path that cannot be written is one clear message."""

import io
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from dsjax.cli.info import info
from dsjax.cli.main import COMMANDS, app
from dsjax.cli.output import ReportConsole, fitted, report_console, write_json, writing
from dsjax.cli.plan import recipe, search_layouts
from dsjax.errors import UserError


def test_json_goes_to_a_file_or_to_standard_output_and_what_it_cannot_hold_is_no_users_mistake(tmp_path, capsys):
    write_json(tmp_path / "a.json", {"a": [1, 2.5]})
    write_json("-", {"b": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, 2.5]}
    assert json.loads(capsys.readouterr().out) == {"b": None}
    with pytest.raises(ValueError, match="not JSON compliant"), writing(tmp_path):
        write_json(tmp_path / "a.json", {"a": float("nan")})


@pytest.mark.parametrize(
    "command",
    [
        lambda where: info(json_file=str(where / "a.json")),
        lambda where: search_layouts(cluster="h200-8", mesh="dp=8", json_file=str(where / "a.json")),
        lambda where: search_layouts(cluster="h200-8", mesh="dp=8", pareto=where / "a.png"),
        lambda where: search_layouts(cluster="h200-8", mesh="dp=8", pareto=where.parent / "a.no-picture"),
        lambda where: recipe(cluster="h200-8", mesh="dp=8", file=where / "a.json"),
    ],
    ids=["info --json", "plan --json", "plan --pareto", "plan --pareto of no kind", "plan recipe"],
)
def test_commands_say_what_they_cannot_write(command, tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*(missing/a\.|a\.no-picture)"):
        command(tmp_path / "missing")


def test_a_pipe_has_room_for_wide_tables_unless_its_width_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert report_console().width == 140
    monkeypatch.setenv("COLUMNS", "200")
    assert report_console().width == 200


WIDTHS = (80, 120)


def drawn(table: Table, width: int) -> str:
    console = ReportConsole(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def wide_table(columns: int = 14) -> Table:
    table = Table(title="exchanges", title_justify="left", caption="of a step")
    table.add_column("form")
    table.add_column("tokens", justify="right", style="bold")
    for index in range(columns):
        table.add_column(f"GFLOP/s {index}", justify="right")
    table.add_column("first bottleneck")
    for row in range(3):
        figures = [f"{row * 100 + index}.{index:03d}" for index in range(columns)]
        table.add_row(f"A_CC_ME/{row}", str(2**row), *figures, "memory bandwidth of the slowest rank by 38 percent")
    return table


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_of_a_wide_table_is_cut_and_its_parts_tell_the_rows_apart(width):
    text = drawn(wide_table(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for row, index in itertools.product(range(3), range(14)):
        assert f" {row * 100 + index}.{index:03d}" in text
    parts = fitted(wide_table(), width)
    assert len(parts) > 1
    assert text.count("A_CC_ME/2") == len(parts), "each part names its rows"
    assert all([column.header for column in part.columns[:2]] == ["form", "tokens"] for part in parts)
    assert (text.count("exchanges"), text.count("of a step")) == (1, 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_of_a_table_whose_columns_are_all_text_is_lost(width):
    names = [f"{name}_of_a_program_that_was_compiled_for_another_mesh" for name in ("place", "order", "other", "known")]
    table = Table(caption=" ".join(f"caption{index}" for index in range(40)), caption_justify="left")
    for name in names:
        table.add_column(name, overflow="fold")
    table.add_row(*(f"{name}_{'x' * 40}_end" for name in names))
    text = drawn(table, width)
    assert max(map(len, text.splitlines())) <= width
    letters = re.sub(r"[^a-z0-9]", "", text)
    assert [index for index in range(40) if f"caption{index}" not in letters] == []
    assert letters.count("x") >= 40 * len(names)


def test_a_table_that_fits_is_left_as_it_is():
    table = wide_table(columns=3)
    assert fitted(table, 200) == [table]
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert drawn(table, 200) == console.file.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_plan_shows_deployment_and_bottleneck_at_any_width(width):
    found = CliRunner().invoke(app, ["plan", "--cluster", "h200-8", "--explain", "plan"], env={"COLUMNS": str(width)})
    assert found.exit_code == 0, found.output
    first, rest = found.output.partition("winner")[0], found.output.partition("figure: --explain plan")[2]
    table = rest.partition("a device:")[0]
    for shown in (first, table):
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
    for heading in ("deployment", "GPUs", "batch", "TTFT s", "TPOT ms", "tokens/s", "/GPU", "/user", "bottleneck"):
        assert heading in table
    assert re.search(r"1 × dp=\d,tp=\d", table)
    assert re.search(r"\+\d+ ?%", table), "the bottleneck, and what twice as much of it would give"


GROUPS = {"plan": ("simulate", "recipe"), "bench": ("serve", "modules", "step", "soak"), "kernels": ("list", "build")}
HELP_PAGES = ["", *COMMANDS, *(f"{group} {name}" for group, names in GROUPS.items() for name in names)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", HELP_PAGES)
def test_help_pages_show_every_name_in_full(page, width):
    text = CliRunner().invoke(app, [*page.split(), "--help"], env={"COLUMNS": str(width)}).output
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in re.sub("(500MB|tpu-v5e|znver4), …", "", text)
    assert not re.search(r"(?<!\])\.\.\.|<bool>|\[default: \(", text)
    assert "--help" in text
    if page == "serve":
        assert "--max-num-batched-tokens <int>" in text
        assert re.search("Options:.*--port.*Scheduling:.*--max-num-seqs <int>", text, re.DOTALL)


def test_the_version_is_printed():
    text = CliRunner().invoke(app, ["--version"]).output
    assert re.fullmatch(r"dsjax \S+\njax \d\S+\njaxlib \d\S+\nflax \d\S+\n", text.replace("not installed", "0"))


@pytest.mark.slow
def test_the_doctor_finds_this_machine_fit():
    found = subprocess.run([sys.executable, "-m", "dsjax", "doctor", "--json", "-"], capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stdout + found.stderr
    subjects = {one["subject"]: one for one in json.loads(found.stdout)}
    trouble = {subject for subject, one in subjects.items() if one["state"] == "trouble"}
    assert trouble <= {"host memory"}, "which other tests may take meanwhile"
    assert found.returncode == len(trouble)
    assert {"versions", "devices", "host memory", "compiled programs", "downloaded models"} <= subjects.keys()
    assert all(one["advice"] for one in subjects.values() if one["state"] != "ok")


def run_into(stdout, command: str, unbuffered: str) -> tuple[int, str]:
    """The exit code of a command that writes there, and what it says on standard error."""
    words = [sys.executable, "-m", "dsjax", *command.split()]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)
    return ended.returncode, ended.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("command", "unbuffered"), [("--version", ""), ("--version", "1"), ("kernels --help", "1"), ("info --json -", "")]
)
def test_standard_output_on_a_full_disk_is_one_message(command, unbuffered):
    message = "error: cannot write what was found: No space left on device; make room, or write it elsewhere\n"
    with open("/dev/full", "w") as full:
        assert run_into(full, command, unbuffered) == (2, message)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_whose_reader_is_gone_ends_a_command_in_silence(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    assert run_into(writer, "--version", unbuffered) == (1, "")
    os.close(writer)

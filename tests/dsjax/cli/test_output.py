"""Tables in files and pipes are wide enough for their figures; a path that cannot be written is one clear message."""

import json
import os
import subprocess
import sys

import pytest

from dsjax.cli.info import info
from dsjax.cli.output import write_json, writing
from dsjax.cli.plan import plan
from dsjax.errors import UserError


def test_json_goes_to_a_file_or_to_standard_output(tmp_path, capsys):
    write_json(tmp_path / "a.json", {"a": [1, 2.5]})
    write_json("-", {"b": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, 2.5]}
    assert json.loads(capsys.readouterr().out) == {"b": None}


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*missing/a\.json: No such file or directory; choose another"):
        write_json(tmp_path / "missing" / "a.json", {})


def test_what_json_cannot_hold_is_not_taken_for_the_users_mistake(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"), writing(tmp_path):
        write_json(tmp_path / "a.json", {"a": float("nan")})


@pytest.mark.parametrize(
    "command",
    [
        lambda where: info(json_file=str(where / "a.json")),
        lambda where: plan(cluster="h200-8", json_file=str(where / "a.json")),
        lambda where: plan(cluster="h200-8", pareto=where / "a.png"),
        lambda where: plan(cluster="h200-8", pareto=where.parent / "a.no-picture"),
        lambda where: plan(cluster="h200-8", recipe_file=where / "a.json"),
    ],
    ids=["info --json", "plan --json", "plan --pareto", "plan --pareto of no kind", "plan --recipe"],
)
def test_commands_say_what_they_cannot_write(command, tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        command(tmp_path / "missing")


PRINT = "from dsjax.cli.output import report_console; print(report_console().width)"


@pytest.mark.parametrize(("columns", "expected"), [(None, 140), ("200", 200)])
def test_a_pipe_has_room_for_wide_tables_unless_its_width_is_said(columns, expected):
    # Said in full: where readline was imported, the C library's environment has a COLUMNS that `os.environ` does not.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    if columns:
        environment["COLUMNS"] = columns
    found = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True, env=environment)
    assert int(found.stdout) == expected

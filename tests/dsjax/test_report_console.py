"""Tables in files and pipes are wide enough for their figures."""

import os
import subprocess
import sys

import pytest

PRINT = "from dsjax.report_console import report_console; print(report_console().width)"


@pytest.mark.parametrize(("columns", "expected"), [(None, 140), ("200", 200)])
def test_a_pipe_has_room_for_wide_tables_unless_its_width_is_said(columns, expected):
    # Said in full: where readline was imported, the C library's environment has a COLUMNS that `os.environ` does not.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    if columns:
        environment["COLUMNS"] = columns
    found = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True, env=environment)
    assert int(found.stdout) == expected

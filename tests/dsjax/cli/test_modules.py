"""`python -m dsjax.<command>` is `dsjax <command>`, for every command there is."""

import subprocess
import sys

import pytest

from dsjax.cli.main import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_can_be_run_as_a_module(command):
    found = subprocess.run([sys.executable, "-m", f"dsjax.{command}", "--help"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert f"Usage: dsjax {command} " in found.stdout

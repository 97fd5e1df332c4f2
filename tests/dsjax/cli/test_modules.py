"""`python -m dsjax.<command>` is `dsjax <command>`, for every command there is."""

import pytest
from commands import run

from dsjax.cli.main import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_can_be_run_as_a_module(command):
    found = run(f"dsjax.{command}", "--help")
    assert found.returncode == 0, found.stderr
    assert f"Usage: dsjax {command} " in found.stdout

"""The engine gives its executors the commands that it gave them before, byte by byte, in scenarios that hold all of its parts.

A commit that moves code keeps them. One that changes a command on purpose says why, and makes the goldens anew:

    python tools/record_commands.py            # --check compares, --full DIRECTORY writes down every command for a diff

Nothing here is drawn from a clock, a thread or a hash, and Python's hash seed is another one in each run of the tests.

These are the tests of `core.py` and `contract/executor.py` too.
"""

from typing import get_args

import pytest
from command_goldens import GOLDENS, difference, parsed, path_of, streams_of
from recorded_scenarios import SCENARIOS

from dsjax.engine.contract.commands import Command, ConnectExperts, Custom, Score


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_commands_are_those_recorded(scenario):
    found = difference(scenario, streams_of(scenario))
    assert found is None, found


def test_every_golden_has_its_scenario():
    assert {path.stem for path in GOLDENS.iterdir()} == set(SCENARIOS)


def test_every_kind_of_command_is_recorded_but_those_that_no_scheduler_of_ours_gives():
    kinds = {
        line.split()[0] for name in SCENARIOS for lines in parsed(path_of(name).read_text()).values() for line in lines
    }
    others = {Score.__name__, Custom.__name__, ConnectExperts.__name__}  # the last one: `POST /scale`
    assert {command.__name__ for command in get_args(Command)} - kinds == others

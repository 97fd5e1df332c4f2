"""Where the tests of each of the engine's rooms find what all rooms share: the fake executor, tiny models, processes of a group. And how
tests of interrupts begin."""

import signal
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "hosts")]


@pytest.fixture
def interrupts_are_raised():
    """As in a shell's foreground: a job in the background begins with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

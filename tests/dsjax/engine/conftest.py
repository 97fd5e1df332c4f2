"""Where the tests of each of the engine's rooms find what all rooms share: the fake executor, tiny models, processes of a group. And how
tests of interrupts begin."""

import signal

import pytest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from layouts import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True)


@pytest.fixture
def interrupts_are_raised():
    """As in a shell's foreground: a job in the background begins with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

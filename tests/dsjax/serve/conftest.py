"""Fixtures of a real server on a real port, over the fake executor of the engine's tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from live_server import LiveServer, wait_until


@pytest.fixture(scope="module")
def server():
    """One server for a module's tests: each must leave it without a page in use."""
    live = LiveServer(num_ranks=4, max_rows_decode=8, max_chunk=16, pages_per_rank=257)
    yield live
    wait_until(lambda: live.pages_in_use == 0 and live.engine.num_unfinished == 0)
    live.signal()
    assert live.join() == 0


@pytest.fixture
def start_server():
    """Starts servers with options of their own."""
    started: list[LiveServer] = []

    def start(**options) -> LiveServer:
        started.append(LiveServer(**options))
        return started[-1]

    yield start
    for live in started:
        if live.exit_code is None and live.failure is None:
            live.executor.step_seconds = 0
            live.signal()
            live.join()

"""A scripted server for each test that asks."""

import pytest
from fake_openai_server import FakeServer, Script


@pytest.fixture
def start_fake():
    started: list[FakeServer] = []

    def start(**script) -> FakeServer:
        started.append(FakeServer(Script(**script)))
        return started[-1]

    yield start
    for server in started:
        server.close()

"""A scripted server for each test that asks."""

import contextlib

import pytest
from fake_openai_server import FakeServer, Script


@pytest.fixture
def start_fake():
    with contextlib.ExitStack() as started:
        yield lambda **script: started.enter_context(contextlib.closing(FakeServer(Script(**script))))

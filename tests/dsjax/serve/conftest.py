"""Fixtures of a real server on a real port, over the fake executor of the engine's tests."""

import contextlib

import pytest
from live_server import LiveServer, wait_until
from scripted_executor import scripted, tool_tokenizer

from dsjax.serve.options import ServeOptions


@pytest.fixture(scope="module", autouse=True)
def patient():
    """Have a server wait as long for its engine's loads and for its front ends as a busy machine may take."""
    from dsjax.serve.front_ends import processes
    from dsjax.serve.routes import status

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((processes, "_ANSWER_SECONDS"), (processes, "_END_SECONDS"), (status, "_LOADS_SECONDS")):
            patch.setattr(module, name, 20.0)
        yield


@pytest.fixture(scope="module")
def server():
    """One server for a module's tests: each must leave it without a page in use."""
    with LiveServer(num_ranks=4, max_rows_decode=8, max_chunk=16, pages_per_rank=257) as live:
        yield live


@pytest.fixture
def at_full_speed(server):
    """Whatever pace a test gives the module's server, the next one finds it without."""
    yield
    server.executor.step_seconds = 0


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


@pytest.fixture(scope="module")
def _scripted_servers():
    """Servers of a module over scripted executors; each test must leave them without a page in use."""
    with contextlib.ExitStack() as stack:
        yield stack, {}


@pytest.fixture
def start(_scripted_servers):
    """Start a server with scripted answers; tests of a module share one with equal options. special: see `tool_tokenizer`."""
    stack, servers = _scripted_servers

    def start(script: str = "", special: bool = False, step_seconds: float = 0.0, **options) -> LiveServer:
        key = (special, *options.items())
        if key not in servers:
            model = scripted(tool_tokenizer(special=special), max_chunk=16, num_ranks=2)
            servers[key] = stack.enter_context(LiveServer(**model, options=ServeOptions(**options)))
        live = servers[key]
        wait_until(lambda: live.pages_in_use == 0 and live.engine.num_unfinished == 0)
        live.executor.script, live.executor.step_seconds = script, step_seconds
        return live

    return start

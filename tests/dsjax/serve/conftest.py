"""Fixtures of a real server on a real port, over the fake executor of the engine's tests."""

import contextlib

import pytest
from live_server import LiveServer, wait_until
from scripted_executor import ScriptedExecutor, tool_tokenizer

from dsjax.serve.options import ServeOptions


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
    servers: dict[tuple, LiveServer] = {}
    with contextlib.ExitStack() as stack:
        yield stack, servers


@pytest.fixture
def start(_scripted_servers):
    """Start a server with scripted answers; tests of a module share one with equal options. special: see `tool_tokenizer`."""

    stack, servers = _scripted_servers

    def start(script: str = "", special: bool = False, step_seconds: float = 0.0, **options) -> LiveServer:
        key = (special, *options.items())
        if key not in servers:
            tokenizer = tool_tokenizer(special=special)
            executor = ScriptedExecutor(tokenizer, max_chunk=16, num_ranks=2)
            live = LiveServer(
                tokenizer=tokenizer, executor=executor, eos=(tokenizer.eos_id,), options=ServeOptions(**options)
            )
            servers[key] = stack.enter_context(live)
        live = servers[key]
        wait_until(lambda: live.pages_in_use == 0 and live.engine.num_unfinished == 0)
        live.executor.script, live.executor.step_seconds = script, step_seconds
        return live

    return start

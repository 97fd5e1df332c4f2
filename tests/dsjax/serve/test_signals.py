"""A server in a process of its own, and real signals. `test_mesh_server.py` ends an idle one."""

import contextlib
import signal
import subprocess
import time

import httpx
import pytest
from live_server import started

pytestmark = pytest.mark.slow  # all together

SCRIPT = """
import sys
from live_server import FakeExecutor, AsyncEngine, Serving, Server, bind
executor = FakeExecutor(step_seconds=float(sys.argv[1]))
serving = Serving(AsyncEngine(executor.parts()), ("tiny",), "tiny", 128)
listener = bind("127.0.0.1", 0)
port = listener.getsockname()[1]
ready = lambda: print(port, flush=True)
sys.exit(Server(serving, shutdown_timeout=float(sys.argv[2]), log_level="error", on_ready=ready).serve_on(listener))
"""

# Compiles 500 shapes of `argv[1]` seconds each, through the command's own `serve_model`.
WARMING_SCRIPT = """
import io, sys, time, types
from live_server import FakeExecutor, bind
from rich.console import Console
from test_command_line import FACTS
from dsjax.serve.command import serve_model
from dsjax.serve.logs import configure_logging

class SlowToCompile(FakeExecutor):
    def warm_up(self, progress, lazily):
        for done in range(500):
            progress(done, 500, f"shape {done}")
            print("shape", done, flush=True)
            time.sleep(float(sys.argv[1]))

configure_logging("warning")
model = types.SimpleNamespace(parts=SlowToCompile().parts(), facts=FACTS)
listener = bind("127.0.0.1", 0)
sys.exit(serve_model(model, Console(file=io.StringIO()), listener, ("tiny",), float(sys.argv[2]), "warning"))
"""


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def run(step_seconds: float, shutdown_timeout: float, script: str = SCRIPT) -> tuple[subprocess.Popen, str]:
            process = stack.enter_context(started(script, step_seconds, shutdown_timeout))
            return process, f"http://127.0.0.1:{process.stdout.readline().strip()}"

        yield run


def test_a_second_signal_ends_at_once_even_while_a_step_hangs(start):
    process, url = start(1000, 100)
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None, "the first lets requests finish"
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0


def test_a_signal_during_warm_up_ends_after_the_shape_that_is_being_compiled(start):
    process, _ = start(0.2, 10, WARMING_SCRIPT)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert len(out.splitlines()) <= 5, "a shape that begins before the signal arrives is finished, and no more"


@pytest.mark.parametrize(("shutdown_timeout", "signals"), [(100, 2), (0.2, 1)])
def test_a_long_shape_is_not_waited_for_after_a_second_signal_or_the_shutdown_timeout(start, shutdown_timeout, signals):
    process, _ = start(1000, shutdown_timeout, WARMING_SCRIPT)
    process.send_signal(signal.SIGTERM)
    if signals == 2:
        time.sleep(0.5)
        assert process.poll() is None, "the first waits for the shape"
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")

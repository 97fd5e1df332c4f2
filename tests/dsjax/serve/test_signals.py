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
from live_server import AsyncEngine, FakeExecutor, serve_alone
serve_alone(AsyncEngine(FakeExecutor(step_seconds=float(sys.argv[1])).parts()), float(sys.argv[2]))
"""

# Compiles 500 shapes of `argv[1]` seconds each.
WARMING_SCRIPT = """
import sys, time
from live_server import FakeExecutor, bind, serve_by_command

class SlowToCompile(FakeExecutor):
    def warm_up(self, progress, lazily):
        for done in range(500):
            progress(done, 500, f"shape {done}")
            print("shape", done, flush=True)
            time.sleep(float(sys.argv[1]))

serve_by_command(SlowToCompile(), bind("127.0.0.1", 0), float(sys.argv[2]))
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
    process, _ = start(1.0, 60, WARMING_SCRIPT)
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

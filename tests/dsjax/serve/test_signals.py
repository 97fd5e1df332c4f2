"""A server in a process of its own, and real signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

SCRIPT = """
import sys
from live_server import FakeExecutor, LLMEngine, AsyncEngine, SchedulerConfig, Serving, Server, bind, tiny_tokenizer
runner = FakeExecutor(step_seconds=float(sys.argv[1]))
config = SchedulerConfig.from_limits(runner.limits, max_num_batched_tokens=32)
serving = Serving(AsyncEngine(LLMEngine(runner, tiny_tokenizer(), config)), ("tiny",), "tiny", 128)
listener = bind("127.0.0.1", 0)
port = listener.getsockname()[1]
ready = lambda: print(port, flush=True)
sys.exit(Server(serving, shutdown_timeout=float(sys.argv[2]), log_level="error", on_ready=ready).serve_on(listener))
"""


@pytest.fixture
def start():
    here = Path(__file__).parent
    started = []

    def run(step_seconds: float, shutdown_timeout: float) -> tuple[subprocess.Popen, str]:
        path = os.pathsep.join([str(here), str(here.parents[2])])
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(step_seconds), str(shutdown_timeout)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        started.append(process)
        return process, f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_server_ends_cleanly_at_a_signal(start, number):
    process, url = start(0, 5)
    assert httpx.get(f"{url}/health").status_code == 200
    process.send_signal(number)
    assert process.wait(5) == 0


def test_a_second_signal_ends_at_once_even_while_a_step_hangs(start):
    process, url = start(1000, 100)
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None, "the first lets requests finish"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0

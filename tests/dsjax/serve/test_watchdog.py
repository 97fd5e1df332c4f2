"""A step that hangs ends the process with a diagnosis; one that does not is left alone."""

import io
import tempfile
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from live_server import started, wait_until

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import Request, Status
from dsjax.serve.watchdog import HANG_EXIT_CODE, Watchdog


def running(request_id: str) -> Request:
    request = Request(request_id, [1, 2, 3], 3, SamplingParams(), 5, 0)
    request.status = Status.RUNNING
    return request


class Fake:
    """Takes steps that began as a function says."""

    scheduler = SimpleNamespace(ranks=[SimpleNamespace(running=rows) for rows in ([], [running("cmpl-stuck")])])
    step_started = property(lambda self: self._began())

    def __init__(self, began):
        self._began = began


def watch(step_started, out) -> tuple[Watchdog, list]:
    done: list = []
    engines = {"the decode engine": Fake(time.monotonic), "the prefill engine": Fake(step_started)}
    dog = Watchdog(2.0, engines, notify_clients=lambda: done.append("told"), exit=done.append, out=out)
    dog.start()
    return dog, done


def test_a_watchdog_that_cannot_look_ends_the_process_since_nobody_else_would_see_a_hang():
    with tempfile.TemporaryFile("w+") as out:
        _, done = watch(Mock(side_effect=RuntimeError("no steps here")), out)
        wait_until(lambda: done)
        assert done == [HANG_EXIT_CODE]
        out.seek(0)
        assert "RuntimeError: no steps here" in out.read()


def test_a_step_that_hangs_is_told_of_with_its_rows_and_every_stack():
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:  # the stacks are written to a file's number
        _, done = watch(lambda: began, out)
        wait_until(lambda: HANG_EXIT_CODE in done)
        assert done == ["told", HANG_EXIT_CODE]
        out.seek(0)
        text = out.read()
    assert "a step of the prefill engine has" in text
    for expected in ("--step-timeout 2", "rank 1: 1 rows", "cmpl-stuck: slot", "0 of 3 tokens", "test_watchdog.py"):
        assert expected in text


def test_steps_that_end_are_left_alone():
    out = io.StringIO()
    dog, done = watch(time.monotonic, out)
    idle, idle_done = watch(lambda: None, out)
    threading.Event().wait(1.8)  # it looks each half second
    dog.stop()
    idle.stop()
    assert (done, idle_done, out.getvalue()) == ([], [], "")


SCRIPT = """
import sys
from live_server import AsyncEngine, FakeExecutor, ServeOptions, serve_alone
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.transfer.prefill_links import LocalLink, PrefillLinks
separated = sys.argv[1] == "the prefill engine"
executor = FakeExecutor(step_seconds=0 if separated else 1000, transfers=separated)
links = [LocalLink(PrefillEngine(FakeExecutor(step_seconds=1000, transfers=True), executor.config, timeout=600))] if separated else []
for link in links:
    link.engine.start()
prefills = PrefillLinks(links) if links else None
serve_alone(AsyncEngine(executor.parts(prefills=prefills)), options=ServeOptions(step_timeout=4))
"""


@pytest.mark.parametrize("hangs", ["the engine", "the prefill engine"])
def test_the_process_ends_with_a_code_of_its_own_and_clients_hear_of_it(hangs):
    with started(SCRIPT, hangs) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a" * 40, "stream": True}, timeout=240
        ) as answer:
            text = "".join(answer.iter_text())
        assert '"error"' in text
        assert text.endswith("data: [DONE]\n\n")
        _, err = process.communicate(timeout=240)
        assert process.returncode == HANG_EXIT_CODE
        assert f"a step of {hangs} has been running" in err
        assert "rank 0: 1 rows" in err
        assert "fake_executor.py" in err, "the stack of the step that hangs"

"""Front ends over an engine do what one process does: tests of the other files, over such a server; and what is new with them.

The imported tests run here with this file's `server`, which has four DP ranks, and `start_server`, which has one.
"""
# ruff: noqa: F401

import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from live_server import LiveServer, events, started, wait_until
from request_bodies import ADMIN, CHAT, COMPLETIONS, HELD, MESSAGES, bearer, tool
from scripted_executor import scripted
from test_admin import (
    test_a_flush_empties_every_rank_and_a_prompt_hits_nothing,
    test_a_rank_that_is_not_there_is_refused,
    test_a_request_can_be_aborted_by_either_of_its_ids,
    test_a_router_outside_names_the_rank_by_its_number,
)
from test_lifecycle import (
    test_a_signal_lets_running_requests_finish_and_admits_no_more,
    test_after_the_shutdown_timeout_what_still_runs_ends_with_an_error,
    test_when_the_engine_dies_every_client_hears_of_it_and_the_exit_code_is_1,
)
from test_metrics_of_server import test_a_client_that_leaves_is_neither_shown_as_running_nor_measured
from test_openai_client import (
    client,
    test_64_clients_at_once_streamed_and_not_get_the_engine_s_own_text,
    test_a_stream_of_several_prompts_and_choices_is_the_whole_answer_in_pieces,
    test_chat_logprobs_have_exact_bytes_and_as_many_alternatives_as_asked,
    test_stop_strings_end_the_text,
)

from dsjax.errors import UserError
from dsjax.serve.front_ends.link import FrontEnd
from dsjax.serve.front_ends.messages import Welcome
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.server import bind, bind_shared
from dsjax.serve.tool_calls import FORMATS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("at_full_speed")]

LONG = {"prompt": [5, 6, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 6}


@pytest.fixture(scope="module")
def server():
    sizes = {"num_ranks": 4, "max_rows_decode": 8, "max_chunk": 16, "pages_per_rank": 257, "max_model_len": 512}
    options, metrics = ServeOptions(admin_api_key="root"), Metrics("tiny", 4, 512)
    with LiveServer(front_ends=2, **sizes, options=options, metrics=metrics) as live:
        yield live
        children = [link.process for link in live.serving.front_ends.links]
    assert [child.poll() for child in children] == [0, 0], "they end with the server"


@pytest.fixture(scope="module")
def keyed():
    """A server with keys whose model calls tools."""
    options = ServeOptions(api_keys=("one",), admin_api_key="root")
    with LiveServer(front_ends=1, stream_interval=3, options=options, **scripted()) as live:
        yield live


@pytest.fixture
def start_server(start_server):
    """Starts servers with one front end, which is as far from the engine as two, or with as many as a test wants."""
    return lambda front_ends=1, **options: start_server(front_ends=front_ends, **options)


def test_both_processes_serve_and_neither_has_loaded_jax(server):
    links = server.serving.front_ends.links
    assert not any("jaxlib" in Path(f"/proc/{link.process.pid}/maps").read_text() for link in links)
    before = [sum(sample[3] for sample in link.samples) for link in links]
    for _ in range(24):  # a connection each, which the system spreads
        assert server.post(COMPLETIONS, SHORT).status_code == 200
    server.get("/metrics")
    assert all(sum(sample[3] for sample in link.samples) > old for link, old in zip(links, before, strict=True))


def test_metrics_are_those_of_all_processes_together(server):
    names = ("vllm:generation_tokens_total", "vllm:request_success_total", "vllm:e2e_request_latency_seconds_count")
    before = [server.total(name) for name in names]
    answered = server.total("http_requests_total", handler=COMPLETIONS)
    for number in range(8):
        server.post(COMPLETIONS, {**SHORT, "n": 2, "stream": number % 2 == 0})
    assert [server.total(name) - b for name, b in zip(names, before, strict=True)] == [96, 16, 16]
    assert server.total("http_requests_total", handler=COMPLETIONS) - answered == 8
    assert server.get("/history").json()["points"][-1]["generation_tokens"] == server.total(names[0])


def test_tool_calls_prompt_logprobs_and_structured_output_come_through(keyed):
    def post(path: str, **body) -> httpx.Response:
        return keyed.post(path, body, headers=bearer("one"))

    keyed.executor.script = "</think>ok" + FORMATS["deepseek_v31"].calls([("f", "{}")])
    tools = [tool(parameters={"type": "object"})]
    message = post(CHAT, messages=MESSAGES, tools=tools, max_tokens=60).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    keyed.executor.script = ""
    echoed = post(COMPLETIONS, prompt="abc", max_tokens=0, echo=True, logprobs=1).json()["choices"][0]
    scores = echoed["logprobs"]["token_logprobs"]
    assert scores == [None, *(-float(k) for k in range(1, len(scores)))]
    form = {"prompt": "ab", "max_tokens": 40, "structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}, "n": 2}
    for choice in post(COMPLETIONS, **form).json()["choices"]:
        assert re.fullmatch("[0-9]{3}-[0-9]{4}", choice["text"])
    wrong = post(COMPLETIONS, **{**form, "structured_outputs": {"regex": "("}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "structured_outputs.regex")
    pieces = post(COMPLETIONS, prompt="ab", max_tokens=8, ignore_eos=True, return_token_ids=True, stream=True)
    assert [len(event["choices"][0]["token_ids"]) for event in events(pieces.text)] == [1, 3, 3, 1]


def test_what_waits_is_limited_over_all_processes(start_server):
    """One slot, two places in the queue: of eight at once three are taken, whichever process they come to."""
    options = ServeOptions(max_queued_requests=2, max_queued_tokens=6)
    metrics = Metrics("tiny", 1, 128)
    server = start_server(front_ends=2, step_seconds=HELD, max_rows_decode=1, options=options, metrics=metrics)
    asked = [server.post_later(COMPLETIONS, SHORT)]
    wait_until(lambda: server.pages_in_use > 0)
    asked += [server.post_later(COMPLETIONS, SHORT) for _ in range(7)]
    wait_until(lambda: sum(each.done() for each in asked) >= 5)
    server.executor.step_seconds = 0
    answers = [each.result(60) for each in asked]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
    assert all(answer.json()["error"]["code"] == "queue_full" and answer.headers["retry-after"] for answer in refused)
    assert server.total("dsjax_requests_rejected_total", reason="queue_full") == 5
    # What was refused never was a request.
    assert server.total("vllm:request_success_total", finished_reason="abort") == 0


def test_the_mesh_of_now_is_what_requests_are_checked_by_and_what_a_new_front_end_hears_of(start_server, monkeypatch):
    live = start_server(max_model_len=64, metrics=Metrics("tiny", 1, 64))
    request = {"prompt": [5] * 40, "max_tokens": 4, "ignore_eos": True}
    assert live.post(COMPLETIONS, request).status_code == 200

    def change():  # as a generation with a smaller cache begins
        live.parts.inputs.change(dataclasses.replace(live.parts.inputs.config, max_model_len=32))
        live.serving.max_model_len = 32
        for call in live.engine.on_change:
            call(SimpleNamespace(facts=SimpleNamespace(dp_ranks=2)))

    live.engine._loop.call_soon_threadsafe(change)
    wait_until(lambda: live.post(COMPLETIONS, request).status_code == 400)
    assert "32" in live.post(COMPLETIONS, request).json()["error"]["message"]
    assert live.get("/v1/models").json()["data"][0]["max_model_len"] == 32
    assert live.get("/ready").status_code == 200
    scheduler, front_ends = live.parts.core.scheduler, live.serving.front_ends
    monkeypatch.setattr(scheduler, "ranks", scheduler.ranks * 3)
    (link,), told, send = front_ends.links, [], FrontEnd.send
    monkeypatch.setattr(FrontEnd, "send", lambda self, message: (told.append(message), send(self, message)))
    link.process.kill()
    wait_until(lambda: link not in front_ends.links and front_ends.links[0].is_listening.is_set())
    assert [message.num_ranks for message in told if isinstance(message, Welcome)] == [3]


def test_keys_are_asked_for_by_every_process_and_for_what_is_forwarded(keyed):
    for _ in range(3):
        assert keyed.get("/v1/models").status_code == keyed.get("/server_info").status_code == 401
        assert keyed.post("/flush_cache", headers=bearer("one")).status_code == 401
    info = keyed.get("/server_info", headers=ADMIN).json()
    assert (info["admin"], info["options"]["num_api_keys"]) == (True, 1)
    assert keyed.post("/flush_cache", headers=ADMIN).status_code == 200
    assert keyed.get("/ready").status_code == 200


def test_a_front_end_that_is_killed_takes_its_own_requests_with_it_and_comes_back(server):
    def kill(link: FrontEnd) -> None:
        """What waits for a successor's door is served: the listening socket never closed."""
        os.kill(link.process.pid, signal.SIGKILL)
        wait_until(lambda: link not in front_ends.links and all(one.is_listening.is_set() for one in front_ends.links))
        wait_until(lambda: server.pages_in_use == 0 and server.engine.num_unfinished == 0)

    front_ends, made = server.serving.front_ends, lambda: server.total("vllm:generation_tokens_total")
    for _ in range(4):
        server.post(COMPLETIONS, SHORT)
    server.executor.step_seconds = HELD
    before = made()
    answers = [server.post_later(COMPLETIONS, {**LONG, "stream": True}) for _ in range(12)]
    wait_until(lambda: server.engine.num_unfinished == 12)
    other, victim = sorted(front_ends.links, key=lambda link: len(link.requests))
    lost = len(victim.requests)
    server.executor.step_seconds = 0.02
    kill(victim)
    whole = [answer.result().text for answer in answers if answer.exception(240) is None]
    assert sum(text.endswith("data: [DONE]\n\n") for text in whole) == 12 - lost
    assert other in front_ends.links
    for _ in range(12):
        assert server.post(COMPLETIONS, SHORT).status_code == 200
    assert made() >= before, "what the dead one had counted is kept"
    before = made()
    kill(other)
    assert made() == before, "and what the next one had"


SCRIPT = """
from live_server import FakeExecutor, bind_shared, serve_by_command
executor = FakeExecutor(num_ranks=2)
executor.warm_up = lambda progress, lazily=False: None
listeners = bind_shared("127.0.0.1", 0, 1)
print(listeners[0].getsockname()[1], flush=True)
serve_by_command(executor, listeners[0], 5.0, listeners)
"""


def test_when_the_engine_s_process_is_killed_all_end():
    """Through the command's own `serve_model`."""
    with started(SCRIPT) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        wait_until(lambda: is_ready(url))
        (child,) = psutil.Process(process.pid).children()
        assert httpx.post(url + COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200
        process.kill()
        process.wait(60)
        wait_until(lambda: not alive(child))


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_that_another_server_has_is_refused_before_either_has_loaded_its_model(count):
    first = bind_shared("127.0.0.1", 0, 2) if count == 2 else [bind("127.0.0.1", 0)]
    (address,) = {socket.getsockname() for socket in first}
    for take in (bind, lambda host, port: bind_shared(host, port, 2)):
        with pytest.raises(UserError, match="Address already in use"):
            take(*address)
    for socket in first:
        socket.close()

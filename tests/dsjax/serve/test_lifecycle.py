"""Signals, and an engine that dies: pages come back, and nothing hangs. `test_hostile_requests.py` has clients that leave."""

import contextlib
import json
import re
import threading
from unittest.mock import Mock

import httpx
import pytest
from live_server import LiveServer, events, wait_until
from request_bodies import ADMIN, COMPLETIONS, HELD, LONG

from dsjax.errors import UserError
from dsjax.serve import connections
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.server import bind

CANNOT_START = Mock(side_effect=RuntimeError("can't start new thread"))


def test_pieces_written_at_once_are_the_bytes_that_uvicorn_sends(start_server, monkeypatch):
    server = start_server()
    body = json.dumps({**LONG, "stream": True, "n": 2, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    def ask() -> list[bytes]:
        sent = head.encode() + b"\r\nX-Request-Id: same\r\nConnection: close\r\n\r\n" + body
        text = re.sub(rb'"created":\d{10}', b'"created":0123456789', server.exchange(sent))
        pieces = text.partition(b"\r\n\r\n")[2].split(b"\r\n")
        sizes, events = pieces[0::2], pieces[1::2]
        assert [int(size, 16) for size in sizes[: len(events)]] == [len(event) for event in events]
        assert b'"length"' in [*filter(None, events)][-1], "the last token goes with the end"
        return b"".join(events).split(b"\n\n")  # which of them were ready together is up to the clock

    written, writer, write = [], connections.BodyWriter, connections.BodyWriter.write
    monkeypatch.setattr(writer, "write", lambda self, piece: (written.append(piece), write(self, piece)))
    at_once = ask()
    assert len(written) > 50
    monkeypatch.setattr(writer, "behind", lambda send: None)
    assert ask() == at_once
    assert len(at_once) > 150


def test_a_signal_lets_running_requests_finish_and_admits_no_more(start_server):
    server = start_server(step_seconds=HELD)
    answer = server.post_later(COMPLETIONS, {**LONG, "stream": True})
    wait_until(lambda: server.pages_in_use > 0)
    server.signal()
    server.executor.step_seconds = 0.005
    assert server.join() == 0
    assert events(answer.result(60).text)[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx.ConnectError):
        server.post(COMPLETIONS, LONG)
    assert server.executor.closed


def test_after_the_shutdown_timeout_what_still_runs_ends_with_an_error(start_server):
    server = start_server(step_seconds=0.1, shutdown_timeout=0.2)
    pending = [server.post_later(COMPLETIONS, {**LONG, "stream": stream}) for stream in (True, False)]
    wait_until(lambda: server.engine.num_unfinished == 2)
    server.signal()
    assert server.join() == 0
    streamed, whole = (answer.result(60) for answer in pending)
    error = events(streamed.text)[-1]["error"]
    assert (error["code"], error["type"]) == ("shutting_down", "server_error")
    assert whole.status_code == 503
    assert server.pages_in_use == 0


@pytest.mark.parametrize("front_ends", [0, 1])
@pytest.mark.parametrize("during", ["begin_change", "change_to"])
def test_a_signal_during_the_check_or_the_change_of_a_mesh_answers_scale_with_503(start_server, during, front_ends):
    server = start_server(options=ServeOptions(admin_api_key="root"), front_ends=front_ends)
    began, released = threading.Event(), threading.Event()

    def wait(*wanted):
        began.set()
        released.wait(60)

    changer = Mock(phase="compiling", needs_change=False, **{during: wait})
    server.parts.core.mesh_changer = changer
    answer = server.post_later("/scale", {"mesh": "dp=2"}, headers=ADMIN)
    assert began.wait(60)
    server.signal()
    response = answer.result(60)
    released.set()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    server.join()


def test_after_all_requests_were_ended_others_get_503_and_metrics_stay_readable(start_server):
    server = start_server(options=ServeOptions(admin_api_key="root"), metrics=Metrics("tiny", 1, 128))
    server.engine.abort_all()
    responses = [server.post(COMPLETIONS, LONG), server.post("/flush_cache", headers=ADMIN)]
    assert [(each.status_code, each.json()["error"]["code"]) for each in responses] == [(503, "shutting_down")] * 2
    assert server.get("/metrics").status_code == 200


def test_when_the_engine_dies_every_client_hears_of_it_and_the_exit_code_is_1(start_server):
    server = start_server(step_seconds=HELD)
    pending = [server.post_later(COMPLETIONS, {**LONG, "stream": i % 2 == 0}) for i in range(6)]
    wait_until(lambda: server.engine.num_unfinished == 6)
    server.executor.fail_at_step = server.executor.steps + 3
    server.executor.step_seconds = 0
    assert server.join() == 1
    responses = [answer.result(60) for answer in pending]
    assert all("error" in events(response.text)[-1] for response in responses[::2])
    assert [response.status_code for response in responses[1::2]] == [500] * 3
    assert not any("fake device" in response.text for response in responses), "messages hold no internals"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({}, 500, "non_finite_values"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, 400, "structured_output_failed"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, 400, "no_token_allowed"),
    ],
)
def test_one_request_fails_as_the_servers_or_the_clients_error_alone(start_server, fields, status, code):
    server = start_server(eos=(1,))
    if status == 500:
        server.executor.non_finite.add(17)
    else:
        server.executor.impossible[17] = "the reason"
    well, failing = {"prompt": "ab", "temperature": 0}, {**LONG, **fields, "seed": 17}
    choices = server.post(COMPLETIONS, well).json()["choices"]
    answer = server.post(COMPLETIONS, failing)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert status == 500 or (error["message"], error["type"]) == ("the reason", "invalid_request_error")
    streamed = server.post(COMPLETIONS, {**failing, "stream": True})
    assert events(streamed.text)[-1]["error"]["code"] == code
    assert server.post(COMPLETIONS, well).json()["choices"] == choices
    assert server.get("/health").json() == {"status": "ok"}


def test_an_address_in_use_is_known_before_anything_is_loaded():
    taken = bind("127.0.0.1", 0)
    with contextlib.closing(taken), pytest.raises(UserError, match=f"on 127.0.0.1 port {taken.getsockname()[1]}"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="--host"):
        bind("203.0.113.9", 0)


def test_a_server_that_cannot_begin_to_serve_ends_with_the_reason_instead_of_listening_for_ever(monkeypatch):
    warmed = threading.Event()
    server = LiveServer(warm_up=lambda check: warmed.wait(60) and None)
    monkeypatch.setattr(server.engine, "start", CANNOT_START)
    warmed.set()
    server.join()
    assert "can't start new thread" in str(server.failure)


def test_a_server_that_cannot_begin_while_programs_are_compiled_says_why_and_exits_with_1(monkeypatch, capfd):
    warmed, compiled, exits = threading.Event(), threading.Event(), []
    monkeypatch.setattr("dsjax.serve.server.os._exit", exits.append)
    rest = lambda check: compiled.wait(60)  # noqa: E731
    server = LiveServer(warm_up=lambda check: warmed.wait(60) and rest, shutdown_timeout=0.1)
    monkeypatch.setattr(server.engine, "start", CANNOT_START)
    warmed.set()
    server.join()
    compiled.set()
    assert exits == [1]
    assert "Error: can't start new thread" in capfd.readouterr().err

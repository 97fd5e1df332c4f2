"""Signals, and an engine that dies: pages come back, and nothing hangs. `test_hostile_requests.py` has clients that leave."""

import contextlib
import json
import re
import threading
from unittest.mock import Mock

import httpx
import pytest
from live_server import LiveServer, events, wait_until

from dsjax.errors import UserError
from dsjax.serve import connections
from dsjax.serve.server import bind

LONG = {"prompt": "ab", "max_tokens": 110, "temperature": 0}


def test_pieces_written_at_once_are_the_bytes_that_uvicorn_sends(start_server, monkeypatch):
    server = start_server()
    body = json.dumps({**LONG, "stream": True, "n": 2, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    def ask() -> list[bytes]:
        sent = head.encode() + b"\r\nX-Request-Id: same\r\nConnection: close\r\n\r\n" + body
        with server.connect(sent) as connection:
            text = b"".join(iter(lambda: connection.recv(65536), b""))
        text = re.sub(rb'"created":\d{10}', b'"created":0123456789', re.sub(rb"\r\ndate: [^\r]*", b"", text))
        pieces = text.partition(b"\r\n\r\n")[2].split(b"\r\n")
        sizes, events = pieces[0::2], pieces[1::2]
        assert [int(size, 16) for size in sizes[: len(events)]] == [len(event) for event in events]
        return b"".join(events).split(b"\n\n")  # which of them were ready together is up to the clock

    written = []
    write = connections.BodyWriter.write
    monkeypatch.setattr(
        connections.BodyWriter, "write", lambda self, piece: (written.append(piece), write(self, piece))
    )
    at_once = ask()
    assert len(written) > 50
    monkeypatch.setattr(connections.BodyWriter, "behind", lambda send: None)
    assert ask() == at_once
    assert len(at_once) > 150


def test_a_signal_lets_running_requests_finish_and_admits_no_more(start_server):
    server = start_server(step_seconds=0.005)
    answer = server.post_later("/v1/completions", {**LONG, "stream": True})
    wait_until(lambda: server.pages_in_use > 0)
    server.signal()
    assert server.join() == 0
    assert events(answer.result(60).text)[-1]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx.ConnectError):
        server.post("/v1/completions", LONG)
    assert server.executor.closed


def test_after_the_shutdown_timeout_what_still_runs_ends_with_an_error(start_server):
    server = start_server(step_seconds=0.1, shutdown_timeout=0.2)
    pending = [server.post_later("/v1/completions", {**LONG, "stream": stream}) for stream in (True, False)]
    wait_until(lambda: server.engine.num_unfinished == 2)
    server.signal()
    assert server.join() == 0
    streamed, whole = (answer.result(60) for answer in pending)
    error = events(streamed.text)[-1]["error"]
    assert (error["code"], error["type"]) == ("shutting_down", "server_error")
    assert whole.status_code == 503
    assert server.pages_in_use == 0


def test_when_the_engine_dies_every_client_hears_of_it_and_the_exit_code_is_1(start_server):
    server = start_server(step_seconds=0.02)
    pending = [server.post_later("/v1/completions", {**LONG, "stream": i % 2 == 0}) for i in range(6)]
    wait_until(lambda: server.engine.num_unfinished == 6)
    server.executor.fail_at_step = server.executor.steps
    assert server.join() == 1
    for index, response in enumerate(answer.result(60) for answer in pending):
        if index % 2 == 0:
            assert "error" in events(response.text)[-1]
        else:
            assert response.status_code == 500
        assert "fake device" not in response.text, "messages hold no internals"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({}, 500, "non_finite_values"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, 400, "structured_output_failed"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, 400, "no_token_allowed"),
    ],
)
def test_one_request_fails_as_the_servers_or_the_clients_error_and_the_next_is_answered(
    start_server, fields, status, code
):
    server = start_server(eos=(1,))
    if status == 500:
        server.executor.non_finite.add(17)
    else:
        server.executor.impossible[17] = "the reason"
    well = {"prompt": "ab", "temperature": 0}
    choices = server.post("/v1/completions", well).json()["choices"]
    answer = server.post("/v1/completions", {**LONG, **fields, "seed": 17})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert status == 500 or (error["message"], error["type"]) == ("the reason", "invalid_request_error")
    streamed = server.post("/v1/completions", {**LONG, **fields, "seed": 17, "stream": True})
    assert events(streamed.text)[-1]["error"]["code"] == code
    assert server.post("/v1/completions", well).json()["choices"] == choices
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
    monkeypatch.setattr(server.engine, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    warmed.set()
    server.join()
    assert "can't start new thread" in str(server.failure)


def test_a_server_that_cannot_begin_while_programs_are_compiled_says_why_and_exits_with_1(monkeypatch, capfd):
    warmed, compiled, exits = threading.Event(), threading.Event(), []

    def warm_up(check):
        warmed.wait(60)
        return lambda check: compiled.wait(60)

    monkeypatch.setattr("dsjax.serve.server.os._exit", exits.append)
    server = LiveServer(warm_up=warm_up, shutdown_timeout=0.1)
    monkeypatch.setattr(server.engine, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    warmed.set()
    server.join()
    compiled.set()
    assert exits == [1]
    assert "Error: can't start new thread" in capfd.readouterr().err

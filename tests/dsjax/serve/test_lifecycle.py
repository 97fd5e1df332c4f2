"""Clients that leave, signals, and an engine that dies: pages come back, and nothing hangs."""

import contextlib
import json
import re
import socket
import threading

import httpx
import pytest
from live_server import LiveServer, wait_until

from dsjax.errors import UserError
from dsjax.serve import connections
from dsjax.serve.server import bind

LONG = {"prompt": "ab", "max_tokens": 110, "temperature": 0}


def events(text: str) -> list:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def in_background(function, *arguments) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)), daemon=True)
    thread.start()
    return thread, results


def test_a_streaming_client_that_leaves_frees_its_pages_within_two_steps(start_server):
    server = start_server(step_seconds=0.02)
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True, "n": 3}) as response:
        next(response.iter_lines())
        assert server.pages_in_use > 0
    steps = server.executor.steps
    wait_until(lambda: server.pages_in_use == 0)
    assert server.executor.steps <= steps + 3, "one step may run while the disconnect arrives, then at most two"
    assert server.engine.num_unfinished == 0


def test_pieces_written_at_once_are_the_bytes_that_uvicorn_sends(start_server, monkeypatch):
    server = start_server()
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": True, "n": 2, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    def ask() -> list[bytes]:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b"\r\nX-Request-Id: same\r\nConnection: close\r\n\r\n" + body)
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


def test_a_waiting_client_that_leaves_frees_its_pages_too(start_server):
    server = start_server(step_seconds=0.05)
    body = json.dumps(LONG).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: server.pages_in_use > 0)
    wait_until(lambda: server.pages_in_use == 0)
    assert server.executor.steps < 100, "it did not run to its end"
    assert server.engine.num_unfinished == 0


def test_a_client_that_leaves_at_once_leaves_nothing(start_server):
    server = start_server(step_seconds=0.01)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    message = head.encode() + b"\r\n\r\n" + body
    for cut in (len(message), len(message) - 5, 40):
        for _ in range(5):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(message[:cut])
    httpx.get(server.url + "/health")
    wait_until(lambda: server.pages_in_use == 0 and server.engine.num_unfinished == 0)


def test_a_signal_lets_running_requests_finish_and_admits_no_more(start_server):
    server = start_server(step_seconds=0.005)
    thread, results = in_background(server.post, "/v1/completions", {**LONG, "stream": True})
    wait_until(lambda: server.pages_in_use > 0)
    server.signal()
    assert server.join() == 0
    thread.join(60)
    assert events(results[0].text)[-1] == "[DONE]"
    assert events(results[0].text)[-2]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx.ConnectError):
        server.post("/v1/completions", LONG)
    assert server.executor.closed


@pytest.mark.parametrize("stream", [True, False])
def test_after_the_shutdown_timeout_what_still_runs_ends_with_an_error(start_server, stream):
    server = start_server(step_seconds=0.1, shutdown_timeout=0.2)
    thread, results = in_background(server.post, "/v1/completions", {**LONG, "stream": stream})
    wait_until(lambda: server.pages_in_use > 0)
    server.signal()
    assert server.join() == 0
    thread.join(60)
    if stream:
        assert events(results[0].text)[-2:] == [
            {
                "error": {
                    "message": "the server is shutting down",
                    "type": "server_error",
                    "param": None,
                    "code": "shutting_down",
                }
            },
            "[DONE]",
        ]
    else:
        assert results[0].status_code == 503
    assert server.pages_in_use == 0


def test_when_the_engine_dies_every_client_hears_of_it_and_the_exit_code_is_1(start_server):
    server = start_server(step_seconds=0.02)
    pending = [in_background(server.post, "/v1/completions", {**LONG, "stream": i % 2 == 0}) for i in range(6)]
    wait_until(lambda: server.engine.num_unfinished == 6)
    server.executor.fail_at_step = server.executor.steps
    assert server.join() == 1
    for index, (thread, results) in enumerate(pending):
        thread.join(60)
        (response,) = results
        if index % 2 == 0:
            assert "error" in events(response.text)[-2]
            assert events(response.text)[-1] == "[DONE]"
        else:
            assert response.status_code == 500
        assert "fake device" not in response.text, "messages hold no internals"


def test_non_finite_values_fail_one_request_with_a_message(start_server):
    server = start_server()
    good = server.post("/v1/completions", {"prompt": "ab", "temperature": 0}).json()
    server.executor.non_finite.add(13)
    answer = server.post("/v1/completions", {**LONG, "seed": 13})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "non_finite_values")
    streamed = server.post("/v1/completions", {**LONG, "stream": True, "seed": 13})
    assert events(streamed.text)[-2]["error"]["code"] == "non_finite_values"
    assert server.post("/v1/completions", {"prompt": "ab", "temperature": 0}).json()["choices"] == good["choices"]
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"structured_outputs": {"regex": "[0-9]+"}}, "structured_output_failed"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "no_token_allowed"),
    ],
)
def test_an_answer_that_its_own_fields_make_impossible_is_the_clients_error(start_server, fields, code):
    server = start_server(eos=(1,))
    well = {**LONG, "max_tokens": 5}
    server.executor.impossible[17] = "the reason"
    answer = server.post("/v1/completions", {**LONG, **fields, "seed": 17})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (400, code, "the reason")
    assert error["type"] == "invalid_request_error"
    streamed = server.post("/v1/completions", {**LONG, **fields, "seed": 17, "stream": True})
    assert events(streamed.text)[-2]["error"]["code"] == code
    assert server.post("/v1/completions", well).status_code == 200


def test_an_address_in_use_is_known_before_anything_is_loaded():
    with contextlib.closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        with pytest.raises(UserError, match=f"cannot serve on 127.0.0.1 port {taken.getsockname()[1]}"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="--host"):
        bind("203.0.113.9", 0)


def test_a_server_that_cannot_begin_to_serve_ends_with_the_reason_instead_of_listening_for_ever(monkeypatch):
    warmed = threading.Event()
    server = LiveServer(warm_up=lambda check: warmed.wait(60))

    def cannot():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server.engine, "start", cannot)
    warmed.set()
    server.join()
    assert "can't start new thread" in str(server.failure)

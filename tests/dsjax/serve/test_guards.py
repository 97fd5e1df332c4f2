"""What stands before the endpoints: keys, bounds of size and time, the queue's limits, readiness."""

import base64
import contextlib
import json
import threading
import time
from unittest.mock import Mock

import httpx
import pytest
from live_server import LiveServer, wait_until
from request_bodies import CHAT, COMPLETIONS, HELD, LONG, bearer

from dsjax.errors import UserError
from dsjax.serve.guards import ADMIN_PATHS
from dsjax.serve.options import ServeOptions, read_keys


def basic(key: str) -> dict:
    return {"Authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}


@pytest.fixture(scope="module")
def module_servers():
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(LiveServer(options=ServeOptions(**options)))


@pytest.fixture(scope="module")
def guarded(module_servers):
    return module_servers(api_keys=("one", "two"), admin_api_key="root")


POSTED = (COMPLETIONS, CHAT, "/tokenize")
READ = ("/v1/models", "/version", "/get_load", "/server_info", "/openapi.json", "/", "/no/such/path")
PATHS = [*POSTED, *READ, "//v1/models", "/health/../v1/models"]

SHORT = {**LONG, "max_tokens": 1}
WRONG = [{}, bearer("wrong"), bearer("one two"), {"Authorization": "one"}, basic("wrong"), bearer("öne")]


@pytest.mark.parametrize(
    ("path", "headers"), [*zip(PATHS, WRONG * 2, strict=True), *((COMPLETIONS, headers) for headers in WRONG)]
)
def test_without_a_valid_key_everything_but_what_a_load_balancer_asks_is_denied(guarded, path, headers):
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = guarded.post(path, {}, headers=headers) if path in POSTED else guarded.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "www-authenticate" in answer.headers
    assert guarded.get("/health").status_code == guarded.get("/ready").status_code == 200


@pytest.mark.parametrize("key", ["one", "two", "root"])
def test_each_key_opens_and_the_admin_s_too_and_the_server_says_which_it_is(guarded, key):
    assert guarded.get("/v1/models", headers=bearer(key)).status_code == 200
    assert guarded.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=bearer(key)).status_code == 200
    assert guarded.get("/server_info", headers=bearer(key)).json()["admin"] is (key == "root")


def test_a_browser_may_read_with_a_password_but_change_nothing(guarded):
    assert guarded.get("/").headers["www-authenticate"].startswith("Basic")
    for path in ("/", "/get_load"):
        assert guarded.get(path, headers=basic("one")).status_code == 200
    assert guarded.post("/flush_cache", headers=basic("root")).status_code == 401
    assert guarded.post(COMPLETIONS, {"prompt": "a"}, headers=basic("one")).status_code == 401


def test_without_keys_only_the_admin_s_makes_an_admin(module_servers):
    server = module_servers(admin_api_key="root")
    asked = [server.get("/server_info", headers=headers) for headers in ({}, bearer("wrong"), bearer("root"))]
    assert [answer.json()["admin"] for answer in asked] == [False, False, True]


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_admin_endpoints_want_the_admin_s_key_and_are_closed_without_one(guarded, server, path):
    assert guarded.post(path, headers=bearer("one")).status_code == 401
    assert guarded.post(path).status_code == 401
    closed = server.post(path)
    assert (closed.status_code, closed.json()["error"]["code"]) == (403, "admin_closed")
    assert guarded.post(path + "/", headers=bearer("one")).status_code == 401


def test_keys_come_from_files_too(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\none\n\n two \n")
    assert read_keys(["zero", "one"], [path]) == ("zero", "one", "two")
    options = ServeOptions(api_keys=("secret-1",), admin_api_key="secret-2")
    assert "secret" not in repr(options) + json.dumps(options.to_json()), "no key is ever shown"
    path.write_text("# none\n")
    with pytest.raises(UserError, match="open to all"):
        read_keys([], [path])
    with pytest.raises(UserError, match="cannot be read"):
        read_keys([], [tmp_path / "nothing"])


WRONG_KEYS = ({"api_keys": (key,)} for key in ("", "ö", "a b"))
SAME_KEY = {"api_keys": ("same",), "admin_api_key": "same"}


@pytest.mark.parametrize("options", [*WRONG_KEYS, SAME_KEY, {"reasoning_parser": "gpt"}, {"tool_call_parser": "gpt"}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(UserError):
        ServeOptions(**options)


@pytest.fixture(scope="module")
def tight(module_servers):
    return module_servers(max_body_bytes=2000, request_timeout=2.0)


HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(("head", "body", "status"), [
    ("Content-Length: 1000000000", b"", 413),
    ("Content-Length: 2001\r\nExpect: 100-continue", b"", 413),
    ("Transfer-Encoding: chunked", (b"400\r\n" + b" " * 0x400 + b"\r\n") * 3, 413),
    ("Content-Length: 100", b'{"prompt":', 408),
])  # fmt: skip
def test_a_body_that_is_too_large_is_refused_and_a_half_sent_one_given_up(tight, head, body, status):
    answer = tight.exchange(f"{HEAD}{head}\r\n\r\n".encode() + body)
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert status == 413 or b'"code":"request_timeout"' in answer
    assert tight.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": "u" * 200}).status_code == 200


def test_a_connection_serves_one_request_after_another(tight):
    with httpx.Client(base_url=tight.url) as client:
        for _ in range(4):
            assert client.get("/health").status_code == 200
            time.sleep(0.7)  # all together they take longer than one may


@pytest.mark.parametrize(
    ("limits", "said"),
    [({"max_queued_requests": 2}, "2 requests are queued"), ({"max_queued_tokens": 8}, "tokens are queued")],
)
def test_too_much_waiting_is_429_with_a_time_before_it_is_tokenised(start_server, monkeypatch, limits, said):
    server = start_server(options=ServeOptions(**limits), max_rows_decode=1, step_seconds=HELD)
    answers = [server.post_later(COMPLETIONS, LONG)]
    wait_until(lambda: server.pages_in_use > 0)
    for waiting in (1, 2):
        answers.append(server.post_later(COMPLETIONS, LONG))
        wait_until(lambda waiting=waiting: server.engine.waiting[0] == waiting)
    encoded = []
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda *a, **k: encoded.append(a) or [1])
    for body in ({**LONG, "prompt": "a" * 40}, {**LONG, "prompt": [5] * 10, "n": 2}):
        refused = server.post(COMPLETIONS, body)
        assert refused.status_code == 429, refused.text
        assert said in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
    assert server.post(CHAT, {"messages": [{"role": "user", "content": "a" * 40}]}).status_code == 429
    assert encoded == []
    server.executor.step_seconds = 0
    for answer in answers:
        answer.result(60)
    monkeypatch.undo()
    assert server.post(COMPLETIONS, SHORT).status_code == 200, "what is alone may always come in"


@pytest.mark.parametrize("n", [2**31 - 1, -(2**31) + 1])
def test_completions_that_cannot_be_count_among_none_that_wait(start_server, monkeypatch, n):
    server, rendering, may_end = start_server(), threading.Event(), threading.Event()

    def render_prompt(*arguments):
        rendering.set()
        may_end.wait(60)
        raise UserError("no prompt")

    monkeypatch.setattr("dsjax.serve.chat.render_prompt", render_prompt)
    body = {"messages": [{"role": "user", "content": "a" * 3000}], "n": n}  # which is rendered in a thread
    chat = server.post_later(CHAT, body)
    wait_until(lambda: rendering.is_set() or chat.done())
    assert server.serving.gate._entering_requests == 0
    assert server.post(COMPLETIONS, SHORT).status_code == 200
    may_end.set()
    answer = chat.result(60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_it_listens_while_it_warms_up(start_server):
    may_end = threading.Event()
    server = start_server(warm_up=lambda check: may_end.wait(60) and None)
    assert server.get("/health").status_code == server.get("/version").status_code == 200
    assert server.get("/server_info").json()["phase"] == "warming up"
    for answer in (server.get("/ready"), server.post(COMPLETIONS, LONG), server.get("/get_load")):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
    may_end.set()
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.post(COMPLETIONS, SHORT).status_code == 200
    assert server.get("/server_info").json()["phase"] == "ready"


def test_it_serves_while_the_rest_is_compiled_and_ends_without_all_of_it(start_server):
    compiling = threading.Event()

    def rest(raise_if_stopped):
        while True:
            raise_if_stopped()
            compiling.set()
            time.sleep(0.01)

    server = start_server(warm_up=lambda check: rest)
    assert compiling.wait(60)
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.post(COMPLETIONS, SHORT).status_code == 200
    server.signal()
    assert server.join() == 0


def test_it_listens_while_it_drains_and_admits_nothing(start_server):
    server = start_server(step_seconds=HELD)
    answer = server.post_later(COMPLETIONS, LONG)
    wait_until(lambda: server.pages_in_use > 0)
    server.signal()
    wait_until(lambda: server.get("/ready").status_code == 503)
    assert server.get("/health").status_code == 200
    refused = server.post(COMPLETIONS, LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) > 0
    server.executor.step_seconds = 0
    assert server.join() == 0
    assert answer.result(60).status_code == 200


def test_what_warm_up_raises_ends_the_server(start_server):
    server = start_server(warm_up=Mock(side_effect=UserError("no such device")))
    server.join()
    assert isinstance(server.failure, UserError)

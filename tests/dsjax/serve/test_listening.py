"""Who is let in: a server that other machines reach wants a key, also a follower of one; and connections are no more than a limit."""

import contextlib
import http.client
import json
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from fastapi.testclient import TestClient
from live_server import read_all, wait_until
from processes import free_port
from request_bodies import COMPLETIONS, bearer
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.dynamo.arguments import _follow
from dsjax.engine.afd.messages import ExpertLinks, LinkCounts
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.hosts import HostOptions
from dsjax.serve import connections
from dsjax.serve.front_ends.engine_server import _welcome_factory
from dsjax.serve.headless import Headless, HeadlessExperts
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions, check_listener, is_loopback
from dsjax.serve.server import bind

KEYED = ServeOptions(api_keys=("one",), admin_api_key="root")
GROUP = ["--coordinator-address", "127.0.0.1:1", "--num-processes", "2", "--process-id"]


class LoadedError(Exception):
    """Raised where a test's server would load its model."""


def load_nothing(*args, **options):
    raise LoadedError


@pytest.fixture
def serve(monkeypatch):
    """Runs `dsjax serve` up to where it would load a model, or follow; gives the message of a refusal, or None."""
    monkeypatch.setattr("dsjax.llm.LLM", load_nothing)
    monkeypatch.setattr("dsjax.serve.logs.configure_logging", Mock())  # which is the whole process's
    monkeypatch.setattr(Headless, "serve", load_nothing)

    def run(*arguments, **variables):
        runner = CliRunner(env={"DSJAX_API_KEY": None, "DSJAX_ADMIN_API_KEY": None} | variables)
        result = runner.invoke(app, ["serve", "--port", "0", *arguments])
        if isinstance(result.exception, LoadedError):
            return None
        assert isinstance(result.exception, UserError), result.exception
        return str(result.exception)

    return run


@pytest.mark.parametrize(("host", "more"), [
    ("0.0.0.0", ()),
    ("::", ("--admin-api-key", "root")),
    ("::ffff:0.0.0.0", ("--api-server-count", "2")),
    ("0.0.0.0", (*GROUP, "1")),
    ("::", (*GROUP, "0")),
])  # fmt: skip
def test_an_address_beyond_loopback_without_a_key_is_refused_before_anything_is_loaded(serve, host, more):
    refusal = serve("--host", host, *more)
    assert "no key was given" in refusal
    assert "--allow-unauthenticated" in refusal
    assert serve("--host", host, "--allow-unauthenticated", *more) is None
    assert serve("--host", host, "--api-key", "one", *more) is None


def test_loopback_needs_no_key_and_a_key_comes_from_a_variable_and_a_file_too(serve, tmp_path):
    assert serve("--host", "localhost") is None
    (tmp_path / "keys").write_text("one\n")
    assert serve("--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys")) is None
    assert serve("--host", "0.0.0.0", DSJAX_API_KEY="one two", DSJAX_ADMIN_API_KEY="root") is None


@pytest.mark.parametrize("empty", ["", "  "])
@pytest.mark.parametrize("name", ["DSJAX_API_KEY", "DSJAX_ADMIN_API_KEY"])
@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_variable_that_is_set_and_empty_is_refused_at_every_address(serve, name, empty, host):
    assert f"{name} is set and empty" in serve("--host", host, "--allow-unauthenticated", **{name: empty})


def test_what_is_loopback_is_told_from_the_address_alone_and_a_refused_listener_is_closed():
    listener = bind("0.0.0.0", 0)
    with pytest.raises(UserError, match="can be reached from other machines"):
        check_listener(listener, (), False)
    assert listener.fileno() == -1
    assert all(map(is_loopback, ["127.0.0.1", "127.255.0.3", "::1", "::ffff:127.0.0.1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "fe80::1%eth0", "169.254.0.1"]))


FOLLOWER = HostOptions(("127.0.0.1", 1), 2, 1, "127.0.0.1")


def probes(client: TestClient) -> list[int]:
    return [client.get(probe).status_code for probe in ("/live", "/health", "/ready")]


@pytest.mark.parametrize(("path", "status"), [("/metrics", 200), ("/metrics/", 200), ("/no/such/path", 404)])
def test_a_follower_s_metrics_want_the_key_and_its_probes_do_not(path, status):
    client = TestClient(Headless(FOLLOWER, KEYED).app())
    assert client.get(path).status_code == client.get(path, headers=bearer("wrong")).status_code == 401
    assert [client.get(path, headers=bearer(key)).status_code for key in ("one", "root")] == [status] * 2
    assert probes(client) == [200, 200, 503]


def test_a_follower_of_an_attention_side_shows_its_own_links_to_processes_with_experts():
    headless = Headless(FOLLOWER, ServeOptions())
    client, line = TestClient(headless.app()), 'dsjax_expert_process_calls_total{process="1",expert_process="0"} 7'
    assert "dsjax_follower_ready" in client.get("/metrics").text, "without keys everybody may read"
    headless.work = SimpleNamespace(phase="loading", group=None, commands=0, steps=0, executor=None)
    assert "dsjax_expert_process_calls_total{" not in client.get("/metrics").text
    links = {ExpertLinks: SimpleNamespace(counts=[LinkCounts(True, 0, 0.0, 7, 100, 200)])}
    headless.work.executor = SimpleNamespace(extension=links.get)
    assert line in client.get("/metrics").text


def test_a_process_with_experts_has_the_same_rules(monkeypatch, serve):
    client = TestClient(HeadlessExperts(KEYED).app())
    assert client.get("/metrics").status_code == 401
    assert 'dsjax_experts_ready{expert_process="0"} 0' in client.get("/metrics", headers=bearer("one")).text
    assert probes(client) == [200, 200, 503]
    monkeypatch.setattr(HeadlessExperts, "serve", load_nothing)
    sides = ["--attention-mesh=dp=2", "--expert-mesh=ep=4", "--afd-role=expert", "--afd-address=127.0.0.1:1"]
    assert "no key was given" in serve("--host", "0.0.0.0", *sides)
    assert serve("--host", "0.0.0.0", "--api-key", "one", *sides) is None


@pytest.fixture
def follow(monkeypatch):
    """Follows for Dynamo up to its listener, which is given back."""
    made: list[socket.socket] = []
    monkeypatch.setattr(Headless, "serve", lambda self, args, listener, console: made.append(listener))
    monkeypatch.delenv("DYN_SYSTEM_HOST", raising=False)

    def run(port, http=ServeOptions(), allowed=False):
        monkeypatch.setenv("DYN_SYSTEM_PORT", port)
        _follow(EngineArgs(), FOLLOWER, http, allowed)
        with made.pop() as listener:
            return listener.getsockname()[0]

    return run


def test_a_follower_of_dynamo_is_open_to_other_machines_at_the_system_port_alone_and_with_a_key(follow):
    port = str(free_port())
    assert follow("") == follow("-1") == "127.0.0.1", "nobody looks for it"
    with pytest.raises(UserError, match="no key was given"):
        follow(port)
    assert follow(port, KEYED) == follow(port, allowed=True) == "0.0.0.0"


@pytest.fixture
def crowded(start_server, monkeypatch):
    """A server of two connections, of which both are taken, and of two more for probes. Gives it, and a way to open one more."""
    monkeypatch.setattr(connections, "_MOST_PROBES", 2)
    server = start_server(options=ServeOptions(max_connections=2), metrics=Metrics("tiny", 1, 128))
    with contextlib.ExitStack() as stack:

        def connect(sent=b""):
            return stack.enter_context(server.connect(sent))

        opened = [connect(), connect()]
        for one in opened:  # they have an answer, and stay open
            assert answer_to(one, "/version")[0] == 200
        yield server, connect, opened


def ask(path):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def answer_to(connection, path):
    """Ask on a connection that stays open, and read the whole answer: its status and body."""
    connection.sendall(ask(path))
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def test_beyond_the_limit_a_connection_is_answered_429_and_closed_but_the_server_s_health_is_answered(crowded):
    _, connect, opened = crowded
    for path in ("/version", "/v1/models", "/metrics", "/healthy"):
        head, _, body = read_all(connect(ask(path))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429")
        assert b"\r\nretry-after: 2" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    status, text = answer_to(opened[0], "/metrics")
    assert status == 200, "one within the limit goes on"
    assert b'reason="too_many_connections"} 4' in text
    probe = connect()
    for path in ("/health", "/ready?x=1", "/health"):
        assert answer_to(probe, path)[0] == 200
    probe.sendall(ask("/version"))
    assert read_all(probe).startswith(b"HTTP/1.1 429"), "the next request of a probe's connection is not let in with it"


def test_what_comes_after_the_connections_for_probes_is_closed_unread(crowded):
    server, connect, _ = crowded
    waiting = [connect() for _ in range(2)]
    wait_until(lambda: len(server.server.server_state.connections) == 4)
    assert read_all(connect()).startswith(b"HTTP/1.1 429")
    assert answer_to(waiting[0], "/health")[0] == 200


def test_a_connection_for_a_probe_that_says_nothing_is_closed_soon(crowded, monkeypatch):
    monkeypatch.setattr(connections, "_PROBE_SECONDS", 0.01)
    _, connect, opened = crowded
    assert read_all(connect()) == b""
    assert answer_to(opened[0], "/version")[0] == 200


def test_a_connection_that_came_too_early_is_like_any_other_once_there_is_room(crowded):
    server, connect, opened = crowded
    late = connect()
    assert answer_to(late, "/health")[0] == 200
    opened[0].close()
    wait_until(lambda: len(server.server.server_state.connections) == 2)
    for _ in range(2):
        assert answer_to(late, "/version")[0] == 200


def test_without_limits_every_connection_is_let_in_and_any_number_waits(start_server):
    options = ServeOptions(max_connections=0, max_queued_requests=0, max_queued_tokens=0)
    server = start_server(options=options, max_rows_decode=1)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client()) for _ in range(100)]
        assert {client.get(server.url + "/version").status_code for client in clients} == {200}
    answer = server.post(COMPLETIONS, {"prompt": ["ab"] * 20, "max_tokens": 1})
    assert len(answer.json()["choices"]) == 20


@pytest.mark.parametrize(("limits", "wanted", "raised", "affordable"), [
    ((1024, 1 << 20), 16_384, [16_384 + 320], 16_384),
    ((1024, 4096), 16_384, [4096], 4096 - 320),
    ((1 << 20, 1 << 20), 16_384, [], 16_384),
    ((1024, 1024), 0, [1024], 0),
    ((1024, 4096), 0, [4096], 0),
    ((256, 256), 16_384, [256], 64),
    ((1024, -1), 16_384, [16_384 + 320], 16_384),
    ((-1, -1), 16_384, [], 16_384),
])  # fmt: skip
def test_connections_are_no_more_than_files_that_a_process_may_open(monkeypatch, limits, wanted, raised, affordable):
    monkeypatch.setattr(connections, "_MOST_PROBES", 64)
    given = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(connections.resource, "setrlimit", lambda which, pair: given.append(pair[0]))
    assert connections.affordable_connections(wanted) == affordable
    assert given == raised


def test_front_ends_share_the_limits():
    named = {"model_names": ("a",), "model_root": "a", "max_model_len": 1, "created": 0, "orders_by_priority": False}
    serving = SimpleNamespace(options=ServeOptions(max_connections=16_384), **named)
    inputs = SimpleNamespace(config=None, vocab_size=1, eos_token_ids=(), draw_seed=lambda: 0)
    parts = SimpleNamespace(inputs=inputs, tokenizer=None, outputs=SimpleNamespace(stream_interval=1), num_ranks=1)
    options = _welcome_factory(serving, parts, 3, "info", False)(0, "").options
    assert (options.max_connections, options.max_queued_requests, options.max_queued_tokens) == (5462, 0, 0)

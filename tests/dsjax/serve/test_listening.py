"""A server that other machines reach wants a key: `serve/options.py`'s checks, in `serve`, its followers, and `dynamo`'s."""

import socket

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.dynamo.command import _follow
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.hosts import HostOptions
from dsjax.serve.headless import Headless
from dsjax.serve.options import ServeOptions, check_key_variables, check_listener, is_loopback
from dsjax.serve.server import bind

KEYED = ServeOptions(api_keys=("one",), admin_api_key="root")
GROUP = ["--coordinator-address", "127.0.0.1:1", "--num-processes", "2", "--process-id"]


class LoadedError(Exception):
    """Raised where a test's server would load its model."""


@pytest.fixture
def serve(monkeypatch):
    """Runs `dsjax serve` up to where it would load a model, or follow; gives the message of a refusal, or None."""

    def load(*args, **options):
        raise LoadedError

    monkeypatch.setattr("dsjax.engine.llm.LLM", load)
    monkeypatch.setattr(Headless, "serve", load)

    def run(*arguments, **variables):
        result = CliRunner(env={"DSJAX_API_KEY": None, "DSJAX_ADMIN_API_KEY": None} | variables).invoke(
            app, ["serve", "--port", "0", *arguments]
        )
        if isinstance(result.exception, LoadedError):
            return None
        assert isinstance(result.exception, UserError), result.exception
        return str(result.exception)

    return run


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
@pytest.mark.parametrize(
    "more", [(), ("--admin-api-key", "root"), ("--api-server-count", "2"), (*GROUP, "1"), (*GROUP, "0")]
)
def test_an_address_beyond_loopback_without_a_key_is_refused_before_anything_is_loaded(serve, host, more):
    refusal = serve("--host", host, *more)
    assert "no key was given" in refusal
    assert "--allow-unauthenticated" in refusal
    assert serve("--host", host, "--allow-unauthenticated", *more) is None
    assert serve("--host", host, "--api-key", "one", *more) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_no_key(serve, host):
    assert serve("--host", host) is None


def test_a_key_comes_from_a_variable_and_a_file_too(serve, tmp_path):
    (tmp_path / "keys").write_text("one\n")
    assert serve("--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys")) is None
    assert serve("--host", "0.0.0.0", DSJAX_API_KEY="one") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
@pytest.mark.parametrize("empty", ["", "  "])
@pytest.mark.parametrize("name", ["DSJAX_API_KEY", "DSJAX_ADMIN_API_KEY"])
def test_a_variable_that_is_set_and_empty_is_refused_at_every_address(serve, name, empty, host):
    refusal = serve("--host", host, "--allow-unauthenticated", **{name: empty})
    assert f"{name} is set and empty" in refusal


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key"])
def test_an_empty_key_on_the_command_line_is_refused(serve, flag):
    assert "an API key is empty" in serve(flag, "")


def test_a_refused_listener_is_closed():
    listener = bind("0.0.0.0", 0)
    with pytest.raises(UserError, match="can be reached from other machines"):
        check_listener(listener, (), False)
    assert listener.fileno() == -1


def test_what_is_loopback_is_told_from_the_address_alone():
    assert all(map(is_loopback, ["127.0.0.1", "127.255.0.3", "::1", "::ffff:127.0.0.1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "10.0.0.1", "::", "::ffff:10.0.0.1", "fe80::1%eth0", "169.254.0.1"]))


def test_variables_that_are_not_set_or_hold_a_key_are_no_mistake():
    check_key_variables({})
    check_key_variables({"DSJAX_API_KEY": "one two", "DSJAX_ADMIN_API_KEY": "root"})


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/no/such/path"])
def test_a_follower_s_metrics_want_the_key_and_its_probes_do_not(path):
    client = TestClient(Headless(HostOptions.find("127.0.0.1:1", 2, 1), KEYED).app())
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    for key in ("one", "root"):
        assert client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == (
            404 if "such" in path else 200
        )
    assert [client.get(probe).status_code for probe in ("/live", "/health", "/ready")] == [200, 200, 503]


def test_a_follower_without_keys_shows_its_metrics():
    client = TestClient(Headless(HostOptions.find("127.0.0.1:1", 2, 1), ServeOptions()).app())
    assert "dsjax_follower_ready" in client.get("/metrics").text


@pytest.fixture
def follow(monkeypatch):
    """Follows for Dynamo up to its listener, which is given back."""
    made: list[socket.socket] = []
    monkeypatch.setattr(Headless, "serve", lambda self, args, listener, console: made.append(listener))
    monkeypatch.delenv("DYN_SYSTEM_HOST", raising=False)

    def run(port, http=ServeOptions(), allowed=False):
        monkeypatch.setenv("DYN_SYSTEM_PORT", port)
        _follow(EngineArgs(), HostOptions.find("127.0.0.1:1", 2, 1), http, allowed)
        with made.pop() as listener:
            return listener.getsockname()[0]

    return run


def test_a_follower_of_dynamo_is_open_to_other_machines_at_the_system_port_alone_and_with_a_key(follow):
    with bind("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    assert follow("") == follow("-1") == "127.0.0.1", "nobody looks for it"
    with pytest.raises(UserError, match="no key was given"):
        follow(port)
    assert follow(port, KEYED) == follow(port, allowed=True) == "0.0.0.0"

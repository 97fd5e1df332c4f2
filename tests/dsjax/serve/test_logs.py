"""One line a request, with what the engine did for it; JSON by option; a client cannot write lines of its own."""

import json
import logging

import pytest
from live_server import wait_until
from request_bodies import COMPLETIONS

from dsjax.errors import UserError
from dsjax.serve.logs import JsonLines, configure_logging
from dsjax.serve.serving import Phase


@pytest.fixture
def lines(caplog):
    """What `dsjax.access` wrote as JSON, parsed."""
    caplog.set_level(logging.INFO, "dsjax.access")
    written = lambda: [record for record in caplog.records if record.name == "dsjax.access"]  # noqa: E731
    return lambda: [json.loads(JsonLines().format(record)) for record in written()]


def one(lines) -> dict:
    wait_until(lines)
    (line,) = lines()
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line_with_its_id_status_tokens_and_times(server, lines, stream):
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    server.post(COMPLETIONS, {**body, "stream": stream}, headers={"X-Request-ID": "mine-7"})
    line = one(lines)
    expected = {"request_id": "mine-7", "method": "POST", "path": COMPLETIONS, "status": 200}
    assert line.items() >= {**expected, "completions": 4, "prompt_tokens": 10, "output_tokens": 24}.items()
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"] < 120
    assert (line["preemptions"], line["level"]) == (0, "info")
    assert set(line["ranks"]) <= {0, 1, 2, 3}
    assert line["time"].endswith("+00:00")


def test_refusals_have_a_line_and_polls_have_none(server, lines):
    server.get("/health")
    server.get("/get_load")
    server.serving.phase = Phase.WARMING_UP
    assert server.get("/ready").status_code == 503, "which a probe asks for until the warm-up has ended"
    server.serving.phase = Phase.READY
    server.post(COMPLETIONS, {"prompt": "ab", "temperature": -1})
    line = one(lines)
    assert (line["path"], line["status"]) == ("/v1/completions", 400)
    assert "prompt_tokens" not in line
    assert line["request_id"]
    assert line["error"] == "invalid_request_error"
    assert "error invalid_request_error" in line["message"]


def test_a_stream_that_ends_with_an_error_says_which(start_server, lines):
    server = start_server()
    server.executor.non_finite.add(13)
    server.post(COMPLETIONS, {"prompt": "ab", "stream": True, "seed": 13})
    line = one(lines)
    assert (line["status"], line["error"]) == (200, "non_finite_values")


def test_a_client_that_leaves_is_written_down_as_499_with_what_was_made_for_it(start_server, lines):
    server = start_server(step_seconds=0.1)
    body = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with server.stream(COMPLETIONS, body) as response:
        next(response.iter_lines())
    line = one(lines)
    assert line["status"] == 499
    assert 0 < line["output_tokens"] < 100


def test_a_path_with_line_breaks_stays_in_its_line(server, lines):
    server.exchange(b"GET /a%0AINFO%20forged HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    line = one(lines)
    assert line["path"] == "/a\nINFO forged"
    assert "\n" not in line["message"]
    assert r'"/a\nINFO forged" 404' in line["message"]


def test_records_of_any_kind_are_one_json_object_a_line():
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "%s failed", ("it",), (ValueError, error, None))
    text = JsonLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["level"]) == ("it failed", "error")
    assert "two\nlines" in line["exception"]


def test_configure_logging_sets_the_process_up_and_refuses_unknown_levels(capsys):
    root = logging.getLogger()
    names = ("dsjax", "sharding", "uvicorn")
    before = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in names}
    try:
        configure_logging("warning", as_json=True)
        logging.getLogger("dsjax.serve").info("not shown")
        logging.getLogger("uvicorn.of_tests").warning("shown %d", 1)
        assert json.loads(capsys.readouterr().err)["message"] == "shown 1"
        configure_logging("info")
        logging.getLogger("dsjax.serve").info("for people")
        assert capsys.readouterr().err.endswith("INFO dsjax.serve: for people\n")
    finally:
        root.handlers[:], root.level = before[0], before[1]
        for name, level in before[2].items():
            logging.getLogger(name).setLevel(level)
    with pytest.raises(UserError, match="--log-level is 'loud', expected one of critical, error"):
        configure_logging("loud")

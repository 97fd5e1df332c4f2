"""Requests made from the server's own schema: the tool finds nothing wrong here, and would see it if there were."""

import importlib.util

import pytest
from scripted_executor import scripted

from dsjax.serve.options import ServeOptions

pytestmark = [
    pytest.mark.slow,  # all together
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="pip install schemathesis"),
]


@pytest.fixture
def server(start_server):
    return start_server(**scripted(num_ranks=4, max_chunk=16), options=ServeOptions(admin_api_key="root"))


def test_requests_made_from_the_schema_find_nothing_wrong(server):
    from fuzz_server import fuzz

    findings = fuzz(server.url, 60, api_key="root", told=lambda line: None)
    assert findings.wrong == []
    assert findings.count >= 60
    assert {200, 400} <= findings.statuses.keys()
    assert len(findings.cases) >= 19, "every operation was asked"


def test_a_server_error_a_lost_page_and_an_answer_that_is_another_in_its_last_bit_are_found(server, monkeypatch):
    """The tool sees two of the server's operations."""
    import fuzz_server

    read, kept = fuzz_server.schemathesis.openapi.from_dict, ("/version", "/v1/chat/completions")
    few = lambda schema: read({**schema, "paths": {path: schema["paths"][path] for path in kept}})  # noqa: E731
    monkeypatch.setattr("fuzz_server.schemathesis.openapi.from_dict", few)
    monkeypatch.setattr("dsjax.serve.routes.status.package_version", lambda: 1 / 0)
    real = server.parts.core.loads
    monkeypatch.setattr(server.parts.core, "loads", lambda: [load._replace(used_pages=1) for load in real()])
    answers = iter([[{"token_logprobs": [-9.538113594055176]}], [{"token_logprobs": [-9.538114547729492]}]])
    monkeypatch.setattr("fuzz_server._good_answers", lambda client: next(answers))
    monkeypatch.setattr("fuzz_server._left_behind.__defaults__", (0.1,))
    wrong = fuzz_server.fuzz(server.url, 6, api_key="root", told=lambda line: None).wrong
    for found in ("GET /version", "still in use", "good requests are answered otherwise than before"):
        assert any(found in each for each in wrong), found


def test_a_stream_without_an_end_and_one_with_an_error_are_found_and_a_changing_mesh_excuses_no_other_503():
    from fuzz_server import broken_stream, says_changing

    text = 'data: {"choices": []}\n\n'
    assert broken_stream(text + "data: [DONE]\n\n") is None
    assert "no end" in broken_stream(text)
    failed = 'data: {"error": {"message": "the engine has failed", "type": "server_error"}}\n\ndata: [DONE]\n\n'
    assert "the engine has failed" in broken_stream(text + failed)
    named = 'event: response.completed\ndata: {"type": "response.completed"}\n\n'
    assert broken_stream(named) is None
    assert "no room" in broken_stream('event: error\ndata: {"type": "error", "code": "x", "message": "no room"}\n\n')
    body = '{"error": {"code": "%s"}}'
    for path, status, text, excused in (
        ("/get_load", 503, body % "changing_mesh", True),
        ("/ready", 503, body % "not_ready", True),
        ("/v1/completions", 503, body % "not_ready", False),
        ("/get_load", 500, body % "changing_mesh", False),
        ("/get_load", 503, "Service Unavailable", False),
    ):
        assert says_changing(path, status, text) is excused

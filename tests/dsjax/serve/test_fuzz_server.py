"""Requests made from the server's own schema: the tool finds nothing wrong here, and would see it if there were."""

import sys
from pathlib import Path

import pytest
from scripted_executor import ScriptedExecutor, tool_tokenizer

pytest.importorskip("schemathesis", reason="pip install schemathesis")
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from fuzz_server import broken_stream, fuzz, says_changing

from dsjax.serve.options import ServeOptions

pytestmark = pytest.mark.slow  # all together


@pytest.fixture
def server(start_server):
    tokenizer = tool_tokenizer()
    executor = ScriptedExecutor(tokenizer, num_ranks=4, max_chunk=16)
    return start_server(
        tokenizer=tokenizer, executor=executor, eos=(tokenizer.eos_id,), options=ServeOptions(admin_api_key="root")
    )


def test_requests_made_from_the_schema_find_nothing_wrong(server):
    findings = fuzz(server.url, 60, api_key="root", told=lambda line: None)
    assert findings.wrong == []
    assert findings.count >= 60
    assert {200, 422} <= findings.statuses.keys()
    assert len(findings.cases) >= 19, "every operation was asked"


def test_a_server_error_and_a_lost_page_are_found(server, monkeypatch):
    monkeypatch.setattr("dsjax.serve.routes.status.package_version", lambda: 1 / 0)
    real = server.parts.core.loads
    monkeypatch.setattr(server.parts.core, "loads", lambda: [load._replace(used_pages=1) for load in real()])
    monkeypatch.setattr("fuzz_server._good_answers", lambda client: [])
    monkeypatch.setattr("fuzz_server._left_behind.__defaults__", (0.1,))
    findings = fuzz(server.url, 20, api_key="root", told=lambda line: None)
    assert any("GET /version" in each for each in findings.wrong)
    assert "still in use" in findings.wrong[-1]


def test_a_stream_without_an_end_and_one_with_the_server_s_error_are_found():
    text = 'data: {"choices": []}\n\n'
    assert broken_stream(text + "data: [DONE]\n\n") is None
    assert "no end" in broken_stream(text)
    failed = 'data: {"error": {"message": "the engine has failed", "type": "server_error"}}\n\ndata: [DONE]\n\n'
    assert "the engine has failed" in broken_stream(text + failed)
    named = 'event: response.completed\ndata: {"type": "response.completed"}\n\n'
    assert broken_stream(named) is None
    assert "no room" in broken_stream('event: error\ndata: {"type": "error", "code": "x", "message": "no room"}\n\n')


def test_a_mesh_that_is_being_changed_excuses_no_other_503():
    body = '{"error": {"code": "%s"}}'
    assert says_changing("/get_load", 503, body % "changing_mesh")
    assert says_changing("/ready", 503, body % "not_ready")
    assert not says_changing("/v1/completions", 503, body % "not_ready")
    assert not says_changing("/get_load", 500, body % "changing_mesh")
    assert not says_changing("/get_load", 503, "Service Unavailable")


def test_an_answer_that_is_another_in_its_last_bit_is_found(server, monkeypatch):
    answers = iter([[{"token_logprobs": [-9.538113594055176]}], [{"token_logprobs": [-9.538114547729492]}]])
    monkeypatch.setattr("fuzz_server._good_answers", lambda client: next(answers))
    findings = fuzz(server.url, 20, api_key="root", told=lambda line: None)
    assert findings.wrong == ["good requests are answered otherwise than before"]

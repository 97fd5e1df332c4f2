"""Fields that change nothing, the schema, and requests that are read without FastAPI. `test_hostile_requests.py` has wrong ones."""

import re

import httpx
import pytest
from request_bodies import CHAT, COMPLETIONS, MESSAGES

from dsjax.serve.chat_fields import ChatRequest
from dsjax.serve.routing import DirectRoutes
from dsjax.serve.sampling_fields import CompletionRequest

RESPONSES = "/v1/responses"
GREEDY = {"max_tokens": 3, "temperature": 0}


def test_neutral_values_of_fields_are_accepted_and_content_in_parts_is_joined(server):
    body = {"prompt": "a", "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "echo": False, "user": "me"}
    assert server.post(COMPLETIONS, body).status_code == 200
    body = {"messages": MESSAGES, "tools": [], "response_format": {"type": "text"}, **GREEDY}
    whole = server.post(CHAT, body).json()
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    in_parts = server.post(CHAT, {**body, "messages": parts}).json()
    assert whole["choices"][0]["message"] == in_parts["choices"][0]["message"]


@pytest.mark.parametrize(
    ("path", "schema", "body"),
    [(COMPLETIONS, CompletionRequest, {"prompt": "a"}), (CHAT, ChatRequest, {"messages": MESSAGES})],
)
def test_a_field_that_is_null_is_a_field_left_out(server, path, schema, body):
    # max_tokens alone has a meaning as null: as many as the context holds.
    body = {**body, "seed": 3, "return_token_ids": True, "max_tokens": 5}
    nulls = {field.alias or name: None for name, field in schema.model_fields.items()} | body
    given, left_out = (server.post(path, fields) for fields in (nulls, body))
    assert given.status_code == 200, given.text
    assert given.json()["choices"] == left_out.json()["choices"]


@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"prompt": "a", "n": 0}),
    (COMPLETIONS, {"prompt": "a", "stream": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}),
    (RESPONSES, {"input": "a", "max_output_tokens": 0, "previous_response_id": "resp_1"}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [-1]}),
])  # fmt: skip
def test_every_route_says_first_that_a_model_is_not_there(server, path, body):
    answer = server.post(path, {"model": "nobody", **body})
    assert answer.status_code == 404, answer.text
    assert answer.json() == server.get("/v1/models/nobody").json()
    assert answer.json()["error"]["code"] == "model_not_found"


def test_the_schema_describes_every_answer(server):
    schema = httpx.get(server.url + "/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= schema["paths"].keys()
    responses = schema["paths"][CHAT]["post"]["responses"]
    assert {"200", "400", "404"} <= responses.keys()
    assert responses["400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorBody")
    answers = [one["responses"] for path in schema["paths"].values() for one in path.values()]
    assert all("422" not in each for each in answers), "FastAPI's own, in place of which a 400 is sent"
    assert "HTTPValidationError" not in schema["components"]["schemas"]


def test_a_wrong_header_is_named(server):
    error = server.post(COMPLETIONS, {"prompt": "a"}, headers={"X-Data-Parallel-Rank": "-1"}).json()["error"]
    assert error["param"] == "X-Data-Parallel-Rank"
    assert error["message"].startswith("X-Data-Parallel-Rank: Input should be greater")


@pytest.mark.parametrize(("path", "body", "headers", "is_usual"), [
    (COMPLETIONS, {"prompt": "ab", **GREEDY, "logprobs": 1}, {}, True),
    (COMPLETIONS, {"prompt": "ab", **GREEDY, "stream": True}, {}, True),
    (CHAT, {"messages": MESSAGES, **GREEDY}, {"X-Session-Affinity": "mine"}, True),
    (RESPONSES, {"model": "tiny", "input": "hi", "max_output_tokens": 3, "temperature": 0, "store": False}, {}, True),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 3, "model": "nobody"}, {}, True),
    (COMPLETIONS, {"prompt": "a", "n": 0}, {}, True),
    (COMPLETIONS, {"prompt": "a"}, {"X-Data-Parallel-Rank": "7000"}, True),
    (COMPLETIONS, {"prompt": "a", "top_p": "x"}, {}, False),
    (COMPLETIONS, [], {}, False),
    (COMPLETIONS, {"prompt": "a"}, {"X-Data-Parallel-Rank": "-1"}, False),
    (COMPLETIONS, {"prompt": "a"}, {"X-Session-Affinity": "m" * 5000}, False),
    (COMPLETIONS + "/", {"prompt": "a"}, {}, False),
])  # fmt: skip
def test_a_usual_request_gets_the_answer_of_fastapi_s_way(server, monkeypatch, path, body, headers, is_usual):
    taken, read = [], DirectRoutes._parse
    monkeypatch.setattr(DirectRoutes, "_parse", lambda self, *given: taken.append(read(self, *given)) or taken[-1])

    def answer(content_type: str) -> tuple:
        response = server.post(path, body, headers={"X-Request-ID": "one", "Content-Type": content_type} | headers)
        text = re.sub(r'"(created|created_at|cached_tokens)":\d+|msg_[0-9a-f]+', "", response.text)
        return response.status_code, text, sorted(response.headers.keys() - {"date"})

    usual = answer("application/json; charset=utf-8")
    assert [one is not None for one in taken] == [is_usual] * (path in (COMPLETIONS, CHAT, RESPONSES))
    taken.clear()
    assert answer("application/vnd.openai+json") == usual  # which FastAPI takes as well
    assert not any(taken)

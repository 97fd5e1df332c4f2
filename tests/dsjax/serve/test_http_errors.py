"""Whatever comes in, an error in OpenAI's shape goes out, and nothing stays behind."""

import json
import re

import httpx
import pytest

from dsjax.serve.chat_fields import ChatRequest
from dsjax.serve.guards import UsualRequests
from dsjax.serve.sampling_fields import CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def check_error(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert ".py" not in error["message"]
    return error


@pytest.mark.parametrize(
    "content", [b"{", b"", b"\xff\xfe", b"[1" * 100000, b'{"prompt": ' + b"9" * 5000 + b"}", b"NaN"]
)
def test_a_body_that_is_not_json_is_refused(server, content):
    response = httpx.post(server.url + COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert check_error(response, response.status_code)
    assert response.status_code in (400, 422)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "best_off": 1}, "best_off"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": [1.5]}, "prompt"),
    ],
)
def test_fields_that_are_not_the_schema_s_are_422_and_named(server, body, param):
    assert check_error(server.post(COMPLETIONS, body), 422)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 1000}, "n"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "priority": 3}, "priority"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"five": 1.0}}, "logit_bias"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_values_that_cannot_be_are_400_and_named_before_any_stream_begins(server, body, param, stream):
    if stream and "stream_options" not in body:
        body = {**body, "stream": True}
    assert check_error(server.post(COMPLETIONS, body), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {"prompt": "\ud800"}, 400),
        (COMPLETIONS, {"prompt": "a", "model": "\ud800"}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400),
    ],
)
def test_half_a_surrogate_pair_is_refused(server, path, body, status):
    # httpx would not send it; JSON's escapes do.
    response = httpx.post(
        server.url + path, content=json.dumps(body), headers={"Content-Type": "application/json"}, timeout=120
    )
    check_error(response, status)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"messages": []}, 422, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 422, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
                ]
            },
            400,
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"messages": MESSAGES, "top_logprobs": 3}, 400, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 50}, 400, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
        ({"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, 422, "tools"),
        ({"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, 422, "response_format"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, 422, "chat_template"),
        ({"messages": MESSAGES, "model": "nope"}, 404, "model"),
    ],
)
def test_chat_requests_that_cannot_be_are_named(server, body, status, param):
    assert check_error(server.post(CHAT, body), status)["param"] == param


def test_neutral_values_of_fields_are_accepted(server):
    body = {"prompt": "a", "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "echo": False, "user": "me"}
    assert server.post(COMPLETIONS, body).status_code == 200
    body = {"messages": MESSAGES, "tools": [], "response_format": {"type": "text"}, "max_tokens": 2}
    assert server.post(CHAT, body).status_code == 200


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


def test_unknown_paths_and_methods_have_the_same_shape(server):
    assert check_error(httpx.get(server.url + "/v1/nothing"), 404)["type"] == "not_found_error"
    check_error(httpx.get(server.url + COMPLETIONS), 405)


def test_content_in_parts_is_joined(server):
    parts = [{"type": "text", "text": "hi"}]
    whole, in_parts = (
        server.post(
            CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
        ).json()
        for content in ("hi", parts)
    )
    assert whole["choices"][0]["message"] == in_parts["choices"][0]["message"]


def test_the_schema_describes_every_answer(server):
    schema = httpx.get(server.url + "/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= schema["paths"].keys()
    responses = schema["paths"][CHAT]["post"]["responses"]
    assert {"200", "400", "404", "422"} <= responses.keys()
    assert responses["422"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorBody")


@pytest.mark.parametrize(
    ("path", "body", "headers", "is_usual"),
    [
        (COMPLETIONS, {"prompt": "ab", "max_tokens": 3, "temperature": 0, "logprobs": 1}, {}, True),
        (COMPLETIONS, {"prompt": "ab", "max_tokens": 3, "temperature": 0, "stream": True}, {}, True),
        (CHAT, {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}, {"X-Session-Affinity": "mine"}, True),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "temperature": 0, "store": False}, {}, True),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 3, "model": "nobody"}, {}, True),
        (COMPLETIONS, {"prompt": "a", "n": 0}, {}, True),
        (COMPLETIONS, {"prompt": "a"}, {"X-Data-Parallel-Rank": "7000"}, True),
        (COMPLETIONS, {"prompt": "a", "top_p": "x"}, {}, False),
        (COMPLETIONS, [], {}, False),
        (COMPLETIONS, {"prompt": "a"}, {"X-Data-Parallel-Rank": "-1"}, False),
        (COMPLETIONS, {"prompt": "a"}, {"X-Session-Affinity": "m" * 5000}, False),
        (COMPLETIONS + "/", {"prompt": "a"}, {}, False),
    ],
)
def test_a_usual_request_gets_the_answer_that_it_would_get_by_fastapi_s_way(
    server, monkeypatch, path, body, headers, is_usual
):
    taken, read = [], UsualRequests._read
    monkeypatch.setattr(UsualRequests, "_read", lambda self, *given: taken.append(read(self, *given)) or taken[-1])

    def answer(content_type: str) -> tuple:
        response = server.post(path, body, headers={"X-Request-ID": "one", "Content-Type": content_type} | headers)
        text = re.sub(r'"(created|created_at|cached_tokens)":\d+|msg_[0-9a-f]+', "", response.text)
        return response.status_code, text, sorted(response.headers.keys() - {"date"})

    usual = answer("application/json; charset=utf-8")
    assert [one is not None for one in taken] == [is_usual] * (path in (COMPLETIONS, CHAT, "/v1/responses"))
    taken.clear()
    assert answer("application/vnd.openai+json") == usual  # which FastAPI takes as well
    assert not any(taken)

"""Anthropic's Messages API tells the same conversation as chat: `anthropic_request.py`, `anthropic_answer.py`.

Its own client is in `tools/clients/test_anthropic.py`.
"""

import json

import httpx
import pytest

from dsjax.serve.tool_calls import FORMATS

URL, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "Weather?"}
BODY = {"model": "tiny", "max_tokens": 200, "messages": [HELLO], "temperature": 0}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
CALL = FORMATS["deepseek_v31"].calls([("weather", '{"city": "Bonn"}'), ("weather", '{"city": "Ulm"}')])
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bonn"}}
HISTORY = [
    HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look.", "signature": "none"},
            {"type": "text", "text": "One moment."},
            USE,
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
            {
                "type": "tool_result",
                "tool_use_id": "a",
                "content": [{"type": "text", "text": "19 °C"}],
                "is_error": False,
            },
        ],
    },
]


def events_of(answer) -> list[dict]:
    events = []
    for event in filter(None, answer.text.split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def built(events: list[dict]) -> list[dict]:
    """The content that a stream's events build."""
    blocks, done = [], 0
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == done
            blocks.append(dict(event["content_block"]))
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            field, piece = ("input", "partial_json") if kind == "input_json" else (kind, kind)
            blocks[event["index"]][field] += event["delta"][piece]
        elif event["type"] == "content_block_stop":
            done += 1
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    assert done == len(blocks)
    return blocks


@pytest.mark.parametrize(
    ("script", "more", "content", "stop_reason"),
    [
        (
            "why</think>because",
            {},
            [{"type": "thinking", "thinking": "why", "signature": ""}, {"type": "text", "text": "because"}],
            "end_turn",
        ),
        ("because", {"thinking": {"type": "disabled"}}, [{"type": "text", "text": "because"}], "end_turn"),
        (
            "why</think>because",
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            [{"type": "text", "text": "because"}],
            "end_turn",
        ),
        (
            "12345",
            {"thinking": {"type": "enabled", "budget_tokens": 2}},
            [{"type": "thinking", "thinking": "12", "signature": ""}, {"type": "text", "text": "45"}],
            "end_turn",
        ),
        ("</think>abc", {"max_tokens": 2}, [{"type": "text", "text": "a"}], "max_tokens"),
        ("</think>abc", {"stop_sequences": ["c"]}, [{"type": "text", "text": "ab"}], "stop_sequence"),
        (
            "</think>Look." + CALL,
            {"tools": [TOOL]},
            [
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "name": "weather", "input": {"city": "Bonn"}},
                {"type": "tool_use", "name": "weather", "input": {"city": "Ulm"}},
            ],
            "tool_use",
        ),
        (
            "</think>" + CALL,
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            [{"type": "tool_use", "name": "weather", "input": {"city": "Bonn"}}],
            "tool_use",
        ),
        (
            "</think>" + CALL,
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            [{"type": "text", "text": CALL}],
            "end_turn",
        ),
    ],
)
def test_a_message_is_the_same_whole_and_streamed(start, script, more, content, stop_reason):
    server = start(script)
    message = server.post(URL, {**BODY, **more}).json()
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    events = events_of(server.post(URL, {**BODY, **more, "stream": True}))
    told = [event["type"] for event in events]
    assert (told[0], told[-2:]) == ("message_start", ["message_delta", "message_stop"])
    ended = {"stop_reason": stop_reason, "stop_sequence": "c" if stop_reason == "stop_sequence" else None}
    ended["stop_details"] = None
    assert {name: message[name] for name in ended} == events[-2]["delta"] == ended
    assert message["usage"]["output_tokens"] == events[-2]["usage"]["output_tokens"]
    for blocks in (message["content"], built(events)):
        for block in blocks:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("call_")
                assert block.pop("caller") == {"type": "direct"}
            assert block.pop("citations", None) is None
        assert blocks == content
    assert events[0]["message"]["content"] == []


def test_a_forced_call_names_its_tool(start):
    server = start(CALL)
    body = {
        **BODY,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "weather"},
        "thinking": {"type": "disabled"},
    }
    message = server.post(URL, body).json()
    assert [(block["name"], block["input"]) for block in message["content"]] == [("weather", {"city": "Bonn"})]
    body["tool_choice"] = {"type": "any"}
    assert [block["input"]["city"] for block in server.post(URL, body).json()["content"]] == ["Bonn", "Ulm"]


def test_arguments_that_were_cut_off_stand_as_text(start):
    server = start(CALL)
    message = server.post(URL, {**BODY, "tools": [TOOL], "thinking": {"type": "disabled"}, "max_tokens": 12}).json()
    assert message["stop_reason"] == "max_tokens"
    (arguments,) = message["content"][0]["input"].values()
    assert '{"city": "Bonn"}'.startswith(arguments)
    assert 0 < len(arguments) < 16


def test_the_prompt_is_that_of_the_same_chat(start):
    server = start()
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    chat = [
        {"role": "system", "content": "Be\nbrief."},
        HELLO,
        {"role": "assistant", "content": "One moment.", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "19 °C"},
        {"role": "user", "content": "Well?"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}]
    tokens = server.post("/tokenize", {"messages": chat, "tools": tools}).json()["count"]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    asked = {"model": "tiny", "messages": HISTORY, "system": system, "tools": [TOOL]}
    assert server.post(COUNT, asked).json() == {"input_tokens": tokens}
    usage = server.post(URL, {**asked, "max_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens


def test_a_last_message_of_the_assistant_is_continued(start):
    server = start("so it is")
    asked = {**BODY, "messages": [HELLO, {"role": "assistant", "content": "so"}]}
    assert server.post(URL, asked).json()["content"][0]["text"] == " it is"


def test_results_alone_are_no_message_of_the_user_and_an_answer_with_calls_is_not_continued(start):
    server = start()
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    chat = [HELLO, {"role": "assistant", "content": "One moment.", "tool_calls": [call]}]
    chat += [{"role": "tool", "tool_call_id": "a", "content": "19 °C"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "One moment."}, USE]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "19 °C"}]}
    for told, messages in ((chat[:2], [HELLO, answer]), (chat, [HELLO, answer, result])):
        tokens = server.post("/tokenize", {"messages": told}).json()["count"]
        assert server.post(COUNT, {"model": "tiny", "messages": messages}).json() == {"input_tokens": tokens}


def test_an_output_format_binds(start):
    config = {"format": {"type": "json_schema", "schema": {"type": "integer"}}, "effort": "high"}
    answer = start("7").post(URL, {**BODY, "output_config": config, "thinking": {"type": "disabled"}})
    assert [block["text"] for block in answer.json()["content"]] == ["7"]


def test_fields_without_effect_are_named_in_a_warning(start):
    answer = start("</think>ok").post(
        URL, {**BODY, "container": "c", "service_tier": "auto", "metadata": {"user_id": "u"}}
    )
    assert answer.headers["warning"] == '299 dsjax "without effect on this server: container"'


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"model": "other"}, 404, "does not exist"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "found a part of type image",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}]},
            400,
            "needs name",
        ),
        ({"messages": HISTORY[:1] + HISTORY[2:]}, 400, "which no message before it calls"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "custom"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice wants tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "needs a name"),
        ({"messages": [{"role": "assistant", "content": [USE] * 200}, HELLO]}, 400, "at most 128 items"),
    ],
)
def test_errors_have_anthropic_s_shape(start, more, status, words):
    answer = start().post(URL, {**BODY, **more})
    assert answer.status_code == status
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert words in body["error"]["message"]


def test_an_error_after_the_stream_has_begun_is_an_error_event(start):
    server = start("a" * 200, step_seconds=0.05)
    with httpx.stream("POST", server.url + URL, json={**BODY, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.engine.abort_all()
        data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert (data[-1]["type"], data[-1]["error"]["type"]) == ("error", "api_error")


def test_the_key_comes_as_anthropic_s_clients_send_it(start):
    server = start("</think>ok", api_keys=("secret",))
    refused = server.post(URL, BODY, headers={"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert server.post(URL, BODY, headers={"x-api-key": "secret"}).status_code == 200


def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation(start):
    """Anthropic's client, whose tool runner asks for a thread first, goes by these details."""
    refused = start("a").post(URL, BODY | {"thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (refused.status_code, refused.json()["error"]["details"]) == (400, details)

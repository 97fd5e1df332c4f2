"""Anthropic's Messages API tells the same conversation as chat: `anthropic_request.py`, `anthropic_answer.py`.

Its own client is in `tools/clients/test_anthropic.py`.
"""

import json

import pytest
from live_server import named_events
from request_bodies import call, taking, tool
from scripted_executor import scripted

from dsjax.serve.tool_calls import FORMATS

URL, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "Weather?"}
BODY = {"model": "tiny", "max_tokens": 200, "messages": [HELLO], "temperature": 0}
SCHEMA = taking(("city",), city="string")
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
CALL = FORMATS["deepseek_v31"].calls([("weather", '{"city": "Bonn"}'), ("weather", '{"city": "Ulm"}')])


def text(said: str, **more) -> dict:
    return {"type": "text", "text": said, **more}


def thinking(said: str, signature: str = "") -> dict:
    return {"type": "thinking", "thinking": said, "signature": signature}


def use(city: str) -> dict:
    return {"type": "tool_use", "name": "weather", "input": {"city": city}}


def result(**more) -> dict:
    return {"type": "tool_result", "tool_use_id": "a", "content": "19 °C", **more}


USE = {**use("Bonn"), "id": "a"}
RESULT = result(content=[text("19 °C")], is_error=False)
HISTORY = [
    HELLO,
    {"role": "assistant", "content": [thinking("Look.", "none"), text("One moment."), USE]},
    {"role": "user", "content": [text("Well?", cache_control={"type": "ephemeral"}), RESULT]},
]
CHAT_CALL = call("weather", '{"city": "Bonn"}', "a")
CHAT_RESULT = {"role": "tool", "tool_call_id": "a", "content": "19 °C"}
NO_THINKING = {"thinking": {"type": "disabled"}}
ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}


def built(events: list[dict]) -> list[dict]:
    """The content that a stream's events build."""
    blocks, done = [], 0
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == done
            blocks.append(
                event["content_block"] | ({"input": ""} if event["content_block"]["type"] == "tool_use" else {})
            )
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta")
            field, piece = ("input", "partial_json") if kind == "input_json" else (kind, kind)
            blocks[event["index"]][field] += event["delta"][piece]
        elif event["type"] == "content_block_stop":
            done += 1
    assert done == len(blocks)
    return [block | {"input": json.loads(block["input"])} if block["type"] == "tool_use" else block for block in blocks]


@pytest.mark.parametrize(("script", "more", "content", "stop_reason"), [
    ("why</think>because", {}, [thinking("why"), text("because")], "end_turn"),
    ("because", NO_THINKING, [text("because")], "end_turn"),
    ("why</think>because", {"thinking": {"type": "adaptive", "display": "omitted"}}, [text("because")], "end_turn"),
    ("12345", {"thinking": {"type": "enabled", "budget_tokens": 2}}, [thinking("12"), text("45")], "end_turn"),
    ("</think>abc", {"max_tokens": 2}, [text("a")], "max_tokens"),
    ("</think>abc", {"stop_sequences": ["c"]}, [text("ab")], "stop_sequence"),
    ("</think>Look." + CALL, {"tools": [TOOL]}, [text("Look."), use("Bonn"), use("Ulm")], "tool_use"),
    ("</think>" + CALL, {"tools": [TOOL], "tool_choice": ONE_CALL}, [use("Bonn")], "tool_use"),
    ("</think>" + CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, [text(CALL)], "end_turn"),
])  # fmt: skip
def test_a_message_is_the_same_whole_and_streamed(start, script, more, content, stop_reason):
    server = start(script)
    message = server.post(URL, {**BODY, **more}).json()
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    events = named_events(server.post(URL, {**BODY, **more, "stream": True}).text)
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


@pytest.mark.parametrize(
    ("choice", "cities"), [({"type": "tool", "name": "weather"}, ["Bonn"]), ({"type": "any"}, ["Bonn", "Ulm"])]
)
def test_a_forced_call_names_its_tool(start, choice, cities):
    message = start(CALL).post(URL, {**BODY, **NO_THINKING, "tools": [TOOL], "tool_choice": choice}).json()
    assert [(block["name"], block["input"]) for block in message["content"]] == [
        ("weather", {"city": city}) for city in cities
    ]


def test_arguments_that_were_cut_off_stand_as_text(start):
    message = start(CALL).post(URL, {**BODY, **NO_THINKING, "tools": [TOOL], "max_tokens": 12}).json()
    assert message["stop_reason"] == "max_tokens"
    (arguments,) = message["content"][0]["input"].values()
    assert '{"city": "Bonn"}'.startswith(arguments)
    assert 0 < len(arguments) < 16


def test_the_prompt_is_that_of_the_same_chat(start):
    server = start()
    chat = [
        {"role": "system", "content": "Be\nbrief."},
        HELLO,
        {"role": "assistant", "content": "One moment.", "reasoning_content": "Look.", "tool_calls": [CHAT_CALL]},
        CHAT_RESULT,
        {"role": "user", "content": "Well?"},
    ]
    tools = [tool("weather", description="of a city", parameters=SCHEMA)]
    tokens = server.post("/tokenize", {"messages": chat, "tools": tools}).json()["count"]
    asked = {"model": "tiny", "messages": HISTORY, "system": [text("Be"), text("brief.")], "tools": [TOOL]}
    assert server.post(COUNT, asked).json() == {"input_tokens": tokens}
    usage = server.post(URL, {**asked, "max_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens


def test_a_last_message_of_the_assistant_is_continued(start):
    asked = {**BODY, "messages": [HELLO, {"role": "assistant", "content": "so"}]}
    assert start("so it is").post(URL, asked).json()["content"][0]["text"] == " it is"


def test_results_alone_are_no_message_of_the_user_and_an_answer_with_calls_is_not_continued(start):
    server = start()
    chat = [HELLO, {"role": "assistant", "content": "One moment.", "tool_calls": [CHAT_CALL]}, CHAT_RESULT]
    answer = {"role": "assistant", "content": [text("One moment."), USE]}
    asked = [HELLO, answer]
    for told, messages in ((chat[:2], asked), (chat, [*asked, {"role": "user", "content": [result()]}])):
        tokens = server.post("/tokenize", {"messages": told}).json()["count"]
        assert server.post(COUNT, {"model": "tiny", "messages": messages}).json() == {"input_tokens": tokens}


def test_an_output_format_binds(start):
    config = {"format": {"type": "json_schema", "schema": {"type": "integer"}}, "effort": "high"}
    answer = start("7").post(URL, {**BODY, **NO_THINKING, "output_config": config})
    assert [block["text"] for block in answer.json()["content"]] == ["7"]


def test_fields_without_effect_are_named_in_a_warning(start):
    fields = {"container": "c", "service_tier": "auto", "metadata": {"user_id": "u"}}
    answer = start("</think>ok").post(URL, {**BODY, **fields})
    assert answer.headers["warning"] == '299 dsjax "without effect on this server: container"'


def said_by(role: str, *content: dict) -> dict:
    return {"messages": [{"role": role, "content": list(content)}]}


@pytest.mark.parametrize(("more", "status", "words"), [
    ({"model": "other"}, 404, "does not exist"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"messages": []}, 400, "messages"),
    (said_by("user", {"type": "image", "source": {}}), 400, "found a part of type image"),
    (said_by("assistant", {"type": "tool_use", "id": "a", "input": {}}), 400, "needs name"),
    ({"messages": HISTORY[:1] + HISTORY[2:]}, 400, "which no message before it calls"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "custom"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice wants tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 400, "needs a name"),
    ({"messages": [{"role": "assistant", "content": [USE] * 200}, HELLO]}, 400, "at most 128 items"),
])  # fmt: skip
def test_errors_have_anthropic_s_shape(start, more, status, words):
    answer = start().post(URL, {**BODY, **more})
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "error", "expected"),
    [
        (URL, BODY, lambda last: last["error"]["type"], "api_error"),
        ("/v1/responses", {"model": "tiny", "input": "hi"}, lambda last: last["code"], "shutting_down"),
    ],
    ids=["messages", "responses"],
)
def test_an_error_after_the_stream_has_begun_is_an_error_event(start_server, path, body, error, expected):
    server = start_server(**scripted(script="</think>" + "a" * 400, step_seconds=0.1))
    with server.stream(path, {**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.engine.abort_all()
        last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")][-1]
    assert (last["type"], error(last)) == ("error", expected)


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

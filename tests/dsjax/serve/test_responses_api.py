"""`/v1/responses`: items and events as OpenAI's client reads them, and nothing that would need a memory.

`test_anthropic.py` tests an error in the middle of a stream.
"""

import itertools
import json

import pytest
from live_server import named_events
from request_bodies import taking
from scripted_executor import tool_tokenizer

from dsjax.serve.responses_request import ResponsesRequest
from dsjax.serve.tool_calls import FORMATS

PATH = "/v1/responses"
ASKED = {"model": "tiny", "input": "hi"}
TOOL = {"type": "function", "name": "get_time", "parameters": taking(city="string")}
CALL = FORMATS["deepseek_v31"].calls([("get_time", '{"city": "Ulm"}')])


def events_of(server, **body) -> list[dict]:
    events = named_events(server.post(PATH, {**ASKED, **body, "stream": True}).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def chat_of(**body):
    """The chat that a request of this API stands for."""
    return ResponsesRequest.model_validate({**ASKED, **body}).to_chat()


def without_ids(response: dict) -> dict:
    shown = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    shown["usage"].pop("input_tokens_details")  # the second request finds the first one's prompt in the cache
    ids = [{"call_id": ""} if "call_id" in item else {} for item in response["output"]]
    shown["output"] = [{**item, "id": item["type"], **id} for item, id in zip(response["output"], ids, strict=True)]
    return shown


@pytest.mark.parametrize(
    ("script", "kinds"),
    [
        ("why so</think>because", ["reasoning", "message"]),
        ("why so</think>I look." + CALL, ["reasoning", "message", "function_call"]),
        ("</think>", ["message"]),
    ],
)
def test_streamed_events_build_what_the_whole_answer_holds(start, script, kinds):
    server = start(script)
    body = {"instructions": "be brief", "tools": [TOOL], "metadata": {"run": "1"}}
    whole = server.post(PATH, {**ASKED, **body}).json()
    assert [item["type"] for item in whole["output"]] == kinds
    assert (whole["object"], whole["status"], whole["error"]) == ("response", "completed", None)
    events = events_of(server, **body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    items: dict[int, dict] = {}
    for event in events:
        at = event.get("output_index")
        match event["type"]:
            case "response.output_item.added":
                assert at == len(items)
                items[at] = event["item"]
            case "response.content_part.added":
                items[at]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[at]["content"][event["content_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[at]["arguments"] += event["delta"]
            case "response.output_item.done":
                assert {**items[at], "status": "completed"} == event["item"]
    assert len(items) == len(kinds)


CALLED = ("function_call", '{"city": "Ulm"}', None)


@pytest.mark.parametrize(
    ("script", "items"),
    [
        # The line breaks are dropped from the text, but their tokens are the message's.
        ("why</think>\n\nbecause", [("reasoning", "why", None), ("message", "because", "\n\nbecause<end>")]),
        ("why</think>I look." + CALL, [("reasoning", "why", None), ("message", "I look.", "I look."), CALLED]),
        ("</think>" + CALL, [CALLED]),
    ],
)
def test_log_probabilities_are_those_of_the_message_s_own_tokens(start, script, items):
    server, end = start(script), tool_tokenizer().special_tokens["eos_token"]
    body = {"tools": [TOOL], "include": ["message.output_text.logprobs"]}
    whole = server.post(PATH, {**ASKED, **body}).json()
    found = []
    for item in whole["output"]:
        (part,) = item.get("content", [{"text": item.get("arguments")}])
        tokens = [entry["token"] for entry in part["logprobs"]] if "logprobs" in part else None
        found.append((item["type"], part["text"], tokens and "".join(tokens).replace(end, "<end>")))
    assert found == items
    events = events_of(server, **body)
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    parts = [part.get("logprobs", []) for item in whole["output"] for part in item.get("content", ())]
    assert [*itertools.chain(*deltas)] == [*itertools.chain(*parts)]


def test_what_is_cut_off_is_incomplete_and_says_why(start):
    server = start("</think>" + "a" * 50)
    whole = server.post(PATH, {**ASKED, "max_output_tokens": 5}).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 5
    assert whole["output"][-1]["status"] == "incomplete"
    assert events_of(server, max_output_tokens=5)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(("fields", "names"), [
    ({"include": ["message.output_text.logprobs"]}, None),
    ({"store": None}, None),
    ({"store": True}, None),
    ({"include": ["reasoning.encrypted_content"], "verbosity": "low"}, "verbosity, include"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
])  # fmt: skip
def test_what_changes_nothing_is_named_in_a_warning_and_nothing_is_stored(start, fields, names):
    answer = start("</think>ok").post(PATH, {**ASKED, **fields})
    assert answer.status_code == 200
    assert answer.json()["store"] is False
    assert answer.headers.get("warning") == (names and f'299 dsjax "without effect on this server: {names}"')


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}
FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}


WRONG = {
    "seed": 2**63, "previous_response_id": "resp_1", "conversation": "conv_1", "prompt": {"id": "p"}, "background": True,
    "truncation": "auto", "max_output_tokens": 0, "top_logprobs": 21, "modalities": ["audio"],
}  # fmt: skip


@pytest.mark.parametrize(("said", "fields"), [
    ("model: Input should be a valid string", {"model": None}),
    ("model: Field required", {"model": ...}),
    ("tool_choice wants tools", {"tool_choice": ALLOWED}),
    *(("", {name: value}) for name, value in WRONG.items()),
    *(("", {"input": wrong}) for wrong in ([], [IMAGE])),
    ("the output of the call 'd'", {"input": [FUNCTION_CALL, {**OUTPUT, "call_id": "d"}]}),
    ("the output of the call 'c'", {"input": [OUTPUT, FUNCTION_CALL]}),
    ("not 4097", {"input": [{"role": "user", "content": "h"}] * 4096, "instructions": "be brief"}),
    ("not 129", {"input": [FUNCTION_CALL] * 129}),
    ("input.0: expected a message, function_call, ", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    *(("", {"request_id": wrong}) for wrong in ("a\r\nSet-Cookie: b=c", "漢", "a b", "i" * 129, "")),
])  # fmt: skip
def test_what_cannot_be_is_refused_and_the_field_named(start, said, fields):
    body = {name: value for name, value in {**ASKED, **fields}.items() if value is not ...}
    answer = start("</think>ok").post(PATH, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].split(".")[0] == next(iter(fields))
    assert said in error["message"]
    assert "set-cookie" not in answer.headers


def test_the_fields_of_a_draw_reach_the_chat_request_and_the_penalties_come_back(start):
    draw = {"seed": 7, "top_k": 3, "min_p": 0.1, "stop": ["x"], "presence_penalty": 0.5, "frequency_penalty": -0.5}
    chat = chat_of(**draw)
    assert {name: getattr(chat, name) for name in draw} == draw
    for given, shown in ((draw, (0.5, -0.5)), ({}, (0.0, 0.0))):
        answer = start("</think>ok").post(PATH, {**ASKED, **given}).json()
        assert (answer["presence_penalty"], answer["frequency_penalty"]) == shown
    stopped = start("</think>axb").post(PATH, {**ASKED, "stop": "x", "temperature": 0}).json()
    assert stopped["output"][-1]["content"][0]["text"] == "a"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_offered_alone(mode):
    chat = chat_of(tools=[{**TOOL, "name": "get_weather"}, TOOL], tool_choice={**ALLOWED, "mode": mode})
    chat.check()
    assert [tool["function"]["name"] for tool in chat.offered_tools] == ["get_time"]
    assert chat.forced_tools == (chat.offered_tools if mode == "required" else [])


def test_an_answer_sent_back_with_a_tools_output_is_the_same_conversation_as_in_chat(start):
    first = start("why</think>I look." + CALL).post(PATH, {**ASKED, "tools": [TOOL]}).json()
    id = first["output"][-1]["call_id"]
    history = [
        {"role": "user", "content": "hi"},
        *first["output"],
        {"type": "function_call_output", "call_id": id, "output": "noon"},
        {"role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
    ]
    messages = chat_of(input=history, instructions="be brief").messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "user"]
    _, _, assistant, answer, _ = messages
    assert (assistant.text, assistant.reasoning_content) == ("I look.", "why")
    (call,) = assistant.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == (id, "get_time", '{"city": "Ulm"}')
    assert (answer.tool_call_id, answer.text) == (id, "noon")


def test_openai_s_client_reads_answers_streams_and_forms(start):
    import openai

    server = start('why</think>{"answer": 7}')
    client = server.openai_client()
    form = {"type": "json_schema", "name": "a", "schema": taking(answer="integer")}
    whole = client.responses.create(**ASKED, text={"format": form}, reasoning={"effort": "low"})
    assert json.loads(whole.output_text) == {"answer": 7}
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(**ASKED) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == whole.output_text
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    with pytest.raises(openai.BadRequestError, match="keeps nothing between requests"):
        client.responses.create(**ASKED, previous_response_id="resp_1")

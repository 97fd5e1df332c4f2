"""`/v1/responses`: items and events as OpenAI's client reads them, and nothing that would need a memory."""

import json

import httpx
import pytest
from scripted_executor import tool_tokenizer

from dsjax.serve.responses_request import ResponsesRequest
from dsjax.serve.tool_calls import FORMATS

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_time",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = FORMATS["deepseek_v31"].calls([("get_time", '{"city": "Ulm"}')])


def events_of(server, **body) -> list[dict]:
    text = server.post(PATH, {"model": "tiny", **body, "stream": True}).text
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response: dict) -> dict:
    shown = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    shown["usage"].pop("input_tokens_details")  # the second request finds the first one's prompt in the cache
    shown["output"] = [
        {**item, "id": item["type"]} | ({"call_id": ""} if "call_id" in item else {}) for item in response["output"]
    ]
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
    body = {"model": "tiny", "input": "hi", "instructions": "be brief", "tools": [TOOL], "metadata": {"run": "1"}}
    whole = server.post(PATH, body).json()
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


@pytest.mark.parametrize(
    ("script", "items"),
    [
        # The line breaks are dropped from the text, but their tokens are the message's.
        ("why so</think>\n\nbecause", [("reasoning", "why so", None), ("message", "because", "\n\nbecause<end>")]),
        (
            "why so</think>I look." + CALL,
            [
                ("reasoning", "why so", None),
                ("message", "I look.", "I look."),
                ("function_call", '{"city": "Ulm"}', None),
            ],
        ),
        ("</think>" + CALL, [("function_call", '{"city": "Ulm"}', None)]),
    ],
)
def test_log_probabilities_are_those_of_the_message_s_own_tokens(start, script, items):
    server, end = start(script), tool_tokenizer().special_tokens["eos_token"]
    body = {"model": "tiny", "input": "hi", "tools": [TOOL], "include": ["message.output_text.logprobs"]}
    whole = server.post(PATH, body).json()
    found = []
    for item in whole["output"]:
        (part,) = item.get("content", [{"text": item.get("arguments")}])
        tokens = [entry["token"] for entry in part["logprobs"]] if "logprobs" in part else None
        found.append((item["type"], part["text"], tokens and "".join(tokens).replace(end, "<end>")))
    assert found == items
    events = events_of(server, **body)
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    streamed = [
        entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]
    ]
    assert streamed == [
        entry for item in whole["output"] for part in item.get("content", ()) for entry in part.get("logprobs", ())
    ]


def test_what_is_cut_off_is_incomplete_and_says_why(start):
    server = start("</think>" + "a" * 50)
    whole = server.post(PATH, {"model": "tiny", "input": "hi", "max_output_tokens": 5}).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 5
    assert whole["output"][-1]["status"] == "incomplete"
    assert events_of(server, input="hi", max_output_tokens=5)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"include": ["message.output_text.logprobs"]}, None),
        ({"store": None}, None),
        ({"store": True}, None),
        ({"include": ["reasoning.encrypted_content"], "verbosity": "low"}, "verbosity, include"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ],
)
def test_what_changes_nothing_is_named_in_a_warning_and_nothing_is_stored(start, fields, names):
    answer = start("</think>ok").post(PATH, {"model": "tiny", "input": "hi", **fields})
    assert answer.status_code == 200
    assert answer.json()["store"] is False
    assert answer.headers.get("warning") == (names and f'299 dsjax "without effect on this server: {names}"')


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}
FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "5"}


@pytest.mark.parametrize(
    ("status", "said", "fields"),
    [
        (400, "model: Input should be a valid string", {"model": None}),
        (400, "model: Field required", {"model": ...}),
        (400, "tool_choice wants tools", {"tool_choice": ALLOWED}),
        (400, "", {"seed": 2**63}),
        (400, "", {"previous_response_id": "resp_1"}),
        (400, "", {"conversation": "conv_1"}),
        (400, "", {"prompt": {"id": "p"}}),
        (400, "", {"background": True}),
        (400, "", {"truncation": "auto"}),
        (400, "", {"max_output_tokens": 0}),
        (400, "", {"top_logprobs": 21}),
        (400, "", {"modalities": ["audio"]}),
        (400, "", {"input": []}),
        (400, "", {"input": [IMAGE]}),
        (400, "the output of the call 'd'", {"input": [FUNCTION_CALL, {**OUTPUT, "call_id": "d"}]}),
        (400, "the output of the call 'c'", {"input": [OUTPUT, FUNCTION_CALL]}),
        (400, "not 4097", {"input": [{"role": "user", "content": "h"}] * 4096, "instructions": "be brief"}),
        (400, "not 129", {"input": [FUNCTION_CALL] * 129}),
        (400, "input.0: expected a message, function_call, ", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        *((400, "", {"request_id": wrong}) for wrong in ("a\r\nSet-Cookie: b=c", "漢", "a b", "i" * 129, "")),
    ],
)
def test_what_cannot_be_is_refused_and_the_field_named(start, status, said, fields):
    body = {"model": "tiny", "input": "hi", **fields}
    answer = start("</think>ok").post(PATH, {name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"].split(".")[0] == next(iter(fields))
    assert said in error["message"]
    assert "set-cookie" not in answer.headers


def test_the_fields_of_a_draw_reach_the_chat_request_and_the_penalties_come_back(start):
    draw = {"seed": 7, "top_k": 3, "min_p": 0.1, "stop": ["x"], "presence_penalty": 0.5, "frequency_penalty": -0.5}
    chat = ResponsesRequest.model_validate({"model": "tiny", "input": "hi", **draw}).to_chat()
    assert {name: getattr(chat, name) for name in draw} == draw
    for given, shown in ((draw, (0.5, -0.5)), ({}, (0.0, 0.0))):
        answer = start("</think>ok").post(PATH, {"model": "tiny", "input": "hi", **given}).json()
        assert (answer["presence_penalty"], answer["frequency_penalty"]) == shown
    stopped = start("</think>axb").post(PATH, {"model": "tiny", "input": "hi", "stop": "x", "temperature": 0}).json()
    assert stopped["output"][-1]["content"][0]["text"] == "a"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_offered_alone(mode):
    other = {**TOOL, "name": "get_weather"}
    asked = {"model": "tiny", "input": "hi", "tools": [other, TOOL], "tool_choice": {**ALLOWED, "mode": mode}}
    chat = ResponsesRequest.model_validate(asked).to_chat()
    chat.check()
    assert [tool["function"]["name"] for tool in chat.offered_tools] == ["get_time"]
    assert chat.forced_tools == (chat.offered_tools if mode == "required" else [])


def test_an_answer_sent_back_with_a_tools_output_is_the_same_conversation_as_in_chat(start, monkeypatch):
    first = start("why</think>I look." + CALL).post(PATH, {"model": "tiny", "input": "hi", "tools": [TOOL]}).json()
    call = first["output"][-1]
    history = [
        {"role": "user", "content": "hi"},
        *first["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"},
        {"role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
    ]
    messages = (
        ResponsesRequest.model_validate({"model": "tiny", "input": history, "instructions": "be brief"})
        .to_chat()
        .messages
    )
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assistant = messages[2]
    assert (assistant.text, assistant.reasoning_content) == ("I look.", "why")
    assert [(c.id, c.function.name, c.function.arguments) for c in assistant.tool_calls] == [
        (call["call_id"], "get_time", '{"city": "Ulm"}')
    ]
    assert (messages[3].tool_call_id, messages[3].text) == (call["call_id"], "noon")


def test_openai_s_client_reads_answers_streams_and_forms(start):
    import openai

    server = start('why</think>{"answer": 7}')
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    form = {
        "type": "json_schema",
        "name": "a",
        "schema": {"type": "object", "properties": {"answer": {"type": "integer"}}},
    }
    whole = client.responses.create(model="tiny", input="hi", text={"format": form}, reasoning={"effort": "low"})
    assert json.loads(whole.output_text) == {"answer": 7}
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model="tiny", input="hi") as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == whole.output_text
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    with pytest.raises(openai.BadRequestError, match="keeps nothing between requests"):
        client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")


def test_an_error_after_the_stream_has_begun_is_an_error_event(start):
    server = start("</think>" + "a" * 400, step_seconds=0.02)
    with httpx.stream(
        "POST", server.url + PATH, json={"model": "tiny", "input": "hi", "stream": True}, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        server.engine.abort_all()
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert (rest[-1]["type"], rest[-1]["code"]) == ("error", "shutting_down")

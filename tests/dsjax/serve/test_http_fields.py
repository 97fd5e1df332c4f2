"""The fields of OpenAI's API and vLLM's extras: what each does to the answer, streamed and whole."""

import json

import pytest
from live_server import events
from scripted_executor import ScriptedExecutor, tool_tokenizer

from dsjax.serve.tool_calls import FORMATS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ALWAYS = {"role": "assistant", "refusal": None, "annotations": []}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "looks it up",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("get_weather", "get_time")
]
CALL = FORMATS["deepseek_v31"].calls([("get_weather", '{"city": "Köln"}'), ("get_time", '{"city": "Ulm"}')])


def together(chunks: list[dict]) -> dict:
    """The message that a stream's deltas make."""
    message: dict = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(call["function"] | {"id": call["id"]})
                else:
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return message


# Prompts that are scored: what lm-eval's local-completions reads.


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(start, max_tokens, stream):
    server = start()
    prompt = [5, 6, 7, *range(40, 70)]  # more than one chunk
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    answer = server.post(COMPLETIONS, body)
    choices = [c for e in events(answer.text) for c in e["choices"]] if stream else answer.json()["choices"]
    lists = choices[0]["logprobs"]
    assert lists["token_logprobs"][: len(prompt)] == [None, *(-float(at) for at in range(1, len(prompt)))]
    assert lists["top_logprobs"][0] is None
    # As lm-eval does: greedy where the token's own value is the greatest of the top ones.
    greedy = [
        logprob == max(top.values())
        for logprob, top in zip(lists["token_logprobs"], lists["top_logprobs"], strict=True)
        if top
    ]
    assert greedy[: len(prompt) - 1] == [at % 2 == 0 for at in range(1, len(prompt))]
    assert len(lists["tokens"]) == len(lists["text_offset"]) == len(lists["token_logprobs"])
    if not stream:
        assert len(lists["tokens"]) == len(prompt) + max_tokens
    tokenizer = server.engine.tokenizer
    assert choices[0]["text"].startswith(tokenizer.decode(prompt))
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
    assert choices[-1]["finish_reason"] == "length"


def test_every_choice_of_a_stream_has_the_prompt_and_its_scores(start):
    server = start()
    body = {"prompt": ["ab", "cd"], "echo": True, "logprobs": 0, "n": 2, "max_tokens": 3, "stream": True, "seed": 1}
    first: dict[int, dict] = {}
    for event in events(server.post(COMPLETIONS, body).text):
        for choice in event["choices"]:
            first.setdefault(choice["index"], choice)
    assert sorted(first) == [0, 1, 2, 3]
    for index, choice in first.items():
        assert choice["text"].startswith("ab" if index < 2 else "cd")
        assert choice["logprobs"]["token_logprobs"][:2] == [None, -1.0]


@pytest.mark.parametrize(("echoed", "scored"), [(0, 2), (2, 0), (1, 1)])
def test_an_echo_and_prompt_logprobs_have_each_as_many_alternatives_as_asked_in_vllm_s_shape(start, echoed, scored):
    body = {"prompt": [5, 6, 7, 8], "echo": True, "max_tokens": 0, "logprobs": echoed, "prompt_logprobs": scored}
    (choice,) = start().post(COMPLETIONS, body).json()["choices"]
    # The token itself is the most probable one at even positions, and the second elsewhere.
    lengths = {0: [1, 1, 1], 1: [2, 1, 2], 2: [2, 2, 2]}
    assert [len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]] == lengths[echoed]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [len(entry) for entry in others] == lengths[scored]
    assert (others[0]["6"]["logprob"], others[0]["6"]["rank"]) == (-1.0, 2)
    chat = start().post(CHAT, {"messages": MESSAGES, "prompt_logprobs": scored, "max_tokens": 1}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("prompt", "offsets"),
    [
        # The tokenizer puts a begin token in front of every text.
        ("", [0, 0]),
        ("ab", [0, 0, 1, 2]),
        ("<｜begin▁of▁sentence｜>ab<｜User｜>c", [0, 0, 21, 22, 23, 31, 32]),
        ("a<｜end▁of▁sentence｜>", [0, 0, 1, 20]),
    ],
)
@pytest.mark.parametrize("skip", [True, False])
def test_text_offsets_of_an_echo_count_the_special_tokens_that_its_text_has(start, prompt, offsets, skip):
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skip}
    (choice,) = start().post(COMPLETIONS, body).json()["choices"]
    assert choice["text"].startswith(prompt)
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids_are_given_when_asked_for(start, path):
    server = start()
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    body |= {"prompt": [5, 6]} if path == COMPLETIONS else {"messages": MESSAGES}
    whole = server.post(path, body).json()
    ids = whole["choices"][0]["token_ids"]
    prompt = whole["prompt_token_ids"] if path == CHAT else whole["choices"][0]["prompt_token_ids"]
    assert len(ids) == 4
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    chunks = events(server.post(path, {**body, "stream": True}).text)
    assert [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids", ())] == ids
    told_prompts = [
        part["prompt_token_ids"]
        for chunk in chunks
        for part in (chunk, *chunk["choices"])
        if "prompt_token_ids" in part
    ]
    assert told_prompts == [prompt]


def test_usage_comes_with_every_chunk_when_asked_for(start):
    server = start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ab", "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": options}
    counts = [event["usage"]["completion_tokens"] for event in events(server.post(COMPLETIONS, body).text)]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    chat = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": options}
    usages = [event["usage"] for event in events(server.post(CHAT, chat).text)]
    assert usages[0]["prompt_tokens"] == usages[-1]["prompt_tokens"] > 0
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 3, 4, 5, 5]


def test_cached_tokens_are_told_and_a_salt_keeps_them_apart(start):
    server = start()
    body = {"prompt": list(range(20, 60)), "max_tokens": 1, "temperature": 0}

    def cached(**extra):
        usage = server.post(COMPLETIONS, {**body, **extra}, headers={"X-Session-Affinity": "s"}).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert cached() > 30
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 30


@pytest.mark.parametrize("stream", [False, True])
def test_request_ids_are_taken_from_the_header_or_the_field_and_echoed(start, stream):
    server = start()
    body = {"prompt": "ab", "max_tokens": 1, "stream": stream}

    def ids(**options):
        answer = server.post(COMPLETIONS, {**body, **options.pop("fields", {})}, **options)
        answer_id = events(answer.text)[0]["id"] if stream else answer.json()["id"]
        return answer_id, answer.headers["x-request-id"]

    assert ids(headers={"X-Request-ID": "mine-1"}) == ("cmpl-mine-1", "mine-1")
    assert ids(fields={"request_id": "field"}) == ("cmpl-field", "field")
    assert ids(fields={"request_id": "field"}, headers={"X-Request-ID": "head"}) == ("cmpl-head", "head")
    made, echoed = ids()
    assert made == f"cmpl-{echoed}"
    unknown = server.get("/nothing")
    assert unknown.headers["x-request-id"]
    assert unknown.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("script", "fields", "options", "message"),
    [
        ("\nwhy\n</think>\n\nso", {}, {}, {"content": "so", "reasoning": "why", "reasoning_content": "why"}),
        ("because", {"chat_template_kwargs": {"thinking": False}}, {}, {"content": "because"}),
        ("because", {"reasoning_effort": "none"}, {}, {"content": "because"}),
        ("why", {"reasoning_effort": "high"}, {}, {"content": "", "reasoning": "why", "reasoning_content": "why"}),
        ("why</think>because", {"include_reasoning": False}, {}, {"content": "because"}),
        ("why</think>because", {"separate_reasoning": False}, {}, {"content": "why</think>because"}),
        ("why</think>because", {}, {"reasoning_parser": "none"}, {"content": "why</think>because"}),
    ],
)
def test_reasoning_comes_apart_or_is_turned_off_left_out_or_left_in_the_content(
    start, script, fields, options, message
):
    server, body = start(script, **options), {"messages": MESSAGES, "temperature": 0, **fields}
    answer = server.post(CHAT, body)
    assert answer.json()["choices"][0]["message"] == {**message, **ALWAYS}
    assert "warning" not in answer.headers
    chunks = events(server.post(CHAT, {**body, "stream": True}).text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert together(chunks) == message


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_ends_when_its_budget_is_used(start, stream):
    server = start("123456789")
    body = {"messages": MESSAGES, "temperature": 0, "thinking_token_budget": 3, "stream": stream}
    answer = server.post(CHAT, body)
    message = together(events(answer.text)) if stream else answer.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("123", "56789")
    without = server.post(CHAT, {**body, "chat_template_kwargs": {"thinking": False}, "stream": False}).json()
    assert without["choices"][0]["message"]["content"] == "123456789"
    assert server.post(CHAT, {**body, "thinking_token_budget": -1}).status_code == 400


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"thinking": False}, []),
        ({"thinkin": False, "thinking": False}, ["chat_template_kwargs.thinkin"]),
        ({"a\r\nb: c": 1, "(": 2}, ["chat_template_kwargs"]),
        ({f"v{index}": 1 for index in range(20)}, [f"chat_template_kwargs.v{index}" for index in range(8)]),
    ],
)
def test_variables_that_the_template_does_not_read_are_named_in_a_warning(start, variables, names):
    body = {"messages": MESSAGES, "temperature": 0, "chat_template_kwargs": variables}
    answer = start("</think>ok").post(CHAT, body)
    warning = f'299 dsjax "without effect on this server: {", ".join(names)}"' if names else None
    assert (answer.status_code, answer.headers.get("warning")) == (200, warning)


def test_both_names_of_reasoning_are_taken_on_input(start):
    server = start()
    for name in ("reasoning", "reasoning_content"):
        history = [*MESSAGES, {"role": "assistant", "content": "a", name: "why"}, *MESSAGES]
        assert server.post(CHAT, {"messages": history, "max_tokens": 1}).status_code == 200


def params_given(server, monkeypatch) -> list:
    """The sampling parameters of every request from now on, as the engine gets them."""
    seen = []
    prepare = server.parts.inputs.prepare

    def watched(request_id, prompt, params, *others):
        seen.append(params)
        return prepare(request_id, prompt, params, *others)

    monkeypatch.setattr(server.parts.inputs, "prepare", watched)
    return seen


def test_a_form_binds_only_after_the_reasoning(start, monkeypatch):
    server = start("why</think>{}")
    seen = params_given(server, monkeypatch)
    close = server.engine.tokenizer.token_id("</think>")
    body = {"messages": MESSAGES, "temperature": 0, "response_format": {"type": "json_object"}}
    assert server.post(CHAT, body).status_code == 200
    assert server.post(CHAT, {**body, "chat_template_kwargs": {"thinking": False}}).status_code == 200
    assert [each.structured_outputs.structured_after for each in seen] == [close, None]
    assert all(each.structured_outputs.form == "json_object" for each in seen)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "json"),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"guided_json": {"type": "object"}}, "json"),
        ({"guided_grammar": 'start: "a"'}, "grammar"),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_every_way_to_ask_for_a_form_reaches_the_engine(start, monkeypatch, fields, form):
    server = start()
    seen = params_given(server, monkeypatch)
    answer = server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    asked = seen[0].structured_outputs
    assert (asked and asked.form) == form


@pytest.mark.parametrize("special", [False, True])
def test_tool_calls_come_apart_for_the_openai_client_streamed_and_whole(start, special):
    import openai

    server = start(f"let me see</think>I look.{CALL}", special=special)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    options = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    assert whole.message.reasoning_content == "let me see"
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [("get_weather", '{"city": "Köln"}'), ("get_time", '{"city": "Ulm"}')]
    chunks = [chunk.model_dump(exclude_unset=True) for chunk in client.chat.completions.create(stream=True, **options)]
    streamed = together(chunks)
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == calls
    assert streamed["content"] == "I look."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    one = client.chat.completions.create(parallel_tool_calls=False, **options).choices[0].message.tool_calls
    assert len(one) == 1


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_special_tokens_are_left_out_of_the_content_where_tool_markers_are_special(start, tools, skip):
    stray = "<｜begin▁of▁sentence｜>"
    script = f"why</think>I{stray} look.{CALL}"
    body = {"messages": MESSAGES, "tools": tools, "temperature": 0, "skip_special_tokens": skip}
    message = start(script, special=True).post(CHAT, body).json()["choices"][0]["message"]
    text = f"I{'' if skip else stray} look."
    if tools:
        assert (message["content"], len(message["tool_calls"])) == (text, 2)
    else:
        assert message["content"].startswith(text)
        assert ("<｜" in message["content"]) is not skip


@pytest.mark.parametrize("special", [False, True])
def test_a_call_begun_before_the_reasoning_ends_is_a_call_unless_the_reasoning_goes_on(start, special):
    body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    thought = {"reasoning": "let me see", "reasoning_content": "let me see"}
    for script, text, calls in ((f"let me see\n{CALL}", None, 2), (f"let me see</think>ok{CALL}", "ok", 2)):
        server = start(script, special=special)
        (whole,) = server.post(CHAT, body).json()["choices"]
        message = whole["message"]
        assert (message["content"], len(message.pop("tool_calls")), whole["finish_reason"]) == (
            text,
            calls,
            "tool_calls",
        )
        assert {name: message[name] for name in thought} == thought
        streamed = together(events(server.post(CHAT, {**body, "stream": True}).text))
        assert (streamed.get("content") or None, len(streamed["tool_calls"])) == (text, calls)
    (draft,) = start(f"so: {CALL}, or not</think>No.", special=special).post(CHAT, body).json()["choices"]
    assert (draft["message"]["content"], draft["finish_reason"]) == ("No.", "stop")
    assert draft["message"]["reasoning"] == f"so: {CALL}, or not"


ANSWER = {"type": "object", "properties": {"so": {"enum": ["yes"]}}, "required": ["so"], "additionalProperties": False}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}}


@pytest.mark.parametrize("form", [FORM, {"response_format": {"type": "json_object"}}, {"guided_json": ANSWER}])
def test_with_a_form_a_model_may_call_tools_or_answer_in_the_form(start, form):
    body = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **form}
    called = start(f"let me see</think>{CALL}").post(CHAT, body).json()["choices"][0]
    assert (called["finish_reason"], len(called["message"]["tool_calls"])) == ("tool_calls", 2)
    server = start('let me see</think>{"so": "yes"}')
    answered = server.post(CHAT, body).json()["choices"][0]
    assert (answered["finish_reason"], answered["message"]["content"]) == ("stop", '{"so": "yes"}')
    forced = server.post(CHAT, {**body, "tool_choice": NAMED_TIME}).json()["choices"][0]
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "get_time", "a forced call drops the form"
    none = start(f"</think>{CALL}").post(CHAT, {**body, "tool_choice": "none"}).json()["choices"][0]
    assert none["message"]["content"].startswith("{")


NAMED_TIME = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("choice", ["required", NAMED_TIME])
def test_a_call_is_forced_by_a_grammar_and_streamed_even_by_a_model_that_would_rather_talk(start, monkeypatch, choice):
    import openai

    server = start("let me see</think>I would rather talk.")
    seen = params_given(server, monkeypatch)
    parameters = {"type": "object", "properties": {"city": {"enum": ["Ulm"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {**tool["function"], "parameters": parameters}} for tool in TOOLS]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    options = {"model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": choice, "temperature": 0}
    options |= {"parallel_tool_calls": False, "max_tokens": 200}
    whole = client.chat.completions.create(**options).choices[0]
    asked = seen[0].structured_outputs
    names = [name for name in ("get_weather", "get_time") if f'"{name}"' in asked.grammar]
    assert names == (["get_weather", "get_time"] if choice == "required" else ["get_time"])
    assert asked.structured_after == server.engine.tokenizer.token_id("</think>")
    (call,) = whole.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    assert call.function.name == "get_time" or choice == "required"
    chunks = [chunk.model_dump(exclude_unset=True) for chunk in client.chat.completions.create(stream=True, **options)]
    streamed = together(chunks)
    (same,) = streamed["tool_calls"]
    assert (same["name"], same["arguments"]) == (call.function.name, call.function.arguments)
    assert same["id"].startswith("call_")
    assert streamed["reasoning"] == whole.message.reasoning == "let me see"
    assert not streamed.get("content")
    assert chunks[-1]["choices"][0]["finish_reason"] == whole.finish_reason == "tool_calls"


def test_calls_and_answers_of_tools_are_taken_on_input(start):
    server = start("</think>ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Ulm"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = server.post("/tokenize", {"messages": history, "tools": TOOLS}).json()
    text = server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
    for expected in ("TOOLS get_weather get_time", 'get_time<｜tool▁sep｜>{"city": "Ulm"}', "noon"):
        assert expected in text
    chat = server.post(CHAT, {"messages": history, "tools": TOOLS, "temperature": 0}).json()
    assert chat["usage"]["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize(
    ("given", "answered", "status"),
    [("a", "a", 200), ("a", None, 200), (None, "a", 200), ("a", "b", 400), ("", None, 400), ("", "a", 400)],
)
def test_a_tool_s_answer_belongs_to_a_call(start, given, answered, status):
    calls = [{"id": given, "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]
    called = {"role": "assistant", "content": "I look.", "tool_calls": None if given == "" else calls}
    history = [*MESSAGES, called, {"role": "tool", "tool_call_id": answered, "content": "noon"}]
    for path in (CHAT, "/tokenize"):
        answer = start("</think>ok").post(path, {"messages": history})
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "messages"
            assert f"messages[2]: found a tool's answer to {answered!r}" in answer.json()["error"]["message"]


def test_a_template_without_a_place_for_tools_gets_them_as_text(start_server):
    tokenizer = tool_tokenizer("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}<｜Assistant｜>")
    server = start_server(tokenizer=tokenizer, executor=ScriptedExecutor(tokenizer, CALL), eos=(tokenizer.eos_id,))
    call = {"type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    ids = server.post("/tokenize", {"messages": history, "tools": TOOLS[:1]}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    described = ("### get_weather", "looks it up", json.dumps(TOOLS[0]["function"]["parameters"]), "tool_name")
    for expected in ("[system: ## Tools", *described, "get_time<｜tool▁sep｜>{}", "<｜tool▁output▁begin｜>noon"):
        assert expected in text
    message = server.post(CHAT, {"messages": MESSAGES, "temperature": 0, "tools": TOOLS[:1], "max_tokens": 60}).json()
    assert message["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_the_final_message_can_be_continued(start):
    server = start()
    history = [*MESSAGES, {"role": "assistant", "content": "I think that"}]
    options = {"messages": history, "continue_final_message": True}
    ids = server.post("/tokenize", options).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("I think that")
    answer = server.post(CHAT, {**options, "max_tokens": 2}).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)
    both = server.post(CHAT, {**options, "add_generation_prompt": True})
    assert both.status_code == 400
    prefix = [*MESSAGES, {**history[-1], "prefix": True}]
    assert server.post("/tokenize", {"messages": prefix}).json()["tokens"] == ids, "as DeepSeek's API has it"
    for wrong in ([*prefix, *MESSAGES], [{**MESSAGES[0], "prefix": True}]):
        answer = server.post(CHAT, {"messages": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_alone_one_may_or_must_be_called(start, mode):
    server = start("</think>I would rather talk." if mode == "required" else f"</think>{CALL}")
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    message = server.post(CHAT, {**asked, "max_tokens": 60}).json()["choices"][0]["message"]
    if mode == "required":
        assert {call["function"]["name"] for call in message["tool_calls"]} == {"get_time"}
    allowed["tools"][0]["function"]["name"] = "get_money"
    assert "'get_money', which is none of the tools" in server.post(CHAT, asked).json()["error"]["message"]


def test_tokenize_and_detokenize_are_each_other_s_inverse(start):
    server = start()
    answer = server.post("/tokenize", {"prompt": "héllo 🙂", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    text = server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<｜begin▁of▁sentence｜>héllo 🙂"
    bare = server.post("/tokenize", {"prompt": "héllo 🙂", "add_special_tokens": False}).json()["tokens"]
    assert bare == answer["tokens"][1:]
    choices = ({}, {"add_special_tokens": False}, {"add_special_tokens": True})
    usual, bare, given = (server.post("/tokenize", {"messages": MESSAGES, **one}).json()["tokens"] for one in choices)
    assert (usual, given) == (bare, [bare[0], *bare]), "of a conversation, with special tokens only when asked"
    info = server.get("/tokenizer_info").json()
    assert info["vocab_size"] == server.engine.tokenizer.vocab_size
    assert "<think>" in info["chat_template"]


def test_sampling_fields_reach_the_engine(start, monkeypatch):
    server = start()
    seen = params_given(server, monkeypatch)
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_p": 0.125,
        "logit_bias": {"7": -100.0, "8": 2.5},
        "allowed_token_ids": [7, 8, 9],
        "bad_words": ["no"],
        "top_k": 5,
        "stop_token_ids": [9],
    }
    assert server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1, **fields}).status_code == 200
    (params,) = seen
    tuples = {"allowed_token_ids": (7, 8, 9), "bad_words": ("no",), "stop_token_ids": (9,)}
    assert {name: getattr(params, name) for name in fields} == fields | {"logit_bias": {7: -100.0, 8: 2.5}} | tuples


# OpenAI's fields without a use here, SGLang's, and what cannot be.

WITHOUT_EFFECT = {
    "store": True,
    "metadata": {"run": "7"},
    "service_tier": "priority",
    "safety_identifier": "a",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "low",
}
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png"}}]}]
MEANINGLESS = {"modalities": ["text"], "parallel_tool_calls": True, "prompt_cache_key": "k", "user": "u"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_fields_without_effect_are_taken_with_a_warning_that_names_them(start, path, stream):
    server = start("answer" if path == CHAT else "")
    asked = {"prompt": "ab"} if path == COMPLETIONS else {"messages": MESSAGES}
    asked |= {"max_tokens": 3, "stream": stream}
    answer = server.post(path, {**asked, **WITHOUT_EFFECT})
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == f'299 dsjax "without effect on this server: {", ".join(WITHOUT_EFFECT)}"'
    usual = {"store": False, "service_tier": "auto", "verbosity": "medium"}
    others = {name: value for name, value in MEANINGLESS.items() if path == CHAT or name != "parallel_tool_calls"}
    assert "warning" not in server.post(path, {**asked, **usual, **others}).headers


def test_a_field_without_effect_is_logged_once(start, caplog, monkeypatch):
    monkeypatch.setattr("dsjax.serve.sampling_fields._logged", set())
    for _ in range(3):
        start("answer").post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "safety_identifier": "a"})
    assert caplog.text.count("requests have safety_identifier, without effect on this server") == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": PICTURE}, "messages.0.content.0: found a part of type image_url, but this model reads text only"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string"),
        ({"messages": MESSAGES, "stop": 5}, "stop: Input should be a valid string or: Input should be a valid list"),
        ({"messages": MESSAGES, "surprise": 5}, "surprise: unknown field; leave it out"),
        ({"messages": [{"content": "a"}]}, "messages.0.role: Field required"),
        ({}, "prompt: Field required"),
        ({"prompt": 5}, "prompt: Input should be a valid string"),
    ],
)
def test_an_error_names_the_field_as_it_was_sent_and_not_the_branches_of_a_union(start, body, message):
    path = CHAT if "messages" in body else "/tokenize"
    assert start("answer").post(path, body).json()["error"]["message"] == message


WRONG = {"type": "x"}
WRONG_TOOL = {"type": "function", "function": {"name": "f", "parameters": WRONG}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        (COMPLETIONS, {"guided_regex": "a("}, "guided_regex"),
        (COMPLETIONS, {"guided_json": "{"}, "guided_json"),
        (COMPLETIONS, {"guided_choice": [""]}, "guided_choice"),
        (COMPLETIONS, {"guided_grammar": "a"}, "guided_grammar"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}}, "response_format"),
        (CHAT, {"tools": [TOOLS[0], WRONG_TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": WRONG}}}, "text.format"),
    ],
)
def test_a_form_that_cannot_be_is_named_as_it_was_asked_for(start, path, fields, param):
    prompt = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": MESSAGES}}.get(path, {"model": "tiny", "input": "a"})
    answer = start().post(path, {**prompt, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["message"].count("structured_outputs") == param.count("structured_outputs")


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_reasoning_with_its_closing_tag(start, stream):
    server = start("so it is</think>yes")
    asked = {"messages": MESSAGES, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}

    def usage(**fields) -> dict:
        answer = server.post(CHAT, {**asked, **fields})
        return events(answer.text)[-1]["usage"] if stream else answer.json()["usage"]

    tokenizer = server.engine.tokenizer
    reasoning = len(tokenizer.encode("so it is</think>", add_special_tokens=False))
    assert usage()["completion_tokens_details"] == {"reasoning_tokens": reasoning}
    assert usage(include_reasoning=False)["completion_tokens_details"] == {"reasoning_tokens": reasoning}
    assert usage(max_tokens=4)["completion_tokens_details"] == {"reasoning_tokens": 4}
    server.executor.script = "yes"
    assert usage(reasoning_effort="none")["completion_tokens_details"] == {"reasoning_tokens": 0}

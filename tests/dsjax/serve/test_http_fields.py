"""The fields of OpenAI's API and vLLM's extras: what each does to the answer, streamed and whole."""

import json

import pytest
from live_server import events
from request_bodies import CHAT, COMPLETIONS, MESSAGES, call, taking, tool
from scripted_executor import scripted, tool_tokenizer

from dsjax.serve.tool_calls import FORMATS

ALWAYS = {"role": "assistant", "refusal": None, "annotations": []}
CITY = taking(("city",), city="string")
TOOLS = [tool(name, description="looks it up", parameters=CITY) for name in ("get_weather", "get_time")]
BOTH = pytest.mark.parametrize("stream", [False, True])
SPECIAL = pytest.mark.parametrize("special", [False, True])
CALL = FORMATS["deepseek_v31"].calls([("get_weather", '{"city": "Köln"}'), ("get_time", '{"city": "Ulm"}')])


def together(chunks: list[dict]) -> dict:
    """The message that a stream's deltas make."""
    message: dict = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for key in delta.keys() & {"content", "reasoning", "reasoning_content"}:
            message[key] = message.get(key, "") + delta[key]
        for told in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if told["index"] == len(calls):
                calls.append(told["function"] | {"id": told["id"]})
            else:
                calls[told["index"]]["arguments"] += told["function"]["arguments"]
    return message


def ask(server, **fields):
    """The answer to a chat."""
    return server.post(CHAT, {"messages": MESSAGES, "temperature": 0, **fields})


def choice(server, **fields) -> dict:
    """The only choice of a chat's answer, or, of a stream, its message alone."""
    if fields.get("stream"):
        return {"message": together(events(ask(server, **fields).text))}
    (one,) = ask(server, **fields).json()["choices"]
    return one


def by_client(server, **fields) -> tuple:
    """What OpenAI's client reads of a chat: the choice of a whole answer, the message of a stream, and the stream's last choice."""
    create = server.openai_client().chat.completions.create
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    whole = create(**asked, **fields).choices[0]
    chunks = [chunk.model_dump(exclude_unset=True) for chunk in create(stream=True, **asked, **fields)]
    return whole, together(chunks), chunks[-1]["choices"][0]


def prompt_of(server, **fields) -> tuple[str, list[int]]:
    """The prompt of a chat, as text and as tokens."""
    tokens = server.post("/tokenize", {"messages": MESSAGES, **fields}).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"], tokens


# Prompts that are scored: what lm-eval's local-completions reads.


@pytest.mark.parametrize("max_tokens", [0, 1])
@BOTH
def test_echo_with_logprobs_scores_the_prompt(start, max_tokens, stream):
    server = start()
    prompt = [5, 6, 7, *range(40, 70)]  # more than one chunk
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    answer = server.post(COMPLETIONS, body)
    choices = [c for e in events(answer.text) for c in e["choices"]] if stream else answer.json()["choices"]
    lists = choices[0]["logprobs"]
    values, tops = lists["token_logprobs"], lists["top_logprobs"]
    assert values[: len(prompt)] == [None, *(-float(at) for at in range(1, len(prompt)))]
    assert tops[0] is None
    # As lm-eval does: greedy where the token's own value is the greatest of the top ones.
    greedy = [value == max(top.values()) for value, top in zip(values, tops, strict=True) if top]
    assert greedy[: len(prompt) - 1] == [at % 2 == 0 for at in range(1, len(prompt))]
    assert len(lists["tokens"]) == len(lists["text_offset"]) == len(values)
    assert choices[0]["text"].startswith(server.engine.tokenizer.decode(prompt))
    if not stream:
        assert len(values) == len(prompt) + max_tokens
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
    (one,) = start().post(COMPLETIONS, body).json()["choices"]
    # The token itself is the most probable one at even positions, and the second elsewhere.
    lengths = {0: [1, 1, 1], 1: [2, 1, 2], 2: [2, 2, 2]}
    assert [len(entry) for entry in one["logprobs"]["top_logprobs"][1:]] == lengths[echoed]
    first, *others = one["prompt_logprobs"]
    assert first is None
    assert [len(entry) for entry in others] == lengths[scored]
    assert (others[0]["6"]["logprob"], others[0]["6"]["rank"]) == (-1.0, 2)
    chat = ask(start(), prompt_logprobs=scored, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("prompt", "offsets"), [
    # The tokenizer puts a begin token in front of every text.
    ("", [0, 0]),
    ("ab", [0, 0, 1, 2]),
    ("<｜begin▁of▁sentence｜>ab<｜User｜>c", [0, 0, 21, 22, 23, 31, 32]),
    ("a<｜end▁of▁sentence｜>", [0, 0, 1, 20]),
])  # fmt: skip
@pytest.mark.parametrize("skip", [True, False])
def test_text_offsets_of_an_echo_count_the_special_tokens_that_its_text_has(start, prompt, offsets, skip):
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skip}
    (choice,) = start().post(COMPLETIONS, body).json()["choices"]
    assert choice["text"].startswith(prompt)
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, {"prompt": [5, 6]}), (CHAT, {"messages": MESSAGES})])
def test_token_ids_are_given_when_asked_for(start, path, asked):
    server = start()
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, **asked}
    whole = server.post(path, body).json()
    ids = whole["choices"][0]["token_ids"]
    prompt = (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    assert len(ids) == 4
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    chunks = events(server.post(path, {**body, "stream": True}).text)
    assert [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids", ())] == ids
    parts = [part for chunk in chunks for part in (chunk, *chunk["choices"])]
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [prompt]


def test_usage_comes_with_every_chunk_when_asked_for(start):
    server, options = start(), {"include_usage": True, "continuous_usage_stats": True}
    asked = {"max_tokens": 5, "temperature": 0, "stream": True, "stream_options": options}
    answer = server.post(COMPLETIONS, {"prompt": "ab", **asked})
    counts = [event["usage"]["completion_tokens"] for event in events(answer.text)]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    usages = [event["usage"] for event in events(ask(server, **asked).text)]
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


@BOTH
def test_request_ids_are_taken_from_the_header_or_the_field_and_echoed(start, stream):
    server = start()

    def ids(headers=None, **fields):
        body = {"prompt": "ab", "max_tokens": 1, "stream": stream, **fields}
        answer = server.post(COMPLETIONS, body, headers=headers)
        return (events(answer.text)[0] if stream else answer.json())["id"], answer.headers["x-request-id"]

    assert ids({"X-Request-ID": "mine-1"}) == ("cmpl-mine-1", "mine-1")
    assert ids(request_id="field") == ("cmpl-field", "field")
    assert ids({"X-Request-ID": "head"}, request_id="field") == ("cmpl-head", "head")
    made, echoed = ids()
    assert made == f"cmpl-{echoed}"
    unknown = server.get("/nothing")
    assert unknown.headers["x-request-id"]
    assert unknown.json()["error"]["type"] == "not_found_error"


WHY = {"reasoning": "why", "reasoning_content": "why"}


@pytest.mark.parametrize(("script", "fields", "options", "message"), [
    ("\nwhy\n</think>\n\nso", {}, {}, {"content": "so", **WHY}),
    ("because", {"chat_template_kwargs": {"thinking": False}}, {}, {"content": "because"}),
    ("because", {"reasoning_effort": "none"}, {}, {"content": "because"}),
    ("why", {"reasoning_effort": "high"}, {}, {"content": "", **WHY}),
    ("why</think>because", {"include_reasoning": False}, {}, {"content": "because"}),
    ("why</think>because", {"separate_reasoning": False}, {}, {"content": "why</think>because"}),
    ("why</think>because", {}, {"reasoning_parser": "none"}, {"content": "why</think>because"}),
])  # fmt: skip
def test_reasoning_is_apart_turned_off_left_out_or_left_in_the_content(start, script, fields, options, message):
    server = start(script, **options)
    answer = ask(server, **fields)
    assert answer.json()["choices"][0]["message"] == {**message, **ALWAYS}
    assert "warning" not in answer.headers
    chunks = events(ask(server, **fields, stream=True).text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert together(chunks) == message


@BOTH
def test_reasoning_ends_when_its_budget_is_used(start, stream):
    server = start("123456789")
    message = choice(server, thinking_token_budget=3, stream=stream)["message"]
    assert (message["reasoning"], message["content"]) == ("123", "56789")
    without = choice(server, thinking_token_budget=3, chat_template_kwargs={"thinking": False})
    assert without["message"]["content"] == "123456789"
    assert ask(server, thinking_token_budget=-1).status_code == 400


@pytest.mark.parametrize(("variables", "names"), [
    ({"thinking": False}, []),
    ({"thinkin": False, "thinking": False}, ["chat_template_kwargs.thinkin"]),
    ({"a\r\nb: c": 1, "(": 2}, ["chat_template_kwargs"]),
    ({f"v{index}": 1 for index in range(20)}, [f"chat_template_kwargs.v{index}" for index in range(8)]),
])  # fmt: skip
def test_variables_that_the_template_does_not_read_are_named_in_a_warning(start, variables, names):
    answer = ask(start("</think>ok"), chat_template_kwargs=variables)
    warning = f'299 dsjax "without effect on this server: {", ".join(names)}"' if names else None
    assert (answer.status_code, answer.headers.get("warning")) == (200, warning)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_both_names_of_reasoning_are_taken_on_input(start, name):
    history = [*MESSAGES, {"role": "assistant", "content": "a", name: "why"}, *MESSAGES]
    assert ask(start(), messages=history, max_tokens=1).status_code == 200


@pytest.fixture
def params_given(monkeypatch):
    """A function that gives the sampling parameters of a server's requests from now on, as the engine gets them."""

    def watch(server) -> list:
        seen, prepare = [], server.parts.inputs.prepare

        def watched(request_id, prompt, params, *others):
            seen.append(params)
            return prepare(request_id, prompt, params, *others)

        monkeypatch.setattr(server.parts.inputs, "prepare", watched)
        return seen

    return watch


def test_a_form_binds_only_after_the_reasoning(start, params_given):
    server = start("why</think>{}")
    seen, form = params_given(server), {"type": "json_object"}
    assert ask(server, response_format=form).status_code == 200
    assert ask(server, response_format=form, chat_template_kwargs={"thinking": False}).status_code == 200
    close = server.engine.tokenizer.token_id("</think>")
    assert [each.structured_outputs.structured_after for each in seen] == [close, None]
    assert all(each.structured_outputs.form == "json_object" for each in seen)


@pytest.mark.parametrize(("fields", "form"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "json"),
    ({"structured_outputs": {"regex": "[a-z]+"}}, "regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
    ({"guided_json": {"type": "object"}}, "json"),
    ({"guided_grammar": 'start: "a"'}, "grammar"),
    ({"response_format": {"type": "text"}}, None),
])  # fmt: skip
def test_every_way_to_ask_for_a_form_reaches_the_engine(start, params_given, fields, form):
    server = start()
    seen = params_given(server)
    answer = server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    asked = seen[0].structured_outputs
    assert (asked and asked.form) == form


@SPECIAL
def test_tool_calls_come_apart_for_the_openai_client_streamed_and_whole(start, special):
    server = start(f"let me see</think>I look.{CALL}", special=special)
    whole, streamed, last = by_client(server, tools=TOOLS)
    assert whole.finish_reason == last["finish_reason"] == "tool_calls"
    assert whole.message.content == streamed["content"] == "I look."
    assert whole.message.reasoning_content == "let me see"
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [("get_weather", '{"city": "Köln"}'), ("get_time", '{"city": "Ulm"}')]
    assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == calls
    assert len(choice(server, tools=TOOLS, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_special_tokens_are_left_out_of_the_content_where_tool_markers_are_special(start, tools, skip):
    stray = "<｜begin▁of▁sentence｜>"
    server = start(f"why</think>I{stray} look.{CALL}", special=True)
    message = choice(server, tools=tools, skip_special_tokens=skip)["message"]
    text = f"I{'' if skip else stray} look."
    if tools:
        assert (message["content"], len(message["tool_calls"])) == (text, 2)
    else:
        assert message["content"].startswith(text)
        assert ("<｜" in message["content"]) is not skip


@SPECIAL
def test_a_call_begun_before_the_reasoning_ends_is_a_call_unless_the_reasoning_goes_on(start, special):
    for script, text in ((f"let me see\n{CALL}", None), (f"let me see</think>ok{CALL}", "ok")):
        server = start(script, special=special)
        whole = choice(server, tools=TOOLS)
        message = whole["message"]
        assert (message["content"], len(message["tool_calls"]), whole["finish_reason"]) == (text, 2, "tool_calls")
        assert message["reasoning"] == message["reasoning_content"] == "let me see"
        streamed = choice(server, tools=TOOLS, stream=True)["message"]
        assert (streamed.get("content") or None, len(streamed["tool_calls"])) == (text, 2)
    draft = choice(start(f"so: {CALL}, or not</think>No.", special=special), tools=TOOLS)
    assert (draft["message"]["content"], draft["finish_reason"]) == ("No.", "stop")
    assert draft["message"]["reasoning"] == f"so: {CALL}, or not"


ANSWER = {"type": "object", "properties": {"so": {"enum": ["yes"]}}, "required": ["so"], "additionalProperties": False}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}}


@pytest.mark.parametrize("form", [FORM, {"response_format": {"type": "json_object"}}, {"guided_json": ANSWER}])
def test_with_a_form_a_model_may_call_tools_or_answer_in_the_form(start, form):
    asked = {"tools": TOOLS, "max_tokens": 200, **form}
    called = choice(start(f"let me see</think>{CALL}"), **asked)
    assert (called["finish_reason"], len(called["message"]["tool_calls"])) == ("tool_calls", 2)
    server = start('let me see</think>{"so": "yes"}')
    answered = choice(server, **asked)
    assert (answered["finish_reason"], answered["message"]["content"]) == ("stop", '{"so": "yes"}')
    (forced,) = choice(server, **asked, tool_choice=tool("get_time"))["message"]["tool_calls"]
    assert forced["function"]["name"] == "get_time", "a forced call drops the form"
    none = choice(start(f"</think>{CALL}"), **asked, tool_choice="none")
    assert none["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("forced", "named"), [("required", ["get_weather", "get_time"]), (tool("get_time"), ["get_time"])]
)
def test_a_call_is_forced_by_a_grammar_and_streamed_even_by_a_model_that_would_rather_talk(
    start, params_given, forced, named
):
    server = start("let me see</think>I would rather talk.")
    seen = params_given(server)
    tools = [
        tool(name, parameters={**CITY, "properties": {"city": {"enum": ["Ulm"]}}})
        for name in ("get_weather", "get_time")
    ]
    whole, streamed, last = by_client(server, tools=tools, tool_choice=forced, parallel_tool_calls=False, max_tokens=99)
    asked = seen[0].structured_outputs
    assert [name for name in ("get_weather", "get_time") if f'"{name}"' in asked.grammar] == named
    assert asked.structured_after == server.engine.tokenizer.token_id("</think>")
    (call,), (same,) = whole.message.tool_calls, streamed["tool_calls"]
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    assert call.function.name in named
    assert (same["name"], same["arguments"]) == (call.function.name, call.function.arguments)
    assert same["id"].startswith("call_")
    assert streamed["reasoning"] == whole.message.reasoning == "let me see"
    assert not streamed.get("content")
    assert last["finish_reason"] == whole.finish_reason == "tool_calls"


def test_calls_and_answers_of_tools_are_taken_on_input(start):
    server = start("</think>ok")
    called = {"role": "assistant", "content": None, "tool_calls": [call("get_time", '{"city": "Ulm"}')]}
    history = [*MESSAGES, called, {"role": "tool", "tool_call_id": "call_1", "content": "noon"}]
    text, tokens = prompt_of(server, messages=history, tools=TOOLS)
    for expected in ("TOOLS get_weather get_time", 'get_time<｜tool▁sep｜>{"city": "Ulm"}', "noon"):
        assert expected in text
    assert ask(server, messages=history, tools=TOOLS).json()["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("given", "answered", "status"),
    [("a", "a", 200), ("a", None, 200), (None, "a", 200), ("a", "b", 400), ("", None, 400), ("", "a", 400)],
)
def test_a_tool_s_answer_belongs_to_a_call(start, given, answered, status):
    calls = None if given == "" else [call("get_time", "{}", given)]
    called = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    history = [*MESSAGES, called, {"role": "tool", "tool_call_id": answered, "content": "noon"}]
    for path in (CHAT, "/tokenize"):
        answer = start("</think>ok").post(path, {"messages": history})
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "messages"
            assert f"messages[2]: found a tool's answer to {answered!r}" in answer.json()["error"]["message"]


def test_a_template_without_a_place_for_tools_gets_them_as_text(start_server):
    tokenizer = tool_tokenizer("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}<｜Assistant｜>")
    server = start_server(**scripted(tokenizer, CALL))
    called = {"role": "assistant", "tool_calls": [call("get_time", "{}")]}
    text, _ = prompt_of(server, messages=[*MESSAGES, called, {"role": "tool", "content": "noon"}], tools=TOOLS[:1])
    described = ("### get_weather", "looks it up", json.dumps(CITY), "tool_name")
    for expected in ("[system: ## Tools", *described, "get_time<｜tool▁sep｜>{}", "<｜tool▁output▁begin｜>noon"):
        assert expected in text
    made = choice(server, tools=TOOLS[:1], max_tokens=60)["message"]["tool_calls"]
    assert made[0]["function"]["name"] == "get_weather"


def test_the_final_message_can_be_continued(start):
    server = start()
    last = {"role": "assistant", "content": "I think that"}
    options = {"messages": [*MESSAGES, last], "continue_final_message": True}
    text, ids = prompt_of(server, **options)
    assert text.endswith("I think that")
    assert ask(server, **options, max_tokens=2).json()["usage"]["prompt_tokens"] == len(ids)
    assert ask(server, **options, add_generation_prompt=True).status_code == 400
    prefix = [*MESSAGES, {**last, "prefix": True}]
    assert prompt_of(server, messages=prefix)[1] == ids, "as DeepSeek's API has it"
    for wrong in ([*prefix, *MESSAGES], [{**MESSAGES[0], "prefix": True}]):
        answer = ask(server, messages=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_alone_one_may_or_must_be_called(start, mode):
    server = start("</think>I would rather talk." if mode == "required" else f"</think>{CALL}")

    def asked(name: str) -> dict:
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name)]}}
        return ask(server, tools=TOOLS, tool_choice=allowed, max_tokens=60).json()

    message = asked("get_time")["choices"][0]["message"]
    if mode == "required":
        assert {call["function"]["name"] for call in message["tool_calls"]} == {"get_time"}
    assert "'get_money', which is none of the tools" in asked("get_money")["error"]["message"]


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


def test_sampling_fields_reach_the_engine(start, params_given):
    server = start()
    seen = params_given(server)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25}
    fields = {**penalties, "min_p": 0.125, "top_k": 5}
    tuples = {"allowed_token_ids": (7, 8, 9), "bad_words": ("no",), "stop_token_ids": (9,)}
    body = {"prompt": "ab", "max_tokens": 1, "logit_bias": {"7": -100.0, "8": 2.5}, **fields, **tuples}
    assert server.post(COMPLETIONS, body).status_code == 200
    (params,) = seen
    expected = {**fields, **tuples, "logit_bias": {7: -100.0, 8: 2.5}}
    assert {name: getattr(params, name) for name in expected} == expected


# OpenAI's fields without a use here, SGLang's, and what cannot be.

WITHOUT_EFFECT = {
    "store": True, "metadata": {"run": "7"}, "service_tier": "priority", "safety_identifier": "a",
    "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "x"}, "verbosity": "low",
}  # fmt: skip
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png"}}]}]
MEANINGLESS = {"modalities": ["text"], "prompt_cache_key": "k", "user": "u"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@BOTH
def test_fields_without_effect_are_taken_with_a_warning_that_names_them(start, path, stream):
    server = start("answer" if path == CHAT else "")
    asked = {"prompt": "ab"} if path == COMPLETIONS else {"messages": MESSAGES}
    asked |= {"max_tokens": 3, "stream": stream}
    answer = server.post(path, {**asked, **WITHOUT_EFFECT})
    assert answer.status_code == 200, answer.text
    assert answer.headers["warning"] == f'299 dsjax "without effect on this server: {", ".join(WITHOUT_EFFECT)}"'
    usual = {"store": False, "service_tier": "auto", "verbosity": "medium", **MEANINGLESS}
    usual |= {"parallel_tool_calls": True} if path == CHAT else {}
    assert "warning" not in server.post(path, {**asked, **usual}).headers


def test_a_field_without_effect_is_logged_once(start, caplog, monkeypatch):
    monkeypatch.setattr("dsjax.serve.sampling_fields._logged", set())
    for _ in range(3):
        ask(start("answer"), max_tokens=1, safety_identifier="a")
    assert caplog.text.count("requests have safety_identifier, without effect on this server") == 1


@pytest.mark.parametrize(("body", "message"), [
    ({"messages": PICTURE}, "messages.0.content.0: found a part of type image_url, but this model reads text only"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string"),
    ({"messages": MESSAGES, "stop": 5}, "stop: Input should be a valid string or: Input should be a valid list"),
    ({"messages": MESSAGES, "surprise": 5}, "surprise: unknown field; leave it out"),
    ({"messages": [{"content": "a"}]}, "messages.0.role: Field required"),
    ({}, "prompt: Field required"),
    ({"prompt": 5}, "prompt: Input should be a valid string"),
])  # fmt: skip
def test_an_error_names_the_field_as_it_was_sent_and_not_the_branches_of_a_union(start, body, message):
    path = CHAT if "messages" in body else "/tokenize"
    assert start("answer").post(path, body).json()["error"]["message"] == message


WRONG = {"type": "x"}


@pytest.mark.parametrize(("path", "fields", "param"), [
    (COMPLETIONS, {"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
    (COMPLETIONS, {"guided_regex": "a("}, "guided_regex"),
    (COMPLETIONS, {"guided_json": "{"}, "guided_json"),
    (COMPLETIONS, {"guided_choice": [""]}, "guided_choice"),
    (COMPLETIONS, {"guided_grammar": "a"}, "guided_grammar"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}}, "response_format"),
    (CHAT, {"tools": [TOOLS[0], tool(parameters=WRONG)], "tool_choice": "required"}, "tools"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": WRONG}}}, "text.format"),
])  # fmt: skip
def test_a_form_that_cannot_be_is_named_as_it_was_asked_for(start, path, fields, param):
    prompt = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": MESSAGES}}.get(path, {"model": "tiny", "input": "a"})
    answer = start().post(path, {**prompt, **fields})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
    assert message.startswith(f"{param}: ")
    assert message.count("structured_outputs") == param.count("structured_outputs")


@BOTH
def test_usage_counts_the_reasoning_with_its_closing_tag(start, stream):
    server = start("so it is</think>yes")
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def reasoning_tokens(**fields) -> int:
        answer = ask(server, **options, **fields)
        usage = events(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
        return usage["completion_tokens_details"]["reasoning_tokens"]

    reasoning = len(server.engine.tokenizer.encode("so it is</think>", add_special_tokens=False))
    assert reasoning_tokens() == reasoning_tokens(include_reasoning=False) == reasoning
    assert reasoning_tokens(max_tokens=4) == 4
    server.executor.script = "yes"
    assert reasoning_tokens(reasoning_effort="none") == 0

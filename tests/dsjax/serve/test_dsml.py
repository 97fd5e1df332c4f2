"""DSML calls are read out of the text in the same way, however it is cut, and the grammar of forced calls takes what is read."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from cut_text import CUTS, message_of, takes
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer
from request_bodies import CHAT, taking, tool
from scripted_executor import scripted
from tiny_tokenizer import CONFIG, tiny_backend

from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.text.prompt_encoder import ASSISTANT, DSML, ENCODERS, EOS, THINK, THINK_END
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.chat_prompt import conversation_prompt
from dsjax.serve.dsml import DSML_FORMATS, DsmlParser
from dsjax.serve.message_parser import MessageParser, ReasoningSplitter, Section

V32, V4 = DSML_FORMATS["deepseek_v32"], DSML_FORMATS["deepseek_v4"]
WEATHER = ("get_weather", {"city": 'Kö"ln\n<b></b>', "days": 3, "where": {"a": [1, None]}, "ok": True})
TIME = ("get_time", {})
END = f"</{DSML}function_calls>"


def invoke(name: str, *parameters: str) -> str:
    return f'<{DSML}invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{DSML}invoke>\n"


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<{DSML}parameter name="{name}" string="{string}">{value}</{DSML}parameter>'


def block(*calls: str) -> str:
    return f"<{DSML}function_calls>\n{''.join(calls)}{END}"


def parse(text: str, cuts=(), form=V32, splitter: ReasoningSplitter | None = None) -> dict:
    return message_of(MessageParser(splitter, form.parser(128), True), text, cuts)


def calls_of(message: dict) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("form", [V32, V4], ids=lambda form: form.name)
def test_what_the_encoder_writes_the_parser_reads_at_every_cut(form):
    text = "I look." + form.calls([WEATHER, TIME])
    expected = parse(text, form=form)
    assert (expected["content"], [name for name, _ in calls_of(expected)]) == ("I look.", ["get_weather", "get_time"])
    assert [json.loads(arguments) for _, arguments in calls_of(expected)] == [WEATHER[1], {}]
    for cut in range(len(text)):
        assert parse(text, [cut], form) == expected
    assert parse(text, range(len(text)), form) == expected


ALL_GOLDENS = json.loads((Path(__file__).parents[1] / "engine/text/prompt_goldens.json").read_text("utf-8"))
GOLDENS = [golden for golden in ALL_GOLDENS if any(message.get("tool_calls") for message in golden["messages"])]


def turns(golden: dict) -> list[tuple[bool, str, dict]]:
    """Each of the assistant's turns in a golden prompt: whether it thinks, its text, and the message that it was made of."""
    said = [part.split(ASSISTANT)[-1].split("</function_results>\n\n")[-1] for part in golden["prompt"].split(EOS)[:-1]]
    thinks = [text.startswith(THINK) for text in said]
    told = [message for message in golden["messages"] if message["role"] == "assistant"]
    return list(zip(thinks, (text.removeprefix(THINK).removeprefix(THINK_END) for text in said), told, strict=True))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: f"{golden['encoder']}: {golden['claim']}")
def test_each_turn_of_a_conversation_with_tools_is_read_from_deepseek_s_prompt_at_every_cut(golden):
    form = DSML_FORMATS[golden["encoder"]]
    for thinks, text, message in turns(golden):
        start = Section.REASONING if thinks else Section.CONTENT
        calls = [call["function"] for call in message.get("tool_calls", ())]
        for cuts in (*([cut] for cut in range(len(text) + 1)), range(len(text))):
            read = parse(text, cuts, form, ReasoningSplitter(start, None, dict.fromkeys(form.openings)))
            assert read.get("reasoning") == (message["reasoning_content"] if thinks else None)
            assert (read["content"] or "") == (message.get("content") or "")
            assert [name for name, _ in calls_of(read)] == [call["name"] for call in calls]
            for (_, arguments), call in zip(calls_of(read), calls, strict=True):
                assert json.loads(arguments) == json.loads(call["arguments"])


F = f'<{DSML}invoke name="f">'
OPEN_ENDED = parameter("a", "1")[:-18]
KINDLESS = f'<{DSML}parameter name="a">1</{DSML}parameter>'


@pytest.mark.parametrize(("text", "content", "calls"), [
    ("no call", "no call", []),
    ("a < b, <｜DS", "a < b, <｜DS", []),
    (block(), "", []),
    (f"a{END}b</{DSML}invoke>", "ab", []),
    ("x\n\n" + block(invoke("f")) + "\n\ny", "x\n\ny", [("f", "{}")]),
    (block(f'<{DSML}invoke name="f"/>\n', invoke("g")), None, [("f", "{}"), ("g", "{}")]),
    (invoke("f", parameter("a", "1")), None, [("f", '{"a": "1"}')]),
    (block(invoke("f", '{"a": [1]}')), None, [("f", '{"a": [1]}')]),
    (block(invoke("f", parameter("a", "it's so", "false"))), None, [("f", '{"a": "it\'s so"}')]),
    (block(invoke("f", parameter("a", "NaN", "false"))), None, [("f", '{"a": "NaN"}')]),
    (block(invoke("f", KINDLESS, parameter("b", "2"))), None, [("f", '{"b": "2"}')]),
    (F + f"{OPEN_ENDED}</{DSML}invoke>" + invoke("g"), None, [("f", '{"a": "1"}'), ("g", "{}")]),
    (f'{F}\n<{DSML}invoke name="g">\n{END}', None, [("f", "{}"), ("g", "{}")]),
    (f"{F}{OPEN_ENDED}{END}y", "y", [("f", '{"a": "1"}')]),
    (f'<{DSML}invoke name="f"/>', None, [("f", "{}")]),
    (invoke("f", parameter("a", "1"), '{"b": 2}'), None, [("f", '{"a": "1"}')]),
])  # fmt: skip
def test_models_do_not_always_write_what_they_should(text, content, calls):
    message = parse(text)
    assert (message["content"], calls_of(message)) == (content, calls)
    assert parse(text, range(len(text))) == message


@pytest.mark.parametrize(("cut_off", "arguments"), [
    (f'{F}\n<{DSML}parameter name="a" string="true">Kö', '{"a": "Kö'),
    (f'{F}\n<{DSML}parameter name="a" string="false">[1, ', '{"a": [1, '),
    (f'{F}\n<{DSML}parameter name="a" string="true">Kö</{DSML}para', '{"a": "Kö'),
    (f'{F}\n{{"a": 1</{DSML}inv', '{"a": 1'),
    (f'{F}\n<{DSML}parameter name="a" str', ""),
    (f'<{DSML}invoke name="f', None),
])  # fmt: skip
def test_a_call_that_is_cut_off_keeps_the_arguments_so_far(cut_off, arguments):
    message = parse(block()[: -len(END)] + cut_off)
    assert calls_of(message) == ([] if arguments is None else [("f", arguments)])


PIECES = [f"<{DSML}function_calls>", END, f'<{DSML}invoke name="', 'f">', "\n", f"</{DSML}invoke>", "/>", "{}"]
PIECES += [f'<{DSML}parameter name="', 'a" string="true">', 'b" string="false">', f"</{DSML}parameter>"]
PIECES += ["1", " x", '"', "<｜"]


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), CUTS)
def test_cuts_change_nothing(text, cuts):
    assert parse(text, cuts) == parse(text)


def test_text_parameters_come_as_they_are_made_and_later_calls_than_the_most_are_dropped():
    parser = DsmlParser("function_calls", 8)
    text = block(invoke("f", parameter("a", "one two"), parameter("b", "[1, 2]", "false")))
    deltas = [delta["function"] for character in text for delta in parser.push(character).tool_calls]
    assert deltas[0] == {"name": "f", "arguments": ""}
    assert [delta["arguments"] for delta in deltas[1:]] == ['{"a": "', *"one two", '"', ', "b": ', "[1, 2]", "}"]
    parser = DsmlParser("function_calls", 1)
    assert {delta["index"] for delta in parser.push(block(invoke("f"), invoke("g"))).tool_calls} == {0}


def test_reasoning_and_the_blank_line_before_the_calls_are_no_content():
    splitter = ReasoningSplitter(Section.REASONING, None, dict.fromkeys(V32.openings))
    parser = MessageParser(splitter, V32.parser(8), True)
    piece = parser.push("I must look.</think>" + V32.calls([TIME]), finished=True)
    assert (piece.reasoning, piece.content, len(piece.tool_calls)) == ("I must look.", "", 1)


def dsml_tokenizer(special: bool | None) -> Tokenizer:
    """The tiny tokenizer, with the markup's token special, as an ordinary one, or (None) without it."""
    backend = tokenizers.Tokenizer.from_str(tiny_backend().to_str())
    token = tokenizers.AddedToken(DSML, special=bool(special), normalized=False)
    if special is not None:
        backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    return Tokenizer(backend, CONFIG)


def encoding_tokenizer(encoder: str) -> Tokenizer:
    """The tokenizer of a model without a template."""
    return Tokenizer(dsml_tokenizer(True)._backend, {**CONFIG, "chat_template": None, "prompt_encoder": encoder})


TOOL = tool(
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "any"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "day": {"type": "string", "pattern": "^[a-z]+$"},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["text"],
        "$defs": {"place": taking(("x",), x="integer")},
    }
)
TEXT, DAY = parameter("text", "a"), parameter("day", '"mon"', "false")
OPEN = tool("g", parameters={"type": "object", "additionalProperties": {"type": "integer"}})


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize(("call", "taken"), [
    (invoke("f", parameter("text", "a</b>\n<c"), parameter("unit", "F")), True),
    (invoke("f", parameter("text", ""), DAY, parameter("place", '{"x": 1}', "false")), True),
    (invoke("f", parameter("unit", "F")), False),
    (invoke("f", TEXT, parameter("unit", "K")), False),
    (invoke("f", TEXT, parameter("day", '"1"', "false")), False),
    (invoke("f", TEXT, parameter("place", '{"y": 1}', "false")), False),
    (invoke("f", TEXT, parameter("other", "a")), False),
    (invoke("g", '{"any": 3}'), True),
    (invoke("g", '{"any": "3"}'), False),
    (invoke("h", TEXT), False),
])  # fmt: skip
def test_the_grammar_binds_the_schema(special, call, taken):
    tokenizer = dsml_tokenizer(special)
    grammar, text = V32.grammar([TOOL, OPEN], tokenizer, several=True), "\n\n" + block(call)
    assert takes(tokenizer, grammar, text) is taken
    if taken:
        assert len(calls_of(parse(text))) == 1


@pytest.mark.parametrize(
    ("text", "taken"), [("[1]", True), ("\n\n" + block(invoke("g", '{"a": 1}')), True), ("{}", False)]
)
def test_an_answer_in_the_form_asked_for_may_come_instead_of_a_call(text, taken):
    tokenizer, instead = dsml_tokenizer(special=True), StructuredOutputs(json={"type": "array"})
    assert takes(tokenizer, V32.grammar([OPEN], tokenizer, several=True, instead=instead), text) is taken


@pytest.fixture(scope="module", params=DSML_FORMATS)
def chat(request):
    """A server of a model without a template, whose answers are scripted, and the model's format."""
    model = scripted(encoding_tokenizer(request.param), max_model_len=4096, pages_per_rank=1025)
    with LiveServer(**model) as live:
        yield live, DSML_FORMATS[request.param]


def prompt_of(live: LiveServer, asked: dict) -> str:
    tokens = live.post("/tokenize", asked).json()["tokens"]
    return live.post("/detokenize", {"tokens": tokens}).json()["prompt"]


MESSAGES = [{"role": "user", "content": "Weather?"}]
TOOLS = [tool(WEATHER[0], parameters=taking(city="string"))]
ASKED = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}


def test_a_model_without_a_template_chats_with_tools_in_its_own_format(chat):
    live, form = chat
    live.executor.script = "Look it up.</think>One moment." + form.calls([WEATHER])
    thinking = {"chat_template_kwargs": {"thinking": True}}
    asked, create = {**ASKED, "max_tokens": 1000, "extra_body": thinking}, live.openai_client().chat.completions.create
    message = create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("Look it up.", "One moment.")
    (called,) = message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == WEATHER
    deltas = [chunk.choices[0].delta for chunk in create(**asked, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "One moment."
    pieces = [delta.tool_calls[0].function.arguments for delta in deltas if delta.tool_calls]
    assert "".join(pieces) == called.function.arguments

    history = [*MESSAGES, message.model_dump(exclude_none=True, exclude={"refusal", "annotations", "reasoning"})]
    history.append({"role": "tool", "tool_call_id": called.id, "content": "18 °C"})
    prompt = prompt_of(live, {"messages": history, "tools": TOOLS, **thinking})
    assert f"<think>Look it up.</think>One moment.{form.calls([WEATHER])}<｜end▁of▁sentence｜>" in prompt
    result, then = r"<(tool_)?result>18 °C</(tool_)?result>", r"(\n</function_results>\n\n|<｜Assistant｜>)<think>$"
    assert re.search(result + then, prompt)


def test_the_prompt_is_the_encoder_s_and_a_forced_call_is_one(chat):
    live, form = chat
    asked = {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES], "model": "tiny"}
    asked["chat_template_kwargs"] = {"enable_thinking": True}
    assert prompt_of(live, asked) == "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Weather?<｜Assistant｜><think>"
    assert live.get("/tokenizer_info").json()["chat_template"] is None
    live.executor.script = form.calls([("get_weather", {"city": "Köln"})])
    (choice,) = live.post(CHAT, {**ASKED, "tool_choice": "required", "max_tokens": 300}).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert calls_of(choice["message"]) == [("get_weather", '{"city": "Köln"}')]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": ["a"]},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {"type": "string", "enum": 5}}},
    ],
)
def test_a_forced_call_of_a_function_with_a_broken_schema_is_refused(chat, parameters):
    live, _ = chat
    asked = {**ASKED, "tools": [tool(parameters=parameters)], "tool_choice": "required"}
    assert live.post(CHAT, asked).status_code == 400


@pytest.mark.parametrize("name", DSML_FORMATS)
def test_a_conversation_given_in_python_has_the_same_prompt(name):
    tokenizer = encoding_tokenizer(name)
    given = {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"thinking": True}}
    prompt = tokenizer.decode(conversation_prompt(tokenizer, **given).token_ids, skip_special_tokens=False)
    assert prompt == ENCODERS[name]().render(MESSAGES, tools=TOOLS, thinking=True)

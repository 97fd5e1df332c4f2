"""DeepSeek's tool calls are read out of the text in the same way, however it is cut, and written as they are read.

The grammar of forced calls takes what the format writes, and nothing else.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_executor import tool_tokenizer
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.text.structured import GrammarCompiler
from dsjax.serve.message_parser import MessageParser
from dsjax.serve.tool_calls import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    FORMATS,
    SEPARATOR,
    MessagePiece,
    ToolCallParser,
    ToolFormat,
)

V3, V31, KIMI = FORMATS["deepseek_v3"], FORMATS["deepseek_v31"], FORMATS["kimi_k2"]
WEATHER, TIME = ("get_weather", '{"city": "Köln"}'), ("get_time", "{}")


def parse(form: ToolFormat, text: str, cuts=()) -> dict:
    """The message that the pieces make, without ids, which are new each time."""
    parser = MessageParser(None, ToolCallParser(form, 128), True)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [parser.push(text[a:b]) for a, b in itertools.pairwise(places)]
    whole = parser.push("", finished=True)
    whole.content = "".join(piece.content for piece in pieces) + whole.content
    whole.tool_calls = [delta for piece in pieces for delta in piece.tool_calls] + whole.tool_calls
    message = whole.message()
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return message


def call(name: str, arguments: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("form", [V3, V31])
def test_what_the_format_writes_the_parser_reads(form):
    text = "I look.\n" + form.calls([WEATHER, TIME])
    expected = {"role": "assistant", "content": "I look.\n", "tool_calls": [call(*WEATHER), call(*TIME)]}
    assert parse(form, text) == expected
    assert parse(form, text, range(len(text))) == expected


def test_v3_writes_a_fenced_block_and_v31_bare_arguments():
    assert V3.calls([TIME]) == (
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_time\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
    )
    assert V31.calls([TIME]) == f"{CALLS_BEGIN}{CALL_BEGIN}get_time{SEPARATOR}{{}}{CALL_END}{CALLS_END}"


@pytest.mark.parametrize("form", [V3, V31])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda form: "no call", {"content": "no call"}),
        (lambda form: form.call(*TIME), {"content": None, "tool_calls": [call(*TIME)]}),
        (lambda form: form.calls([WEATHER]) + " done", {"content": " done", "tool_calls": [call(*WEATHER)]}),
        (lambda form: CALLS_BEGIN + CALL_BEGIN + "broken" + CALL_END + CALLS_END, {"content": ""}),
        (lambda form: CALLS_BEGIN, {"content": ""}),
        (lambda form: f"a{CALL_END}b{SEPARATOR}{CALLS_END}c", {"content": "abc"}),
        (lambda form: form.calls([("f", "not JSON")]), {"content": None, "tool_calls": [call("f", "not JSON")]}),
        (lambda form: form.calls([("f", "")]), {"content": None, "tool_calls": [call("f", "{}")]}),
    ],
)
def test_models_do_not_always_write_what_they_should(form, make, expected):
    text = make(form)
    assert parse(form, text) == {"role": "assistant", **expected}
    assert parse(form, text, range(len(text))) == {"role": "assistant", **expected}


HEADS = {
    "V3.1": f"get_time{SEPARATOR}",
    "V3": f"function{SEPARATOR}get_time\n```json\n",
    "V3, a bare fence": f"function{SEPARATOR}get_time\n```\n",
    "V3, half a fence": f"function{SEPARATOR}get_time\n``json\n",
    "V3, the fence in the name's line": f"function{SEPARATOR}get_time```json",
    "V3, no fence": f"function{SEPARATOR}get_time\n",
    "V3, neither fence nor line break": f"function{SEPARATOR}get_time",
    "both": f"function{SEPARATOR}get_time{SEPARATOR}",
    "blanks": f"\n function {SEPARATOR} get_time \n\n",
}
TAILS = ["", "\n```", "```", "\n``", "`\n", "\n\n```\n", " "]


@pytest.mark.parametrize("form", [V3, V31])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_arguments_are_without_markers_and_fences_however_a_call_is_written(form, head):
    arguments = '{"code": "```\\n{` `}"}'
    for tail, end in itertools.product(
        TAILS, [CALL_END + CALLS_END, CALLS_END, CALL_END, "", CALL_END + "\n" + CALLS_END]
    ):
        text = CALLS_BEGIN + CALL_BEGIN + head + arguments + tail + end
        expected = {"role": "assistant", "content": None, "tool_calls": [call("get_time", arguments)]}
        assert parse(form, text) == expected, text
        assert parse(form, text, range(len(text))) == expected, text


@pytest.mark.parametrize("form", [V3, V31])
def test_a_call_that_begins_before_the_last_one_has_ended_ends_it(form):
    (first, second), third = (f"{CALL_BEGIN}{HEADS[head]}" for head in ("V3", "V3.1")), HEADS["V3, no fence"]
    text = (
        f"{CALLS_BEGIN}{first}{{}}\n```\n{second}{CALL_BEGIN}{third}{CALL_BEGIN}lost{CALL_BEGIN}{third}{{}}{CALLS_END}"
    )
    for cuts in ((), range(len(text))):
        assert parse(form, text, cuts)["tool_calls"] == [call(*TIME)] * 4


PIECES = [CALLS_BEGIN, CALL_BEGIN, CALL_END, CALLS_END, SEPARATOR]
PIECES += ["function", "f", "\n```json\n", "\n```", "``", "\n", "{}", " x", "<｜tool"]


@given(
    st.sampled_from([V3, V31]),
    st.lists(st.sampled_from(PIECES)).map("".join),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_cuts_change_nothing(form, text, cuts):
    assert parse(form, text, cuts) == parse(form, text)


def test_deltas_have_the_name_first_and_one_kind_of_text_or_one_call():
    parser = ToolCallParser(V31, 8)
    text = V31.calls([WEATHER])
    pieces = [parser.push(character).deltas() for character in text]
    deltas = [call for parts in pieces for delta in parts for call in delta.get("tool_calls", ())]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": "{"}
    assert len(deltas) > 5
    assert all(set(delta) == {"index", "function"} for delta in deltas[1:])
    assert "".join(delta["function"]["arguments"] for delta in deltas) == WEATHER[1]
    deltas = ToolCallParser(V31, 8).push("I look." + V31.calls([WEATHER, TIME])).deltas()
    assert [sorted(delta) for delta in deltas] == [["content"], ["tool_calls"], ["tool_calls"]]
    calls = [call for delta in deltas[1:] for call in delta["tool_calls"]]
    assert [(call["index"], call["function"]) for call in calls] == [
        (0, {"name": WEATHER[0], "arguments": WEATHER[1]}),
        (1, {"name": TIME[0], "arguments": TIME[1]}),
    ]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"function": {"name": "get", "parameters": SCHEMA}}, {"function": {"name": "put"}}]
GET, PUT = ("get", '{"a": 5}'), ("put", "{}")
TOKENIZERS = {"tokens": tool_tokenizer(), "special tokens": tool_tokenizer(special=True), "text": tiny_tokenizer()}


def takes(tokenizer, form: ToolFormat, text: str, tools=TOOLS, several: bool = True, **options) -> bool:
    """Whether the grammar takes every token of the text, and may then end."""
    grammar = form.grammar(tools, tokenizer, several=several, **options)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    constraint = compiler.compile(StructuredOutputs(grammar=grammar))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if constraint.complete or constraint.take(token) is not None:
            return False
    return constraint.take(tokenizer.eos_id) is None


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_grammar_takes_calls_as_the_format_writes_them_and_nothing_else(tokenizer, form):
    assert takes(tokenizer, form, form.calls([GET]))
    assert takes(tokenizer, form, form.calls([GET, PUT, GET]))
    assert takes(tokenizer, form, form.calls([PUT]), several=False)
    wrong = ["no call", form.calls([("other", "{}")]), form.calls([("get", "{}")]), form.calls([("get", '{"a": "5"}')])]
    wrong += ["so: " + form.calls([GET]), form.calls([GET]) + "done"]
    for text in wrong:
        assert not takes(tokenizer, form, text), text
    assert not takes(tokenizer, form, form.calls([GET, PUT]), several=False)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_arguments_have_one_blank_or_none_between_their_parts(form):
    tokenizer = TOKENIZERS["tokens"]
    spaced, compact, flood = (form.calls([("get", text)]) for text in ('{"a": 5}', '{"a":5}', '{"a":   5}'))
    assert takes(tokenizer, form, spaced)
    assert not takes(tokenizer, form, flood)
    assert takes(tokenizer, form, compact, compact=True)
    assert not takes(tokenizer, form, spaced, compact=True)


def test_forced_arguments_hold_what_the_schema_names_unless_it_says_otherwise():
    closed = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}}
    opened = {**closed, "additionalProperties": True}
    inner = {"type": "object", "properties": {"a": {"type": "object"}}}
    tokenizer, form = TOKENIZERS["tokens"], FORMATS["deepseek_v31"]
    for schema, text, expected in (
        (closed, '{"a": {"b": 1}}', True),
        (closed, '{"a": {}, "c": 1}', False),
        (closed, '{"a": {"c": 1}}', False),
        (opened, '{"a": {}, "c": 1}', True),
        (inner, '{"a": {"c": 1}}', True),
    ):
        tools = [{"function": {"name": "f", "parameters": schema}}]
        assert takes(tokenizer, form, form.calls([("f", text)]), tools) is expected, (schema, text)


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_is_called_with_an_empty_object(schema):
    tokenizer, form = TOKENIZERS["tokens"], FORMATS["deepseek_v31"]
    tools = [{"function": {"name": "f", "parameters": schema}}]
    assert takes(tokenizer, form, form.calls([("f", "{}")]), tools)
    assert not takes(tokenizer, form, form.calls([("f", '{"a": 1}')]), tools)
    opened = [
        {"function": {"name": "f", "parameters": {"type": "object", "additionalProperties": {"type": "integer"}}}}
    ]
    assert takes(tokenizer, form, form.calls([("f", '{"a": 1}')]), opened)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"json": {"type": "object", "properties": {"so": {"type": "integer"}}, "required": ["so"]}}, '{"so": 5}'),
        ({"json_object": True}, '{"so": {"call": []}}'),
        ({"regex": r"so/\d+"}, "so/12"),
        ({"choice": ["so", "no"]}, "so"),
        ({"grammar": 'start: call\ncall: "so" TEXT\nTEXT: /[0-9]+/'}, "so12"),
    ],
    ids=str,
)
def test_an_answer_in_the_form_asked_for_may_come_instead_of_a_call(tokenizer, outputs, text):
    form, instead = FORMATS["deepseek_v3"], StructuredOutputs(**outputs)
    assert takes(tokenizer, form, text, instead=instead)
    assert takes(tokenizer, form, form.calls([GET, PUT]), instead=instead)
    for wrong in ("no", text + form.calls([GET]), form.calls([GET]) + text, form.calls([("get", "{}")])):
        assert ("choice" in outputs and wrong == "no") is takes(tokenizer, form, wrong, instead=instead), wrong
    assert not takes(tokenizer, form, text)


def test_kimi_s_calls_keep_the_ids_that_the_model_gives_them_or_get_one_and_forced_ones_are_numbered():
    text = "I look." + KIMI.calls([WEATHER, TIME])
    assert text == (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    )
    expected = [
        {"id": "functions.get_weather:0", **call(*WEATHER)},
        {"id": "functions.get_time:1", **call(*TIME)},
    ]
    for cut in range(len(text)):
        parser = KIMI.parser(8)
        pieces = [parser.push(text[:cut]), parser.push(text[cut:], finished=True)]
        piece = MessagePiece(content="", tool_calls=[delta for each in pieces for delta in each.tool_calls])
        assert "".join(each.content for each in pieces) == "I look."
        assert piece.message()["tool_calls"] == expected
    (head,) = KIMI.parser(8).push(KIMI.call("f", "{}").replace("functions.f:0", "f"), finished=True).tool_calls
    assert (head["id"][:5], head["function"]["name"]) == ("call_", "f")
    assert takes(TOKENIZERS["text"], KIMI, KIMI.calls([GET, PUT]))
    assert not takes(TOKENIZERS["text"], KIMI, KIMI.calls([GET]).replace("get:0", "get"))

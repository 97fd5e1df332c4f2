"""DeepSeek's tool calls are read out of the text in the same way, however it is cut, and written as they are read.

The grammar of forced calls takes what the format writes, and nothing else.
"""

import itertools

import cut_text
import pytest
from cut_text import CUTS, message_of
from hypothesis import given
from hypothesis import strategies as st
from request_bodies import taking, tool
from scripted_executor import tool_tokenizer
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.serve.message_parser import MessageParser
from dsjax.serve.tool_calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, FORMATS, SEPARATOR, MessagePiece

BOTH = pytest.mark.parametrize("form", [FORMATS["deepseek_v3"], FORMATS["deepseek_v31"]])
V3, V31, KIMI = FORMATS["deepseek_v3"], FORMATS["deepseek_v31"], FORMATS["kimi_k2"]
WEATHER, TIME = ("get_weather", '{"city": "Köln"}'), ("get_time", "{}")


def parse(form, text: str, cuts=()) -> dict:
    return message_of(MessageParser(None, form.parser(128), True), text, cuts)


def call(name: str, arguments: str) -> dict:
    return tool(name, arguments=arguments)


def parsed(form, text: str) -> dict:
    """The message that a text makes, whole and in single characters."""
    message = parse(form, text)
    assert parse(form, text, range(len(text))) == message, text
    return message


@BOTH
def test_what_the_format_writes_the_parser_reads(form):
    expected = {"role": "assistant", "content": "I look.\n", "tool_calls": [call(*WEATHER), call(*TIME)]}
    assert parsed(form, "I look.\n" + form.calls([WEATHER, TIME])) == expected


def test_v3_writes_a_fenced_block_and_v31_bare_arguments():
    assert V3.calls([TIME]) == (
        f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_time\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
    )
    assert V31.calls([TIME]) == f"{CALLS_BEGIN}{CALL_BEGIN}get_time{SEPARATOR}{{}}{CALL_END}{CALLS_END}"


@BOTH
@pytest.mark.parametrize(("make", "expected"), [
    (lambda form: "no call", {"content": "no call"}),
    (lambda form: form.call(*TIME), {"content": None, "tool_calls": [call(*TIME)]}),
    (lambda form: form.calls([WEATHER]) + " done", {"content": " done", "tool_calls": [call(*WEATHER)]}),
    (lambda form: CALLS_BEGIN + CALL_BEGIN + "broken" + CALL_END + CALLS_END, {"content": ""}),
    (lambda form: CALLS_BEGIN, {"content": ""}),
    (lambda form: f"a{CALL_END}b{SEPARATOR}{CALLS_END}c", {"content": "abc"}),
    (lambda form: form.calls([("f", "not JSON")]), {"content": None, "tool_calls": [call("f", "not JSON")]}),
    (lambda form: form.calls([("f", "")]), {"content": None, "tool_calls": [call("f", "{}")]}),
    (lambda form: CALLS_BEGIN + form.call(*WEATHER)[:-3], {"content": None, "tool_calls": [call(*WEATHER)]}),
])  # fmt: skip
def test_models_do_not_always_write_what_they_should(form, make, expected):
    assert parsed(form, make(form)) == {"role": "assistant", **expected}


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


ENDS = [CALL_END + CALLS_END, CALLS_END, CALL_END, "", CALL_END + "\n" + CALLS_END]


@BOTH
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_arguments_are_without_markers_and_fences_however_a_call_is_written(form, head):
    arguments = '{"code": "```\\n{` `}"}'
    expected = {"role": "assistant", "content": None, "tool_calls": [call("get_time", arguments)]}
    for tail, end in itertools.product(TAILS, ENDS):
        assert parsed(form, CALLS_BEGIN + CALL_BEGIN + head + arguments + tail + end) == expected, (tail, end)


@BOTH
def test_a_call_that_begins_before_the_last_one_has_ended_ends_it(form):
    (first, second), third = (f"{CALL_BEGIN}{HEADS[head]}" for head in ("V3", "V3.1")), HEADS["V3, no fence"]
    lost = f"{CALL_BEGIN}lost"
    text = f"{CALLS_BEGIN}{first}{{}}\n```\n{second}{CALL_BEGIN}{third}{lost}{CALL_BEGIN}{third}{{}}{CALLS_END}"
    assert parsed(form, text)["tool_calls"] == [call(*TIME)] * 4


PIECES = [CALLS_BEGIN, CALL_BEGIN, CALL_END, CALLS_END, SEPARATOR]
PIECES += ["function", "f", "\n```json\n", "\n```", "``", "\n", "{}", " x", "<｜tool"]


@given(st.sampled_from([V3, V31]), st.lists(st.sampled_from(PIECES)).map("".join), CUTS)
def test_cuts_change_nothing(form, text, cuts):
    assert parse(form, text, cuts) == parse(form, text)


def test_deltas_have_the_name_first_and_one_kind_of_text_or_one_call():
    parser = V31.parser(8)
    pieces = [parser.push(character).deltas() for character in V31.calls([WEATHER])]
    deltas = [call for parts in pieces for delta in parts for call in delta.get("tool_calls", ())]
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": "{"}
    assert len(deltas) > 5
    assert all(set(delta) == {"index", "function"} for delta in deltas[1:])
    assert "".join(delta["function"]["arguments"] for delta in deltas) == WEATHER[1]
    deltas = V31.parser(8).push("I look." + V31.calls([WEATHER, TIME])).deltas()
    assert [sorted(delta) for delta in deltas] == [["content"], ["tool_calls"], ["tool_calls"]]
    calls = [call for delta in deltas[1:] for call in delta["tool_calls"]]
    expected = [(index, call(*one)["function"]) for index, one in enumerate((WEATHER, TIME))]
    assert [(call["index"], call["function"]) for call in calls] == expected


SCHEMA = {**taking(("a",), a="integer"), "additionalProperties": False}
TOOLS = [{"function": {"name": "get", "parameters": SCHEMA}}, {"function": {"name": "put"}}]
GET, PUT = ("get", '{"a": 5}'), ("put", "{}")
TOKENIZERS = {"tokens": tool_tokenizer(), "special tokens": tool_tokenizer(special=True), "text": tiny_tokenizer()}


def takes(tokenizer, form, text: str, tools=TOOLS, several: bool = True, **options) -> bool:
    return cut_text.takes(tokenizer, form.grammar(tools, tokenizer, several=several, **options), text)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_grammar_takes_calls_as_the_format_writes_them_and_nothing_else(tokenizer, form):
    for calls, several in (([GET], True), ([GET, PUT, GET], True), ([PUT], False)):
        assert takes(tokenizer, form, form.calls(calls), several=several)
    wrong = [form.calls([one]) for one in (("other", "{}"), ("get", "{}"), ("get", '{"a": "5"}'))]
    for text in ("no call", *wrong, "so: " + form.calls([GET]), form.calls([GET]) + "done"):
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


CLOSED = {"type": "object", "properties": {"a": taking(b="integer")}}
OPENED = {**CLOSED, "additionalProperties": True}
EMPTY = [None, {}, {"type": "object"}, {"type": "object", "properties": {}}]
ANY = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(("schema", "arguments", "taken"), [
    (CLOSED, '{"a": {"b": 1}}', True),
    (CLOSED, '{"a": {}, "c": 1}', False),
    (CLOSED, '{"a": {"c": 1}}', False),
    (OPENED, '{"a": {}, "c": 1}', True),
    (taking(a="object"), '{"a": {"c": 1}}', True),
    *((empty, "{}", True) for empty in EMPTY),
    *((empty, '{"a": 1}', False) for empty in EMPTY),
    (ANY, '{"a": 1}', True),
])  # fmt: skip
def test_forced_arguments_hold_what_the_schema_names_unless_it_says_otherwise(schema, arguments, taken):
    assert takes(TOKENIZERS["tokens"], V31, V31.calls([("f", arguments)]), [tool(parameters=schema)]) is taken


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"json": taking(("so",), so="integer")}, '{"so": 5}'),
        ({"json_object": True}, '{"so": {"call": []}}'),
        ({"regex": r"so/\d+"}, "so/12"),
        ({"choice": ["so", "no"]}, "so"),
        ({"grammar": 'start: call\ncall: "so" TEXT\nTEXT: /[0-9]+/'}, "so12"),
    ],
    ids=str,
)
def test_an_answer_in_the_form_asked_for_may_come_instead_of_a_call(tokenizer, outputs, text):
    instead = StructuredOutputs(**outputs)
    assert takes(tokenizer, V3, text, instead=instead)
    assert takes(tokenizer, V3, V3.calls([GET, PUT]), instead=instead)
    for wrong in ("no", text + V3.calls([GET]), V3.calls([GET]) + text, V3.calls([("get", "{}")])):
        assert ("choice" in outputs and wrong == "no") is takes(tokenizer, V3, wrong, instead=instead), wrong
    assert not takes(tokenizer, V3, text)


def test_kimi_s_calls_keep_the_ids_that_the_model_gives_them_or_get_one_and_forced_ones_are_numbered():
    text = "I look." + KIMI.calls([WEATHER, TIME])
    assert text == (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    )
    expected = [{"id": f"functions.{one[0]}:{at}", **call(*one)} for at, one in enumerate((WEATHER, TIME))]
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

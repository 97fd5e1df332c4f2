"""The grammar of forced tool calls takes what the format writes, and nothing else."""

import pytest
from scripted_runner import tool_tokenizer
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.structured import GrammarCompiler
from dsjax.engine.structured_params import StructuredOutputs
from dsjax.serve.tool_format import FORMATS, ToolFormat
from dsjax.serve.tool_grammar import tool_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"function": {"name": "get", "parameters": SCHEMA}}, {"function": {"name": "put"}}]
GET, PUT = ("get", '{"a": 5}'), ("put", '{"anything": []}')
TOKENIZERS = {"tokens": tool_tokenizer(), "special tokens": tool_tokenizer(special=True), "text": tiny_tokenizer()}


def takes(tokenizer, form: ToolFormat, text: str, several: bool = True, compact: bool = False) -> bool:
    """Whether the grammar takes every token of the text, and may then end."""
    grammar = tool_grammar(form, TOOLS, tokenizer, several=several, compact=compact)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    constraint = compiler.compile(StructuredOutputs(grammar=grammar))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if constraint.complete or constraint.take(token) is not None:
            return False
    return constraint.take(tokenizer.eos_id) is None


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_calls_as_the_format_writes_them_are_taken(tokenizer, form):
    assert takes(tokenizer, form, form.calls([GET]))
    assert takes(tokenizer, form, form.calls([GET, PUT, GET]))
    assert takes(tokenizer, form, form.calls([PUT]), several=False)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_anything_else_is_not(tokenizer, form):
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
    tokenizer, form = TOKENIZERS["tokens"], FORMATS["deepseek_v31"]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    for schema, text, expected in (
        (closed, '{"a": {"b": 1}}', True),
        (closed, '{"a": {}, "c": 1}', False),
        (closed, '{"a": {"c": 1}}', False),
        (opened, '{"a": {}, "c": 1}', True),
    ):
        grammar = tool_grammar(form, [{"function": {"name": "f", "parameters": schema}}], tokenizer, several=False)
        constraint = compiler.compile(StructuredOutputs(grammar=grammar))
        tokens = tokenizer.encode(form.calls([("f", text)]), add_special_tokens=False)
        assert all(constraint.take(token) is None for token in tokens) is expected, (schema, text)

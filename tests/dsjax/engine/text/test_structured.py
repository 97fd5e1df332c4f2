"""Structured output: text keeps its form, and what cannot have one fails alone and says why. Also tests `contract/structured_params.py`."""

import json
import re

import numpy as np
import pytest
from tiny_tokenizer import BOS, tiny_tokenizer
from tiny_tokenizer import EOS as EOS_TEXT

from dsjax.engine.contract.structured_params import MAX_GRAMMAR_CHARS, SamplingError, StructuredOutputs
from dsjax.engine.text.structured import GrammarCompiler

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_id
A, B = (TOKENIZER.encode(letter, add_special_tokens=False)[-1] for letter in "ab")
V = TOKENIZER.vocab_size + 23  # padded, and no multiple of 32
COMPILER = GrammarCompiler(TOKENIZER, V, [EOS])


def allowed(constraint) -> set[int]:
    (words,), error = constraint.preview([], -(-V // 32))
    assert error is None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[V:].any()
    return set(np.flatnonzero(bits).tolist())


def accepts(outputs: StructuredOutputs, text: str) -> bool:
    """Whether the text's tokens, and then the end, are allowed one after the other."""
    constraint = COMPILER.compile(outputs)
    for token in [*TOKENIZER.encode(text, add_special_tokens=False), EOS]:
        if token not in allowed(constraint):
            return False
        assert constraint.take(token) is None
    return True


@pytest.mark.parametrize("text", [f"ab{BOS}{EOS_TEXT}c", f"<{BOS}{EOS_TEXT[1:]}", EOS_TEXT, f"a{EOS_TEXT[:-1]}"])
@pytest.mark.parametrize("form", ["choice", "regex", "json"])
def test_a_text_that_reads_like_a_special_token_is_spelled_in_letters(form, text):
    value = {"choice": [text], "regex": re.escape(text), "json": {"const": text}}[form]
    constraint, made = COMPILER.compile(StructuredOutputs(**{form: value})), []
    while not constraint.complete:
        made.append(max(allowed(constraint)))
        assert constraint.take(made[-1]) is None
    written = json.dumps(text, ensure_ascii=False) if form == "json" else text
    assert TOKENIZER.decode(made, skip_special_tokens=True) == written


NAME_AND_AGE = {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}
SCHEMA = {"type": "object", "properties": NAME_AND_AGE, "required": ["name", "age"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("outputs", "right", "wrong"),
    [
        ({"json": SCHEMA}, ['{"name":"é🙂","age":3}', '{"name": "a", "age": 0}'], ['{"name":"a","age":-1}']),
        ({"json": json.dumps(SCHEMA)}, ['{"name":"","age":12}'], ["{}", "3", '{"name":"","age":12'.ljust(60)]),
        ({"json": True}, ["1", '"a"', "[]"], ["a"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{'a': 1}", "{} {}"]),
        ({"regex": r"[0-9]{3}-[a-f]+"}, ["123-af"], ["12-af", "123-", "123-g", "x123-a"]),
        ({"choice": ['a"b\\c', "ab\n", "日本", "a"]}, ['a"b\\c', "ab\n", "日本", "a"], ["ab", "", "日"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["((x)", "()"]),
    ],
)
def test_texts_of_the_form_are_allowed_and_others_are_not(outputs, right, wrong):
    outputs = StructuredOutputs(**outputs)
    assert [text for text in right if not accepts(outputs, text)] == []
    assert [text for text in wrong if accepts(outputs, text)] == []


def test_json_is_written_in_the_usual_ways_and_never_in_floods_of_blanks():
    plain, spaced, pretty = '{"name":"a","age":0}', '{"name": "a", "age": 0}', '{\n  "name": "a",\n  "age": 0\n}'
    floods = ['{"name":  "a","age":0}', '{\n\n"name":"a","age":0}']
    for disabled, right in ((False, [plain, spaced, pretty]), (True, [plain])):
        outputs = StructuredOutputs(json=SCHEMA, disable_any_whitespace=disabled)
        assert [text for text in (plain, spaced, pretty, *floods) if accepts(outputs, text)] == right


def test_when_the_form_is_complete_only_the_end_is_allowed_and_stays_so():
    constraint = COMPILER.compile(StructuredOutputs(choice=["a"]))
    assert not constraint.complete
    constraint.take(A)
    assert constraint.complete
    for _ in range(3):
        assert allowed(constraint) == {EOS}
        assert constraint.take(EOS) is None


def test_tokens_are_free_until_the_one_that_the_form_comes_after():
    think = TOKENIZER.encode("</think>", add_special_tokens=False)[-1]
    constraint = COMPILER.compile(StructuredOutputs(regex="b", structured_after=think))
    for token in (EOS, 50, 60):
        assert not constraint.active
        assert constraint.take(token) is None
    constraint.take(think)
    assert constraint.active
    assert allowed(constraint) == {B}


def test_each_completion_stands_at_its_own_place_in_a_grammar_that_is_compiled_once():
    outputs = StructuredOutputs(regex="ab")
    first, second = COMPILER.compile(outputs), COMPILER.compile(outputs)
    first.take(A)
    assert (allowed(first), allowed(second), allowed(COMPILER.compile(outputs))) == ({B}, {A}, {A})


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "ab("},
        {"regex": "(" * 20_000},
        {"json": {"type": "foo"}},
        {"json": {"type": "string", "pattern": "(?=a)b"}},
        {"json": {"$ref": "http://localhost/schema.json"}},
        {"json": '{"items":' * 300 + "{}" + "}" * 300},
        {"grammar": "start: b"},
        {"grammar": "start: a\na: a a"},
        {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
        {"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60)) + 'A60: "a"'},
    ],
    ids=range(10),
)
def test_a_form_that_cannot_be_is_refused_and_its_field_named(outputs):
    with pytest.raises(SamplingError) as caught:
        COMPILER.compile(StructuredOutputs(**outputs))
    assert caught.value.param == f"structured_outputs.{next(iter(outputs))}"
    assert len(str(caught.value)) < 500


def test_a_chain_of_as_many_rules_as_fit_does_not_overrun_the_stack():
    rules = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4_000)) + 'r4000: "a"'
    assert len(rules) < MAX_GRAMMAR_CHARS
    assert allowed(COMPILER.compile(StructuredOutputs(grammar=rules))) == {A}


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        ({}, "exactly one"),
        ({"json_object": False}, "json_object"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a"] * 2_000}, "at most"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "schema"),
        ({"json": {"a": float("nan")}}, "JSON"),
        ({"regex": "a", "structured_after": -1}, "structured_after"),
    ],
)
def test_parameters_without_meaning_are_refused(outputs, match):
    with pytest.raises(SamplingError, match=match):
        StructuredOutputs(**outputs)


def test_a_model_without_tokenizer_or_end_has_no_structured_output():
    with pytest.raises(SamplingError, match="tokenizer"):
        GrammarCompiler(None, V, [EOS]).compile(StructuredOutputs(regex="a"))
    with pytest.raises(SamplingError, match="end-of-sequence"):
        GrammarCompiler(TOKENIZER, V, []).compile(StructuredOutputs(regex="a"))

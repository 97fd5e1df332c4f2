"""Keywords of JSON Schema: what each allows is what JSON Schema accepts, or it is refused in the words of JSON Schema."""

import json

import jsonschema
import numpy as np
import pytest
from test_structured import COMPILER, EOS, TOKENIZER, accepts, allowed

from dsjax.engine.contract.structured_params import SamplingError, StructuredOutputs
from dsjax.engine.text.json_schema import FORMATS, each_schema, enforceable

OBJECT = {"type": "object"}
A = {"type": "object", "properties": {"kind": {"const": "a"}, "next": {"$ref": "#/$defs/A"}}, "required": ["kind"]}
B = {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}, "size": {"type": "integer"}}, "required": ["kind"]}
UNION = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B", "description": "the other"}], "$defs": {"A": A, "B": B}}


@pytest.mark.parametrize("name", ["path", "password", "binary", "int32", "uri-reference", "regex", "unknown", "x-ours"])
@pytest.mark.parametrize("where", [{"type": "string"}, {}, {"type": "string", "minLength": 1}])
def test_a_format_that_is_not_enforced_is_an_annotation(name, where):
    assert accepts(StructuredOutputs(json={**where, "format": name}), '"any text"')


@pytest.mark.parametrize("name", ["my schema", "#user", "https://example.com/user#/$defs/name", "", "user"])
def test_a_schema_s_id_is_a_name_that_references_within_it_do_not_need(name):
    schema = StructuredOutputs(json={"$id": name, "$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}})
    assert [accepts(schema, text) for text in ("1.5", '"a"')] == [True, False]
    inner = StructuredOutputs(json={"properties": {"a": {"$id": name, "type": "number"}}, "required": ["a"]})
    assert accepts(inner, '{"a": 1.5}')


def test_a_reference_to_a_schema_s_id_is_followed():
    schema = {"$id": "https://a.b/c", "$defs": {"n": {"type": "number"}}, "items": {"$ref": "https://a.b/c#/$defs/n"}}
    outputs = StructuredOutputs(json={"type": "array", **schema})
    assert [accepts(outputs, text) for text in ("[1.5]", '["a"]')] == [True, False]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_enforced_format_is_one(name):
    assert not accepts(StructuredOutputs(json={"type": "string", "format": name}), '" ?"')


@pytest.mark.parametrize(
    "keywords",
    [
        {"not": False},
        {"propertyNames": True},
        {"unevaluatedProperties": {}},
        {"dependencies": {}},
        {"minContains": 1, "maxContains": 2},
        {"if": {"type": "string"}},
        {"minProperties": 0},
        {"oneOf": [{"type": "array"}, {"$ref": "#/$defs/o"}], "$defs": {"o": OBJECT}},
    ],
    ids=str,
)
def test_a_keyword_that_constrains_nothing_is_taken(keywords):
    schema = StructuredOutputs(json={"type": ["array", "object"], **keywords})
    assert accepts(schema, "[1,1]")
    assert accepts(schema, '{"a":1}')


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"uniqueItems": True}, "these keywords of JSON Schema cannot be enforced here: uniqueItems; leave them out"),
        ({"contains": {}, "minContains": 2}, "enforced here: contains, minContains"),
        ({"propertyNames": {"pattern": "a"}}, "enforced here: propertyNames"),
        ({"oneOf": [{"minItems": 1}, {"maxItems": 1}]}, "oneOf: a text could fit two of its schemas"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: a text could fit two of its schemas"),
        ({"patternProperties": {"^a": {}}, "minProperties": 2}, "minProperties is 2, and 0 properties are required"),
        ({"required": ["k"], "minProperties": 3}, "minProperties is 3, and 1 properties are required"),
    ],
    ids=str,
)
def test_what_a_grammar_cannot_enforce_is_refused_in_json_schema_s_words(keywords, message):
    with pytest.raises(SamplingError, match=message):
        COMPILER.compile(StructuredOutputs(json={"items": keywords}))


OPTIONAL = {"A": A | {"required": []}, "B": B | {"required": []}}
DISCRIMINATED = UNION | {"discriminator": {"propertyName": "kind"}, "$defs": OPTIONAL}
COLOURS = {**OBJECT, "propertyNames": {"$ref": "#/$defs/colour"}, "$defs": {"colour": {"enum": ["red", "a.b"]}}}
COLOURS |= {"additionalProperties": {"type": "integer"}}
NAMED = {**OBJECT, "properties": {"format": {"type": "integer"}, "not": False}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (UNION, ['{"kind":"a","next":{"kind":"a"}}', '{"kind":"c","size":1}'], ['{"kind":"b","size":"x"}', "{}"]),
        (DISCRIMINATED, ['{"kind":"a"}', '{"kind":"b","size":2}'], ["{}", '{"size":2}']),
        (COLOURS, ['{"red":1,"a.b":2}', "{}"], ['{"redder":1}', '{"axb":1}', '{"red":"x"}']),
        ({**OBJECT, "required": ["k"], "minProperties": 2}, ['{"k":1,"j":1}'], ['{"k":1}', '{"k":1,"k":1}']),
        (NAMED, ['{"format":1}'], ['{"format":"x"}', '{"not":1}']),
        ({"const": {"uniqueItems": False, "format": "path"}}, ['{"uniqueItems":false,"format":"path"}'], ["{}"]),
    ],
    ids=range(6),
)
def test_schemas_are_enforced_as_they_are_meant(schema, right, wrong):
    outputs = StructuredOutputs(json=schema)
    assert [text for text in right if not accepts(outputs, text)] == []
    assert [text for text in wrong if accepts(outputs, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        UNION,
        {**OBJECT, "patternProperties": {"^a": {"type": "boolean"}}, "additionalProperties": False, "minProperties": 1},
        {**OBJECT, "properties": {"k": {"type": "null"}}, "required": ["k"], "minProperties": 2, "maxProperties": 3},
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"enum": [1, "b"]}, "maxItems": 4},
        {"type": "string", "format": "path", "maxLength": 4},
        {**OBJECT, "properties": {"a": {"enum": ["x", "yy", 3]}}, "required": ["a"], "additionalProperties": False},
    ],
    ids=range(6),
)
def test_any_walk_gives_what_jsonschema_accepts(schema):
    for seed in range(8):
        rng, constraint, tokens = np.random.default_rng(seed), COMPILER.compile(StructuredOutputs(json=schema)), []
        while len(tokens) < 400:
            choices = sorted(allowed(constraint))
            token = EOS if EOS in choices else int(rng.choice(choices))
            if token == EOS:
                jsonschema.validate(json.loads(TOKENIZER.decode(tokens, skip_special_tokens=False)), schema)
                break
            tokens.append(token)
            assert constraint.take(token) is None


@pytest.mark.parametrize("broken", [5, None, "a", [], [{}], {"a": 1}])
@pytest.mark.parametrize("name", ["required", "type", "oneOf", "discriminator", "$ref", "properties", "enum", "format"])
def test_a_malformed_schema_is_left_for_llguidance_to_refuse(name, broken):
    schema = {"oneOf": [{"type": "object", name: broken}, {"type": "object", name: broken}], name: broken}
    enforceable(schema)
    assert each_schema(schema, lambda one: one) == schema

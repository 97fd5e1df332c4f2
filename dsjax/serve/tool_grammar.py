"""The grammar of an answer that must be tool calls, in the Lark dialect of llguidance."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsjax.engine.structured import COMPACT_JSON_OPTIONS, JSON_OPTIONS
from dsjax.engine.tokenizer import Tokenizer
from dsjax.serve.tool_format import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR, ToolFormat


def tool_grammar(
    form: ToolFormat, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, several: bool, compact: bool = False
) -> str:
    """One call, or with `several` one or more, of any of the tools, each with arguments that fit its schema.

    compact: arguments have no blanks between JSON's parts.

    Markers are tokens by number where the model has them: a grammar of their text alone would let them be spelled out.
    """
    options = COMPACT_JSON_OPTIONS if compact else JSON_OPTIONS
    between = f"{json.dumps(form.between_calls)} " if form.between_calls else ""
    more = f" ({between}call)*" if several else ""
    rules = [
        "%llguidance {}",
        f"start: {_marker(CALLS_BEGIN, tokenizer)} call{more} {_marker(CALLS_END, tokenizer)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    before, name_end = _texts(form.before_name, tokenizer), _texts(form.after_name, tokenizer)
    for index, tool in enumerate(tools):
        function = tool["function"]
        parts = [_marker(CALL_BEGIN, tokenizer), *before, json.dumps(function["name"]), *name_end, f"arguments_{index}"]
        parts += [*_texts(form.after_arguments, tokenizer), _marker(CALL_END, tokenizer)]
        schema = _closed(function.get("parameters") or {"type": "object"})
        rules += [
            f"call_{index}: {' '.join(parts)}",
            f"arguments_{index}: %json {json.dumps(schema | {'x-guidance': options})}",
        ]
    return "\n".join(rules) + "\n"


def _closed(schema: Any) -> Any:
    """The schema, whose objects hold what they name and nothing else, unless they say otherwise.

    So do xgrammar, with which vLLM and SGLang force calls, and OpenAI's strict functions: a model that may add properties can go
    on with them for ever.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            found[name] = {key: _closed(each) for key, each in value.items()}  # names of the user's, not of JSON Schema
        else:
            found[name] = value if name in ("enum", "const", "default", "examples") else _closed(value)
    composed = schema.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if isinstance(schema.get("properties"), dict) and not composed:
        found["additionalProperties"] = False
    return found


def _marker(text: str, tokenizer: Tokenizer) -> str:
    token_id = tokenizer.token_id(text)
    return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def _texts(text: str, tokenizer: Tokenizer) -> list[str]:
    """A text that may hold the separator, as terminals."""
    before, marker, after = text.partition(SEPARATOR)
    parts = [json.dumps(before)] if before else []
    parts += [_marker(SEPARATOR, tokenizer)] if marker else []
    return parts + ([json.dumps(after)] if after else [])

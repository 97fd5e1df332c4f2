"""JSON schemas for llguidance: remove keywords without effect, and reject schemas that it cannot enforce."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dsjax.errors import UserError

FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
"""String formats that are enforced. Any other format is an annotation, as JSON Schema allows."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps user-defined names to schemas."""
_INSTANCES = ("const", "enum", "default", "example", "examples")
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
_NEEDS = {
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
}
"""Keywords that have an effect only beside one of the keywords listed for them."""
_MOST_REFERENCES = 8
"""Maximum length of a chain of references."""


def each_schema(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply `change` to every schema inside a schema, inner ones first. Values (`const`, `enum`) are not schemas."""
    if isinstance(schema, list):
        return [each_schema(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            changed[name] = {key: each_schema(each, change) for key, each in value.items()}
        else:
            changed[name] = value if name in _INSTANCES else each_schema(value, change)
    return change(changed)


def enforceable(schema: Any) -> Any:
    """Return a schema that llguidance supports, and that accepts the same texts or fewer.

    Raises:
        UserError: the grammar could allow a text that violates the schema.
    """

    is_named = _is_referred_to_by_name(schema)

    def change(inner: dict[str, Any]) -> dict[str, Any]:
        keywords = {name: value for name, value in inner.items() if not _says_nothing(name, value, inner)}
        if not is_named:
            keywords.pop("$id", None)  # may be any text, but llguidance would treat it as a URI
        least = keywords.get("minProperties")
        named = _texts(keywords.get("required"))
        if isinstance(least, int) and least > len(named) + 1:
            raise UserError(
                f"minProperties is {least}, and {len(named)} properties are required by name; a grammar cannot keep the others from having "
                "the same name, so require all but one by name"
            )
        names = _only_texts(_resolved(keywords.get("propertyNames"), schema))
        if names and not keywords.keys() & {"properties", "patternProperties"}:
            keywords["patternProperties"] = {
                f"^({'|'.join(map(re.escape, sorted(names)))})$": keywords.get("additionalProperties", True)
            }
            del keywords["propertyNames"]
            keywords["additionalProperties"] = False
        if isinstance(keywords.get("oneOf"), list) and "anyOf" not in keywords:
            return _as_any_of(keywords, schema)
        return keywords

    return each_schema(schema, change)


def _is_referred_to_by_name(schema: Any) -> bool:
    """Whether any reference is not a path within the schema."""
    references: list[Any] = []
    each_schema(schema, lambda inner: references.append(inner.get("$ref")) or inner)
    return any(
        isinstance(reference, str) and reference != "#" and not reference.startswith("#/") for reference in references
    )


def explained(reason: str) -> str:
    """Return llguidance's error about a schema in the terms of JSON Schema."""
    if keys := re.search(r"Unimplemented keys: (\[.*\])", reason):
        return (
            f"these keywords of JSON Schema cannot be enforced here: {', '.join(json.loads(keys[1]))}; leave them out"
        )
    if "oneOf constraints are not supported" in reason:
        return "oneOf: a text could fit two of its schemas; tell them apart by a required property with a const, or use anyOf"
    return reason


def _says_nothing(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword has no effect."""
    if name == "format":
        return isinstance(value, str) and value not in FORMATS
    return value in _WITHOUT_EFFECT.get(name, ()) or (name in _NEEDS and not any(one in schema for one in _NEEDS[name]))


def _as_any_of(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Replace `oneOf` by `anyOf` if no value can match two of its schemas: their types or the texts of a required property differ.

    OpenAPI's `discriminator`, as pydantic writes it, names a property that every object has.
    """
    named = schema.get("discriminator")
    tag = named.get("propertyName") if isinstance(named, dict) else None
    tag = tag if isinstance(tag, str) else None
    branches_seen: list[tuple[set[str], dict[str, set[str]]]] = []
    for branch in schema["oneOf"]:
        resolved = _resolved(branch, root)
        kinds = {"number" if kind == "integer" else kind for kind in _texts(resolved.get("type"))}
        texts = _required_texts(resolved, tag) if kinds == {"object"} else {}
        for others, other_texts in branches_seen:
            shared = texts.keys() & other_texts.keys()
            if not kinds or not others or (kinds & others and all(texts[name] & other_texts[name] for name in shared)):
                return schema
        branches_seen.append((kinds, texts))
    branches = [
        {**branch, "required": [*sorted(_texts(branch.get("required"))), tag]} if tag in texts else branch
        for branch, (_, texts) in zip(schema["oneOf"], branches_seen, strict=True)
    ]
    return {name: value for name, value in schema.items() if name != "oneOf"} | {"anyOf": branches}


def _required_texts(schema: dict[str, Any], tag: Any) -> dict[str, set[str]]:
    """Return the allowed texts of each required property that allows only texts. tag: another required property."""
    properties = schema.get("properties")
    texts = {}
    for name in _texts(schema.get("required")) | _texts(tag):
        one = properties.get(name) if isinstance(properties, dict) else None
        if isinstance(one, dict) and _only_texts(one):
            texts[name] = _only_texts(one)
    return texts


def _only_texts(schema: dict[str, Any]) -> set[str]:
    """Return the texts that a schema allows; empty if it also allows other values."""
    values = schema.get("enum", [schema.get("const")])
    texts = _texts(values)
    return texts if isinstance(values, list) and len(texts) == len(values) else set()


def _texts(value: Any) -> set[str]:
    """Return the texts in a text or a list. Ignore other values: llguidance reports malformed schemas."""
    return {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)}


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Return the target of a schema's reference within `root`; an empty schema if there is none."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            break
        schema = root
        for step in reference.removeprefix("#/").split("/"):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}

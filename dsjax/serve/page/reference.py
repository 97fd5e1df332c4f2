"""`GET /docs`: the OpenAPI schema as an HTML page that loads nothing from other sites, unlike FastAPI's."""

import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

Schema = Mapping[str, Any]

_BOUNDS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "above {}"),
    ("maximum", "at most {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} fields"),
    ("pattern", "matches {}"),
)
_INT32_BOUNDS = (-(2**31), 1 - 2**31, 2**31 - 1)
"""Bounds that only express the int32 range; the page omits them."""


def render_reference(schema: Schema) -> str:
    """Return the page as HTML, with the schema's texts escaped.

    Args:
        schema: an OpenAPI 3.1 schema, as `FastAPI.openapi` returns it.
    """
    source = (importlib.resources.files(__package__) / "docs.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    operations = [
        (method.upper(), path, operation, _body_type(operation))
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = schema.get("components", {}).get("schemas", {})
    return template.render(
        version=schema["info"]["version"],
        type_name=type_name,
        operations=operations,
        shapes={name: (_description(model), list(_fields(model))) for name, model in sorted(schemas.items())},
    )


def _body_type(operation: Schema) -> Markup | None:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return None if content is None else type_name(content["schema"])


def _fields(model: Schema) -> Iterator[tuple[str, Markup, str, str]]:
    """Yield name, type, default and description of each field."""
    required = model.get("required", ())
    for name, field in model.get("properties", {}).items():
        if name in required:
            default = "required"
        else:
            default = "" if field.get("default") is None else f"default {json.dumps(field['default'])}"
        yield name, type_name(field), default, _description(field)


def _description(schema: Schema) -> str:
    return schema.get("description", "").strip()


def type_name(schema: Schema) -> Markup:
    """Return a type in words, with its bounds and links to the schemas that it references. Omit `null`."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        class_name = name.rpartition("__")[2]  # FastAPI adds the module to a name that two classes share
        return Markup('<a href="#{0}">{1}</a>').format(name, class_name)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return Markup(" or ").join(type_name(branch) for branch in branches if branch.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return escape(" or ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")])))
    bounds = [text.format(schema[key]) for key, text in _BOUNDS if key in schema and schema[key] not in _INT32_BOUNDS]
    return _base_type(schema) + (f" ({', '.join(bounds)})" if bounds else "")


def _base_type(schema: Schema) -> Markup:
    """Return a type in words, without bounds."""
    kind = schema.get("type", "any value")
    if kind == "array":
        return Markup("list of {}").format(type_name(schema.get("items", {})))
    value_type = schema.get("additionalProperties")
    if kind == "object" and isinstance(value_type, Mapping):
        return Markup("object of {}").format(type_name(value_type))
    return escape(kind)

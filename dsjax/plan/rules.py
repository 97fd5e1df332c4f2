"""Rules as data: files of `configs/engines`, with conditions, values and texts as Jinja templates over facts."""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import jinja2

from dsjax.errors import UserError
from dsjax.toml_files import read_toml


def comment(text: str) -> str:
    """Return a text as comment lines for YAML or a shell. User-given names may contain line breaks."""
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines() or [""])


_JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
_JINJA.filters |= {"json": json.dumps, "comment": comment, "indented": functools.partial(json.dumps, indent=2)}
template = functools.cache(_JINJA.from_string)
_expression = functools.cache(functools.partial(_JINJA.compile_expression, undefined_to_none=False))


@functools.cache
def documented(engine: str) -> Mapping[str, Any]:
    """`configs/engines/ENGINE.toml`."""
    return read_toml("engine", "engines", engine)


def _holds(rule: Mapping[str, str], facts: Mapping[str, Any]) -> bool:
    return "if" not in rule or bool(_expression(rule["if"])(**facts))


def written(engine: str, table: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return name → value of the options in `configs/engines/ENGINE.toml` whose condition holds."""
    rules = documented(engine).get(table, {})
    return {name: _expression(r.get("value", "''"))(**facts) for name, r in rules.items() if _holds(r, facts)}


def said(engine: str, table: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the texts of the rules in `configs/engines/ENGINE.toml` whose condition holds."""
    rules = documented(engine).get(table, ())
    return [template(rule["text"]).render(facts) for rule in rules if _holds(rule, facts)]


def refusal(table: str, **facts: Any) -> str | None:
    """Return the text of the first rule in a table of `configs/engines/refusals.toml` whose condition holds, or None."""
    return next(iter(said("refusals", table, {"infinity": math.inf, **facts})), None)


def refuse(table: str, **facts: Any) -> None:
    """Raise `UserError` with the text of `refusal`, if there is one."""
    if text := refusal(table, **facts):
        raise UserError(text)

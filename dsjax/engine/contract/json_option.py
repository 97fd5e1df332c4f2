"""Options that are JSON objects, with a dataclass for their fields: how they are read, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from dsjax.errors import UserError

Option = TypeVar("Option")


def parse_json_option(
    kind: type[Option], given: str | Mapping[str, Any], flag: str, example: str, required: tuple[str, ...] = ()
) -> Option:
    """A `kind` from the JSON text of the command line, or from a dictionary with its fields.

    Raises:
        UserError: no JSON object, an unknown field, or one missing that is `required`. Values are `kind`'s to check.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise UserError(f"{flag} is not JSON ({error}); expected an object such as {example}") from error
    if not isinstance(given, Mapping):
        raise UserError(f"{flag} is {given!r}; expected an object such as {example}")
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(map(str, given.keys() - set(known)))
    if unknown:
        raise UserError(f"{flag} has the unknown field {', '.join(unknown)}; the fields are {', '.join(known)}")
    for name in required:
        if name not in given:
            raise UserError(f"{flag} has no {name}; expected an object such as {example}")
    return kind(**given)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def wrong_field(flag: str, name: str, value: Any, expected: str) -> UserError:
    """What is said of a field whose value cannot be."""
    return UserError(f"{flag} has {name} {json.dumps(value, default=repr)}; expected {expected}")

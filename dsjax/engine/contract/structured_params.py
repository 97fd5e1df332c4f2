"""`StructuredOutputs`: the required format of a completion's text. Checked here; compiled in `structured.py`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.errors import UserError

MAX_GRAMMAR_CHARS = 65_536
"""Maximum length of a schema, regular expression, grammar or list of choices, in characters."""
MAX_CHOICES = 1_024

_FORMS = ("json", "json_object", "regex", "choice", "grammar")


class SamplingError(UserError):
    """An invalid sampling parameter. `param` names the field; `reason` says why it is invalid."""

    def __init__(self, param: str, reason: str):
        super().__init__(f"{param}: {reason}")
        self.param, self.reason = param, reason


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The required format of the text; exactly one is given. Names and meanings are vLLM's.

    ::

        StructuredOutputs(regex=r"[0-9]{3}-[0-9]{4}")

    Attributes:
        json: a JSON schema, as text or as the object itself.
        json_object: True allows any JSON object.
        regex: a regular expression that matches the whole text (Rust's syntax, without look-around).
        choice: the text is one of these strings.
        grammar: a context-free grammar in llguidance's dialect of Lark; its start rule is `start`.
        structured_after: a token id, such as the id of `</think>`. Text up to this token is unconstrained; the format applies after it.
            None: the format applies from the first token.
        disable_any_whitespace: allow no whitespace between JSON elements. Otherwise one space, or a line break and an indentation, is
            allowed there.

    Raises:
        SamplingError: no format or several, a format of the wrong type, or one that is too long.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structured_after: int | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self):
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _error("", f"found {' and '.join(given) or 'nothing'}, expected exactly one of {', '.join(_FORMS)}")
        (name,) = given
        value = getattr(self, name)
        if name == "json":
            value = self._schema_text()
            object.__setattr__(self, "json", value)
        elif name == "json_object":
            if value is not True:
                raise _error(name, f"found {value!r}, expected true")
        elif name == "choice":
            object.__setattr__(self, "choice", _checked_choices(value))
            value = "".join(self.choice)
        elif not isinstance(value, str) or not value:
            raise _error(name, f"found {value!r}, expected text")
        if isinstance(value, str):
            _check_text(name, value)
        if type(self.disable_any_whitespace) is not bool:
            raise _error("disable_any_whitespace", f"found {self.disable_any_whitespace!r}, expected true or false")
        after = self.structured_after
        if after is not None and (type(after) is not int or after < 0):
            raise _error("structured_after", f"found {after!r}, expected a token id")

    @property
    def form(self) -> str:
        """Name of the given format."""
        return next(name for name in _FORMS if getattr(self, name) is not None)

    def _schema_text(self) -> str:
        """Return the schema as normalized JSON text, so that differently formatted copies of a schema compile once."""
        schema = self.json
        if isinstance(schema, str):
            _check_text("json", schema)
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise _error("json", f"the schema is not JSON: {error}") from error
            except RecursionError as error:
                raise _error("json", "the schema is nested too deeply") from error
        schema = {} if schema is True else schema  # in JSON Schema, `true` accepts any value
        if not isinstance(schema, dict):
            raise _error("json", f"found {type(schema).__name__}, expected a JSON schema: an object, or its text")
        try:
            return json.dumps(schema, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _error("json", "the schema holds what JSON cannot write") from error


def _checked_choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, list | tuple) or not choices:
        raise _error("choice", f"found {choices!r}, expected a list of strings")
    if len(choices) > MAX_CHOICES:
        raise _error("choice", f"found {len(choices)} strings, expected at most {MAX_CHOICES}")
    for each in choices:
        if not isinstance(each, str) or not each:
            raise _error("choice", f"found {each!r}, expected strings of at least one character")
    return tuple(choices)


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _error(name, f"found {len(text)} characters, expected at most {MAX_GRAMMAR_CHARS}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _error(name, f"half a surrogate pair at character {error.start}; send whole characters") from error


def _error(name: str, message: str) -> SamplingError:
    return SamplingError(f"structured_outputs.{name}" if name else "structured_outputs", message)

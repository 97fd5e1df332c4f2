"""`ChatTemplate`: messages to a prompt, with the model's own Jinja template in Jinja's immutable sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox

from dsjax.errors import UserError


class ChatTemplateError(UserError):
    """A template that is broken, or that refuses these messages."""


class ChatTemplate:
    """A chat template as Hugging Face renders it: same environment, same globals, same variables.

    Templates come from the model's directory alone; none is ever taken from a request. `source` is the template's text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is not a Jinja template: {error}") from error

    @classmethod
    def from_config(cls, entry: Any, special_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """From `chat_template` of tokenizer_config.json: a string, or a list of named ones, of which `default` is taken."""
        if entry is None:
            return None
        if isinstance(entry, str):
            return cls(entry, special_tokens)
        named = {item["name"]: item["template"] for item in entry}
        if "default" not in named:
            raise ChatTemplateError(
                f"tokenizer_config.json has the chat templates {sorted(named)}, expected one named default"
            )
        return cls(named["default"], special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text, special tokens included: encode it with `add_special_tokens=False`.

        Raises:
            ChatTemplateError: the template refuses these messages.
        """
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(known)
        except Exception as error:  # whatever a sandboxed template raises is about the messages that it was given
            raise ChatTemplateError(f"the model's chat template does not accept these messages: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own `tojson` escapes HTML characters, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

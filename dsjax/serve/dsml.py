"""Tool calls in DSML, the markup of DeepSeek-V3.2 and V4: their format, the grammar of forced calls, and their streaming parser.

::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4's block is named ``tool_calls``. A parameter with ``string="true"`` is literal text; any other is JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsjax.engine.text.prompt_encoder import DSML, PromptEncoder, V4Encoder, V32Encoder, json_text
from dsjax.engine.text.stop_strings import FoundMarker, find_first, num_undecided
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.tool_calls import CallFormat, CallParser, MessagePiece, closed_schema

_INVOKE, _INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
_PARAMETER, _PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
_TAGS = (f"<{DSML}", f"</{DSML}")
_HEAD = re.compile(r'(.*?)"\s+string="(true|false)"\s*>', re.DOTALL)
_NOTES = frozenset({"type", "title", "description", "default", "examples"})
"""Schema keywords that do not constrain a string beyond its type."""
_LISTED = _NOTES | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
"""Schema keywords of an object that only lists its properties."""


class DsmlFormat(CallFormat):
    """Tool calls in the format of an encoder's prompts.

    Each property of a function's schema is a parameter, in the schema's order. In a forced call, a string with constraints other than
    type and enum is written as JSON, so that its schema applies. If the function's schema is more than a list of properties, all
    arguments are one JSON object.
    """

    markers = (DSML,)

    def __init__(self, name: str, encoder: PromptEncoder):
        self.name, self._encoder = name, encoder
        self.calls, self.describe = encoder.calls, encoder.describe
        self.openings = (f"<{DSML}{encoder.block}>", _INVOKE)

    def parser(self, most: int) -> "DsmlParser":
        """Return a parser for one answer that returns at most `most` calls."""
        return DsmlParser(self._encoder.block, most)

    def _rules(
        self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, several: bool, options: Mapping[str, Any]
    ) -> tuple[str, list[str]]:
        # A text parameter ends with `</` + DSML + `parameter>`: a string, or if DSML is one token, text up to `</`, the token and the rest.
        token = tokenizer.token_id(DSML)
        if token is None:
            rules = [f'text[suffix="</{DSML}parameter>\\n"]: /(?s:.*)/']
        else:
            rules = [f'text: TEXT <[{token}]> "parameter>\\n"', r"TEXT: /(?s:.*)<\//"]

        def written(text: str) -> str:
            """Return a text, which may contain the DSML token once, as grammar terminals."""
            before, _, after = text.partition(DSML)
            return json.dumps(text) if token is None else f"{json.dumps(before)} <[{token}]> {json.dumps(after)}"

        def as_json(schema: Any) -> str:
            return f"%json {json.dumps(closed_schema(schema) | {'x-guidance': options})}"

        parameter_end, invoke_end = written(f"{_PARAMETER_END}\n"), written(f"{_INVOKE_END}\n")

        def value(schema: Any, definitions: Mapping[str, Any]) -> str:
            """Return the grammar rule for a parameter's `string` attribute, value and closing tag."""
            if isinstance(schema, dict) and schema.get("type") == "string" and schema.keys() <= _NOTES | {"enum"}:
                choices = schema.get("enum")
                if choices is None:
                    return r'" string=\"true\">" text'
                if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
                    return rf'" string=\"true\">" ({" | ".join(map(json.dumps, choices))}) {parameter_end}'
            schema = (schema if isinstance(schema, dict) else {}) | definitions
            return rf'" string=\"false\">" {as_json(schema)} {parameter_end}'

        for index, tool in enumerate(tools):
            function = tool["function"]
            schema = function.get("parameters") or {}
            parts = [written(f'{_INVOKE}{function["name"]}">\n')]
            fields = schema.get("properties") or {}
            needed = schema.get("required") or ()
            is_listed = isinstance(fields, dict) and isinstance(needed, list | tuple) and schema.keys() <= _LISTED
            if is_listed and not schema.get("additionalProperties"):
                definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                for place, (name, one) in enumerate(fields.items()):
                    rule = f"parameter_{index}_{place}"
                    head = written(f'{_PARAMETER}{name}"')
                    rules.append(f"{rule}: {head} {value(one, definitions)}")
                    parts.append(rule if name in needed else f"{rule}?")
            else:
                parts.append(as_json(schema) + r' "\n"')
            rules.append(f"call_{index}: {' '.join(parts)} {invoke_end}")
        begin, end = written(f"\n\n<{DSML}{self._encoder.block}>\n"), written(f"</{DSML}{self._encoder.block}>")
        return f"{begin} call{'+' if several else ''} {end}", rules


DSML_FORMATS = {
    form.name: form for form in (DsmlFormat("deepseek_v32", V32Encoder()), DsmlFormat("deepseek_v4", V4Encoder()))
}


class DsmlParser(CallParser):
    """Streaming parser of DSML. The result does not depend on how the text is split.

    Arguments become one JSON object. A text parameter is passed on as it arrives, a JSON parameter once it is complete; if it is not
    valid JSON, it becomes a string. A call whose body is a JSON object instead of parameters is accepted too. Text that ends inside a
    tag is dropped, as is a parameter with an unreadable tag. block: name of the tag around all calls.
    """

    def __init__(self, block: str, most: int):
        super().__init__(most)
        begin, self._end = f"<{DSML}{block}>", f"</{DSML}{block}>"
        self._openings = (f"\n\n{begin}", begin, f"\n\n{_INVOKE}", _INVOKE)
        self._ends = (_PARAMETER_END, _INVOKE_END, self._end)  # any of these ends a value, since models omit some
        self._num_parameters = 0

    def _text(self, piece: MessagePiece, finished: bool) -> bool:
        markers = (*self._openings, *self._ends)
        marker = find_first(self._buffer, markers)
        piece.content += self._take(marker.at if marker else len(self._buffer) - self._num_undecided(markers, finished))
        if marker and marker.text in self._openings:
            self._step = self._between
        elif marker:  # not part of a call
            self._take(len(marker.text))
        return marker is not None

    def _between(self, piece: MessagePiece, finished: bool) -> bool:
        marker = find_first(self._buffer, (_INVOKE, self._end))
        if marker:
            self._take(marker.at + len(marker.text))
            self._step = self._name if marker.text == _INVOKE else self._text
        return marker is not None

    def _name(self, piece: MessagePiece, finished: bool) -> bool:
        end = self._buffer.find(">")
        if end < 0:
            return False
        tag = self._take(end + 1)
        self._num_parameters = 0
        self._begin_call(piece, tag.partition('"')[0].strip())
        self._step = self._body
        if tag.endswith("/>"):
            self._finish_call(piece)
        return True

    def _body(self, piece: MessagePiece, finished: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith("{") and not self._num_parameters:
            self._step = self._whole_arguments
            return True
        marker = find_first(self._buffer, (_PARAMETER, _INVOKE_END, _INVOKE, self._end))
        if not marker:
            return False
        if marker.text == _PARAMETER:
            self._take(marker.at + len(marker.text))
            self._step = self._parameter
        else:
            self._take(marker.at)
            self._finish_call(piece)
        return True

    def _whole_arguments(self, piece: MessagePiece, finished: bool) -> bool:
        markers = (_INVOKE_END, _INVOKE, self._end)
        end = find_first(self._buffer, markers)
        text = self._buffer[: end.at if end else len(self._buffer) - num_undecided(self._buffer, markers)]
        arguments = text.rstrip()  # space is held back, because it may stand before a tag
        self._take(len(text) if end else len(arguments))
        self._add(piece, arguments)
        if end:
            self._step = self._between
        return end is not None

    def _parameter(self, piece: MessagePiece, finished: bool) -> bool:
        """Read a parameter's tag after the opening quote of its name."""
        end = find_first(self._buffer, _TAGS)
        head = _HEAD.match(self._buffer[: end.at if end else len(self._buffer)])
        if head:
            self._take(head.end())
            self._add(piece, f"{', ' if self._num_parameters else '{'}{json_text(head[1])}: ")
            self._num_parameters += 1
            self._step = self._json_value
            if head[2] == "true":
                self._add(piece, '"')
                self._step = self._text_value
        elif end:
            self._step = self._body
        return bool(head or end)

    def _text_value(self, piece: MessagePiece, finished: bool) -> bool:
        end = find_first(self._buffer, self._ends)
        text = self._take(end.at if end else len(self._buffer) - num_undecided(self._buffer, self._ends))
        self._add(piece, json_text(text)[1:-1] + ('"' if end else ""))
        return self._end_value(end)

    def _json_value(self, piece: MessagePiece, finished: bool) -> bool:
        end = find_first(self._buffer, self._ends)
        if end:
            text = self._take(end.at)
            self._add(piece, text.strip() if _is_json(text) else json_text(text))
        elif finished:
            self._add(piece, self._take(len(self._buffer) - num_undecided(self._buffer, self._ends)))
        return self._end_value(end)

    def _end_value(self, end: FoundMarker | None) -> bool:
        if end:
            self._take(len(end.text) if end.text == _PARAMETER_END else 0)
            self._step = self._body
        return end is not None

    def _finish_call(self, piece: MessagePiece) -> None:
        self._add(piece, "}" if self._num_parameters else "{}")
        self._step = self._between

    def _add(self, piece: MessagePiece, arguments: str) -> None:
        if arguments:
            self._emit(piece, {"function": {"arguments": arguments}})


def _is_json(text: str) -> bool:
    """Return whether a text is valid JSON, which has no NaN and no infinities."""
    try:
        json.loads(text, parse_constant=lambda name: float(f"no {name}"))
    except (ValueError, RecursionError):
        return False
    return True

"""DeepSeek's tool calls: how they are written, the grammar of an answer that must be some, and their parser.

`ToolFormat` writes calls and tells a prompt of the tools; `tool_grammar` is in the Lark dialect of llguidance;
`ToolCallParser` takes calls out of text that comes in pieces.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjax.engine.text.detokenizer import find_first, num_undecided
from dsjax.engine.text.json_schema import each_schema, enforceable
from dsjax.engine.text.structured import COMPACT_JSON_OPTIONS, JSON_OPTIONS
from dsjax.engine.text.tokenizer import Tokenizer

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
_OUTPUTS_BEGIN, _OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
_OUTPUT_BEGIN, _OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


@dataclass(frozen=True)
class ToolFormat:
    """One of DeepSeek's two ways to write a call, between `CALL_BEGIN` and `CALL_END`.

    `deepseek_v3` (V3, R1) writes `function`, the separator, the name, and the arguments in a fenced block of JSON;
    `deepseek_v31` the name, the separator and the bare arguments.
    """

    name: str
    before_name: str
    after_name: str
    after_arguments: str
    between_calls: str

    @classmethod
    def choose(cls, name: str, tokenizer: Tokenizer | None) -> "ToolFormat | None":
        """Return the format of this name; None for `none`, and for a model without tokenizer.

        `auto` takes the format that the model's template writes, or else V3.1's where the model has the separator as a token.
        """
        if name == "none" or tokenizer is None:
            return None
        if name != "auto":
            return FORMATS[name]
        source = tokenizer.chat_template.source if tokenizer.chat_template else ""
        if SEPARATOR in source:
            return FORMATS["deepseek_v3" if "```json" in source else "deepseek_v31"]
        return FORMATS["deepseek_v31"] if tokenizer.token_id(SEPARATOR) is not None else None

    def call(self, name: str, arguments: str) -> str:
        """Write one call as text."""
        return f"{CALL_BEGIN}{self.before_name}{name}{self.after_name}{arguments}{self.after_arguments}{CALL_END}"

    def calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write calls of (name, arguments) as text."""
        return CALLS_BEGIN + self.between_calls.join(self.call(*call) for call in calls) + CALLS_END

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Write what the system message says of the functions, for templates that do not say it themselves."""
        lines = ["## Tools", "You have access to the following tools:", ""]
        for tool in tools:
            function = tool["function"]
            lines += [f"### {function['name']}", f"Description: {function.get('description') or ''}", ""]
            lines += [f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}", ""]
        example = self.calls([("tool_name", '{"argument": "value"}')])
        lines += [f"To call tools, write exactly this, with JSON arguments as above: {example}"]
        return "\n".join(lines)


FORMATS = {
    "deepseek_v3": ToolFormat("deepseek_v3", f"function{SEPARATOR}", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": ToolFormat("deepseek_v31", "", SEPARATOR, "", ""),
}


def tool_outputs(contents: Sequence[str]) -> str:
    """Write answers of tools as text, for templates that have no place for them."""
    return _OUTPUTS_BEGIN + "".join(f"{_OUTPUT_BEGIN}{each}{_OUTPUT_END}" for each in contents) + _OUTPUTS_END


def tool_grammar(
    form: ToolFormat, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, several: bool, compact: bool = False
) -> str:
    """Write the grammar of one call, or with `several` of one or more, to any of the tools, with arguments that fit its schema.

    compact: arguments have no blanks between JSON's parts.

    Markers are written as token numbers where the model has them as tokens, so that the model cannot spell them in letters.
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
    """Return the schema, whose objects hold what they name and nothing else, unless they say otherwise.

    So do xgrammar, with which vLLM and SGLang force calls, and OpenAI's strict functions: a model that may add properties can go
    on with them for ever.
    """

    def close(inner: dict[str, Any]) -> dict[str, Any]:
        composed = inner.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
        open_ended = isinstance(inner.get("properties"), dict) and not composed
        return inner | {"additionalProperties": False} if open_ended else inner

    return enforceable(each_schema(schema, close))


def _marker(text: str, tokenizer: Tokenizer) -> str:
    token_id = tokenizer.token_id(text)
    return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def _texts(text: str, tokenizer: Tokenizer) -> list[str]:
    """Write a text that may hold the separator, as terminals."""
    before, marker, after = text.partition(SEPARATOR)
    parts = [json.dumps(before)] if before else []
    parts += [_marker(SEPARATOR, tokenizer)] if marker else []
    return parts + ([json.dumps(after)] if after else [])


@dataclass
class MessagePiece:
    """What a piece of text added; `tool_calls` are deltas as OpenAI's chunks have them."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_one_text(self) -> bool:
        """Whether it is content or reasoning, and nothing else."""
        return not self.tool_calls and bool(self.content) != bool(self.reasoning)

    def delta(self) -> dict[str, Any]:
        """Make a chunk's delta."""
        body: dict[str, Any] = {}
        if self.reasoning:
            body |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.content:
            body["content"] = self.content
        if self.tool_calls:
            body["tool_calls"] = self.tool_calls
        return body

    def message(self) -> dict[str, Any]:
        """Make a whole message: the deltas of a call are put together."""
        calls: list[dict[str, Any]] = []
        for delta in self.tool_calls:
            if delta["index"] == len(calls):
                calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        body: dict[str, Any] = {"role": "assistant", "content": self.content or (None if calls else "")}
        if self.reasoning:
            body |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if calls:
            body["tool_calls"] = calls
        return body


class ToolCallParser:
    """Takes an answer's text piece by piece. However it is cut, the pieces put together are the same.

    A call whose arguments are not JSON is passed on as it is, as OpenAI does: whoever called knows what to do. What is cut off
    inside a call's name is dropped.

    Args:
        most: how many calls are given; later ones are dropped.
    """

    def __init__(self, form: ToolFormat, most: int):
        self._most = most
        self._fence = form.after_name.strip() if form.after_name != SEPARATOR else ""
        self._ends = tuple(
            dict.fromkeys((form.after_arguments + CALL_END, form.after_arguments.strip() + CALL_END, CALL_END))
        )
        self._step = self._text
        self._held = ""
        self._has_arguments = False
        self.num_calls = 0

    def push(self, text: str, finished: bool = False) -> MessagePiece:
        """Add text; with `finished` nothing is held back any more."""
        self._held += text
        piece = MessagePiece()
        while self._step(piece, finished):
            pass
        return piece

    # Each state takes what it can from `_held` and says whether the next state may go on.

    def _text(self, piece: MessagePiece, finished: bool) -> bool:
        first_marker = find_first(self._held, (CALLS_BEGIN, CALL_BEGIN))
        if first_marker:
            at, marker = first_marker
            piece.content += self._held[:at]
            self._held = self._held[at + (len(marker) if marker == CALLS_BEGIN else 0) :]
            self._step = self._between
            return True
        keep = 0 if finished else num_undecided(self._held, (CALLS_BEGIN, CALL_BEGIN))
        piece.content += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False

    def _between(self, piece: MessagePiece, finished: bool) -> bool:
        first_marker = find_first(self._held, (CALL_BEGIN, CALLS_END))
        if not first_marker:
            return False
        at, marker = first_marker
        self._held = self._held[at + len(marker) :]
        self._step = self._name if marker == CALL_BEGIN else self._text
        return True

    def _name(self, piece: MessagePiece, finished: bool) -> bool:
        end = find_first(self._held, (CALL_END,))
        name_end = find_first(self._held, (self._fence or SEPARATOR,))
        if name_end is None or (end is not None and end[0] < name_end[0]):
            if end is not None:  # a call without arguments' beginning: nothing to make of it
                self._held, self._step = self._held[end[0] + len(CALL_END) :], self._between
            return end is not None
        at, marker = name_end
        name = self._held[:at].rpartition(SEPARATOR)[2].strip()
        self._held = self._held[at + len(marker) :]
        self.num_calls += 1
        self._has_arguments = False
        self._step = self._arguments
        head = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}
        self._emit(piece, head)
        return True

    def _arguments(self, piece: MessagePiece, finished: bool) -> bool:
        if not self._has_arguments:
            self._held = self._held.lstrip()
        end_marker = find_first(self._held, self._ends)
        if end_marker:
            at, marker = end_marker
            text, self._held = self._held[:at], self._held[at + len(marker) :]
            if not (text or self._has_arguments):
                text = "{}"
            self._step = self._between
        else:
            keep = 0 if finished else num_undecided(self._held, self._ends)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if text:
            self._has_arguments = True
            self._emit(piece, {"function": {"arguments": text}})
        return end_marker is not None

    def _emit(self, piece: MessagePiece, delta: dict[str, Any]) -> None:
        if self.num_calls <= self._most:
            piece.tool_calls.append({"index": self.num_calls - 1, **delta})

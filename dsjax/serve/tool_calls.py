"""Tool calls of DeepSeek-V3, R1, V3.1 and Kimi-K2: their format, the grammar of forced calls, and their streaming parser."""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.text.json_schema import each_schema, enforceable
from dsjax.engine.text.stop_strings import find_first, num_undecided
from dsjax.engine.text.structured import COMPACT_JSON_OPTIONS, JSON_OPTIONS, lark_text
from dsjax.engine.text.tokenizer import Tokenizer

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_OUTPUTS_BEGIN, OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
_OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


class CallFormat(ABC):
    """Format of a model's tool calls. The parser looks for `markers`; `openings` begin a block of calls and a single call."""

    name: str
    markers: tuple[str, ...]
    openings: tuple[str, str]

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        several: bool,
        compact: bool = False,
        instead: StructuredOutputs | None = None,
    ) -> str:
        """Return the grammar of an answer that calls one of the tools, with arguments that match the tool's schema.

        The grammar uses llguidance's dialect of Lark. Markers that are tokens of the model appear as token ids, so that the model
        cannot spell them in letters.

        Args:
            several: allow more than one call.
            compact: allow no whitespace in JSON.
            instead: form of an answer without calls, if the model may answer without one.
        """
        start, rules = self._rules(tools, tokenizer, several, COMPACT_JSON_OPTIONS if compact else JSON_OPTIONS)
        head = ["%llguidance {}", f"start: {start}"]
        if instead is not None:
            head += ["  | instead", f"instead: %lark {{\n{lark_text(instead)}\n}}"]
        head.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        return "\n".join([*head, *rules]) + "\n"

    @abstractmethod
    def _rules(
        self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, several: bool, options: Mapping[str, Any]
    ) -> tuple[str, list[str]]:
        """Return the start rule's right side, which uses `call`, and the rules `call_0`, `call_1`, … options: llguidance's JSON options."""

    @abstractmethod
    def parser(self, most: int) -> "CallParser":
        """Return a parser for one answer that returns at most `most` calls."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat(CallFormat):
    """Tool calls between markers: one pair around all calls, and one around each call.

    `deepseek_v3` (V3, R1) writes `function`, the separator, the name, and the arguments in a fenced JSON block. `deepseek_v31` writes the
    name, the separator and the bare arguments. `kimi_k2` is like `deepseek_v31` with other markers and a call number after the name
    (`functions.NAME:0`); both together are the call's id.
    """

    name: str
    calls_begin: str = CALLS_BEGIN
    calls_end: str = CALLS_END
    call_begin: str = CALL_BEGIN
    call_end: str = CALL_END
    separator: str = SEPARATOR
    before_name: str = ""
    after_name: str
    after_arguments: str = ""
    between_calls: str = ""
    numbers_calls: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All five markers."""
        return self.calls_begin, self.calls_end, self.call_begin, self.call_end, self.separator

    @property
    def openings(self) -> tuple[str, str]:
        """Markers before all calls and before each."""
        return self.calls_begin, self.call_begin

    def call(self, name: str, arguments: str, number: int = 0) -> str:
        """Return one call as text. number: its index in the answer."""
        name += f":{number}" if self.numbers_calls else ""
        return f"{self.call_begin}{self.before_name}{name}{self.after_name}{arguments}{self.after_arguments}{self.call_end}"

    def calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls, given as (name, arguments), as text."""
        texts = [self.call(*call, number) for number, call in enumerate(calls)]
        return self.calls_begin + self.between_calls.join(texts) + self.calls_end

    def identified(self, written: str) -> tuple[str, str]:
        """Split a call's head into name and id. The id is empty if the model does not write one."""
        match = re.fullmatch(r"(?:functions\.)?(.+):\d+", written) if self.numbers_calls else None
        return (match[1], written) if match else (written, "")

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Describe the functions for the system message, for chat templates that do not do so."""
        lines = ["## Tools", "You have access to the following tools:", ""]
        for tool in tools:
            function = tool["function"]
            lines += [f"### {function['name']}", f"Description: {function.get('description') or ''}", ""]
            lines += [f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}", ""]
        example = self.calls([("tool_name", '{"argument": "value"}')])
        lines += [f"To call tools, write exactly this, with JSON arguments as above: {example}"]
        return "\n".join(lines)

    def _rules(
        self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, several: bool, options: Mapping[str, Any]
    ) -> tuple[str, list[str]]:
        between = f"{json.dumps(self.between_calls)} " if self.between_calls else ""
        calls = f"call ({between}call)*" if several else "call"
        begin, end = _marker(self.calls_begin, tokenizer), _marker(self.calls_end, tokenizer)
        rules: list[str] = []
        before, name_end, after = (
            _texts(text, self, tokenizer) for text in (self.before_name, self.after_name, self.after_arguments)
        )
        name_end = ['":" /[0-9]+/', *name_end] if self.numbers_calls else name_end
        for index, tool in enumerate(tools):
            function = tool["function"]
            parts = [_marker(self.call_begin, tokenizer), *before, json.dumps(function["name"]), *name_end]
            parts += [f"arguments_{index}", *after, _marker(self.call_end, tokenizer)]
            schema = closed_schema({"type": "object", "properties": {}} | (function.get("parameters") or {}))
            rules += [
                f"call_{index}: {' '.join(parts)}",
                f"arguments_{index}: %json {json.dumps(schema | {'x-guidance': options})}",
            ]
        return f"{begin} {calls} {end}", rules

    def parser(self, most: int) -> "ToolCallParser":
        """Return a parser for one answer that returns at most `most` calls."""
        return ToolCallParser(self, most)


FORMATS = {
    form.name: form
    for form in (
        ToolFormat(
            name="deepseek_v3",
            before_name=f"function{SEPARATOR}",
            after_name="\n```json\n",
            after_arguments="\n```",
            between_calls="\n",
        ),
        ToolFormat(name="deepseek_v31", after_name=SEPARATOR),
        ToolFormat(
            name="kimi_k2",
            calls_begin="<|tool_calls_section_begin|>",
            calls_end="<|tool_calls_section_end|>",
            call_begin="<|tool_call_begin|>",
            call_end="<|tool_call_end|>",
            separator="<|tool_call_argument_begin|>",
            before_name="functions.",
            after_name="<|tool_call_argument_begin|>",
            numbers_calls=True,
        ),
    )
}


def tool_outputs(contents: Sequence[str]) -> str:
    """Return tools' results as text, for chat templates that do not support them."""
    return _OUTPUTS_BEGIN + "".join(f"{_OUTPUT_BEGIN}{content}{OUTPUT_END}" for content in contents) + OUTPUTS_END


def closed_schema(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in objects that list properties and do not allow others.

    OpenAI's strict functions and xgrammar, which vLLM and SGLang use to force calls, do the same: a model that may add properties can
    generate them without end. An object that lists no properties may hold any.
    """

    def close(inner: dict[str, Any]) -> dict[str, Any]:
        composed = inner.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
        open_ended = isinstance(inner.get("properties"), dict) and not composed
        return inner | {"additionalProperties": False} if open_ended else inner

    return enforceable(each_schema(schema, close))


def _marker(text: str, tokenizer: Tokenizer) -> str:
    token_id = tokenizer.token_id(text)
    return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def _texts(text: str, form: ToolFormat, tokenizer: Tokenizer) -> list[str]:
    """Return a text, which may contain the separator, as grammar terminals."""
    before, marker, after = text.partition(form.separator)
    parts = [json.dumps(before)] if before else []
    parts += [_marker(marker, tokenizer)] if marker else []
    return parts + ([json.dumps(after)] if after else [])


@dataclass
class MessagePiece:
    """Additions to a message from a piece of text; `tool_calls` are deltas in OpenAI's format."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def deltas(self) -> list[dict[str, Any]]:
        """Return at least one delta: one per kind of text and per call, because some clients read only one field of a chunk."""
        deltas: list[dict[str, Any]] = []
        if self.reasoning:
            deltas.append({"reasoning_content": self.reasoning, "reasoning": self.reasoning})
        if self.content:
            deltas.append({"content": self.content})
        return deltas + [{"tool_calls": [call]} for call in self.tool_calls] or [{}]

    def message(self) -> dict[str, Any]:
        """Return the whole message, with the deltas of each call joined."""
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


class CallParser(ABC):
    """A streaming parser for one answer, as a state machine: `_step` is the current state's method.

    A state consumes as much of `_buffer` as it can and returns whether to run `_step` again.

    Args:
        most: maximum number of calls to return; later ones are dropped.
    """

    def __init__(self, most: int):
        self._most = most
        self._step = self._text
        self._buffer = ""
        self.num_calls = 0

    def push(self, text: str, finished: bool = False) -> MessagePiece:
        """Parse more text and return its additions to the message. finished: the answer has ended, so hold nothing back."""
        self._buffer += text
        piece = MessagePiece()
        while self._step(piece, finished):
            pass
        return piece

    @abstractmethod
    def _text(self, piece: MessagePiece, finished: bool) -> bool:
        """The first state."""

    def _take(self, length: int) -> str:
        text = self._buffer[:length]
        self._buffer = self._buffer[length:]
        return text

    def _num_undecided(self, markers: Sequence[str], finished: bool) -> int:
        return 0 if finished else num_undecided(self._buffer, markers)

    def _begin_call(self, piece: MessagePiece, name: str, call_id: str = "") -> None:
        """Emit the head of the next call. call_id: the id that the model wrote; empty: generate one."""
        self.num_calls += 1
        head = {"id": call_id or f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        self._emit(piece, {**head, "function": {"name": name, "arguments": ""}})

    def _emit(self, piece: MessagePiece, delta: dict[str, Any]) -> None:
        index = self.num_calls - 1
        if piece.tool_calls and piece.tool_calls[-1]["index"] == index:
            piece.tool_calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
        elif self.num_calls <= self._most:
            piece.tool_calls.append({"index": index, **delta})


class ToolCallParser(CallParser):
    """Parser for `ToolFormat`. The result does not depend on how the text is split into pieces.

    Models sometimes deviate from their format, so the parser accepts both of DeepSeek's formats, with and without a fence, and any marker
    ends a call. Arguments that are not JSON are passed on unchanged, as OpenAI does. A call that is cut off inside its name is dropped.
    """

    def __init__(self, form: ToolFormat, most: int):
        super().__init__(most)
        self._form = form
        self._ends = (form.call_end, form.calls_end, form.call_begin)
        separator = re.escape(form.separator)
        # Either `function`, the separator and the name, or the name and the separator; then the line that opens a fence.
        # Possessive quantifiers keep an incomplete head from matching as a shorter one.
        kind = rf"(?>(?:\s*+function\s*+{separator}\s*+(?![{{`]))?)"
        self._head = re.compile(rf"{kind}([^\n`{{<]++)(?:{separator})?\s*+(?:`++[^\n{{]*+)?\s*+")
        self._has_arguments = False

    def _text(self, piece: MessagePiece, finished: bool) -> bool:
        first_marker = find_first(self._buffer, self._form.markers)
        if not first_marker:
            piece.content += self._take(len(self._buffer) - self._num_undecided(self._form.markers, finished))
            return False
        index, marker = first_marker
        piece.content += self._take(index)
        if marker in self._form.openings:
            self._step = self._between
        else:  # not part of a call
            self._take(len(marker))
        return True

    def _between(self, piece: MessagePiece, finished: bool) -> bool:
        first_marker = find_first(self._buffer, (self._form.call_begin, self._form.calls_end))
        if not first_marker:
            return False
        index, marker = first_marker
        self._take(index + len(marker))
        self._step = self._name if marker == self._form.call_begin else self._text
        return True

    def _name(self, piece: MessagePiece, finished: bool) -> bool:
        end = find_first(self._buffer, self._ends)
        undecided = self._num_undecided((*self._ends, self._form.separator), finished)
        text = self._buffer[: end.at if end else len(self._buffer) - undecided]
        head = self._head.match(text)
        # Empty arguments, or a name without arguments, are valid only once the call's end has arrived.
        if not head or self._form.separator not in head[0] or not (end or head.end(1) < len(text)):
            if end:
                self._take(end.at)
                self._step = self._between
            return end is not None
        if head.end() == len(text) and not (end or finished):
            return False
        self._take(head.end())
        self._has_arguments = False
        self._step = self._arguments
        self._begin_call(piece, *self._form.identified(head[1].strip()))
        return True

    def _arguments(self, piece: MessagePiece, finished: bool) -> bool:
        end = find_first(self._buffer, self._ends)
        text = self._buffer[: end.at if end else len(self._buffer) - num_undecided(self._buffer, self._ends)]
        arguments = text.rstrip("` \n\r\t")  # the end of a fence, or whitespace before more text
        self._take(len(text) if end else len(arguments))
        if end:
            self._step = self._between
            arguments = arguments or ("" if self._has_arguments else "{}")
        if arguments:
            self._has_arguments = True
            self._emit(piece, {"function": {"arguments": arguments}})
        return end is not None

"""`ToolFormat`: how DeepSeek's models write tool calls, and what a prompt tells them of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.engine.tokenizer import Tokenizer

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
        """The format of this name; `auto`: what the model's template writes, else V3.1's where the model has its tokens."""
        if name == "none" or tokenizer is None:
            return None
        if name != "auto":
            return FORMATS[name]
        source = tokenizer.chat_template.source if tokenizer.chat_template else ""
        if SEPARATOR in source:
            return FORMATS["deepseek_v3" if "```json" in source else "deepseek_v31"]
        return FORMATS["deepseek_v31"] if tokenizer.token_id(SEPARATOR) is not None else None

    def call(self, name: str, arguments: str) -> str:
        """One call as text."""
        return f"{CALL_BEGIN}{self.before_name}{name}{self.after_name}{arguments}{self.after_arguments}{CALL_END}"

    def calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls of (name, arguments) as text."""
        return CALLS_BEGIN + self.between_calls.join(self.call(*call) for call in calls) + CALLS_END

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What the system message says of the functions, for templates that do not say it themselves."""
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
    """Answers of tools as text, for templates that have no place for them."""
    return _OUTPUTS_BEGIN + "".join(f"{_OUTPUT_BEGIN}{each}{_OUTPUT_END}" for each in contents) + _OUTPUTS_END

"""Prompts of DeepSeek-V3.2 and V4, whose checkpoints define the prompt format as code instead of a chat template.

`V32Encoder` and `V4Encoder` have the interface of `ChatTemplate`. The format follows `encoding/encoding_dsv32.py` (DeepSeek-V3.2) and
`encoding/encoding_dsv4.py` (DeepSeek-V4): roles are special tokens, tools are described in the system message, and tool calls are written
in DSML, a markup whose tags begin with the token ``｜DSML｜``.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from dsjax.errors import UserError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, THINK_END = "<think>", "</think>"
DSML = "｜DSML｜"

Message = Mapping[str, Any]

ABSOLUTE_EFFORT = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing \
your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected \
hypothesis to ensure absolutely no assumption is left unchecked.

"""
BEYOND_EFFORT = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most \
fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains \
unchecked and no error remains undiscovered.

"""
EFFORTS = {"high": ABSOLUTE_EFFORT, "max": BEYOND_EFFORT}
"""Prefix of V4 prompts by reasoning effort, for checkpoints from 2026-07-31 on."""
FIRST_EFFORTS = {"max": ABSOLUTE_EFFORT}
"""The same for earlier V4 checkpoints."""
_LEVELS = {"minimal": "low", "medium": "low", "xhigh": "high"}
"""vLLM's mapping of OpenAI efforts that V4 does not have."""
_TASKS = ("action", "query", "authority", "domain", "title", "read_url")


class ChatTemplateError(UserError):
    """A broken template, or a conversation that a template or an encoder rejects."""


class PromptEncoder(ABC):
    """Writes a conversation as the prompt of one model family."""

    block: str
    """Name of the DSML block around a message's tool calls."""
    variables = frozenset({"tools", "tool_calls", "thinking", "enable_thinking"})
    """Variables that `render` reads besides the messages."""
    _tools: str
    """Tool description; `SCHEMAS` is the placeholder for the tools' JSON."""
    source = None

    def reads(self, variable: str) -> bool:
        """Whether the prompt depends on this variable."""
        return variable in self.variables

    def writes(self, text: str) -> bool:
        """Whether prompts can contain this text, e.g. ``</think>``."""
        return text in (THINK, THINK_END, f"<{DSML}{self.block}>")

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        enable_thinking: bool = False,
        reasoning_effort: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt's text with special tokens; encode it with ``add_special_tokens=False``.

        Args:
            messages: roles are system, user, assistant, tool, developer, and for V4 latest_reminder. A system or developer message may
                have its own `tools` and `response_format`.
            tools: in the format of OpenAI's API; described in the first system message.
            thinking, enable_thinking: either makes the model think before it answers.
            reasoning_effort: "none" turns thinking off.

        Raises:
            ChatTemplateError: messages that the format does not support.
        """
        thinks = bool(thinking or enable_thinking) and reasoning_effort != "none"
        try:
            if tools:
                head, rest = _split_system(messages)
                messages = [{**head, "tools": tools}, *rest]
            parts = self._parts(list(messages), thinks, reasoning_effort, variables)
        except (KeyError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"the model's prompt format does not accept these messages: {error}") from error
        text = BOS + "".join(parts)
        opening = ASSISTANT + (THINK if thinks else THINK_END)
        return text.removesuffix("" if add_generation_prompt else opening)

    @abstractmethod
    def _parts(
        self, messages: list[Message], thinks: bool, effort: str | None, variables: Mapping[str, Any]
    ) -> list[str]:
        """Return the text of each message."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return a system message's description of the tools."""
        return self._tools.replace("SCHEMAS", "\n".join(json_text(tool["function"]) for tool in tools))

    def _described(self, message: Message) -> list[str]:
        """Return a system or developer message's descriptions of its tools and response format."""
        parts = []
        if message.get("tools"):
            parts.append(self.describe(message["tools"]))
        if form := message.get("response_format"):
            head = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
            parts.append(head + json_text(form))
        return parts

    def _system(self, message: Message) -> str:
        return "\n\n".join([message.get("content") or "", *self._described(message)])

    def _said(self, message: Message) -> str:
        """Return an assistant message's content and tool calls."""
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(function["name"], function.get("arguments")) for function in functions]
        return (message.get("content") or "") + (self.calls(calls) if calls else "")

    def calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return tool calls as DSML. calls: (name, arguments); arguments are a mapping or its JSON."""
        invokes = [
            f'<{DSML}invoke name="{name}">\n{_parameters(arguments)}\n</{DSML}invoke>\n' for name, arguments in calls
        ]
        return f"\n\n<{DSML}{self.block}>\n{''.join(invokes)}</{DSML}{self.block}>"


class V32Encoder(PromptEncoder):
    """Encoder of DeepSeek-V3.2. Omits reasoning before the last user message; tool results form a separate block."""

    block = "function_calls"
    _tools = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. \
The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

{THINK}...thinking about results{THINK_END}

Here are the functions available in JSONSchema format:
<functions>
SCHEMAS
</functions>
"""

    def _parts(
        self, messages: list[Message], thinks: bool, effort: str | None, variables: Mapping[str, Any]
    ) -> list[str]:
        if thinks:
            last = _last_user(messages)
            messages = [m for index, m in enumerate(messages) if m["role"] != "developer" or index >= last]
        last = _last_user(messages)
        parts = []
        awaited = 0
        results = 0
        for index, message in enumerate(messages):
            opened = THINK if thinks and index >= last else THINK_END
            match message["role"]:
                case "system":
                    parts.append(self._system(message))
                case "user":
                    parts.append(f"{USER}{message.get('content') or ''}{ASSISTANT}{opened}")
                case "developer":
                    question = f"# The user's message is: {message['content']}"
                    described = "".join(f"\n\n{part}" for part in [*self._described(message), question])
                    parts.append(f"{USER}{described}{ASSISTANT}{opened}")
                case "assistant":
                    reasoning = f"{_reasoning(message)}{THINK_END}" if thinks and index > last else ""
                    parts.append(f"{reasoning}{self._said(message)}{EOS}")
                    awaited = len(message.get("tool_calls") or ())
                    results = 0
                case "tool":
                    results += 1
                    if results > awaited:
                        raise ValueError(f"message {index} is a tool's result that no tool call asked for")
                    begin = "\n\n<function_results>" if results == 1 else ""
                    end = f"\n</function_results>\n\n{opened}" if results == awaited else ""
                    parts.append(f"{begin}\n<result>{message.get('content') or ''}</result>{end}")
                case role:
                    raise ValueError(f"message {index} has the role {role!r}")
        return parts


class V4Encoder(PromptEncoder):
    """Encoder of DeepSeek-V4. Puts tool results in user messages; with tools, keeps all reasoning.

    Args:
        efforts: prompt prefix by reasoning effort: `EFFORTS` or `FIRST_EFFORTS`.
    """

    block = "tool_calls"
    variables = PromptEncoder.variables | {"reasoning_effort", "drop_thinking"}
    _tools = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}tool_calls>" block like \
the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the \
value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{THINK_END} BEFORE any tool \
calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

SCHEMAS

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

    def __init__(self, efforts: Mapping[str, str] = EFFORTS):
        self._efforts = efforts

    def _parts(
        self, messages: list[Message], thinks: bool, effort: str | None, variables: Mapping[str, Any]
    ) -> list[str]:
        messages = _with_results_in_user_messages(messages)
        drops = variables.get("drop_thinking", True) and not any(message.get("tools") for message in messages)
        last = _last_user(messages)
        if thinks and drops:
            messages = [m for index, m in enumerate(messages) if m["role"] != "developer" or index >= last]
            last = _last_user(messages)
        parts = []
        for index, message in enumerate(messages):
            role = message["role"]
            match role:
                case "system":
                    part = self._system(message)
                case "user":
                    part = USER + "\n\n".join(message["blocks"])
                case "developer":
                    part = USER + "\n\n".join([message["content"], *self._described(message)])
                case "latest_reminder":
                    part = REMINDER + message["content"]
                case "assistant":
                    answers_task = index > 0 and messages[index - 1].get("task") is not None
                    keeps = thinks and not answers_task and (index > last or not drops)
                    reasoning = f"{_reasoning(message)}{THINK_END}" if keeps else ""
                    part = reasoning + self._said(message) + ("" if message.get("wo_eos") else EOS)
                case _:
                    raise ValueError(f"found the role {role!r}")
            follower = messages[index + 1]["role"] if index + 1 < len(messages) else "assistant"
            if follower in ("assistant", "latest_reminder"):
                part += self._before_answer(message, thinks, thinks and (index >= last or not drops))
            parts.append(part)
        effort = _LEVELS.get(effort, effort)
        return [self._efforts.get(effort, "") if thinks else "", *parts]

    def _before_answer(self, message: Message, thinks: bool, opens: bool) -> str:
        """Return the text between a message and its answer: a task's token, or the start of the answer."""
        task = message.get("task")
        if task is None:
            is_user_turn = message["role"] in ("user", "developer")
            return f"{ASSISTANT}{THINK if opens else THINK_END}" if is_user_turn else ""
        if task not in _TASKS:
            raise ValueError(f"found the task {task!r}, expected one of {', '.join(_TASKS)}")
        return (f"{ASSISTANT}{THINK if thinks else THINK_END}" if task == "action" else "") + f"<｜{task}｜>"


ENCODERS: dict[str, type[PromptEncoder]] = {"deepseek_v32": V32Encoder, "deepseek_v4": V4Encoder}
"""Encoders by tokenizer mode, which equals `model_type` in the models' `config.json`."""
TOKENIZER_MODES = ("auto", "hf", *ENCODERS)


def _with_results_in_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive tool results and user messages into one user message with `blocks`; results follow the order of the calls."""
    merged: list[Message] = []
    order: dict[str, int] = {}
    for message in messages:
        role = message["role"]
        text = message.get("content") or ""
        if role not in ("user", "tool"):
            merged.append(message)
            if calls := message.get("tool_calls"):
                order = {call["id"]: index for index, call in enumerate(calls) if call.get("id")}
            continue
        goes_on = merged and merged[-1]["role"] == "user" and (role == "tool" or merged[-1]["task"] is None)
        if not goes_on:
            merged.append({"role": "user", "task": message.get("task"), "blocks": []})
        call = order.get(message.get("tool_call_id", ""), 0) if role == "tool" else None
        merged[-1]["blocks"].append((call, f"<tool_result>{text}</tool_result>" if role == "tool" else text))
    for message in merged:
        if message["role"] == "user":
            results = iter(sorted((b for b in message["blocks"] if b[0] is not None), key=lambda block: block[0]))
            message["blocks"] = [text if call is None else next(results)[1] for call, text in message["blocks"]]
    return merged


def _split_system(messages: Sequence[Message]) -> tuple[Message, Sequence[Message]]:
    """Return the first message if it is a system message, else an empty system message, and the rest."""
    if messages and messages[0]["role"] == "system":
        return messages[0], messages[1:]
    return {"role": "system", "content": ""}, messages


def _last_user(messages: Sequence[Message]) -> int:
    """Return the index of the last user or developer message; -1 if there is none."""
    return max(
        (index for index, message in enumerate(messages) if message["role"] in ("user", "developer")), default=-1
    )


def _reasoning(message: Message) -> str:
    return message.get("reasoning_content") or message.get("reasoning") or ""


def arguments_object(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments. Return other JSON and invalid JSON as text under `arguments`, like V4's own encoder."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


def _parameters(arguments: Any) -> str:
    """Return a call's arguments, a mapping or its JSON, as DSML parameters."""
    if isinstance(arguments, str):
        arguments = arguments_object(arguments)
    lines = []
    for name, value in (arguments or {}).items():
        is_text = isinstance(value, str)
        text = value if is_text else json_text(value)
        lines.append(
            f'<{DSML}parameter name="{name}" string="{"true" if is_text else "false"}">{text}</{DSML}parameter>'
        )
    return "\n".join(lines)


def json_text(value: Any) -> str:
    """Return JSON in the style of DeepSeek's prompts: with spaces, and without escaping non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False)

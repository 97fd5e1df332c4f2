"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, and their conversion to a chat request."""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dsjax.serve import bounds
from dsjax.serve.chat_fields import ChatRequest, FunctionName, ThinkingSwitch, as_chat, check_part_type, text_or_list
from dsjax.serve.errors import THREAD_UNSUPPORTED, ApiError
from dsjax.serve.sampling_fields import Count, Effort, Name, Stop, StrictModel, safe_header_names

_REQUIRED_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""By type of block."""


class Part(StrictModel):
    """Part of a request. Unknown fields, such as `cache_control`, are ignored: all prompts are cached."""

    model_config = ConfigDict(extra="ignore")


class Block(Part):
    """Content block of a message: text, reasoning, a tool call from an earlier response, or a tool result."""

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: Name = ""
    name: FunctionName = "unnamed"
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: Name = ""
    content: "Content" = ""

    @model_validator(mode="before")
    @classmethod
    def _check_required_fields(cls, block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        check_part_type(kind, _REQUIRED_FIELDS)
        if missing := [name for name in _REQUIRED_FIELDS.get(kind, ()) if name not in block]:
            context = {"kind": kind, "name": missing[0]}
            raise PydanticCustomError("block", "a block of type {kind} needs {name}", context)
        return block


Content = text_or_list(Block, bounds.MAX_PARTS)


class Message(Part):
    """A message, which may contain tool results."""

    role: Literal["user", "assistant", "system"]
    content: Content


class MessagesTool(Part):
    """A tool that the client runs. Server tools are not supported."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(StrictModel):
    """Whether a tool must be called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "MessagesToolChoice":
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("tool_choice", "a choice of type tool needs a name")
        return self


class Thinking(ThinkingSwitch):
    """The `thinking` field. `display: omitted` leaves the reasoning out of the response."""

    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    """JSON schema of the response text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """The `output_config` field: reasoning effort and output format."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class TokenCountRequest(StrictModel):
    """Body of `/v1/messages/count_tokens`. Fields that are not listed have no effect."""

    model_config = ConfigDict(extra="allow")

    model: Name
    messages: list[Message] = Field(min_length=1, max_length=bounds.MAX_MESSAGES)
    system: Content | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=bounds.MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def without_effect(self) -> list[str]:
        """Return the names of given fields that have no effect, except those with a default value and those that change no answer."""
        fields = [name for name, value in self.model_extra.items() if value not in (None, "auto", "standard")]
        return safe_header_names([name for name in fields if name not in ("cache_control", "metadata")])

    def to_chat(self, **more: Any) -> ChatRequest:
        """Return the equivalent chat request. more: further fields of the chat request.

        Raises:
            ApiError: too many messages, or too many tool calls in one message.
        """
        choice, thinking, config = self.tool_choice, self.thinking, self.output_config or OutputConfig()
        if choice is not None and choice.type == "tool":
            more["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice is not None:
            more["tool_choice"] = "required" if choice.type == "any" else choice.type
        if config.format is not None:
            more["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
        if thinking is not None:
            more |= {"thinking": {"type": thinking.type}, "thinking_token_budget": thinking.budget_tokens}
            more["include_reasoning"] = thinking.display != "omitted"
        messages = self._messages()
        last = messages[-1]
        # A last assistant message with text is the beginning of the response.
        continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        chat = {
            "model": self.model,
            "messages": messages,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "reasoning_effort": config.effort,
            "continue_final_message": continues,
            **more,
        }
        return as_chat(chat, "messages")

    def _messages(self) -> list[dict[str, Any]]:
        """Return the chat messages. A message's tool results become messages of the role `tool` before it."""
        messages = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        for message in self.messages:
            blocks = message.content if isinstance(message.content, list) else []
            results = [block for block in blocks if block.type == "tool_result"]
            messages += [
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
                for block in results
            ]
            chat_message: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
            if thought := "\n".join(block.thinking for block in blocks if block.type == "thinking"):
                chat_message["reasoning_content"] = thought
            if calls := [_chat_call(block) for block in blocks if block.type == "tool_use"]:
                chat_message["tool_calls"] = calls
            if chat_message["content"] or not results:
                messages.append(chat_message)
        return messages


class MessagesRequest(TokenCountRequest):
    """Body of `/v1/messages`. Fields that are not listed have no effect."""

    max_tokens: Annotated[int, Field(ge=1, le=bounds.MAX_INTEGER)]
    stream: bool | None = False
    stop_sequences: Annotated[list[Stop], Field(max_length=bounds.MAX_STOPS)] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: Count | None = 0
    thread: Any = None

    def to_chat(self, **more: Any) -> ChatRequest:
        """Return the equivalent chat request. Raises `ApiError` also for a request with a `thread`. more: further fields."""
        if self.thread is not None:
            reason = "thread: this server keeps nothing between requests; send the whole conversation each time"
            raise ApiError(400, reason, param="thread", code=THREAD_UNSUPPORTED)
        sampling = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return super().to_chat(**sampling, stop=self.stop_sequences, **more)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content if block.type == "text")


def _chat_call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}

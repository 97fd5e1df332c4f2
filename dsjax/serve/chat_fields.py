"""The body of `/v1/chat/completions`: messages, tools and other fields, and the checks between them."""

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from dsjax.engine.contract.sampling_params import MAX_LOGPROBS, SamplingError
from dsjax.engine.text.tokenizer import Template
from dsjax.serve import bounds
from dsjax.serve.errors import ApiError, to_api_error
from dsjax.serve.sampling_fields import Count, Effort, Name, SamplingFields, StrictModel, safe_header_names

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(StrictModel):
    """Content part of a message: text, or an assistant's refusal, which is treated as text."""

    type: Literal["text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        if kind == "refusal" and "text" not in part:
            return {"type": kind, "text": part.get("refusal")}
        check_part_type(kind, ("text", "refusal"))
        return part


def check_part_type(kind: Any, kinds: Collection[str]) -> None:
    """Raise a validation error if a part's type is not one of `kinds`."""
    if isinstance(kind, str) and kind not in kinds:
        reason = "found a part of type {kind}, but this model reads text only"
        raise PydanticCustomError("text_only", reason, {"kind": kind})


def text_or_list(part: Any, most: int) -> Any:
    """Return the type for a string or a list of parts. The discriminator makes errors refer to the branch that the client used."""
    return Annotated[
        Annotated[str, Tag("text")] | Annotated[list[part], Field(max_length=most), Tag("parts")],
        Discriminator(lambda content: "parts" if isinstance(content, list) else "text"),
    ]


Content = text_or_list(TextPart, bounds.MAX_PARTS)


class CalledFunction(StrictModel):
    """Function called in an earlier response. `arguments` is JSON text."""

    name: FunctionName
    arguments: str


class ToolCall(StrictModel):
    """Tool call from an earlier response in the conversation."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Count | None = Field(None, description="accepted, because stream chunks contain it")


class ChatMessage(StrictModel):
    """A message. The role `developer` is treated as `system`, as in OpenAI's reasoning models."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = Field(None, description="accepted; DeepSeek's chat templates ignore it")
    reasoning_content: str | None = Field(None, description="reasoning of an assistant message, for the chat template")
    reasoning: str | None = Field(None, description="alias of reasoning_content")
    tool_calls: Annotated[list[ToolCall], Field(max_length=bounds.MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None
    prefix: bool | None = Field(None, description="DeepSeek's extension: continue this message, which must be the last")
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str | None:
        """The content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def check(self, index: int) -> None:
        """Raise `ApiError` if the role does not allow a field of the message, or if the message has no content."""
        where = f"messages[{index}]"
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning", "prefix"):
                if getattr(self, name):
                    raise ApiError(400, f"{where}: {name} is only for the role assistant", param="messages")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ApiError(400, f"{where}: tool_call_id is only for the role tool", param="messages")
        if self.content is None and not self.tool_calls:
            raise ApiError(400, f"{where}: found no content, expected text", param="messages")


class Function(StrictModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = None


class Tool(StrictModel):
    """A tool in OpenAI's format. Only functions are supported."""

    type: Literal["function"]
    function: Function


class ChosenFunction(StrictModel):
    """The function that must be called."""

    name: FunctionName


class ToolChoice(StrictModel):
    """Names a function that must be called, in OpenAI's format."""

    type: Literal["function"]
    function: ChosenFunction


class ThinkingSwitch(StrictModel):
    """DeepSeek's `thinking` field. Anthropic's `adaptive` is treated as `enabled`."""

    type: Literal["enabled", "disabled", "adaptive"]


class AllowedTools(StrictModel):
    """A subset of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=bounds.MAX_TOOLS)]


class AllowedToolChoice(StrictModel):
    """OpenAI's `allowed_tools`: functions that may or must be called. The others are not shown to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


THINKING_SWITCHES = ("thinking", "enable_thinking")
"""Template variables that turn reasoning on or off, in DeepSeek-V3.1 and in other models."""


class PromptFields(StrictModel):
    """Fields that define the prompt, shared with `/tokenize`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=bounds.MAX_MESSAGES)
    tools: Annotated[list[Tool], Field(max_length=bounds.MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = Field(None, description="default: true unless continue_final_message is true")
    continue_final_message: bool | None = Field(False, description="continue the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="additional variables for the chat template")

    def check_prompt_fields(self) -> None:
        """Raise `ApiError` if messages and tools are inconsistent or too large."""
        called: set[str | None] = set()
        for index, message in enumerate(self.messages):
            message.check(index)
            called.update(call.id for call in message.tool_calls or ())
            # Tool calls and tool messages may lack an id.
            call_ids = called if None in {message.tool_call_id, *called} else called & {message.tool_call_id}
            if message.role == "tool" and not call_ids:
                reason = f"messages[{index}]: found a tool's answer to {message.tool_call_id!r}, which no message before it calls"
                raise ApiError(400, reason, param="messages")
        if any(message.prefix for message in self.messages[:-1]):
            raise ApiError(400, "prefix is only for the last message", param="messages")
        if self.goes_on and self.add_generation_prompt:
            reason = "continue_final_message and add_generation_prompt exclude each other; give one"
            raise ApiError(400, reason, param="continue_final_message")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ApiError(400, "two tools have the same name", param="tools")
        if self.tools and len(json.dumps(self.tool_dicts())) > bounds.MAX_GRAMMAR_BYTES:
            raise ApiError(400, f"the tools take more than {bounds.MAX_GRAMMAR_BYTES:,} bytes", param="tools")

    @property
    def goes_on(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.continue_final_message or self.messages[-1].prefix)

    def template_variables(self, template: Template) -> dict[str, Any]:
        """Return variables for a template."""
        return dict(self.chat_template_kwargs or {})

    def tool_dicts(self, named: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Return the tools as dicts for templates and grammars. named: names of the tools to include; None: all."""
        tools = (tool for tool in self.tools or () if named is None or tool.function.name in named)
        return [tool.model_dump(exclude_none=True) for tool in tools]


class ChatRequest(SamplingFields, PromptFields):
    """Body of `/v1/chat/completions`."""

    max_tokens: Count | None = Field(None, description="default: the rest of the context length")
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Count | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = Field(True, description="false omits the reasoning from the response")
    separate_reasoning: bool | None = Field(True, description="SGLang: false keeps the reasoning in the content")
    reasoning_effort: Effort | None = Field(
        None,
        description="none disables thinking if the chat template supports it; other values are passed to the template",
    )
    thinking: ThinkingSwitch | None = Field(
        None, description="DeepSeek's extension: enables or disables reasoning; overrides the effort"
    )
    functions: list[Any] | None = Field(None, description="deprecated by OpenAI and rejected; use tools")
    function_call: Any = Field(None, description="deprecated by OpenAI and rejected; use tool_choice")

    def check(self) -> None:
        """Raise `ApiError` for fields that contradict each other."""
        self.check_stream_fields()
        self.check_prompt_fields()
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, old) is not None:
                raise ApiError(400, f"{old} is the older name of {new}; send {new}", param=old)
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not self.tools:
            raise ApiError(400, "tool_choice wants tools, and there are none", param="tool_choice")
        _, allowed = self._choice
        if unknown := sorted((allowed or set()) - {tool.function.name for tool in self.tools or ()}):
            raise ApiError(400, f"tool_choice names {unknown[0]!r}, which is none of the tools", param="tool_choice")

    def template_variables(self, template: Template) -> dict[str, Any]:
        """Return the template's variables, derived from `thinking` and `reasoning_effort`; `chat_template_kwargs` overrides them."""
        variables = dict(self.chat_template_kwargs or {})
        switch = self.thinking and self.thinking.type
        effort = self.reasoning_effort
        if switch is not None or effort is not None:
            thinks = effort != "none" if switch is None else switch != "disabled"
            variables = {name: thinks for name in THINKING_SWITCHES if template.reads(name)} | variables
        if effort is not None and template.reads("reasoning_effort"):
            variables.setdefault("reasoning_effort", effort)
        return variables

    def fields_without_effect(self, template: Template | None) -> list[str]:
        """Return the names of the fields that have no effect with this chat template."""
        unused_fields = self.without_effect()
        switches = template is not None and any(map(template.reads, THINKING_SWITCHES))
        if self.reasoning_effort is not None and not (switches or (template and template.reads("reasoning_effort"))):
            unused_fields.append("reasoning_effort")
        if self.thinking is not None and not switches:
            unused_fields.append("thinking")
        variables = self.chat_template_kwargs or ()
        if unread := [name for name in variables if template is None or not template.reads(name)]:
            named = [f"chat_template_kwargs.{name}" for name in safe_header_names(unread)]
            unused_fields += named or ["chat_template_kwargs"]
        return unused_fields

    @property
    def _choice(self) -> tuple[bool, set[str] | None]:
        """Whether a tool must be called, and the names of the allowed ones; None: all."""
        match self.tool_choice:
            case ToolChoice(function=function):
                return True, {function.name}
            case AllowedToolChoice(allowed_tools=allowed):
                return allowed.mode == "required", {tool.function.name for tool in allowed.tools}
        return self.tool_choice == "required", None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that are shown to the model and may be called."""
        _, allowed = self._choice
        allowed_tools = allowed if isinstance(self.tool_choice, AllowedToolChoice) else None
        return [] if self.tool_choice == "none" else self.tool_dicts(allowed_tools)

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools among which the model must call one; empty if the answer may be text."""
        is_forced, allowed = self._choice
        return self.tool_dicts(allowed) if is_forced else []

    def token_limit(self) -> int | None:
        """Return the maximum number of output tokens: `max_completion_tokens`, or `max_tokens`, its older name.

        Raises:
            ApiError: both are given and differ.
            SamplingError: the limit is below 1.
        """
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens")
        name = "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"
        limit = getattr(self, name)
        if limit is not None and limit < 1:
            raise SamplingError(name, f"found {limit}, expected at least 1")
        return limit

    def num_logprobs(self) -> int | None:
        """Return the number of most probable tokens to list for each token; None without log-probabilities.

        Raises:
            ApiError: `top_logprobs` without `logprobs`.
            SamplingError: `top_logprobs` is out of range.
        """
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise SamplingError("top_logprobs", f"found {self.top_logprobs}, expected 0 to {MAX_LOGPROBS}")
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs is only for logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


def as_chat(fields: Mapping[str, Any], param: str) -> ChatRequest:
    """Convert another API's request to a chat request.

    Raises:
        ApiError: there are too many messages, or too many tool calls in one turn. The error names the field `param`.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        reason = to_api_error(RequestValidationError(error.errors(), body=fields)).message
        raise ApiError(400, reason, param=param) from error

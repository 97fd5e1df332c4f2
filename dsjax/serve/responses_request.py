"""The body of `/v1/responses` and its conversion to a chat request. Nothing is stored between requests."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dsjax.engine.contract.sampling_params import SamplingError
from dsjax.serve import bounds
from dsjax.serve.chat_fields import ChatRequest, Function, FunctionName, as_chat, check_part_type, text_or_list
from dsjax.serve.errors import ApiError
from dsjax.serve.sampling_fields import Count, DrawFields, Effort, Name, OpenAIFields, RequestId, StrictModel

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text"}


class Item(StrictModel):
    """An input item. Null fields are treated as absent, because clients send earlier responses back with nulls."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, item: Any) -> Any:
        return {name: value for name, value in item.items() if value is not None} if isinstance(item, dict) else item


class Part(Item):
    """Content part. Annotations and log-probabilities from earlier responses are ignored."""

    type: str
    text: str = ""
    refusal: str = ""
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        check_part_type(kind, (*_TEXTS, "refusal"))
        return part


Content = text_or_list(Part, bounds.MAX_PARTS)


def text_of(content: Any) -> str:
    """Return content as one string."""
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal for part in content)


class AnswerItem(Item):
    """An item that may come from an earlier response."""

    id: Name = ""
    status: Name = ""


class MessageItem(AnswerItem):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Name = ""


class CallItem(AnswerItem):
    """A function call from an earlier response."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: str


class CallOutputItem(AnswerItem):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content


class ReasoningItem(AnswerItem):
    """Reasoning from an earlier response. It belongs to the message that follows."""

    type: Literal["reasoning"]
    summary: list[Part] = Field(default_factory=list)
    content: list[Part] = Field(default_factory=list)


def _kind(item: Any) -> str | None:
    return (item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="expected a message, function_call, function_call_output or reasoning; this server keeps "
        "no items to refer to and reads text only",
    ),
]


Input = text_or_list(InputItem, bounds.MAX_MESSAGES)


class FunctionTool(Function):
    """A function that the model may call. Unlike in the chat API, its fields are not nested in `function`."""

    type: Literal["function"]


class NamedFunction(StrictModel):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(StrictModel):
    """A subset of the tools, of which the model may or must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=bounds.MAX_TOOLS)]


class TextFormat(StrictModel):
    """Format of the text: free text, JSON or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """The `text` field."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(StrictModel):
    """The `reasoning` field. The response contains the reasoning itself, not a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(StrictModel):
    """The `stream_options` field."""

    include_obfuscation: bool | None = None


class ResponsesRequest(DrawFields, OpenAIFields):
    """Body of `/v1/responses`. Nothing is stored, so clients send the whole conversation."""

    model: Name = Field(description="a model name from /v1/models")
    input: Input
    instructions: str | None = Field(None, description="system message inserted before the input")
    max_output_tokens: Count | None = Field(None, description="default: the rest of the context length")
    top_logprobs: Count | None = Field(None, description="number of most probable tokens to return per token")
    stream: bool | None = False
    stream_options: ResponsesStreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=bounds.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: Count | None = Field(None, description="no effect: it limits built-in tools, and there are none")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Name], Field(max_length=bounds.MAX_NAME_CHARACTERS)] | None = Field(
        None, description="message.output_text.logprobs; other values have no effect"
    )
    truncation: Literal["disabled", "auto"] | None = Field(None, description="must be disabled")
    background: bool | None = Field(False, description="must be false")
    previous_response_id: Any = Field(None, description="rejected: responses are not stored")
    conversation: Any = Field(None, description="rejected: responses are not stored")
    prompt: Any = Field(None, description="rejected: prompts are not stored")
    request_id: RequestId | None = Field(
        None, description="becomes part of the response id; the header X-Request-ID overrides it"
    )

    def check(self) -> None:
        """Raise `ApiError` for fields that need stored responses, and for a limit below 1."""
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                reason = f"{name}: this server keeps nothing between requests; send the whole conversation as input"
                raise ApiError(400, reason, param=name)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise SamplingError("max_output_tokens", f"found {self.max_output_tokens}, expected at least 1")
        if self.background:
            reason = "background: this server answers in the foreground only; leave it out"
            raise ApiError(400, reason, param="background")
        if self.truncation == "auto":
            reason = "truncation: this server shortens no conversation by itself; send one that fits, or leave it out"
            raise ApiError(400, reason, param="truncation")

    def without_effect(self) -> list[str]:
        """Return the fields without effect, except `store` and `metadata`: the answer's own `store` field covers them."""
        unused_fields = [name for name in super().without_effect() if name not in ("store", "metadata")]
        if self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary):
            unused_fields.append("reasoning.summary")
        if set(self.include or ()) - {_LOGPROBS}:
            unused_fields.append("include")
        return unused_fields

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return _LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def to_chat(self) -> ChatRequest:
        """Return the equivalent chat request.

        Raises:
            ApiError: a field needs stored responses, or a format has no schema.
        """
        self.check()
        chat: dict[str, Any] = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self._format(),
            "tools": list(map(_in_chat, self.tools)) if self.tools else None,
            "tool_choice": self.tool_choice,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            # Log-probabilities need a stream: its chunks show the item that each of them belongs to.
            "stream": self.stream or self.wants_logprobs,
            **{name: getattr(self, name) for name in ("model", "parallel_tool_calls")},
            **{name: getattr(self, name) for name in (*DrawFields.model_fields, *OpenAIFields.model_fields)},
        }
        if isinstance(self.tool_choice, NamedFunction):
            chat["tool_choice"] = _in_chat(self.tool_choice)
        elif isinstance(self.tool_choice, AllowedFunctions):
            allowed = {"mode": self.tool_choice.mode, "tools": list(map(_in_chat, self.tool_choice.tools))}
            chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        if self.tool_choice is not None and not self.tools:
            chat["tool_choice"] = None if self.tool_choice in ("auto", "none") else chat["tool_choice"]
        return as_chat(chat, "input")

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "json_object"}
        if form.schema_ is None:
            raise ApiError(400, "text.format of type json_schema wants a schema", param="text")
        return {"type": "json_schema", "json_schema": {"name": form.name or "", "schema": form.schema_}}

    def _messages(self) -> list[dict[str, Any]]:
        """Return the items as messages. Reasoning, text and calls of one assistant turn become one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        called = set()
        for item in items:
            match item:
                case CallOutputItem() if item.call_id not in called:
                    reason = (
                        f"input: found the output of the call {item.call_id!r}, which no function_call before it makes"
                    )
                    raise ApiError(400, reason, param="input")
                case CallOutputItem():
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
                case MessageItem(role="assistant"):
                    turn = _turn(messages, has="content")
                    turn["content"] = text_of(item.content)
                case MessageItem():
                    messages.append({"role": item.role, "content": text_of(item.content)})
                case ReasoningItem():
                    turn = _turn(messages, has="reasoning_content")
                    turn["reasoning_content"] = text_of(item.content or item.summary)
                case CallItem():
                    called.add(item.call_id)
                    function = {"name": item.name, "arguments": item.arguments}
                    calls = _turn(messages).setdefault("tool_calls", [])
                    calls.append({"id": item.call_id, "type": "function", "function": function})
        for message in messages:
            if message["role"] == "assistant" and "tool_calls" not in message:
                message.setdefault("content", "")
        if not messages:
            raise ApiError(400, "input is an empty list, expected at least one item", param="input")
        return messages


def _turn(messages: list[dict[str, Any]], has: str = "") -> dict[str, Any]:
    """Return the assistant message to extend: the last message, or a new one if the last already has calls or the field `has`."""
    last = messages[-1] if messages else {"role": None}
    if last["role"] != "assistant" or (has and (has in last or "tool_calls" in last)):
        messages.append({"role": "assistant"})
    return messages[-1]


def _in_chat(function: FunctionTool | NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": function.model_dump(exclude={"type"}, exclude_none=True)}

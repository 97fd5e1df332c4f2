"""`ChatPrompt`: the prompt of messages and tools, rendered by the model's template or encoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from dsjax.engine.text.input_processor import EncodedPrompt
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.errors import UserError
from dsjax.serve.chat_fields import ChatMessage, PromptFields
from dsjax.serve.errors import ApiError, to_api_error
from dsjax.serve.tool_calls import tool_outputs
from dsjax.serve.tool_formats import CallFormat, choose_tool_format

_RESERVED_VARIABLES = {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"}


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered prompt."""

    text: str
    token_ids: list[int]
    # text of the last assistant message, which the answer continues; None: the answer is a new message
    unfinished: str | None


def render_prompt(
    tokenizer: Tokenizer | None, fields: PromptFields, tools: Sequence[Mapping[str, Any]], form: CallFormat | None
) -> ChatPrompt:
    """Render messages and tools into a prompt and tokenise it. Call it in a thread if the conversation is long.

    Args:
        tools: the tools to offer to the model.
        form: the model's tool-call format; None if the server has none.

    Raises:
        ApiError, ChatTemplateError: the model has no chat template, or the template refuses the messages.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    template = tokenizer.chat_template
    variables = fields.template_variables(template)
    reserved = sorted(_RESERVED_VARIABLES & variables.keys())
    if reserved:
        raise ApiError(400, f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs")
    messages = _messages(fields.messages, template.reads("tool_calls"), form)
    if tools and not template.reads("tools"):
        messages = _with_description(messages, tools, form)
    text = template.render(
        messages,
        add_generation_prompt=not fields.goes_on and fields.add_generation_prompt is not False,
        **({"tools": list(tools)} if tools else {}),
        **variables,
    )
    unfinished = None
    if fields.goes_on:
        unfinished = messages[-1]["content"] or ""
        text = _cut_after(text, unfinished)
    return ChatPrompt(text, tokenizer.encode(text, add_special_tokens=False), unfinished)


def conversation_prompt(tokenizer: Tokenizer, **fields: Any) -> EncodedPrompt:
    """Return the prompt that `/v1/chat/completions` renders for a conversation. fields: the fields of `PromptFields`.

    Raises:
        UserError: the messages or tools are not valid.
    """
    try:
        body = PromptFields.model_validate(fields)
        body.check_prompt_fields()
        prompt = render_prompt(tokenizer, body, body.tool_dicts(), choose_tool_format("auto", tokenizer))
        return EncodedPrompt(prompt.token_ids)
    except ValidationError as error:
        raise UserError(to_api_error(RequestValidationError(error.errors(), body=fields)).message) from error
    except ApiError as error:
        raise UserError(error.message) from error


def _messages(messages: Sequence[ChatMessage], has_tool_calls: bool, form: CallFormat | None) -> list[dict[str, Any]]:
    """Return the messages as dicts for a template. Tool calls and results become text if the template does not support them."""
    rendered: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": message.text}
        if reasoning := message.reasoning_content or message.reasoning:
            entry |= {"reasoning_content": reasoning}
        if message.tool_calls and has_tool_calls:
            entry["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        elif message.tool_calls:
            calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
            entry["content"] = (message.text or "") + _needed(form).calls(calls)
        if role == "tool" and has_tool_calls and message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        elif role == "tool" and not has_tool_calls:
            entry = {"role": "user", "content": tool_outputs([message.text or ""])}
        rendered.append(entry)
    return rendered


def _with_description(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallFormat | None
) -> list[dict[str, Any]]:
    description = _needed(form).describe(tools)
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def _needed(form: CallFormat | None) -> CallFormat:
    if form is None:
        reason = "this model has no format for tool calls; start the server with --tool-call-parser to give it one"
        raise ApiError(400, reason, param="tools")
    return form


def _cut_after(text: str, final: str) -> str:
    """Return the prompt up to the end of the last message's text."""
    start = text.rfind(final.strip())
    if start < 0 or not final.strip():
        reason = "the model's template does not keep the last message's text as it is, so it cannot be continued"
        raise ApiError(400, reason, param="continue_final_message")
    return text[: start + len(final.strip())]

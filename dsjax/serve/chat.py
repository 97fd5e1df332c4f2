"""`/v1/chat/completions`: the request's fields, and outputs as its answer or its chunks."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field

from dsjax.engine.async_engine import OutputStream
from dsjax.engine.outputs import CompletionOutput, Logprob, TokenLogprobs
from dsjax.serve.errors import ApiError
from dsjax.serve.responses import ChatChoice, ChatLogprobs, ChatResponse
from dsjax.serve.sampling_fields import SamplingFields, StrictModel
from dsjax.serve.serving import Serving, UsageCounter, finite, gather, new_id, refuse_failed, usage_of

_RESERVED_TEMPLATE_VARIABLES = {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"}


class TextPart(StrictModel):
    """A piece of a message's content; only text has a meaning for this model."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message. A developer's is taken as the system's, as OpenAI's reasoning models do."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(None, description="accepted; DeepSeek's templates have no place for it")

    def for_template(self) -> dict[str, str]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ResponseFormat(StrictModel):
    """Only plain text is supported."""

    type: str


class ChatRequest(SamplingFields):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, description="default: what the context leaves")
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's own template")
    response_format: ResponseFormat | None = Field(None, description="not supported; only text")
    tools: list[dict[str, Any]] | None = Field(None, description="not supported; only empty")
    tool_choice: str | dict[str, Any] | None = Field(None, description="not supported; only none or auto")

    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or its older name.

        Raises:
            ApiError: both are given and differ.
        """
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens")
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many log-probabilities beside each token's own; None for none at all.

        Raises:
            ApiError: `top_logprobs` without `logprobs`.
        """
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs is only for logprobs=true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


class ChatAnswer:
    """One request on its way: `start` checks and queues it, then either `whole` or `chunks`."""

    def __init__(self, serving: Serving, body: ChatRequest):
        self._serving = serving
        self._body = body
        self._model = serving.check_model(body.model)
        self._id = new_id("chatcmpl")
        self._created = int(time.time())

    async def start(self) -> OutputStream:
        """Check everything, render the template and queue the prompt.

        Raises:
            ApiError, UserError: nothing was queued.
        """
        body = self._body
        body.refuse_unsupported(
            {"response_format": (ResponseFormat(type="text"),), "tools": ([],), "tool_choice": ("none", "auto")}
        )
        params = body.sampling_params(max_tokens=body.token_limit(), logprobs=body.num_logprobs())
        token_ids = await asyncio.to_thread(self._prompt)  # a long conversation takes long to tokenise
        return await self._serving.engine.submit(self._id, [token_ids], params)

    async def whole(self, stream: OutputStream) -> ChatResponse:
        """The answer when all is done."""
        (output,) = outputs = await gather(stream)
        choices: list[ChatChoice] = [
            {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text},
                "logprobs": self._logprobs(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage_of(outputs)}

    async def chunks(self, stream: OutputStream) -> AsyncIterator[ChatResponse]:
        """The answer's pieces as they come; the first of each choice has the role."""
        head = self._head("chat.completion.chunk")
        extra = {"usage": None} if self._body.include_usage else {}
        counter = UsageCounter()
        for index in range(self._body.n):
            yield {**head, "choices": [_delta(index, {"role": "assistant", "content": ""})], **extra}
        async for index, output in stream:
            counter.count(index, output)
            for completion in output.outputs:
                refuse_failed(completion)
                if not (completion.text or completion.finished or completion.logprobs):
                    continue
                choice = _delta(completion.index, {"content": completion.text} if completion.text else {})
                choice["logprobs"] = self._logprobs(completion)
                if completion.finished:
                    choice |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
                yield {**head, "choices": [choice], **extra}
        if self._body.include_usage:
            yield {**head, "choices": [], "usage": counter.usage()}

    def _prompt(self) -> list[int]:
        tokenizer = self._serving.engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        variables = self._body.chat_template_kwargs or {}
        reserved = sorted(_RESERVED_TEMPLATE_VARIABLES & variables.keys())
        if reserved:
            raise ApiError(400, f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs")
        messages = [message.for_template() for message in self._body.messages]
        return tokenizer.encode(tokenizer.chat_template.render(messages, **variables), add_special_tokens=False)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        return {"content": [self._token(entry) for entry in completion.logprobs]}

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The token taken, and the most probable ones: as many as asked for, the token taken only where it is one."""
        count = self._body.top_logprobs or 0
        ranked = [(token, one) for token, one in entry.items() if one.rank is not None and one.rank <= count]
        ranked.sort(key=lambda pair: pair[1].rank)
        taken = next(iter(entry.items()))
        return {**self._one(*taken), "top_logprobs": [self._one(*pair) for pair in ranked]}

    def _one(self, token_id: int, one: Logprob) -> dict[str, Any]:
        text = list(self._serving.engine.tokenizer.token_bytes(token_id))
        return {"token": one.decoded_token, "logprob": finite(one.logprob), "bytes": text}


def _delta(index: int, delta: dict[str, str]) -> ChatChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

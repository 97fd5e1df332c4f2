"""`/v1/completions`: the request's fields, and outputs as its answer or its chunks."""

import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from dsjax.engine.async_engine import OutputStream
from dsjax.engine.outputs import CompletionOutput, TokenLogprobs
from dsjax.serve.errors import ApiError
from dsjax.serve.responses import CompletionChoice, CompletionLogprobs, CompletionResponse
from dsjax.serve.sampling_fields import SamplingFields
from dsjax.serve.serving import Serving, UsageCounter, finite, gather, new_id, refuse_failed, usage_of


class CompletionRequest(SamplingFields):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="text or token ids, one or several")
    max_tokens: int | None = 16
    logprobs: int | None = Field(None, description="0 to 20 most probable tokens beside each token")
    echo: bool | None = Field(None, description="not supported; only false")
    suffix: str | None = Field(None, description="not supported; only empty")
    best_of: int | None = Field(None, description="not supported; only n")

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, whichever way they were given.

        Raises:
            ApiError: there is none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt is an empty list, expected at least one prompt", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class CompletionAnswer:
    """One request on its way: `start` checks and queues it, then either `whole` or `chunks`."""

    def __init__(self, serving: Serving, body: CompletionRequest):
        self._serving = serving
        self._body = body
        self._model = serving.check_model(body.model)
        self._id = new_id("cmpl")
        self._created = int(time.time())

    async def start(self) -> OutputStream:
        """Check everything and queue the prompts.

        Raises:
            ApiError, UserError: nothing was queued.
        """
        self._body.refuse_unsupported({"echo": (False,), "suffix": ("",), "best_of": (self._body.n,)})
        params = self._body.sampling_params(max_tokens=self._body.max_tokens, logprobs=self._body.logprobs)
        return await self._serving.engine.submit(self._id, self._body.prompts(), params)

    async def whole(self, stream: OutputStream) -> CompletionResponse:
        """The answer when all is done."""
        outputs = await gather(stream)
        choices = [
            self._choice(index, completion, _Offset()) for index, o in enumerate(outputs) for completion in o.outputs
        ]
        return {**self._head(), "choices": choices, "usage": usage_of(outputs)}

    async def chunks(self, stream: OutputStream) -> AsyncIterator[CompletionResponse]:
        """The answer's pieces as they come."""
        offsets: dict[int, _Offset] = {}
        counter = UsageCounter()
        extra = {"usage": None} if self._body.include_usage else {}
        async for prompt_index, output in stream:
            counter.count(prompt_index, output)
            for completion in output.outputs:
                refuse_failed(completion)
                if not (completion.text or completion.finished or completion.logprobs):
                    continue
                index = prompt_index * self._body.n + completion.index
                choice = self._choice(prompt_index, completion, offsets.setdefault(index, _Offset()))
                yield {**self._head(), "choices": [choice], **extra}
        if self._body.include_usage:
            yield {**self._head(), "choices": [], "usage": counter.usage()}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def _choice(self, prompt_index: int, completion: CompletionOutput, offset: "_Offset") -> CompletionChoice:
        return {
            "index": prompt_index * self._body.n + completion.index,
            "text": completion.text,
            "logprobs": None if completion.logprobs is None else _logprobs(completion.logprobs, offset),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }


class _Offset:
    """Where in a completion's text the next token begins."""

    def __init__(self):
        self.characters = 0


def _logprobs(entries: list[TokenLogprobs], offset: _Offset) -> CompletionLogprobs:
    body: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        taken = next(iter(entry.values()))
        body["text_offset"].append(offset.characters)
        body["token_logprobs"].append(finite(taken.logprob))
        body["tokens"].append(taken.decoded_token)
        body["top_logprobs"].append({each.decoded_token: finite(each.logprob) for each in reversed(entry.values())})
        offset.characters += len(taken.decoded_token)
    return body

"""`/v1/completions`: the request's fields, and its outputs made into an answer or the chunks of a stream."""

import dataclasses
import time
from typing import Annotated, Any

from pydantic import Field

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.request_streams import OutputStream
from dsjax.engine.schedule.request import FinishReason, RequestOptions
from dsjax.engine.text.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from dsjax.serve import bounds
from dsjax.serve.answers import (
    CompletionLogprobLists,
    TextChunk,
    UsageCounter,
    gather,
    prompt_logprobs_body,
    refuse_failed,
    usage_of,
)
from dsjax.serve.errors import ApiError
from dsjax.serve.sampling_fields import Count, SamplingFields
from dsjax.serve.schemas import CompletionChoice, CompletionLogprobs, CompletionResponse
from dsjax.serve.serving import Serving


class CompletionRequest(SamplingFields):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=bounds.MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Field(max_length=bounds.MAX_PROMPTS)]
    ) = Field(description="text or token ids, one or several")
    max_tokens: Count | None = Field(16, description="0 with echo: only the prompt, with its log-probabilities")
    logprobs: Count | None = Field(None, description="0 to 20 most probable tokens beside each token")
    echo: bool | None = Field(False, description="begin with the prompt; its tokens have log-probabilities too")
    suffix: str | None = Field(None, description="not supported; only empty")
    best_of: Count | None = Field(None, description="not supported; only n")

    def check(self) -> None:
        """Raise for fields that exclude each other, and for those that this server does not support."""
        self.check_stream_fields()
        if self.suffix:
            reason = "suffix is not supported: chat models are not trained to fill in; leave it out"
            raise ApiError(400, reason, param="suffix")
        if self.best_of not in (None, self.n):
            reason = "best_of is not supported: it computes completions to throw them away; use n and choose yourself"
            raise ApiError(400, reason, param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, which only echo=true gives a meaning", param="max_tokens")
        if len(self.prompts()) * max(self.n, 1) > bounds.MAX_SEQUENCES:
            raise ApiError(400, f"prompts times n is more than {bounds.MAX_SEQUENCES}", param="n")

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

    def params(self, form: dict[str, Any] | None) -> SamplingParams:
        """The engine's parameters. A prompt that is only scored still makes one token, which nobody sees.

        form: of the text, as a keyword argument of `StructuredOutputs`.

        Raises:
            SamplingError: a value out of range.
        """
        scored = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scored = max(self.logprobs, scored or 0)
        return self.sampling_params(
            max_tokens=1 if self.max_tokens == 0 else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=scored,
            form=form,
        )


class CompletionAnswer:
    """One request, from its body to its answer.

    `start` checks and queues it. Then `whole` gives the answer, or `first_chunks`, `chunks_of` and `last_chunks` a stream's.
    """

    def __init__(self, serving: Serving, body: CompletionRequest, request_id: str):
        self.id = f"cmpl-{request_id}"
        self._serving = serving
        self._body = body
        model = serving.check_model(body.model)
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._counter = UsageCounter()
        self._begun: set[int] = set()  # choices of which a chunk has told
        self._lists: dict[int, CompletionLogprobLists] = {}
        self._only_text_changes = body.logprobs is None and not (body.return_token_ids or body.continuous_usage)
        self._text_chunks: dict[int, TextChunk] = {}  # by choice
        self._scores: dict[
            int, list[TokenLogprobs | None]
        ] = {}  # by prompt: a stream tells them once, for all its choices

    @property
    def session(self) -> str | None:
        """Requests of one session go to one DP rank, where the header does not name one."""
        return self._body.prompt_cache_key

    def without_effect(self) -> list[str]:
        """Fields of the request that change nothing here."""
        return self._body.without_effect()

    async def start(self, place: RequestOptions) -> OutputStream:
        """Check everything and queue the prompts.

        Raises:
            ApiError, UserError: nothing was queued.
        """
        body = self._body
        body.check()
        params, prompts = body.params(self._serving.with_whitespace(body.form_of_text())), body.prompts()
        with self._serving.admitted(body, prompts) as submit:
            return await submit(self.id, prompts, params, place)

    async def whole(self, stream: OutputStream) -> CompletionResponse:
        """Wait for all completions, and give the whole answer."""
        outputs = [self._scored_only(output) for output in await gather(stream)]
        choices = [
            self._choice(index, output, completion, first=True)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": usage_of(outputs)}

    def first_chunks(self) -> list[CompletionResponse]:
        """No chunk: nothing is sent before the first token."""
        return []

    def chunks_of(self, prompt_index: int, whole_output: RequestOutput) -> list[CompletionResponse | bytes]:
        """The chunks of one output, some as JSON already: one for each completion that has something new.

        Raises:
            ApiError: a completion failed.
        """
        output = self._scored_only(whole_output)
        self._counter.count(prompt_index, output)
        chunks = []
        for completion in output.outputs:
            refuse_failed(completion)
            index = prompt_index * self._body.n + completion.index
            first = index not in self._begun
            if self._only_text_changes and not first and completion.text and completion.finish_reason is None:
                if index not in self._text_chunks:
                    empty = dataclasses.replace(completion, text="")
                    chunk = self._chunk(prompt_index, output, empty, first=False)
                    self._text_chunks[index] = TextChunk(chunk, b'"text":""')
                chunks.append(self._text_chunks[index].with_text(completion.text))
            elif self._is_told(completion) or (first and self._body.echo):
                self._begun.add(index)
                chunks.append(self._chunk(prompt_index, output, completion, first=first))
        return chunks

    def last_chunks(self) -> list[CompletionResponse]:
        """A chunk with the usage, where the request asks for it."""
        return [{**self._head, "choices": [], "usage": self._counter.usage()}] if self._body.include_usage else []

    def _chunk(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> CompletionResponse:
        choice = self._choice(prompt_index, output, completion, first=first)
        return {**self._head, "choices": [choice], **self._running_usage()}

    def _is_told(self, completion: CompletionOutput) -> bool:
        ids = self._body.return_token_ids and completion.token_ids
        return bool(completion.text or completion.finished or completion.logprobs or ids)

    def _running_usage(self) -> dict[str, Any]:
        if self._body.continuous_usage:
            return {"usage": self._counter.usage()}
        return {"usage": None} if self._body.include_usage else {}

    def _scored_only(self, output: RequestOutput) -> RequestOutput:
        """Without the one token that was made although none was asked for."""
        if self._body.max_tokens != 0:
            return output
        emptied = [
            each
            if each.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            else dataclasses.replace(
                each,
                text="",
                token_ids=[],
                logprobs=None if each.logprobs is None else [],
                finish_reason=FinishReason.LENGTH if each.finished else None,
                stop_reason=None,
            )
            for each in output.outputs
        ]
        return dataclasses.replace(output, outputs=emptied)

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> CompletionChoice:
        """One choice, or what a chunk adds to it; the first piece has what belongs to the prompt."""
        body = self._body
        index = prompt_index * body.n + completion.index
        if output.prompt_logprobs is not None:
            self._scores[prompt_index] = output.prompt_logprobs
        scores = self._scores.get(prompt_index) if first else None
        echoed = self._prompt_text(output) if body.echo and first else ""
        choice: CompletionChoice = {
            "index": index,
            "text": echoed + completion.text,
            "logprobs": self._logprobs(index, output.prompt_token_ids, scores, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.prompt_logprobs is not None and scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(scores)
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        skip = self._body.skip_special_tokens is not False
        return self._serving.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)

    def _logprobs(
        self,
        index: int,
        prompt_token_ids: list[int],
        scores: list[TokenLogprobs | None] | None,
        completion: CompletionOutput,
    ) -> CompletionLogprobs | None:
        """Those of the completion's tokens, behind the prompt's where they are to be echoed."""
        if completion.logprobs is None:
            return None
        token_ids, entries = completion.token_ids, completion.logprobs
        if self._body.echo and scores is not None:
            token_ids, entries = prompt_token_ids + token_ids, scores + entries
        if index not in self._lists:
            skip = self._body.skip_special_tokens is not False
            self._lists[index] = CompletionLogprobLists(self._serving.engine.tokenizer, skip)
        return self._lists[index].of(token_ids, entries)

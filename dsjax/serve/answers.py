"""Answers of `/v1/completions`, complete or streamed in chunks; `chat.py` has those of chat.

Both share the code here for failed completions, usage, and log-probabilities in OpenAI's and vLLM's shapes.
"""

import codecs
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.contract.sampling_params import SamplingError
from dsjax.engine.request_streams import OutputStream
from dsjax.engine.schedule.request import FinishReason, RequestOptions
from dsjax.engine.text.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.connections import encode_event, to_json
from dsjax.serve.errors import ApiError
from dsjax.serve.guards import new_id
from dsjax.serve.sampling_fields import CompletionRequest, SamplingFields
from dsjax.serve.schemas import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from dsjax.serve.serving import Serving

# JSON has no -inf. OpenAI and vLLM send this number instead.
_LEAST_LOGPROB = -9999.0


async def gather(stream: OutputStream) -> list[RequestOutput]:
    """Return the final output of every prompt of a stream, in the prompts' order."""
    outputs = {index: output async for index, output in stream}
    for output in outputs.values():
        for completion in output.outputs:
            raise_if_failed(completion)
    return [outputs[index] for index in sorted(outputs)]


def raise_if_failed(completion: CompletionOutput) -> None:
    """Raise `ApiError` for a completion that failed or was aborted, for which OpenAI's API has no finish reason."""
    if completion.finish_reason is FinishReason.ERROR:
        if completion.error is ErrorKind.NON_FINITE:
            raise ApiError(500, str(completion.stop_reason), type="server_error", code=completion.error)
        # 400, because clients repeat a request after a 5xx, which would not help here.
        param = "structured_outputs" if completion.error is ErrorKind.STRUCTURED_OUTPUT else None
        raise ApiError(400, str(completion.stop_reason), param=param, code=completion.error)
    if completion.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the request was aborted", type="server_error", code="aborted")


@contextmanager
def errors_name(field: str | None, instead_of: str = "structured_outputs") -> Iterator[None]:
    """Make errors about the parameter `instead_of` name the request's own `field`. None: keep the name.

    Raises:
        SamplingError: raised in the block.
    """
    try:
        yield
    except SamplingError as error:
        if field is None or error.param.partition(".")[0] != instead_of:
            raise
        raise SamplingError(field, error.reason) from error


class TextEvent:
    """Template for stream events whose chunks differ only in their text, as most do. The rest of the chunk is encoded once.

    Args:
        chunk: a chunk with an empty text.
        names: the JSON fields that hold the text, in order.
    """

    def __init__(self, chunk: Mapping[str, Any], *names: str):
        self._parts_around_text: list[bytes] = []
        rest = encode_event(chunk)
        for name in names:
            # An empty field is found only where it belongs: inside a JSON string, its quotes would be escaped.
            empty_field = b'"%b":""' % name.encode()
            before, _, rest = rest.partition(empty_field)
            self._parts_around_text.append(before + empty_field[:-2])
        self._parts_around_text.append(rest)

    def with_text(self, text: str) -> bytes:
        """Return the event of the chunk with this text."""
        return to_json(text).join(self._parts_around_text)


class UsageCounter:
    """Counts the tokens of a request, output by output."""

    def __init__(self):
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int | None] = {}
        self._completion_tokens = 0
        self._reasoning_tokens: dict[int, int] = {}

    def expect(self, index: int, prompt_tokens: int) -> None:
        """Set the length of prompt `index` before its first output."""
        self._prompts[index] = prompt_tokens

    def count(self, index: int, output: RequestOutput) -> None:
        """Add an output of prompt `index`, whose completions hold only tokens that have not been counted yet."""
        if self._cached.get(index) is None:  # known from the first admission on
            self._prompts[index] = len(output.prompt_token_ids)
            self._cached[index] = output.num_cached_tokens
        for completion in output.outputs:
            self._completion_tokens += len(completion.token_ids)

    def count_reasoning(self, completion: int, tokens: int) -> None:
        """Set the number of a completion's reasoning tokens so far."""
        self._reasoning_tokens[completion] = tokens

    def usage(self) -> Usage:
        """Return the usage so far."""
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(filter(None, self._cached.values()))},
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning_tokens.values())},
        }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def prompt_logprobs_body(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """Return a prompt's log-probabilities in vLLM's shape: by token id, for each token but the first."""
    return [
        entry
        and {
            str(token_id): {"logprob": finite(score.logprob), "rank": score.rank, "decoded_token": score.decoded_token}
            for token_id, score in entry.items()
        }
        for entry in entries
    ]


def most_probable(entries: Sequence[TokenLogprobs | None], count: int) -> list[TokenLogprobs | None]:
    """Reduce each entry to its own token, which comes first, and the `count` most probable ones."""
    return [
        entry
        and {token: score for index, (token, score) in enumerate(entry.items()) if index == 0 or score.rank <= count}
        for entry in entries
    ]


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a single token's text as OpenAI writes it.

    A token that is not valid UTF-8 by itself is written as its bytes, `bytes:\\xe2\\x80`, so that no two tokens have the same name.
    """
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobLists:
    """The log-probabilities of a `/v1/completions` choice as lists over its tokens, with `echo` over the prompt's too.

    In a stream, each piece continues `text_offset` where the last one ended.

    Args:
        skip_special_tokens: whether special tokens are left out of the text and so have no length in it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], prompt: str | None = None
    ) -> CompletionLogprobs:
        """Return the lists for some tokens. An entry of None, as for a prompt's first token, stays None.

        prompt: the prompt's text, if the tokens are a prompt. Its special tokens count in the offsets; a BOS token that the tokenizer
            added does not.
        """
        body: CompletionLogprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        skips = self._skip_special_tokens if prompt is None else False
        has_added_bos = prompt is not None and self._tokenizer.decode(token_ids, skip_special_tokens=False) != prompt
        for index, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
            body["text_offset"].append(self._characters)
            body["tokens"].append(token_name(self._tokenizer, token_id))
            body["token_logprobs"].append(None if entry is None else finite(entry[token_id].logprob))
            body["top_logprobs"].append(None if entry is None else self._top(entry))
            if not ((skips or (has_added_bos and index == 0)) and self._tokenizer.is_special(token_id)):
                self._characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return body

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities by text, the highest first. Two tokens of the same text keep the higher one."""
        top: dict[str, float] = {}
        for token_id, score in sorted(entry.items(), key=lambda pair: -pair[1].logprob):
            top.setdefault(token_name(self._tokenizer, token_id), finite(score.logprob))
        return top


class Answer:
    """A request and its answer.

    `start` checks and queues the request. Then `whole` returns the answer, or `first_chunks`, `chunks_of` and `last_chunks` stream it.

    Args:
        kind: the chunks' field `object`.
        body: the request's body.
    """

    def __init__(self, serving: Serving, body: SamplingFields, answer_id: str, kind: str):
        self.id = answer_id
        self._request_id = f"{answer_id}~{new_id()[:8]}"  # clients may use an id twice
        self._serving, self._body = serving, body
        model = serving.check_model(body.model)
        self._common_fields = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._counter = UsageCounter()

    def without_effect(self) -> list[str]:
        """Return the names of the request's fields that have no effect."""
        return self._body.without_effect()

    def usage(self) -> Usage:
        """Return the usage so far."""
        return self._counter.usage()

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return a chunk with the usage if the request asks for it."""
        return [{**self._common_fields, "choices": [], "usage": self.usage()}] if self._body.include_usage else []

    def _chunk_of(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chunk of one choice, with the usage so far if the request asks for it."""
        chunk = {**self._common_fields, "choices": [choice]}
        if self._body.continuous_usage:
            return {**chunk, "usage": self.usage()}
        return {**chunk, "usage": None} if self._body.include_usage else chunk


class CompletionAnswer(Answer):
    """An answer of `/v1/completions`."""

    _body: CompletionRequest

    def __init__(self, serving: Serving, body: CompletionRequest, request_id: str):
        super().__init__(serving, body, f"cmpl-{request_id}", "text_completion")
        self._started: set[int] = set()  # choices that have sent a chunk
        self._lists: dict[int, CompletionLogprobLists] = {}
        self._only_text_changes = body.logprobs is None and not (body.return_token_ids or body.continuous_usage)
        self._text_events: dict[int, TextEvent] = {}  # by choice, for text-only chunks after the first
        # Prompt log-probabilities, by prompt. The engine's stream has them once for all choices.
        self._scores: dict[int, list[TokenLogprobs | None]] = {}

    async def start(self, options: RequestOptions) -> OutputStream:
        """Check everything and queue the prompts.

        Raises:
            ApiError, UserError: nothing was queued.
        """
        body = self._body
        body.check()
        with errors_name(body.form_field()):
            params = body.params(self._serving.with_whitespace(body.output_form()))
            prompts = body.prompts()
            with self._serving.admitted(body, prompts, options) as admitted:
                return await self._serving.engine.submit(self._request_id, prompts, params, admitted)

    async def whole(self, stream: OutputStream) -> CompletionResponse:
        """Wait for all completions and return the answer."""
        outputs = [self._drop_unrequested_token(output) for output in await gather(stream)]
        choices = []
        for index, output in enumerate(outputs):
            self._counter.count(index, output)
            choices += [self._choice(index, output, completion, first=True) for completion in output.outputs]
        return {**self._common_fields, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> list[CompletionResponse]:
        """Return no chunk: nothing is sent before the first token."""
        return []

    def chunks_of(self, prompt_index: int, whole_output: RequestOutput) -> list[CompletionResponse | bytes]:
        """Return one chunk, or its event in bytes, for each completion of an output that has something new.

        Raises:
            ApiError: a completion failed.
        """
        output = self._drop_unrequested_token(whole_output)
        self._counter.count(prompt_index, output)
        chunks = []
        for completion in output.outputs:
            index = prompt_index * self._body.n + completion.index
            if completion.finish_reason is None and completion.text:
                event = self._text_events.get(index)
                if event is not None:
                    chunks.append(event.with_text(completion.text))
                    continue
            raise_if_failed(completion)
            is_first = index not in self._started
            if self._only_text_changes and not is_first and completion.text and completion.finish_reason is None:
                empty = dataclasses.replace(completion, text="")  # for the template of this and later chunks
                chunk = self._chunk(prompt_index, output, empty, first=False)
                event = self._text_events[index] = TextEvent(chunk, "text")
                chunks.append(event.with_text(completion.text))
            elif self._is_sent(completion) or (is_first and self._body.echo):
                self._started.add(index)
                chunks.append(self._chunk(prompt_index, output, completion, first=is_first))
        return chunks

    def _chunk(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> CompletionResponse:
        return self._chunk_of(self._choice(prompt_index, output, completion, first=first))

    def _is_sent(self, completion: CompletionOutput) -> bool:
        ids = self._body.return_token_ids and completion.token_ids
        return bool(completion.text or completion.finished or completion.logprobs or ids)

    def _drop_unrequested_token(self, output: RequestOutput) -> RequestOutput:
        """Remove the token that the engine generates even for `max_tokens: 0`."""
        if self._body.max_tokens != 0:
            return output
        emptied = [
            completion
            if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            else dataclasses.replace(
                completion,
                text="",
                token_ids=[],
                logprobs=None if completion.logprobs is None else [],
                finish_reason=FinishReason.LENGTH if completion.finished else None,
                stop_reason=None,
            )
            for completion in output.outputs
        ]
        return dataclasses.replace(output, outputs=emptied)

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, *, first: bool
    ) -> CompletionChoice:
        """Return a choice, or the part of it that a chunk adds. The first chunk also has the prompt's fields."""
        body = self._body
        index = prompt_index * body.n + completion.index
        if output.prompt_logprobs is not None:
            self._scores[prompt_index] = output.prompt_logprobs
        scores = self._scores.get(prompt_index) if first else None
        echoed = self._prompt_text(output) if body.echo and first else ""
        choice: CompletionChoice = {
            "index": index,
            "text": echoed + completion.text,
            "logprobs": self._logprobs(index, output, scores, completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.prompt_logprobs is not None and scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(most_probable(scores, body.prompt_logprobs))
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        should_skip = self._body.skip_special_tokens is not False
        return self._serving.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=should_skip)

    def _logprobs(
        self, index: int, output: RequestOutput, scores: list[TokenLogprobs | None] | None, completion: CompletionOutput
    ) -> CompletionLogprobs | None:
        """Return the lists of the completion's tokens. With `echo`, the prompt's tokens precede them in the first chunk."""
        if completion.logprobs is None:
            return None
        if index not in self._lists:
            skip = self._body.skip_special_tokens is not False
            self._lists[index] = CompletionLogprobLists(self._serving.engine.tokenizer, skip)
        lists = self._lists[index]
        if not self._body.echo or scores is None:
            return lists.of(completion.token_ids, completion.logprobs)
        echoed = lists.of(output.prompt_token_ids, most_probable(scores, self._body.logprobs), output.prompt)
        generated = lists.of(completion.token_ids, completion.logprobs)
        return {name: values + generated[name] for name, values in echoed.items()}

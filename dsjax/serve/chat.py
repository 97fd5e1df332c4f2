"""Answers of `/v1/chat/completions`, complete or streamed as chunks."""

import dataclasses
from abc import abstractmethod
from typing import Any

from dsjax.engine.contract.sampling_params import SamplingParams, StructuredOutputs
from dsjax.engine.request_streams import INLINE_LENGTH, OutputStream
from dsjax.engine.schedule.request import FinishReason, RequestOptions
from dsjax.engine.text.input_processor import EncodedPrompt
from dsjax.engine.text.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from dsjax.serve import bounds
from dsjax.serve.answers import Answer, TextEvent, errors_name, finite, gather, prompt_logprobs_body, raise_if_failed
from dsjax.serve.chat_fields import ChatRequest, ToolChoice
from dsjax.serve.chat_prompt import ChatPrompt, render_prompt
from dsjax.serve.connections import StreamedAnswer
from dsjax.serve.errors import ApiError
from dsjax.serve.message_parser import CLOSE, OPEN, MessageParser, ReasoningSplitter, Section
from dsjax.serve.schemas import ChatChoice, ChatLogprobs, ChatResponse
from dsjax.serve.serving import Serving
from dsjax.serve.tool_calls import MessagePiece


class ChatAnswer(Answer):
    """An answer of `/v1/chat/completions`."""

    _body: ChatRequest

    def __init__(self, serving: Serving, body: ChatRequest, request_id: str):
        super().__init__(serving, body, f"chatcmpl-{request_id}", "chat.completion.chunk")
        if body.service_tier is not None:
            self._common_fields["service_tier"] = "default"
        self._tokenizer = serving.engine.tokenizer
        self._section: Section | None = None
        self._parsers: list[MessageParser] = []  # one per choice of a stream
        self._prompt_is_sent = False
        self._only_text_changes = not (body.logprobs or body.return_token_ids or body.continuous_usage)
        # Keyed by choice index and the names of the delta's fields.
        self._text_events: dict[tuple[int, tuple[str, ...]], TextEvent] = {}

    def without_effect(self) -> list[str]:
        """Return the names of the request's fields that have no effect."""
        return self._body.fields_without_effect(self._tokenizer.chat_template if self._tokenizer else None)

    async def start(self, options: RequestOptions) -> OutputStream:
        """Validate the request, render the chat template and queue the prompt.

        Raises:
            ApiError, UserError: the request was refused; nothing was queued.
        """
        body = self._body
        body.check()
        logprobs, max_tokens, form = body.num_logprobs(), body.token_limit(), self._form()
        texts = [message.text or "" for message in body.messages]
        field = "tools" if body.forced_tools else body.form_field()

        def render() -> tuple[list[EncodedPrompt], SamplingParams]:
            prompt = render_prompt(self._tokenizer, body, body.offered_tools, self._serving.tool_format)
            return [EncodedPrompt(prompt.token_ids)], self._params(prompt, max_tokens, logprobs, form)

        with errors_name(field), self._serving.admitted(body, texts, options) as admitted:
            takes_long = form is not None or bool(body.offered_tools) or sum(map(len, texts)) > INLINE_LENGTH
            stream = await self._serving.engine.submit_rendered(
                self._request_id, render, admitted, in_thread=takes_long
            )
        self._counter.expect(0, stream.completions[0].num_prompt_tokens)
        return stream

    def _form(self) -> dict[str, Any] | None:
        """Return the output constraint: forced tool calls, the requested format, or either of the two; None: free text."""
        body = self._body
        tool_format = self._serving.tool_format
        form = self._serving.with_whitespace(body.output_form())
        forced = body.forced_tools
        if forced and (self._tokenizer is None or tool_format is None):
            raise ApiError(400, "this server has no tool-call parser (--tool-call-parser)", param="tool_choice")
        tools = forced or (body.offered_tools if form is not None and tool_format is not None else [])
        if not tools:
            return form
        grammar = tool_format.grammar(
            tools,
            self._tokenizer,
            several=not isinstance(body.tool_choice, ToolChoice) and body.parallel_tool_calls is not False,
            compact=self._serving.options.disable_any_whitespace,
            instead=None if forced else StructuredOutputs(**form),
        )
        return {"grammar": grammar}

    def _params(
        self, prompt: ChatPrompt, max_tokens: int | None, logprobs: int | None, form: dict[str, Any] | None
    ) -> SamplingParams:
        reasoning = self._serving.reasoning if self._body.separate_reasoning is not False else None
        self._section = None if reasoning is None else reasoning.start_of(prompt.text, prompt.unfinished)
        markers = [] if self._section is None else [OPEN, CLOSE]
        markers += self._serving.tool_format.markers if self._parses_tools else []
        ids = map(self._tokenizer.token_id, markers)
        return self._body.sampling_params(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self._body.prompt_logprobs,
            kept_special_tokens=[token_id for token_id in ids if token_id is not None],
            form=form,
            form_after=self._form_after(prompt),
        )

    def _form_after(self, prompt: ChatPrompt) -> int | None:
        """Return the id of the token after which the constraint applies (reasoning is unconstrained). None: from the first token."""
        reasoning = self._serving.reasoning
        if reasoning is None or reasoning.start_of(prompt.text, prompt.unfinished) is not Section.REASONING:
            return None
        return reasoning.close_token_id

    @property
    def _parses_tools(self) -> bool:
        return bool(self._body.offered_tools) and self._serving.tool_format is not None

    def _parser(self) -> MessageParser:
        tools = None
        openings = {}
        if self._parses_tools:
            openings = {marker: self._tokenizer.token_id(marker) for marker in self._serving.tool_format.openings}
            most = 1 if self._body.parallel_tool_calls is False else bounds.MAX_TOOL_CALLS
            tools = self._serving.tool_format.parser(most)
        splitter = None
        if self._section is not None:
            splitter = ReasoningSplitter(self._section, self._serving.reasoning.close_token_id, openings)
        return MessageParser(splitter, tools, self._body.include_reasoning is not False)

    async def whole(self, stream: OutputStream) -> ChatResponse:
        """Wait for all completions and return the answer."""
        (output,) = await gather(stream)
        choices: list[ChatChoice] = []
        self._counter.count(0, output)
        for completion in output.outputs:
            parser = self._parser()
            message = parser.push(completion.text, finished=True, token_ids=completion.token_ids).message()
            self._counter.count_reasoning(completion.index, parser.reasoning_tokens)
            choice: ChatChoice = {
                "index": completion.index,
                "message": message | {"refusal": None, "annotations": []},
                "logprobs": self._logprobs(completion),
                **_end(completion, parser),
            }
            if self._body.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        common_fields = {**self._common_fields, "object": "chat.completion"}
        answer: ChatResponse = {**common_fields, "choices": choices, "usage": self.usage()}
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def first_chunks(self) -> list[ChatResponse]:
        """Return the first chunk of each choice, with its role."""
        self._parsers = [self._parser() for _ in range(self._body.n)]
        first = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk_of(_delta(index, first)) for index in range(self._body.n)]

    def chunks_of(
        self, prompt_index: int, output: RequestOutput, *, as_events: bool = True
    ) -> list[ChatResponse | bytes]:
        """Return the chunks for the completions that changed in one output.

        as_events: encode chunks that only add text as server-sent events (bytes).

        Raises:
            ApiError: a completion failed.
        """
        self._counter.count(prompt_index, output)
        chunks = []
        for completion in output.outputs:
            raise_if_failed(completion)
            parser = self._parsers[completion.index]
            num_reasoning_before = parser.reasoning_tokens
            piece = parser.push(completion.text, completion.finished, completion.token_ids)
            self._counter.count_reasoning(completion.index, parser.reasoning_tokens)
            for part, delta in _split_by_delta(completion, piece, parser.reasoning_tokens - num_reasoning_before):
                adds_text = "content" in delta or "reasoning" in delta
                if as_events and self._only_text_changes and adds_text and not part.finished:
                    chunks.append(self._text_event(part.index, delta))
                    continue
                choice = self._chunk(part, parser, delta)
                if choice is None:
                    continue
                chunks.append(self._chunk_of(choice))
                if self._body.return_token_ids and not self._prompt_is_sent:
                    chunks[-1]["prompt_token_ids"] = output.prompt_token_ids
                    self._prompt_is_sent = True
        return chunks

    def _text_event(self, index: int, delta: dict[str, str]) -> bytes:
        """Return the event that adds content or reasoning to a choice."""
        names = tuple(delta)
        event = self._text_events.get((index, names))
        if event is None:
            chunk = self._chunk_of(_delta(index, dict.fromkeys(names, "")))
            event = self._text_events[index, names] = TextEvent(chunk, *names)
        return event.with_text(delta[names[0]])

    def _chunk(self, completion: CompletionOutput, parser: MessageParser, delta: dict[str, Any]) -> ChatChoice | None:
        """Return a chunk's choice; None if it would be empty."""
        ids = self._body.return_token_ids and completion.token_ids
        if not (delta or completion.finished or completion.logprobs or ids):
            return None
        choice = _delta(completion.index, delta)
        choice["logprobs"] = self._logprobs(completion)
        if completion.finished:
            choice |= _end(completion, parser)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        return {"content": [self._token(entry) for entry in completion.logprobs]}

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        """Return the log-probabilities of the sampled token and of the `top_logprobs` most probable ones, which may include it."""
        count = self._body.top_logprobs or 0
        ranked = [(token, score) for token, score in entry.items() if score.rank is not None and score.rank <= count]
        ranked.sort(key=lambda pair: pair[1].rank)
        sampled = next(iter(entry.items()))
        return {**self._scored(*sampled), "top_logprobs": [self._scored(*pair) for pair in ranked]}

    def _scored(self, token_id: int, score: Logprob) -> dict[str, Any]:
        text = list(self._tokenizer.token_bytes(token_id))
        return {"token": score.decoded_token, "logprob": finite(score.logprob), "bytes": text}


def _split_by_delta(
    completion: CompletionOutput, piece: MessagePiece, num_reasoning: int
) -> list[tuple[CompletionOutput, dict[str, Any]]]:
    """Pair each delta with its tokens: the first `num_reasoning` tokens with the reasoning, the rest with the last delta."""
    *first, last = piece.deltas()
    parts = []
    rest = completion
    for delta in first:
        num_tokens = max(0, num_reasoning) if "reasoning" in delta else 0
        ids, scores = rest.token_ids, rest.logprobs
        own = {"token_ids": ids[:num_tokens], "logprobs": scores and scores[:num_tokens], "finish_reason": None}
        parts.append((dataclasses.replace(rest, **own), delta))
        rest = dataclasses.replace(rest, token_ids=ids[num_tokens:], logprobs=scores and scores[num_tokens:])
    return [*parts, (rest, last)]


class ConvertedAnswer(StreamedAnswer):
    """A chat answer converted to another API's format."""

    def __init__(self, serving: Serving, body: Any, answer_id: str, request_id: str):
        self.id, self._body = answer_id, body
        self._model = serving.check_model(body.model)
        self._chat = ChatAnswer(serving, body.to_chat(), request_id)

    async def start(self, options: RequestOptions) -> OutputStream:
        """Validate the request and queue the prompt, as `ChatAnswer.start` does.

        Raises:
            ApiError, UserError: the request was refused; nothing was queued.
        """
        return await self._chat.start(options)

    async def whole(self, stream: OutputStream) -> dict[str, Any]:
        """Wait for the completion and return the answer, built from the same events as a stream."""
        self.first_chunks()
        async for index, output in stream:
            self.chunks_of(index, output)
        self.last_chunks()
        return self._built()

    def chunks_of(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the events of one output.

        Raises:
            ApiError: the completion failed.
        """
        chunks = self._chat.chunks_of(prompt_index, output, as_events=False)
        return [event for chunk in chunks for choice in chunk["choices"] for event in self._convert(choice)]

    @abstractmethod
    def _convert(self, choice: ChatChoice) -> list[dict[str, Any]]:
        """Return the events for a chunk's choice."""

    @abstractmethod
    def _built(self) -> dict[str, Any]:
        """Return the answer so far."""


def _delta(index: int, delta: dict[str, Any]) -> ChatChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _end(completion: CompletionOutput, parser: MessageParser) -> dict[str, Any]:
    """Return the finish reason: `tool_calls` if the message has tool calls and was not truncated."""
    called = parser.has_calls and completion.finish_reason is FinishReason.STOP
    reason = "tool_calls" if called else completion.finish_reason
    return {"finish_reason": reason, "stop_reason": completion.stop_reason}

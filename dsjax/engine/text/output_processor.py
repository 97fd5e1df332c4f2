"""`OutputProcessor`: turns a step's tokens into `RequestOutput`s with text and log-probabilities.

Text is emitted in whole characters, and ends at a stop string.
"""

from collections.abc import Iterable, Sequence

from dsjax.engine.contract.executor import ErrorKind, RowResult
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.text.input_processor import PreparedRequest
from dsjax.engine.text.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from dsjax.engine.text.stop_strings import StopStrings
from dsjax.engine.text.tokenizer import IncrementalDetokenizer, Tokenizer

NON_FINITE = "the model gave values that are not finite for this request"


class Completion:
    """Collects the updates of one completion. `take` returns the output in the caller's `OutputKind`."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None):
        self.index, self.request = index, request
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: ErrorKind | None = None
        params = request.params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = self._tokenizer and IncrementalDetokenizer(
            self._tokenizer, params.skip_special_tokens, params.kept_special_tokens
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        # Whether a token that does not end the completion needs only detokenizing: `append`'s fast path.
        needs_more = params.stop or params.logprobs is not None or params.prompt_logprobs is not None
        self._is_text_only = self._detokenizer is not None and not needs_more
        # Of all tokens so far; with `DELTA`, of the tokens not yet taken, except for the sum of log-probabilities.
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        # By position in the prompt. The first token has no log-probability.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._num_removed = 0  # tokens that `take` returned and removed from `_token_ids`
        self._num_taken = 0

    def append(self, update: Update) -> None:
        """Add a step's update. Set `finish_reason` if the completion has ended, including by a stop string.

        Tokens after a stop string are dropped.
        """
        _, result, reason = update
        if reason is None and self._is_text_only and result is not None:
            self._token_ids += result.token_ids
            for token_id in result.token_ids:
                self._text += self._detokenizer.push(token_id)
            return
        if result is not None and result.prompt_scores:
            self.prompt_logprobs += [self._token_logprobs(*entry) for entry in result.prompt_scores]
        tokens = () if result is None else result.token_ids
        for index, token_id in enumerate(tokens):
            self._token_ids.append(token_id)
            if self._logprobs is not None:
                entry = result.scores[index]
                self._logprobs.append(self._token_logprobs(*entry))
                self._cumulative_logprob += entry[1]
            if self._detokenizer is not None:
                self._append_text(token_id, reason if index == len(tokens) - 1 else None)
                if self._stop_string is not None:
                    break
        if self._stop_string is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, self._stop_string
        elif reason is not None:
            self._finish(reason, result)

    @property
    def _stop_string(self) -> str | None:
        """The stop string that has ended the text, or None."""
        return self._stops and self._stops.matched

    def is_due(self, interval: int) -> bool:
        """Whether an output is due: after the first token, after every `interval` tokens, and at the end."""
        new = self._num_removed + len(self._token_ids) - self._num_taken
        return new >= interval or self._num_taken == 0 or self.finish_reason is not None

    def take(self, kind: OutputKind) -> CompletionOutput:
        """Return the completion so far, or with `DELTA` only the part since the last call."""
        token_ids, text, logprobs = self._token_ids, self._text, self._logprobs
        self._num_taken = self._num_removed + len(token_ids)
        if kind is OutputKind.DELTA:  # so that a long text is not copied for each token
            self._num_removed = self._num_taken
            self._token_ids = []
            self._text = ""
            if logprobs is not None:
                self._logprobs = []
        else:
            token_ids = token_ids.copy()
            logprobs = None if logprobs is None else logprobs.copy()
        ended = self.finish_reason, self._stop_reason, self._error
        return CompletionOutput(self.index, text, token_ids, self._cumulative_logprob, logprobs, *ended)

    def _append_text(self, token_id: int, reason: FinishReason | None) -> None:
        """Add a token's text, unless it is a stop token; hold back a possible stop string. reason: why it ends the completion, or None."""
        params = self.request.params
        text = ""
        if reason is not FinishReason.STOP or params.include_stop_str_in_output:
            text = self._detokenizer.push(token_id)
        if reason is not None:
            text += self._detokenizer.flush()
        if self._stops is None:
            self._text += text
        elif self._num_removed + len(self._token_ids) <= params.min_tokens:
            self._text += self._stops.flush() + text  # stop strings do not count yet
        else:
            self._text += self._stops.push(text)

    def _finish(self, reason: FinishReason, result: RowResult | None) -> None:
        self.finish_reason = reason
        if self._stops is not None:
            self._text += self._stops.flush()
        if reason is FinishReason.ERROR:
            self._error = error_kind(self.request.params, result)
            self._stop_reason = NON_FINITE if self._error is ErrorKind.NON_FINITE else result.error
        elif reason is FinishReason.STOP and result.token_ids[-1] in self.request.params.stop_token_ids:
            self._stop_reason = result.token_ids[-1]

    def _token_logprobs(
        self, token_id: int, logprob: float, place: int | None, top: Sequence[tuple[int, float]]
    ) -> TokenLogprobs:
        """Return the sampled token's entry first, then those of `top`, most probable first. place: the sampled token's rank, if known."""
        ranked = {token: rank for rank, (token, _) in enumerate(top, start=1)}
        place = place if place is not None else ranked.get(token_id)
        logprobs = {token_id: Logprob(logprob, place, self._token_text(token_id))}
        for token, value in top:
            if token not in logprobs:
                logprobs[token] = Logprob(value, ranked[token], self._token_text(token))
        return logprobs

    def _token_text(self, token_id: int) -> str | None:
        """Return the text of a single token, special or not; incomplete characters are U+FFFD."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace") if self._tokenizer else None


def error_kind(params: SamplingParams, result: RowResult | None) -> ErrorKind:
    """Return why a request failed. result: None if the values of its step were not finite."""
    if result is None or result.error is None:
        return ErrorKind.NON_FINITE
    if result.kind is not None:
        return result.kind
    return ErrorKind.NO_TOKEN_ALLOWED if params.structured_outputs is None else ErrorKind.STRUCTURED_OUTPUT


class _Group:
    """The completions of one request."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer | None):
        self.prepared, self.kind = prepared, prepared.params.output_kind
        self.completions = [Completion(index, r, tokenizer) for index, r in enumerate(prepared.completions)]
        self.open = len(self.completions)
        self._sent_prompt_logprobs = False

    def output(self, changed: list[Completion]) -> RequestOutput:
        """Take the output of the completions that changed, or of all if `FINAL_ONLY`."""
        prepared, kind = self.prepared, self.kind
        if kind is OutputKind.FINAL_ONLY:
            changed = self.completions
        return RequestOutput(
            prepared.request_id,
            prepared.prompt,
            prepared.prompt_token_ids,
            [completion.take(kind) for completion in changed],
            self.open == 0,
            None if self.open else self._metrics(),
            prepared.completions[0].num_cached_tokens,
            self._prompt_logprobs(changed[0]),
        )

    def _prompt_logprobs(self, completion: Completion) -> list[TokenLogprobs | None] | None:
        """Return the prompt's log-probabilities, all of them once a token has been generated; with `DELTA`, in the first output only."""
        was_reported = self._sent_prompt_logprobs
        self._sent_prompt_logprobs = True
        if was_reported and self.kind is OutputKind.DELTA:
            return None
        return completion.prompt_logprobs

    def _metrics(self) -> RequestMetrics:
        requests = self.prepared.completions
        first = requests[0]
        return RequestMetrics(
            arrival_time=first.arrival_time,
            first_scheduled_time=_earliest(r.first_scheduled_time for r in requests),
            first_token_time=_earliest(r.first_token_time for r in requests),
            finish_time=max(r.finish_time or 0.0 for r in requests),
            num_preemptions=sum(r.num_preemptions for r in requests),
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens or 0,
        )


class OutputProcessor:
    """Tracks every request until its last token. May run in another thread than the engine core.

    The core does not know stop strings: `process` returns the completions that one has ended, and skips their later tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1):
        self._tokenizer = tokenizer
        self.stream_interval = stream_interval
        self._groups: dict[str, _Group] = {}
        self._by_completion: dict[str, tuple[_Group, Completion]] = {}

    def add(self, prepared: PreparedRequest) -> None:
        """Track a request. Raises a `ValueError` if an unfinished request has the same id."""
        ids = [prepared.request_id, *(request.request_id for request in prepared.completions)]
        if prepared.request_id in self._groups or any(i in self._by_completion for i in ids):
            raise ValueError(f"request id {prepared.request_id!r} is in use")
        group = self._groups[prepared.request_id] = _Group(prepared, self._tokenizer)
        for completion in group.completions:
            self._by_completion[completion.request.request_id] = (group, completion)

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._groups)

    def unfinished(self, request_id: str) -> list[Request]:
        """Return the unfinished completions of a request; none if it is unknown or has ended."""
        group = self._groups.get(request_id)
        return [c.request for c in group.completions if c.finish_reason is None] if group else []

    def forget(self, request_id: str) -> None:
        """Stop tracking a request whose output is no longer wanted."""
        group = self._groups.pop(request_id, None)
        for completion in group.completions if group else ():
            self._by_completion.pop(completion.request.request_id, None)

    def process(
        self,
        updates: Iterable[Update],
        failed: dict[str, Exception] | None = None,
        followed: list[Update] | None = None,
    ) -> tuple[list[RequestOutput], list[str]]:
        """Return the outputs to deliver, and the core's ids of completions ended by a stop string.

        failed: receives the errors of requests whose output failed, by id; the caller ends these requests. None: raise the error.
        followed: receives the updates that were processed, not those of unknown or ended completions.
        """
        changed: dict[_Group, list[Completion]] = {}
        to_abort: list[str] = []
        by_completion, interval = self._by_completion, self.stream_interval
        for update in updates:
            request, result, reason = update
            group, completion = by_completion.get(request.request_id, (None, None))
            if completion is None or completion.request is not request:
                continue
            if followed is not None:
                followed.append(update)
            try:
                completion.append(update)
            except Exception as error:
                if failed is None:
                    raise
                failed[group.prepared.request_id] = error
                continue
            if completion.finish_reason is not None:
                if reason is None:
                    to_abort.append(request.request_id)
                del by_completion[request.request_id]
                group.open -= 1
            elif result is not None and not result.token_ids:
                continue  # only prompt log-probabilities, which are delivered with the first token
            elif interval > 1 and not completion.is_due(interval):
                continue
            changed.setdefault(group, []).append(completion)
        outputs: list[RequestOutput] = []
        for group, completions in changed.items():
            if group.open == 0:
                del self._groups[group.prepared.request_id]
            elif group.kind is OutputKind.FINAL_ONLY:
                continue
            if not failed or group.prepared.request_id not in failed:
                outputs.append(group.output(completions))
        return outputs, to_abort


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)

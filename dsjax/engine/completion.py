"""`Completion`: one completion's tokens, text and log-probabilities, as they grow."""

from collections.abc import Sequence

from dsjax.engine.executor import RowResult
from dsjax.engine.outputs import CompletionOutput, Logprob, TokenLogprobs
from dsjax.engine.request import ErrorKind, FinishReason, Request
from dsjax.engine.sampling_params import OutputKind, SamplingParams
from dsjax.engine.scheduler import Update
from dsjax.engine.text import IncrementalDetokenizer, StopStrings
from dsjax.engine.tokenizer import Tokenizer

NON_FINITE = "the model gave values that are not finite for this request"


class Completion:
    """Takes a completion's updates one by one; `take` gives what the caller asked to see."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None):
        self.index = index
        self.request = request
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: ErrorKind | None = None
        params = request.params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = (
            IncrementalDetokenizer(self._tokenizer, params.skip_special_tokens) if self._tokenizer else None
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        # Of the prompt: a token's entry stands at its place, and nothing predicts the first.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._taken_tokens = 0
        self._taken_text = 0

    def append(self, update: Update) -> None:
        """Enter what a step did. Sets `finish_reason` when the completion has ended, by a stop string too.

        Of several tokens, those behind a stop string are not the completion's any more.
        """
        _, result, reason = update
        if result is not None and result.prompt_scores:
            self.prompt_logprobs += [self._token_logprobs(*entry) for entry in result.prompt_scores]
        tokens = () if result is None else result.token_ids
        for place, token_id in enumerate(tokens):
            self._token_ids.append(token_id)
            if self._logprobs is not None:
                entry = result.scores[place]
                self._logprobs.append(self._token_logprobs(*entry))
                self._cumulative_logprob += entry[1]
            if self._detokenizer is not None:
                self._append_text(token_id, reason if place == len(tokens) - 1 else None)
                if self._stops.matched is not None:
                    break
        if self._stops.matched is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, self._stops.matched
        elif reason is not None:
            self._finish(reason, result)

    def take(self, kind: OutputKind) -> CompletionOutput:
        """What the caller sees now: all so far, or with `DELTA` what came since the last time."""
        first_token, first_char = (self._taken_tokens, self._taken_text) if kind is OutputKind.DELTA else (0, 0)
        self._taken_tokens, self._taken_text = len(self._token_ids), len(self._text)
        return CompletionOutput(
            self.index,
            self._text[first_char:],
            self._token_ids[first_token:],
            self._cumulative_logprob,
            None if self._logprobs is None else self._logprobs[first_token:],
            self.finish_reason,
            self._stop_reason,
            self._error,
        )

    def _append_text(self, token_id: int, reason: FinishReason | None) -> None:
        params = self.request.params
        text = ""
        if reason is not FinishReason.STOP or params.include_stop_str_in_output:
            text = self._detokenizer.push(token_id)
        if reason is not None:
            text += self._detokenizer.flush()
        if len(self._token_ids) <= params.min_tokens:
            self._text += self._stops.flush() + text  # stop strings do not count yet
        else:
            self._text += self._stops.push(text)

    def _finish(self, reason: FinishReason, result: RowResult | None) -> None:
        self.finish_reason = reason
        self._text += self._stops.flush()
        if reason is FinishReason.ERROR:
            self._error = error_kind(self.request.params, result)
            self._stop_reason = NON_FINITE if self._error is ErrorKind.NON_FINITE else result.error
        elif reason is FinishReason.STOP and result.token_ids[-1] in self.request.params.stop_token_ids:
            self._stop_reason = result.token_ids[-1]

    def _token_logprobs(
        self, token_id: int, logprob: float, place: int | None, top: Sequence[tuple[int, float]]
    ) -> TokenLogprobs:
        """The token taken first, then the most probable ones; in a tie the token taken keeps its own entry."""
        ranked = {token: rank for rank, (token, _) in enumerate(top, start=1)}
        place = place if place is not None else ranked.get(token_id)
        found = {token_id: Logprob(logprob, place, self._token_text(token_id))}
        for token, value in top:
            if token not in found:
                found[token] = Logprob(value, ranked[token], self._token_text(token))
        return found

    def _token_text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._tokenizer else None


def error_kind(params: SamplingParams, result: RowResult | None) -> ErrorKind:
    """Why a request with these parameters failed with this result; without a result the step itself was not finite."""
    if result is None or result.error is None:
        return ErrorKind.NON_FINITE
    return ErrorKind.NO_TOKEN_ALLOWED if params.structured_outputs is None else ErrorKind.STRUCTURED_OUTPUT

"""What a caller gets back for a request. Names and meanings are vLLM's."""

from dataclasses import dataclass

from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.schedule.request import FinishReason


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the raw logits. rank: its place among all tokens, 1 for the most probable; None: not asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""At one position: token id to its log-probability; the token taken comes first, then the most probable ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt: all of it, or with `OutputKind.DELTA` what a step added.

    Attributes:
        text: without the stop string or stop token unless asked for. What may become a stop string, and bytes of a character that is not
            whole, are held back.
        token_ids: every token, the one that ended the completion included.
        cumulative_logprob: sum over all tokens so far; logprobs: one entry a token of `token_ids`. None where not asked for.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token; with `finish_reason` error, the
            message.
        error: with `finish_reason` error, of which kind it is.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: ErrorKind | None = None

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock; the earliest over its completions.

    Preemptions are the sum over the completions. `num_cached_tokens` is the first one's: the others of a prompt share its pages.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's completions.

    Attributes:
        prompt: the text given; None where token ids were given.
        outputs: the completions that this output tells of; with `OutputKind.FINAL_ONLY` all of them, by index. finished: whether all have
            ended.
        metrics: in the last output; None before.
        num_cached_tokens: of the prompt, in the prefix cache; None before the first admission.
        prompt_logprobs: one entry a token of the prompt, the first None. None where not asked for, and with `DELTA` in all outputs but the
            first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class EngineDeadError(RuntimeError):
    """The engine's thread has failed; no request can be served any more."""


class EngineClosingError(RuntimeError):
    """The engine is closing, and this request was ended before it was done."""

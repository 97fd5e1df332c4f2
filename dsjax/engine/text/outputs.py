"""Outputs of a request, with vLLM's names and meanings."""

from dataclasses import dataclass

from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.schedule.request import FinishReason


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the raw logits."""

    logprob: float
    rank: int | None = None  # among all tokens, 1 is the most probable; None: not requested
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities at one position, by token id: the sampled token first, then the most probable ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt: all of it, or the part added by a step with `OutputKind.DELTA`."""

    index: int
    # without the stop string or stop token unless requested. A possible beginning of a stop string and bytes of an incomplete character are
    # held back
    text: str
    token_ids: list[int]  # all tokens, including the one that ended the completion
    cumulative_logprob: float | None = None  # sum over all tokens so far
    logprobs: list[TokenLogprobs] | None = None  # one entry per token of `token_ids`. None if not requested
    finish_reason: FinishReason | None = None
    # the stop string or stop token id that ended it; None for the end-of-sequence token; the message if `finish_reason` is error
    stop_reason: int | str | None = None
    error: ErrorKind | None = None  # kind of the error if `finish_reason` is error

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds on the engine's clock; the earliest over its completions.

    `num_preemptions` is summed over the completions. `num_cached_tokens` is the first completion's; the others share its pages.
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
    """A request's completions."""

    request_id: str
    prompt: str | None  # the prompt's text; None if token ids were given
    prompt_token_ids: list[int]
    # the completions in this output; with `OutputKind.FINAL_ONLY` all of them, by index
    outputs: list[CompletionOutput]
    finished: bool  # whether all completions have ended
    metrics: RequestMetrics | None = None  # only in the last output; None before
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache; None before the first admission
    # one entry per prompt token, the first None. None if not requested, and with `DELTA` in all outputs after the first
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class EngineDeadError(RuntimeError):
    """The engine's thread has failed and serves no more requests."""


class EngineClosingError(RuntimeError):
    """The engine is shutting down: it refuses a new request or call, or ended this one early."""

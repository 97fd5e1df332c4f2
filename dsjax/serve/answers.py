"""The parts of an answer that completions and chat share: usage, ids, log-probabilities, completions that failed."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dsjax.engine.async_engine import OutputStream
from dsjax.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from dsjax.engine.request import FinishReason
from dsjax.serve.errors import ApiError
from dsjax.serve.responses import Usage

# JSON has no -inf. OpenAI's clients know this number, which vLLM also sends.
_LEAST_LOGPROB = -9999.0


async def gather(stream: OutputStream) -> list[RequestOutput]:
    """The final output of every prompt of a stream, in the prompts' order."""
    outputs = {index: output async for index, output in stream}
    for output in outputs.values():
        for completion in output.outputs:
            refuse_failed(completion)
    return [outputs[index] for index in sorted(outputs)]


def refuse_failed(completion: CompletionOutput) -> None:
    """Raise for a completion that did not end by itself: OpenAI's API has no finish reason for that."""
    if completion.finish_reason is FinishReason.ERROR:
        raise ApiError(500, str(completion.stop_reason), type="server_error", code="non_finite_values")
    if completion.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the request was aborted", type="server_error", code="aborted")


class UsageCounter:
    """Counts the tokens of a request while its outputs go by: each output's tokens are counted once."""

    def __init__(self):
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion_tokens = 0
        self._reasoning_tokens: dict[int, int] = {}

    def count(self, index: int, output: RequestOutput) -> None:
        """Enter an output of prompt `index`, whose completions hold tokens not yet counted."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens or 0
        self._completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def count_reasoning(self, completion: int, tokens: int) -> None:
        """Enter how many tokens of a completion are reasoning by now."""
        self._reasoning_tokens[completion] = tokens

    def usage(self) -> Usage:
        """The sums."""
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning_tokens.values())},
        }


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """The usage of final outputs."""
    counter = UsageCounter()
    for index, output in enumerate(outputs):
        counter.count(index, output)
    return counter.usage()


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def prompt_logprobs_body(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities in vLLM's shape: for each token but the first, token id to value, rank and text."""
    return [
        entry
        and {
            str(token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in entry.items()
        }
        for entry in entries
    ]

"""`Serving`: what every endpoint needs, and the parts of an answer that completions and chat share."""

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsjax.engine.async_engine import AsyncEngine, OutputStream
from dsjax.engine.outputs import CompletionOutput, RequestOutput
from dsjax.engine.request import FinishReason
from dsjax.serve.errors import ApiError
from dsjax.serve.responses import Usage

# JSON has no -inf. OpenAI's clients know this number, which vLLM also sends.
_LEAST_LOGPROB = -9999.0


@dataclass
class Serving:
    """The engine and the names it is served under. The first name is used where a request gives none."""

    engine: AsyncEngine
    model_names: Sequence[str]
    model_root: str
    max_model_len: int
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404, nothing of this name is served.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has: {known}",
                type="not_found_error",
                param="model",
                code="model_not_found",
            )
        return name


def new_id(prefix: str) -> str:
    """A request id that nobody can guess or repeat."""
    return f"{prefix}-{uuid.uuid4().hex}"


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
        self._completion_tokens = 0

    def count(self, index: int, output: RequestOutput) -> None:
        """Enter an output of prompt `index`, whose completions hold tokens not yet counted."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self) -> Usage:
        """The sums."""
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
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

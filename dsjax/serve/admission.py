"""`QueueGate`: turns requests away, before they are tokenised, when too much waits already."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dsjax.engine.async_engine import AsyncEngine
from dsjax.serve.errors import ApiError
from dsjax.serve.options import ServeOptions

_CHARACTERS_PER_TOKEN = 4
_RETRY_SECONDS = 2


class QueueGate:
    """Counts what waits: in the engine, and between this gate and the engine. `reject` counts what is turned away."""

    def __init__(self, engine: AsyncEngine, options: ServeOptions, reject: Callable[[str, ApiError], ApiError]):
        self._engine = engine
        self._reject = reject
        self._most_requests = options.max_queued_requests
        self._most_tokens = options.max_queued_tokens
        self._entering_requests = self._entering_tokens = 0

    @contextmanager
    def through(self, prompts: Sequence[str | Sequence[int]], completions: int) -> Iterator[None]:
        """Let a request in, or not. Inside, it is tokenised and submitted; then the engine counts it.

        Args:
            completions: of each prompt.

        Raises:
            ApiError: 429, with its time to retry.
        """
        requests = completions * len(prompts)
        tokens = completions * sum(
            len(prompt) // _CHARACTERS_PER_TOKEN if isinstance(prompt, str) else len(prompt) for prompt in prompts
        )
        self._check(requests, tokens)
        self._entering_requests += requests
        self._entering_tokens += tokens
        try:
            yield
        finally:
            self._entering_requests -= requests
            self._entering_tokens -= tokens

    def _check(self, requests: int, tokens: int) -> None:
        # What would wait alone may always come in: a limit below one request's size must not refuse it for ever.
        waiting = self._engine.num_waiting + self._entering_requests
        if waiting and self._most_requests is not None and waiting + requests > self._most_requests:
            raise self._full(f"{waiting} requests wait, and this server lets {self._most_requests} wait")
        waiting = self._engine.waiting_tokens + self._entering_tokens
        if waiting and self._most_tokens is not None and waiting + tokens > self._most_tokens:
            raise self._full(f"{waiting:,} tokens wait, and this server lets {self._most_tokens:,} wait")

    def _full(self, reason: str) -> ApiError:
        message, code = f"{reason}; try again later", "queue_full"
        error = ApiError(429, message, type="rate_limit_error", code=code, retry_after=_RETRY_SECONDS)
        return self._reject(code, error)

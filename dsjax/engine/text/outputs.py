"""What a caller gets back for a request, whole or as an `OutputStream`. Names and meanings are vLLM's."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsjax.engine.contract.executor import ErrorKind
from dsjax.engine.schedule.request import FinishReason, Request


@dataclass(slots=True)
class Logprob:
    """One token's log-probability under the raw logits.

    `rank` is its place among all tokens, 1 for the most probable; None where it is not among those asked for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""At one position: token id to its log-probability; the token taken comes first, then the most probable ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt: all of it, or with `OutputKind.DELTA` what a step added.

    Attributes:
        index: which of the request's `n` completions.
        text: without the stop string or stop token unless asked for; text that may still become a stop string, and
            bytes that are not yet a whole character, are held back until they are decided.
        token_ids: every token, the one that ended the completion included.
        cumulative_logprob: sum over all tokens so far; None where no log-probabilities were asked for.
        logprobs: one entry a token of `token_ids`; None where not asked for.
        finish_reason: None while the completion goes on.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token. With
            `finish_reason` error, the message.
        error: with `finish_reason` error, of which kind it is; otherwise None.
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
        outputs: the completions that this output tells of; with `OutputKind.FINAL_ONLY` all of them, by index.
        finished: whether all completions of the request have ended.
        num_cached_tokens: how many of the prompt's tokens the prefix cache had; None before the first admission.
        prompt_logprobs: one entry a token of the prompt, the first None, as no token is before it. None where not asked for,
            and with `OutputKind.DELTA` in all outputs but the first.
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


class OutputStream:
    """The outputs of one or several prompts, as they come: an async iterator of (prompt's index, output).

    Ends after the last output. `close` ends what is unfinished; call it in any case, e.g. with `contextlib.closing`.
    `completions` are the core's requests, for a log of what became of them: another thread writes them while they run.
    One reader at a time.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        abort: Callable[[Sequence[str]], None],
        completions: Sequence[Request] = (),
    ):
        self.completions = completions
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._abort = abort
        self._ready: deque[RequestOutput | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[list[tuple[int, RequestOutput]]], bool] | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output and tell the reader of it. Called in the event loop's thread, as is `add`."""
        self._ready.append(output)
        self.tell()

    def add(self, output: RequestOutput) -> None:
        """Add an output, of which `tell` will tell the reader: outputs of one step are told of together."""
        self._ready.append(output)

    def tell(self) -> None:
        """Give the reader that waits what there is, or wake it."""
        if self._waiter is None or self._waiter.done():
            return
        try:
            goes_on = None if self._at_once is None else self._peek()
            if goes_on is not None and self._at_once(goes_on):
                self._ready.clear()
            else:
                self._waiter.set_result(None)
        except Exception as error:  # the reader's own
            self._ready.clear()
            self._waiter.set_exception(error)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._open:
            raise StopAsyncIteration
        await self._wait()
        return self._take()

    async def ready(
        self, at_once: Callable[[list[tuple[int, RequestOutput]]], bool] | None = None
    ) -> list[tuple[int, RequestOutput]]:
        """Wait, then give everything that is there: a reader that is late gets several outputs at once. Empty at the end.

        Raises what `__anext__` would, after the outputs before it.

        at_once: takes outputs that come while this waits and that are not a request's last, and says whether it did; the reader goes on
            waiting then. To wake a task, with all the functions in which it waits, costs more than to make an event of a token.
        """
        if not self._open:
            return []
        self._at_once = at_once
        await self._wait()
        taken = [self._take()]
        while self._ready and self._open and not isinstance(self._ready[0], Exception):
            taken.append(self._take())
        return taken

    async def _wait(self) -> None:
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _peek(self) -> list[tuple[int, RequestOutput]] | None:
        """What there is; None where something of it ends a request."""
        found = []
        for output in self._ready:
            if isinstance(output, Exception) or output.finished:
                return None
            found.append((self._index[output.request_id], output))
        return found

    def _take(self) -> tuple[int, RequestOutput]:
        output = self._ready.popleft()
        if isinstance(output, Exception):
            self._open.clear()
            raise output
        if output.finished:
            self._open.discard(output.request_id)
        return self._index[output.request_id], output

    def close(self) -> None:
        """Abort what has not ended; its pages are free before the engine's next step."""
        unfinished, self._open = self._open, set()
        if unfinished:
            self._abort(sorted(unfinished))

    def fail(self, error: Exception) -> None:
        """Abort what has not ended; whoever reads gets `error` after the outputs that are there."""
        if self._open:
            self.put(error)
            self._abort(sorted(self._open))

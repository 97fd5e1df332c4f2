"""`RequestStreams`: checks and submits requests and delivers their outputs. `OutputStream`: the outputs for one caller."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

from dsjax.background import contained, note_failure
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import DEFAULT_OPTIONS, FinishReason, Request, RequestOptions
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import EngineObserver, StepStats
from dsjax.engine.text.input_processor import InputProcessor, PreparedRequest, Prompt
from dsjax.engine.text.output_processor import OutputProcessor
from dsjax.engine.text.outputs import EngineClosingError, EngineDeadError, RequestOutput

INLINE_LENGTH = 2048
"""Maximum number of characters or tokens prepared in the event loop; up to this length a thread costs more than it saves."""


class OutputStream:
    """The outputs of one or several prompts: an async iterator of (prompt's index, output), for one reader at a time.

    `close` ends unfinished requests; always call it, e.g. with `contextlib.closing`.
    completions: the core's requests, for logs. The engine's thread writes them while they run.
    """

    def __init__(
        self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None], completions: Sequence[Request] = ()
    ):
        self.completions = completions
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._abort = abort
        self._ready: deque[tuple[int, RequestOutput] | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[Iterable[tuple[int, RequestOutput]]], bool] | None = None

    @property
    def ended(self) -> bool:
        """Whether the reader has taken the last output of every prompt."""
        return not self._open

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output and wake the reader. Called in the event loop's thread, as `add` is."""
        if isinstance(output, Exception):
            self._ready.append(output)
            self._at_once = None
        else:
            self.add(output)
        self.tell()

    def add(self, output: RequestOutput) -> None:
        """Add an output without waking the reader; `tell` follows when all outputs of a step are added."""
        self._ready.append((self._index[output.request_id], output))
        if output.finished:
            self._at_once = None  # the reader itself must see an end

    def tell(self) -> None:
        """Hand the waiting reader the outputs, or wake it."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            if self._at_once is not None and self._at_once(self._ready):
                self._ready.clear()
            else:
                waiter.set_result(None)
        except Exception as error:  # the reader's own
            self._ready.clear()
            waiter.set_exception(error)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._open:
            raise StopAsyncIteration
        await self._wait()
        return self._take()

    async def ready(
        self, at_once: Callable[[Iterable[tuple[int, RequestOutput]]], bool] | None = None
    ) -> list[tuple[int, RequestOutput]]:
        """Wait for outputs and return all of them; a late reader gets several. Return an empty list at the end.

        Raises what `__anext__` would, after the outputs before it.

        at_once: called with new outputs while this method waits, if none of them ends a request. Returns whether it has consumed them; if
            so, the reader is not woken. Waking a task and its chain of coroutines costs more than writing a token's event.
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

    def _take(self) -> tuple[int, RequestOutput]:
        first = self._ready.popleft()
        if isinstance(first, Exception):
            self._open.clear()
            raise first
        _, output = first
        if output.finished:
            self._open.discard(output.request_id)
        return first

    def close(self) -> None:
        """Abort the unfinished requests. Their pages are released before the engine's next step."""
        unfinished, self._open = self._open, set()
        if unfinished:
            self._abort(sorted(unfinished))

    def fail(self, error: Exception) -> None:
        """Abort the unfinished requests. The reader gets `error` after the outputs that are ready."""
        if self._open:
            self.put(error)
            self._abort(sorted(self._open))


class RequestStreams(ABC):
    """Tracks requests in the event loop's thread. A subclass runs the engine in a thread or in another process.

    error: why the engine has failed; None while it works. closing: whether the engine refuses new requests. observers: called in the
    event loop's thread for every step and output. Add them before `start`.
    """

    def __init__(self, inputs: InputProcessor, outputs: OutputProcessor):
        self._inputs, self._outputs = inputs, outputs
        self.error: BaseException | None = None
        self.closing = False
        self.observers: list[EngineObserver] = []
        self._streams: dict[str, OutputStream] = {}

    @abstractmethod
    async def _admit(self, prepared: Sequence[PreparedRequest]) -> None:
        """Submit checked requests to the engine. Raise if it refuses them."""

    @abstractmethod
    def _end(self, completion_ids: Sequence[str]) -> None:
        """Stop computing these completions."""

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return self._outputs.num_unfinished

    async def submit(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> OutputStream:
        """Check all prompts, then queue them all.

        Raises:
            UserError: a prompt or a parameter is wrong; nothing is queued.
            EngineDeadError: the engine has failed.
            EngineClosingError: the engine accepts no more requests.
        """
        ids = [f"{request_id}-{index}" for index in range(len(prompts))] if len(prompts) > 1 else [request_id]
        # Draw seeds in the order of arrival; threads may prepare prompts in any order.
        seeds = [self._inputs.draw_seed() if params.seed is None else None for _ in prompts]
        # Long texts and grammars take long to prepare; both libraries release Python's lock meanwhile.
        short = params.structured_outputs is None and params.n * sum(map(_length, prompts)) <= INLINE_LENGTH
        return await self._submit(ids, lambda: (prompts, params), seeds, options, not short)

    async def submit_rendered(
        self,
        request_id: str,
        render: Callable[[], tuple[Sequence[Prompt], SamplingParams]],
        options: RequestOptions,
        *,
        in_thread: bool,
    ) -> OutputStream:
        """Queue the single prompt that `render` returns, with its parameters. Raises the errors of `submit` and of `render`.

        in_thread: whether to render and prepare in a worker thread, because it takes long.
        """
        return await self._submit([request_id], render, [self._inputs.draw_seed()], options, in_thread)

    async def _submit(
        self,
        ids: Sequence[str],
        make: Callable[[], tuple[Sequence[Prompt], SamplingParams]],
        seeds: Sequence[int | None],
        options: RequestOptions,
        in_thread: bool,
    ) -> OutputStream:
        arrival_time = time.monotonic()

        def prepare() -> list[PreparedRequest]:
            prompts, params = make()
            return [
                self._inputs.prepare(id_, prompt, params, options, arrival_time, seed)
                for id_, prompt, seed in zip(ids, prompts, seeds, strict=True)
            ]

        prepared = await asyncio.to_thread(prepare) if in_thread else prepare()
        if self.error is not None:
            raise EngineDeadError("the engine has failed") from self.error
        if self.closing:
            raise EngineClosingError("the server is shutting down")
        requests = [request for each in prepared for request in each.completions]
        stream = OutputStream(ids, self.abort, requests)
        for each in prepared:
            self._outputs.add(each)
            self._streams[each.request_id] = stream
        try:
            await self._admit(prepared)
        except Exception:  # refused: observers never hear of the request
            self._forget(ids)
            raise
        except BaseException:  # the caller was cancelled
            self.abort(ids)
            raise
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests whose caller has gone."""
        ended = self._forget(request_ids)
        for observer in self.observers if ended else ():
            with contained("observers", "It misses that requests have ended."):
                observer.on_ended(ended, FinishReason.ABORT)

    def _forget(self, request_ids: Sequence[str]) -> list[Request]:
        """Forget requests and stop computing them. Return their unfinished completions."""
        ended = [request for request_id in request_ids for request in self._outputs.unfinished(request_id)]
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._outputs.forget(request_id)
        self._end([request.request_id for request in ended])
        return ended

    def abort_all(self) -> None:
        """Refuse new requests from now on, and end all others; each stream gets an `EngineClosingError`."""
        self.closing = True
        for stream in set(self._streams.values()):
            stream.put(EngineClosingError("the server is shutting down"))
        self.abort(list(self._streams))

    def deliver(self, updates: list[Update], stats: StepStats | None) -> None:
        """Turn a step's updates into outputs, and pass them to streams and observers."""
        followed: list[Update] = []
        failed: dict[str, Exception] = {}
        outputs, to_abort = self._outputs.process(updates, failed, followed if self.observers else None)
        self._end(to_abort)
        for request_id, error in failed.items():
            note_failure("request text", error, "The request ends with an error.")
            if request_id in self._streams:
                self._streams[request_id].fail(error)
        told: dict[OutputStream, None] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.add(output)
                told[stream] = None
                if output.finished:
                    del self._streams[output.request_id]
        for stream in told:
            stream.tell()
        stopped = [update.request for update in followed if update.request.request_id in to_abort] if to_abort else []
        for observer in self.observers:
            try:
                if followed:
                    observer.on_updates(followed)
                if stopped:
                    observer.on_ended(stopped, FinishReason.STOP)
                if stats is not None:
                    observer.on_step(stats)
                if outputs:
                    observer.on_outputs(outputs)
            except Exception as error:
                note_failure("observers", error, "It misses what one step did.")

    def fail_requests(self, error: BaseException) -> None:
        """Give every stream an `EngineDeadError`."""
        self.error = error
        for stream in set(self._streams.values()):
            stream.put(EngineDeadError("the engine has failed"))
        for request_id in list(self._streams):
            self._outputs.forget(request_id)
        self._streams.clear()


def _length(prompt: Prompt) -> int:
    """Return the number of characters or tokens."""
    whole = next(iter(prompt.values()), "") if isinstance(prompt, Mapping) else prompt
    return len(whole) if isinstance(whole, Sized) else 0

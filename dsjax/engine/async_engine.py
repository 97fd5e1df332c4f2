"""`AsyncEngine`: the engine in a thread of its own, its outputs in asyncio."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from dsjax.engine.engine import LLMEngine
from dsjax.engine.input_processor import PreparedRequest, Prompt
from dsjax.engine.outputs import RequestOutput
from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Update

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine's thread has failed; no request can be served any more."""


class EngineClosingError(RuntimeError):
    """The engine is closing, and this request was ended before it was done."""


class OutputStream:
    """The outputs of one or several prompts, as they come: an async iterator of (prompt's index, output).

    Ends after the last output. `close` ends what is unfinished; call it in any case, e.g. with `contextlib.closing`.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]):
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._abort = abort
        self._ready: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, output: RequestOutput | Exception) -> None:
        """Called by the engine, in the event loop's thread."""
        self._ready.put_nowait(output)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._open:
            raise StopAsyncIteration
        output = await self._ready.get()
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


class AsyncEngine:
    """Runs an `LLMEngine`'s core in one dedicated thread; makes text in the event loop, while the device computes.

    The thread takes commands (add, abort, close) from a queue between steps and hands each step's updates to the event
    loop in one call. When it fails, every stream gets the error and `on_death` is called: nothing waits for ever.
    """

    def __init__(self, engine: LLMEngine):
        self.tokenizer = engine.tokenizer
        self.error: BaseException | None = None
        self.on_death: Callable[[], None] | None = None
        self._closing = False
        self._core = engine.core
        self._inputs = engine.inputs
        self._outputs = engine.outputs
        self._streams: dict[str, OutputStream] = {}
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._outputs.num_unfinished

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Call it in the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="dsjax-engine", daemon=True)
        self._thread.start()

    async def submit(
        self, request_id: str, prompts: Sequence[Prompt], params: SamplingParams, *, priority: int = 0
    ) -> OutputStream:
        """Check all prompts, then queue them all.

        Raises:
            UserError: one of them cannot be; none is queued.
            EngineDeadError: the engine has failed.
            EngineClosingError: the engine takes no more requests.
        """
        arrival_time = time.monotonic()
        ids = [f"{request_id}-{index}" for index in range(len(prompts))] if len(prompts) > 1 else [request_id]

        def prepare() -> list[PreparedRequest]:
            return [
                self._inputs.prepare(id_, prompt, params, arrival_time=arrival_time, priority=priority)
                for id_, prompt in zip(ids, prompts, strict=True)
            ]

        prepared = await asyncio.to_thread(
            prepare
        )  # a long text takes long to tokenise, and the library lets others run
        if self.error is not None:
            raise EngineDeadError("the engine has failed") from self.error
        if self._closing:
            raise EngineClosingError("the server is shutting down")
        stream = OutputStream(ids, self.abort)
        for each in prepared:
            self._outputs.add(each)
            self._streams[each.request_id] = stream
        self._commands.put(lambda: self._add([request for each in prepared for request in each.completions]))
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for any more."""
        completions = [id_ for request_id in request_ids for id_ in self._outputs.completion_ids(request_id)]
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._outputs.forget(request_id)
        self._abort_completions(completions)

    def abort_all(self) -> None:
        """End every request; each stream gets an `EngineClosingError`."""
        for stream in set(self._streams.values()):
            stream.put(EngineClosingError("the server is shutting down"))
        self.abort(list(self._streams))

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End all requests and the thread. After `timeout` seconds in a step that hangs, the thread is left behind."""
        self._closing = True
        self.abort_all()
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout)

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while True:
                while not self._commands.empty() or not self._core.has_unfinished:
                    command = self._commands.get()
                    if command is None:
                        self._core.runner.shutdown()
                        return
                    command()
                updates = self._core.step()
                if updates:
                    self._loop.call_soon_threadsafe(self._deliver, updates)
        except BaseException as error:
            logger.exception("the engine's thread has failed")
            self._loop.call_soon_threadsafe(self._die, error)

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._core.add(request)

    # In the event loop's thread.

    def _abort_completions(self, completion_ids: Sequence[str]) -> None:
        for completion_id in completion_ids:
            self._commands.put(lambda completion_id=completion_id: self._core.abort(completion_id))

    def _deliver(self, updates: list[Update]) -> None:
        outputs, to_abort = self._outputs.process(updates)
        self._abort_completions(to_abort)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]

    def _die(self, error: BaseException) -> None:
        self.error = error
        for stream in set(self._streams.values()):
            stream.put(EngineDeadError("the engine has failed"))
        for request_id in list(self._streams):
            self._outputs.forget(request_id)
        self._streams.clear()
        if self.on_death is not None:
            self.on_death()

"""`OutputStream`: what a submitted request gives, as it comes, and how it can end early."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from dsjax.engine.outputs import RequestOutput
from dsjax.engine.request import Request


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

    def put(self, output: RequestOutput | Exception) -> None:
        """Called by the engine, in the event loop's thread."""
        self._ready.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._open:
            raise StopAsyncIteration
        await self._wait()
        return self._take()

    async def ready(self) -> list[tuple[int, RequestOutput]]:
        """Wait, then give everything that is there: a reader that is late gets several outputs at once. Empty at the end.

        Raises what `__anext__` would, after the outputs before it.
        """
        if not self._open:
            return []
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

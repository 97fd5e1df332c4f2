"""Server-sent events, and clients that go away."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dsjax.engine.async_engine import OutputStream
from dsjax.engine.outputs import RequestOutput
from dsjax.serve.errors import to_api_error
from dsjax.serve.json_bodies import to_json
from dsjax.serve.logging_requests import CONNECTION_SEND

Answer = TypeVar("Answer")


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads the answer."""


class StreamedAnswer(Protocol):
    """An answer that can be given in chunks, each a JSON body."""

    def first_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Those before any output."""

    def chunks_of(self, prompt_index: int, output: RequestOutput) -> Iterable[Mapping[str, Any]]:
        """Those of one output.

        Raises:
            ApiError: a completion failed.
        """

    def last_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Those after the last output."""


class EventStream(StreamingResponse):
    """An answer's chunks as server-sent events, then `[DONE]`; an error in between is an `error` event before it.

    What is ready at the same time is written at once, and past the middlewares, which look at an answer's start and end alone:
    hundreds of streams have an event in every step. However the response ends, also when the client left before its first
    byte, `resources` are closed.
    """

    _END = b"data: [DONE]\n\n"

    def __init__(
        self,
        answer: StreamedAnswer,
        outputs: OutputStream,
        resources: AbstractContextManager[Any],
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-cache", **(headers or {})})
        self._answer = answer
        self._outputs = outputs
        self._resources = resources
        self._send_events: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        self._send_events = scope["state"].get(CONNECTION_SEND, send)
        with self._resources:
            watch = asyncio.ensure_future(self._watch(receive))
            try:
                await self.stream_response(send)
            finally:
                watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        await _disconnected(receive)
        self._outputs.fail(ClientGoneError())

    async def stream_response(self, send: Send) -> None:
        """Send the head, the events as they come, and the end; nothing more once the client has left."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._send_all(self._answer.first_chunks())
            while outputs := await self._outputs.ready():
                await self._send_each(outputs)
            await self._send_all(self._answer.last_chunks())
        except ClientGoneError:
            return
        except Exception as error:  # the status line is sent; an event is the only way left to tell
            await self._send_all([self._failure(error)])
        await send({"type": "http.response.body", "body": self._END, "more_body": False})

    async def _send_each(self, outputs: list[tuple[int, RequestOutput]]) -> None:
        """The events of some outputs; those before one that failed are sent in any case."""
        chunks: list[Mapping[str, Any]] = []
        try:
            for index, output in outputs:
                chunks.extend(self._answer.chunks_of(index, output))
        finally:
            await self._send_all(chunks)

    async def _send_all(self, chunks: Iterable[Mapping[str, Any]]) -> None:
        events = b"".join([self._event(chunk) for chunk in chunks])
        if events:
            await self._send_events({"type": "http.response.body", "body": events, "more_body": True})

    def _event(self, chunk: Mapping[str, Any]) -> bytes:
        return b"data: " + to_json(chunk) + b"\n\n"

    def _failure(self, error: Exception) -> Mapping[str, Any]:
        """What tells of an error after the head has been sent."""
        return to_api_error(error).body()


async def unless_client_leaves(request: Request, work: Awaitable[Answer]) -> Answer:
    """Wait for an answer, but no longer than the client does.

    Raises:
        ClientGoneError: it has closed the connection; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

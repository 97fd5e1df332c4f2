"""Server-sent events, and clients that go away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dsjax.serve.errors import to_api_error
from dsjax.serve.json_bodies import to_json

Answer = TypeVar("Answer")


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads the answer."""


class EventStream(StreamingResponse):
    """Chunks as server-sent events, then `[DONE]`; an error in between is an `error` event before it.

    However the response ends, also when the client left before its first byte, `resources` are closed.
    """

    def __init__(self, chunks: AsyncIterator[Mapping[str, Any]], resources: AbstractContextManager[Any]):
        super().__init__(_events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        with self._resources:
            await super().__call__(scope, receive, send)


async def _events(chunks: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:  # the status line is sent; an event is the only way left to tell
        yield _event(to_api_error(error).body())
    yield b"data: [DONE]\n\n"


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


async def unless_client_leaves(request: Request, work: Awaitable[Answer]) -> Answer:
    """Wait for an answer, but no longer than the client does.

    Raises:
        ClientGoneError: it has closed the connection; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

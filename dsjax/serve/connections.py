"""What comes and goes over uvicorn's HTTP connections: heads within bounds in; JSON and server-sent events out.

Everything that reaches into uvicorn's own modules is here: `BoundedConnection` and `BodyWriter`. It was checked with uvicorn 0.54, and
pyproject.toml bounds the version.
"""

import asyncio
import json
import logging
import resource
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import httptools
import pydantic_core
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dsjax.background import contained, note_failure
from dsjax.engine.request_streams import OutputStream
from dsjax.engine.text.outputs import RequestOutput
from dsjax.serve.errors import ApiError, anthropic_body, to_api_error

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

CONNECTION_SEND = "connection_send"
"""Key in a scope's state of the connection's own `send`, which no middleware sees."""
MAX_HEAD_BYTES = 64 * 1024
_UNWATCHED = "A request is computed to its end, whether or not its client is there."
PROBES = frozenset({b"/health", b"/ready"})
"""Paths that are answered on connections beyond the limit too."""
_MOST_PROBES = 64
"""Connections beyond the limit that are read, because they may ask whether the server lives."""
_PROBE_SECONDS = 5.0
"""Time for the head of a request on one of those."""
_OTHER_FILES = 256 + _MOST_PROBES
"""Files that a process has open besides its clients' connections, with room to spare."""
_RETRY_SECONDS = 2
_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


def to_json(body: Any) -> bytes:
    """Write compact JSON. A lone surrogate, which a client's escape can smuggle into an error message, becomes `?`."""
    try:
        return pydantic_core.to_json(body)
    except ValueError:  # it refuses lone surrogates
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event_of(chunk: Mapping[str, Any]) -> bytes:
    """Write a chunk as a server-sent event without a name."""
    return b"data: %b\n\n" % to_json(chunk)


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the body's bytes."""
        return to_json(content)


def note_error(scope: Scope, error: ApiError) -> None:
    """Leave an error's code, or its type where it has no code, in the scope's state, where `RequestLog` reads it."""
    scope.setdefault("state", {})["error"] = error.code or error.type


def error_response(scope: Scope, error: ApiError, *, close: bool = False) -> JsonResponse:
    """Answer a request with an error; `close` ends the connection after it, because the rest of the request will not be read."""
    note_error(scope, error)
    headers = {**(error.headers or {}), **({"Connection": "close"} if close else {})}
    body = anthropic_body(error) if scope["path"].startswith("/v1/messages") else error.body()
    return JsonResponse(body, status_code=error.status, headers=headers)


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads the answer."""


class StreamedAnswer(Protocol):
    """An answer that can be given in chunks, each a JSON body."""

    def first_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Return the chunks that are sent before any output."""

    def chunks_of(self, prompt_index: int, output: RequestOutput) -> Iterable[Mapping[str, Any] | bytes]:
        """Return the chunks of one output, those that are bytes as events already.

        Raises:
            ApiError: a completion failed.
        """

    def last_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Return the chunks that are sent after the last output."""


class BodyWriter:
    """Writes pieces of a streamed body to uvicorn's connection, byte for byte as its `send` does, which is a coroutine."""

    _STATE = ("chunked_encoding", "flow", "disconnected", "transport")

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle, self._flow = cycle, cycle.flow
        self._write_bytes = cycle.transport.write

    @classmethod
    def behind(cls, send: Send) -> "BodyWriter | None":
        """Make a writer of a connection's own `send`; None for another one, or if this version of uvicorn keeps its state elsewhere."""
        cycle = getattr(send, "__self__", None)
        known = isinstance(cycle, RequestResponseCycle) and all(hasattr(cycle, name) for name in cls._STATE)
        return cls(cycle) if known else None

    @property
    def is_ready(self) -> bool:
        """Whether `send` would not wait for the client to read what was written before."""
        return self._cycle.chunked_encoding is True and not self._flow.write_paused

    def write(self, body: bytes) -> None:
        """Write a piece, which is not empty; nothing once the client has left."""
        if not self._cycle.disconnected:
            self._write_bytes(b"%x\r\n%b\r\n" % (len(body), body))


class EventStream(StreamingResponse):
    """An answer's chunks as server-sent events, then `[DONE]`; an error in between is an `error` event before it.

    What is ready at the same time is written at once, and past the middlewares, which look at an answer's start and end alone: hundreds
    of streams have an event in every step. For as long as the client keeps up that happens without waking this answer's task.
    However the response ends, also when the client left before its first byte, `resources` are closed.
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
        self._scope: Scope | None = None
        self._send_events: Send | None = None
        self._writer: BodyWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        self._scope = scope
        self._send_events = scope["state"].get(CONNECTION_SEND, send)
        self._writer = BodyWriter.behind(self._send_events)
        with self._resources:
            watch = asyncio.ensure_future(self._watch(receive))  # it contains its failures
            try:
                await self._send_answer(send)
            finally:
                watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        if await _disconnected(receive):
            with contained("client watch", _UNWATCHED):
                self._outputs.fail(ClientGoneError())

    async def _send_answer(self, send: Send) -> None:
        """Send the head, the events as they come, and the end; nothing more once the client has left."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._send_all(self._answer.first_chunks())
            while outputs := await self._outputs.ready(self._write_each):
                await self._send_each(outputs)
            last = self._events(self._answer.last_chunks())
        except ClientGoneError:
            return
        except Exception as error:  # the status line is sent; an event is the only way left to tell
            answer = to_api_error(error)
            note_error(self._scope, answer)
            last = self._events([self._failure(answer)])
        await send({"type": "http.response.body", "body": last + self._END, "more_body": False})

    async def _send_each(self, outputs: list[tuple[int, RequestOutput]]) -> None:
        """Send the events of some outputs; those before one that failed are sent in any case."""
        chunks: list[Mapping[str, Any] | bytes] = []
        try:
            for index, output in outputs:
                chunks.extend(self._answer.chunks_of(index, output))
        finally:
            await self._send_all(chunks)

    def _write_each(self, outputs: list[tuple[int, RequestOutput]]) -> bool:
        """Send the events of some outputs without waiting; False, and nothing done, where that cannot be."""
        writer = self._writer
        if writer is None or not writer.is_ready:
            return False
        chunks: list[Mapping[str, Any] | bytes] = []
        try:
            for index, output in outputs:
                chunks.extend(self._answer.chunks_of(index, output))
        finally:
            if events := self._events(chunks):
                writer.write(events)
        return True

    async def _send_all(self, chunks: Iterable[Mapping[str, Any] | bytes]) -> None:
        if events := self._events(chunks):
            await self._send_events({"type": "http.response.body", "body": events, "more_body": True})

    def _events(self, chunks: Iterable[Mapping[str, Any] | bytes]) -> bytes:
        return b"".join([chunk if isinstance(chunk, bytes) else self._event(chunk) for chunk in chunks])

    def _event(self, chunk: Mapping[str, Any]) -> bytes:
        return event_of(chunk)

    def _failure(self, error: ApiError) -> Mapping[str, Any]:
        """Make the chunk that tells of an error after the head has been sent."""
        return error.body()


async def unless_client_leaves(request: Request, work: Awaitable[Answer]) -> Answer:
    """Wait for an answer, but no longer than the client does.

    Raises:
        ClientGoneError: it has closed the connection; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and watch.result():
            raise ClientGoneError
        await asyncio.wait({task})
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> bool:
    """Wait until the client has left, and say so; False, and at once, where that cannot be seen."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
        return True
    except Exception as error:
        note_failure("client watch", error, _UNWATCHED)
        return False


class _HeadTooLargeError(Exception):
    """Raised in the parser, which answers 400 and closes."""


class _TooManyConnectionsError(Exception):
    """Raised in the parser, which answers 429 and closes."""


def too_many_connections() -> ApiError:
    """Make the answer for a connection beyond the limit."""
    reason = "this server has as many connections as it takes; try again later"
    return ApiError(429, reason, type="rate_limit_error", code="too_many_connections", retry_after=_RETRY_SECONDS)


def affordable_connections(wanted: int) -> int:
    """Return how many connections a process can have, `wanted` at most; 0 where that is to have no limit.

    The process's own limit of open files is raised as far as the system lets it. Some are kept for the engine, and for connections that
    ask whether the server lives.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and (soft < needed or not wanted):
        raised = hard if hard == resource.RLIM_INFINITY or not wanted else min(hard, needed)
        if hard == resource.RLIM_INFINITY:
            raised = max(needed, soft)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if not wanted or soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    fitting = max(soft - _OTHER_FILES, soft // 4, 1)
    logger.warning(
        "--max-connections is %d, and this process may have %d files open, so that it takes %d connections; raise its limit (ulimit -n)",
        wanted,
        soft,
        fitting,
    )
    return fitting


def bounded_connections(
    head_timeout: float, most: int = 0, refuse: Callable[[], ApiError] = too_many_connections
) -> type[HttpToolsProtocol]:
    """Make a protocol class for uvicorn, which makes one object a connection.

    httptools, because of its price: h11 checks every event of every stream against its state machines.

    Args:
        most: open connections of a server; 0: no limit.
        refuse: makes the answer for a connection beyond them.
    """

    class BoundedConnection(HttpToolsProtocol):
        """Closes a connection whose next request has begun to come, or whose first has not, for too long.

        A connection beyond the limit has its request's head read, and is closed with a 429 unless it asks whether the server lives or
        is ready. So many of those may be open at once; what comes after them is closed unread.

        A head of more than `MAX_HEAD_BYTES` is refused before it is complete; headers that follow a chunked body count too. An
        offer to speak another protocol is passed over, as HTTP allows: the parser alone would end such a request at its head.
        """

        _head_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0
        _is_beyond = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._is_beyond = 0 < most < len(self.connections)
            if self._is_beyond and len(self.connections) > most + _MOST_PROBES:
                self._send_refusal(refuse())
                return
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._head_timer is not None:  # the parser tells of a header when it is whole, which it may never be
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.send_400_response("the request's head is too large")
                    return
                self._head_bytes += len(data)
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                self._stay(data[stopped.args[0] :])
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _TooManyConnectionsError):
                    self._send_refusal(refuse())
                else:
                    self.send_400_response("this is not an HTTP/1.1 request that can be read")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0
            self._watch_head()

        def on_header(self, name: bytes, value: bytes) -> None:
            self._header_bytes += len(name) + len(value)
            if self._header_bytes > MAX_HEAD_BYTES:
                raise _HeadTooLargeError
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if not self.parser.should_upgrade():
                self._unwatch_head()
                self._is_beyond = self._is_beyond and len(self.connections) > most
                if self._is_beyond and self.url.partition(b"?")[0] not in PROBES:
                    raise _TooManyConnectionsError
                super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                super().on_message_complete()

        def _stay(self, rest: bytes) -> None:
            """Read the request once more, without the offer to speak another protocol."""
            method = self.parser.get_method()
            if method == b"CONNECT":
                self.send_400_response("CONNECT asks for a proxy, which this server is not")
                return
            kept = [b"%s: %s\r\n" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(b"%s %s HTTP/1.1\r\n%s\r\n" % (method, self.url, b"".join(kept)) + rest)

        def send_400_response(self, msg: str) -> None:
            self._send_refusal(ApiError(400, msg))

        def _send_refusal(self, error: ApiError) -> None:
            """Answer with an error past the application, and close."""
            body = to_json(error.body())
            lines = [b"%b: %b\r\n" % (k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + b"".join(lines) + head + body)
            self.transport.close()

        def _watch_head(self) -> None:
            """The timer runs while a head is on its way; what has come is no reason to start it again."""
            if self._head_timer is None:
                self._head_bytes = 0
                seconds = min(head_timeout, _PROBE_SECONDS) if self._is_beyond else head_timeout
                self._head_timer = self.loop.call_later(seconds, self._close_late)

        def _unwatch_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _close_late(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedConnection

"""HTTP connections: limits on incoming data, and answers as JSON or server-sent events.

Only this module uses uvicorn's internals (`BoundedConnection`, `BodyWriter`). Tested with uvicorn 0.54; pyproject.toml bounds the
version.
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

from dsjax.background import contained
from dsjax.engine.request_streams import OutputStream
from dsjax.engine.text.outputs import RequestOutput
from dsjax.serve.errors import ApiError, anthropic_body, to_api_error

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

CONNECTION_SEND = "connection_send"
"""Key in a scope's state for the connection's own `send`, which bypasses the middlewares."""
MAX_HEAD_BYTES = 64 * 1024
_UNWATCHED = "A request is computed to its end, whether or not its client is there."
PROBES = frozenset({b"/health", b"/ready"})
"""Paths that are answered even on connections beyond the limit."""
_MOST_PROBES = 64
"""Most connections beyond the limit on which a request is still read, because it may be for one of `PROBES`."""
_PROBE_SECONDS = 5.0
"""Timeout for the head of a request on such a connection."""
_OTHER_FILES = 256 + _MOST_PROBES
"""Estimated upper bound on a process's open files other than client connections."""
_RETRY_SECONDS = 2
_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


def to_json(body: Any) -> bytes:
    """Return compact JSON. A lone surrogate, which an error message may quote from a request, becomes `?`."""
    try:
        return pydantic_core.to_json(body)
    except ValueError:  # pydantic_core refuses lone surrogates
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encode_event(chunk: Mapping[str, Any]) -> bytes:
    """Return a chunk as an unnamed server-sent event."""
    return b"data: %b\n\n" % to_json(chunk)


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return to_json(content)


def note_error(scope: Scope, error: ApiError) -> None:
    """Store an error's code, or else its type, in the scope's state for `RequestLog`."""
    scope.setdefault("state", {})["error"] = error.code or error.type


def error_response(scope: Scope, error: ApiError, *, close: bool = False) -> JsonResponse:
    """Return the answer for an error. close: end the connection, because the rest of the request will not be read."""
    note_error(scope, error)
    headers = {**(error.headers or {}), **({"Connection": "close"} if close else {})}
    body = anthropic_body(error) if scope["path"].startswith("/v1/messages") else error.body()
    return JsonResponse(body, status_code=error.status, headers=headers)


class ClientGoneError(Exception):
    """The client has closed its connection."""


class StreamedAnswer(Protocol):
    """An answer that can be streamed as chunks, each a JSON body."""

    def first_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Return the chunks that are sent before any output."""

    def chunks_of(self, prompt_index: int, output: RequestOutput) -> Iterable[Mapping[str, Any] | bytes]:
        """Return the chunks of one output; chunks in bytes are complete server-sent events.

        Raises:
            ApiError: a completion failed.
        """

    def last_chunks(self) -> Iterable[Mapping[str, Any]]:
        """Return the chunks that are sent after the last output."""


class BodyWriter:
    """Writes parts of a streamed body to uvicorn's connection: the same bytes as uvicorn's `send`, but without awaiting."""

    _STATE = ("chunked_encoding", "flow", "disconnected", "transport")

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._flow = cycle.flow
        self._write_bytes = cycle.transport.write

    @classmethod
    def behind(cls, send: Send) -> "BodyWriter | None":
        """Return a writer for a connection's own `send`; None for any other `send`, or if uvicorn's internals differ."""
        cycle = getattr(send, "__self__", None)
        has_state = isinstance(cycle, RequestResponseCycle) and all(hasattr(cycle, name) for name in cls._STATE)
        return cls(cycle) if has_state else None

    @property
    def is_ready(self) -> bool:
        """Whether `send` would write at once, without waiting for the client to read earlier parts."""
        return self._cycle.chunked_encoding is True and not self._flow.write_paused

    def write(self, body: bytes) -> None:
        """Write a part, which must not be empty; do nothing once the client has left."""
        if not self._cycle.disconnected:
            self._write_bytes(b"%x\r\n%b\r\n" % (len(body), body))


class EventStream(StreamingResponse):
    """An answer's chunks as server-sent events, followed by `[DONE]`. An error is sent as an event before `[DONE]`.

    Hundreds of streams may have an event in every step. Events that are ready together are therefore written together, bypassing the
    middlewares, which only look at an answer's start and end. While the client keeps up, this answer's task is not woken. `resources` are
    closed however the response ends, even if the client left before its first byte.
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
            watch = asyncio.ensure_future(self._watch(receive))  # handles its own failures
            try:
                await self._send_answer(send)
            finally:
                watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        if await _disconnected(receive):
            with contained("client watch", _UNWATCHED):
                self._outputs.fail(ClientGoneError())

    async def _send_answer(self, send: Send) -> None:
        """Send the head, the events and the end; stop once the client has left. The last outputs' events go with the end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        unsent = b""
        try:
            unsent = self._events(self._answer.first_chunks())
            while not self._outputs.ended:
                if unsent:
                    await self._send_events({"type": "http.response.body", "body": unsent, "more_body": True})
                unsent = b""
                for index, output in await self._outputs.ready(self._write_each):
                    unsent += self._events(self._answer.chunks_of(index, output))
            unsent += self._events(self._answer.last_chunks())
        except ClientGoneError:
            return
        except Exception as error:  # the status is already sent, so report the error as an event
            answer = to_api_error(error)
            note_error(self._scope, answer)
            unsent += self._events([self._failure(answer)])
        await send({"type": "http.response.body", "body": unsent + self._END, "more_body": False})

    def _write_each(self, outputs: Iterable[tuple[int, RequestOutput]]) -> bool:
        """Send the events of these outputs without waiting. Return False, having sent nothing, if the writer is not ready."""
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

    def _events(self, chunks: Iterable[Mapping[str, Any] | bytes]) -> bytes:
        return b"".join([chunk if isinstance(chunk, bytes) else self._event(chunk) for chunk in chunks])

    def _event(self, chunk: Mapping[str, Any]) -> bytes:
        return encode_event(chunk)

    def _failure(self, error: ApiError) -> Mapping[str, Any]:
        """Return the chunk for an error after the head has been sent."""
        return error.body()


async def cancel_if_client_leaves(request: Request, work: Awaitable[Answer]) -> Answer:
    """Wait for an answer while the client stays connected.

    Raises:
        ClientGoneError: the client has closed the connection; `work` is cancelled.
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
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> bool:
    """Return True once the client has left; False if watching fails."""
    with contained("client watch", _UNWATCHED):
        while (await receive())["type"] != "http.disconnect":
            pass
        return True
    return False


class _HeadTooLargeError(Exception):
    """Raised in a parser callback; the client gets a 400 and the connection is closed."""


class _TooManyConnectionsError(Exception):
    """Raised in a parser callback; the client gets a 429 and the connection is closed."""


def too_many_connections() -> ApiError:
    """Return the error for a connection beyond the limit."""
    reason = "this server has as many connections as it takes; try again later"
    return ApiError(429, reason, type="rate_limit_error", code="too_many_connections", retry_after=_RETRY_SECONDS)


def affordable_connections(connections: int) -> int:
    """Return the number of connections that this process can accept, at most `connections`; 0: no limit.

    Raises the process's limit on open files as far as the system allows, and reserves some files for the engine and for probes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and (soft < needed or not connections):
        raised = hard if hard == resource.RLIM_INFINITY or not connections else min(hard, needed)
        if hard == resource.RLIM_INFINITY:
            raised = max(needed, soft)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if not connections or soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    fitting = max(soft - _OTHER_FILES, soft // 4, 1)
    logger.warning(
        "--max-connections is %d, and this process may have %d files open, so that it takes %d connections; raise its limit (ulimit -n)",
        connections,
        soft,
        fitting,
    )
    return fitting


def bounded_connections(
    head_timeout: float, most: int = 0, refuse: Callable[[], ApiError] = too_many_connections
) -> type[HttpToolsProtocol]:
    """Return a protocol class for uvicorn, which creates one object for each connection.

    Uses httptools, which is faster than h11: h11 checks every event of every stream against its state machines.

    Args:
        most: most open connections; 0: no limit.
        refuse: returns the error for a connection beyond the limit.
    """

    class BoundedConnection(HttpToolsProtocol):
        """Closes a connection if a request head takes over `head_timeout`, from connecting or, for later requests, its first byte.

        On connections beyond the limit, only the request head is read, and the answer is 429 unless the path is one of `PROBES`.
        At most `_MOST_PROBES` such connections are open at once; further ones are refused unread.

        A head larger than `MAX_HEAD_BYTES`, including a chunked body's trailers, is refused before it is complete. A protocol upgrade
        request is ignored, as HTTP allows; the parser alone would end such a request at its head.
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
            if self._head_timer is not None:  # the parser reports a header only when it is complete
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
            """Parse the request again without its upgrade headers."""
            method = self.parser.get_method()
            if method == b"CONNECT":
                self.send_400_response("CONNECT asks for a proxy, which this server is not")
                return
            headers = [b"%s: %s\r\n" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(b"%s %s HTTP/1.1\r\n%s\r\n" % (method, self.url, b"".join(headers)) + rest)

        def send_400_response(self, msg: str) -> None:
            self._send_refusal(ApiError(400, msg))

        def _send_refusal(self, error: ApiError) -> None:
            """Send an error, bypassing the application, and close the connection."""
            body = to_json(error.body())
            lines = [b"%b: %b\r\n" % (k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + b"".join(lines) + head + body)
            self.transport.close()

        def _watch_head(self) -> None:
            """Start the timer for a request head unless it is running; further bytes do not restart it."""
            if self._head_timer is None:
                self._head_bytes = 0
                seconds = min(head_timeout, _PROBE_SECONDS) if self._is_beyond else head_timeout
                self._head_timer = self.loop.call_later(seconds, self.transport.close)

        def _unwatch_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return BoundedConnection

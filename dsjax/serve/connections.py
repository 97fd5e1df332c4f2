"""`BoundedConnection`: uvicorn's HTTP connection, which bounds a request's head in bytes and in seconds."""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dsjax.serve.bodies import to_json
from dsjax.serve.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


class _HeadTooLargeError(Exception):
    """Raised in the parser, which answers 400 and closes."""


def bounded_connections(head_timeout: float) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn, which makes one object a connection.

    httptools, because of its price: h11 checks every event of every stream against its state machines.
    """

    class BoundedConnection(HttpToolsProtocol):
        """Closes a connection whose next request has begun to come, or whose first has not, for too long.

        A head of more than `MAX_HEAD_BYTES` is refused before it is complete; headers that follow a chunked body count too. An
        offer to speak another protocol is passed over, as HTTP allows: the parser alone would end such a request at its head.
        """

        _head_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
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
            except httptools.HttpParserError:
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
            body = to_json(ApiError(400, msg).body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[400] + head + body)
            self.transport.close()

        def _watch_head(self) -> None:
            """The timer runs while a head is on its way; what has come is no reason to start it again."""
            if self._head_timer is None:
                self._head_bytes = 0
                self._head_timer = self.loop.call_later(head_timeout, self._close_late)

        def _unwatch_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _close_late(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedConnection

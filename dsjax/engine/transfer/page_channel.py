"""`Channel`, `Listener` and `connected`: connections between processes that hand pages over, and the greeting with which each begins."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from dsjax.engine.transfer.page_transfer import (
    Ask,
    Cancel,
    Failed,
    Forget,
    Granted,
    Offer,
    Release,
    Take,
    Taken,
    UnderWay,
)
from dsjax.errors import UserError
from dsjax.hosts.wire import keep_alive, receive_frame, send_frame, split_address

VERSION = 3
"""Of the messages. It changes whenever an older side could misunderstand a newer one."""

_log = logging.getLogger(__name__)
_MOST_BYTES = 64 << 20
_CONNECT_SECONDS = 5.0
_GONE_SECONDS = 30
"""After which a host that has gone without a word, as when it loses power, is known to be gone."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Decode comes. space: everything that a page's values depend on beside its tokens; both sides must have the same."""

    version: int
    space: dict[str, Any]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Prefill's answer. carrier: the address that granted parcels are pulled from. error: why there is no connection."""

    carrier: str = ""
    error: str = ""


_decoder = msgspec.msgpack.Decoder(
    Hello | Welcome | Take | Granted | Taken | Ask | Cancel | Release | Forget | Offer | UnderWay | Failed
)


class Channel:
    """Messages over a connection: whoever sends does not wait, and what comes is handed over in a thread."""

    def __init__(self, connection: socket.socket, receive: Callable[[Any], None], closed: Callable[[], None]):
        keep_alive(connection, _GONE_SECONDS)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # the same where something was sent and is not acknowledged
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_SECONDS * 1000)
        self._connection, self._receive, self._closed = connection, receive, closed
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to read and write."""
        for run, name in ((self._read, "read"), (self._write, "write")):
            threading.Thread(target=run, name=f"dsjax-transfer-{name}", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._queue.put(message)

    def close(self) -> None:
        """End the connection."""
        self._queue.put(None)
        with contextlib.suppress(OSError):  # it has gone
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                write(self._connection, message)
        except OSError:  # the reader finds out too
            pass

    def _read(self) -> None:
        try:
            while True:
                self._receive(read(self._connection))
        except (OSError, EOFError):
            pass
        except msgspec.MsgspecError as error:
            _log.warning("A connection for pages was closed, because what came over it is no message: %s", error)
        self.close()
        self._closed()


class Listener:
    """An address at which processes of the other side greet this one, and connections to those that may come.

    Args:
        serve: makes what stands behind a connection, whose `channel` is started then. space: as of `Hello`. carrier: as of `Welcome`.
        port: 0: a free one.

    Attributes:
        address: `HOST:PORT`.
    """

    def __init__(
        self, serve: Callable[[socket.socket], Any], space: dict[str, Any], host: str, port: int = 0, carrier: str = ""
    ):
        self._serve, self._space, self._carrier = serve, plain(space), carrier
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise UserError(f"the address {host}:{port} for pages cannot be used: {error.strerror or error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._clients: set[Any] = set()
        threading.Thread(target=self._accept, name="dsjax-transfer", daemon=True).start()

    def forget(self, client: Any) -> None:
        """A connection has ended."""
        self._clients.discard(client)

    def close(self) -> None:
        """End the connections, and let nobody come any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # to close it alone would wake no thread that waits in `accept`
        self._listener.close()
        for client in list(self._clients):
            client.channel.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(connection,), name="dsjax-transfer", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_CONNECT_SECONDS)
            error = self._objection(read(connection))
            write(connection, Welcome(self._carrier, error))
            if error:
                connection.close()
                return
            connection.settimeout(None)
        except (OSError, EOFError, msgspec.MsgspecError):
            connection.close()
            return
        client = self._serve(connection)
        self._clients.add(client)
        client.channel.start()

    def _objection(self, hello: Any) -> str:
        if not isinstance(hello, Hello) or hello.version != VERSION:
            return f"the other side speaks another version of these messages than {VERSION}; use the same dsjax on both sides"
        different = sorted(
            k for k in self._space.keys() | hello.space.keys() if self._space.get(k) != hello.space.get(k)
        )
        if different:
            found = ", ".join(
                f"{key} ({self._space.get(key)!r} here, {hello.space.get(key)!r} there)" for key in different
            )
            return f"pages of the two sides differ in {found}; start both with the same model and options"
        return ""


def connected(address: str, space: dict[str, Any]) -> tuple[socket.socket, str]:
    """A connection to a listener, greeted, and the address that granted parcels are pulled from.

    Raises:
        OSError, EOFError, msgspec.MsgspecError: it cannot be reached, or is something else. UserError: the address is none, or it refuses.
    """
    connection = socket.create_connection(split_address(address), _CONNECT_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        write(connection, Hello(VERSION, plain(space)))
        answer = read(connection)
        if not isinstance(answer, Welcome) or answer.error:
            raise UserError(answer.error if isinstance(answer, Welcome) else "it is no prefill engine")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, answer.carrier


def write(connection: socket.socket, message: Any) -> None:
    """Send a message in a frame with its length."""
    send_frame(connection, msgspec.msgpack.encode(message))


def read(connection: socket.socket) -> Any:
    """Wait for a message.

    Raises:
        EOFError, OSError: the other side has gone. msgspec.MsgspecError: it sent something else.
    """
    return _decoder.decode(receive_frame(connection, _MOST_BYTES))


def plain(space: dict[str, Any]) -> dict[str, Any]:
    """As the other side reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(space, enc_hook=str))

"""`TransferChannel`, `TransferListener`, `connect_to`: connections between processes that transfer pages, and how each begins."""

from __future__ import annotations

import logging
import queue
import socket
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from dsjax.background import note_failure, start_thread
from dsjax.engine.transfer.messages import PullMessage, ToDecode, ToPrefill
from dsjax.errors import UserError
from dsjax.messaging.credentials import Credentials
from dsjax.hosts.secure_channel import SecureChannel, closed_on_failure, connect
from dsjax.hosts.secure_listener import SecureListener
from dsjax.hosts.wire import decoded, split_address

PAGES, CHUNKS = "pages", "chunks"
"""Services (`SecureChannel`): messages about transfers, and messages about pulling their chunks."""
VERSION = 7
"""Version of the messages. It changes whenever an older side could misunderstand a newer one."""

_log = logging.getLogger(__name__)
_MOST_BYTES = 64 << 20
_CONNECT_SECONDS = 5.0
_GONE_SECONDS = 30
"""Seconds after which a host that has gone without a word, as when it loses power, is known to be gone."""


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The decode side's first message.

    Attributes:
        space: what both sides must have alike: everything that a page's values depend on beside its tokens, and the transport.
    """

    version: int
    space: dict[str, Any]


class GreetingAnswer(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The prefill side's answer.

    Attributes:
        transport: address of its transport, from which chunks are pulled.
        error: why there is no connection; empty where there is one.
    """

    transport: str = ""
    error: str = ""


_decoder = msgspec.msgpack.Decoder(Greeting | GreetingAnswer | PullMessage | ToPrefill | ToDecode)


class TransferChannel:
    """Sends messages over a connection without waiting, and hands over in a thread those that come."""

    def __init__(self, connection: SecureChannel):
        connection.keep_alive(_GONE_SECONDS, unacknowledged=True)
        self._connection = connection
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(self, receive: Callable[[Any], None], closed: Callable[[], None]) -> None:
        """Begin to write, and to hand what is read to `receive`. closed: is called at the end.

        Raises:
            RuntimeError: the system has no thread left; the connection is closed.
        """
        try:
            start_thread("transfer messages", self._read, receive, closed, name="dsjax-transfer-read")
            start_thread("transfer messages", self._write, name="dsjax-transfer-write")
        except RuntimeError:
            self.close()
            raise

    def send(self, message: Any) -> None:
        """Queue a message."""
        self._queue.put(message)

    def close(self) -> None:
        """End the connection."""
        self._queue.put(None)
        self._connection.close()

    def _write(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                write(self._connection, message)
        except OSError:  # the reader finds out too
            pass
        except Exception as error:  # nothing may be waited for that is never sent
            note_failure("transfer messages", error, "The connection is closed, and made again when it is needed.")
            self.close()

    def _read(self, receive: Callable[[Any], None], closed: Callable[[], None]) -> None:
        try:
            while True:
                receive(read(self._connection))
        except (OSError, EOFError):
            pass
        except msgspec.MsgspecError as error:
            _log.warning("A connection for pages was closed, because what came over it is no message: %s", error)
        except Exception as error:  # whoever is at the other end must not wait for ever
            note_failure(
                "transfer messages",
                error,
                "A connection for pages was closed, because a message that came over it could not be handled.",
            )
        finally:
            self.close()
            closed()


class Peer(Protocol):
    """A process that has connected to a listener."""

    def receive(self, message: Any) -> None:
        """Take a message, in the thread of its connection."""

    def leave(self) -> None:
        """End what was done for the process, whose connection has ended."""


class TransferListener:
    """Listens at an address where processes of the other side greet this one, and holds the connections to those that may come.

    Only a process of the deployment is heard at all, and told what differs.

    Args:
        service: as in `SecureChannel`. credentials: by which both sides know each other.
        serve: makes the peer of a connection, which is started then.
        space: as in `Greeting`. transport: as in `GreetingAnswer`.
        port: 0 takes a free one.

    Attributes:
        address: `HOST:PORT`.
    """

    def __init__(
        self,
        serve: Callable[[TransferChannel], Peer],
        space: dict[str, Any],
        host: str,
        port: int = 0,
        transport: str = "",
        *,
        service: str,
        credentials: Credentials,
    ):
        self._serve, self._space, self._transport = serve, plain(space), transport
        credentials.check_host(host)
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise UserError(f"the address {host}:{port} for pages cannot be used: {error.strerror or error}") from error
        shown = f"[{host}]" if ":" in host else host
        self._channels: set[TransferChannel] = set()
        self._listener = SecureListener(listener, credentials, {service: self._greet}, "dsjax-transfer")
        self.address = f"{shown}:{self._listener.port}"

    def close(self) -> None:
        """End the connections, and let nobody come any more."""
        self._listener.close(connections=True)  # those that are being greeted too
        for channel in list(self._channels):
            channel.close()

    def _greet(self, connection: SecureChannel) -> None:
        try:
            connection.settimeout(_CONNECT_SECONDS)
            error = self._objection(read(connection))
            write(connection, GreetingAnswer(self._transport, error))
            if error:
                connection.close()
                return
            connection.settimeout(None)
        except (OSError, EOFError, msgspec.MsgspecError):
            connection.close()
            return
        channel = TransferChannel(connection)
        peer = self._serve(channel)

        def leave() -> None:
            peer.leave()
            self._channels.discard(channel)

        self._channels.add(channel)
        try:
            channel.start(peer.receive, leave)
        except RuntimeError:
            leave()
            raise

    def _objection(self, hello: Any) -> str:
        if not isinstance(hello, Greeting) or hello.version != VERSION:
            return f"the other side speaks another version of these messages than {VERSION}; use the same dsjax on both sides"
        different = sorted(
            k for k in self._space.keys() | hello.space.keys() if self._space.get(k) != hello.space.get(k)
        )
        if different:
            values = (f"{key} ({self._space.get(key)!r} here, {hello.space.get(key)!r} there)" for key in different)
            return f"pages of the two sides differ in {', '.join(values)}; start both with the same model and options"
        return ""


def connect_to(
    address: str, space: dict[str, Any], service: str, credentials: Credentials
) -> tuple[SecureChannel, str]:
    """Connect to a listener and greet it. Return the connection, and the address of the other side's transport.

    Raises:
        OSError, EOFError, msgspec.MsgspecError: it cannot be reached, or is something else. UserError: the address is none, or it refuses,
            or one of the two sides does not belong to the other's deployment.
    """
    with closed_on_failure(connect(split_address(address), service, credentials, _CONNECT_SECONDS)) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        write(connection, Greeting(VERSION, plain(space)))
        answer = read(connection)
        if not isinstance(answer, GreetingAnswer) or answer.error:
            raise UserError(answer.error if isinstance(answer, GreetingAnswer) else "it is no prefill engine")
        connection.settimeout(None)
    return connection, answer.transport


def write(connection: SecureChannel, message: Any) -> None:
    """Send a message."""
    connection.send(msgspec.msgpack.encode(message))


def read(connection: SecureChannel) -> Any:
    """Wait for a message.

    Raises:
        EOFError, OSError: the other side has gone. msgspec.MsgspecError: it sent something else.
    """
    return decoded(_decoder, connection.receive(_MOST_BYTES))


def plain(space: dict[str, Any]) -> dict[str, Any]:
    """Return a space as the other side reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(space, enc_hook=str))

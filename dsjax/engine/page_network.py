"""Prefill and decode in different processes: `PrefillServer` and `RemoteLink`, which send messages over TCP and parcels by a carrier."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

import msgspec

from dsjax.engine.commands import int32s
from dsjax.engine.page_transfer import Ask, Cancel, Failed, Forget, Offer, Parcel, ParcelGoneError, Release, ToPrefill
from dsjax.engine.parcel_carrier import ParcelCarrier, Shapes
from dsjax.engine.prefill_engine import PrefillEngine, Receive
from dsjax.errors import UserError
from dsjax.hosts.wire import receive_frame, send_frame

if TYPE_CHECKING:
    from dsjax.engine.executor import Progress

VERSION = 1
"""Of the messages. It changes whenever an older side could misunderstand a newer one."""

_log = logging.getLogger(__name__)
_MOST_BYTES = 64 << 20
_CONNECT_SECONDS = 5.0


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Decode comes. space: everything that a page's values depend on beside its tokens; both sides must have the same."""

    version: int
    space: dict[str, Any]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Prefill's answer. carrier: the address that parcels are pulled from. error: why there is no connection."""

    carrier: str = ""
    error: str = ""


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Decode is about to pull a parcel."""

    number: int


class Granted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """The parcel can be pulled now, or is not kept any more."""

    number: int
    ok: bool


_decoder = msgspec.msgpack.Decoder(Hello | Welcome | Take | Granted | Ask | Cancel | Release | Forget | Offer | Failed)


class Channel:
    """Messages over a connection: whoever sends does not wait, and what comes is handed over in a thread."""

    def __init__(self, connection: socket.socket, receive: Callable[[Any], None], closed: Callable[[], None]):
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


def write(connection: socket.socket, message: Any) -> None:
    """Send a message in a frame with its length."""
    send_frame(connection, msgspec.msgpack.encode(message))


def read(connection: socket.socket) -> Any:
    """Wait for a message.

    Raises:
        EOFError, OSError: the other side has gone. msgspec.MsgspecError: it sent something else.
    """
    return _decoder.decode(receive_frame(connection, _MOST_BYTES))


class PrefillServer:
    """A prefill engine that decode engines of other processes reach at an address.

    space: as of `Hello`.
    """

    def __init__(self, engine: PrefillEngine, carrier: ParcelCarrier, space: dict[str, Any], host: str, port: int = 0):
        self.engine, self._carrier, self._space = engine, carrier, _plain(space)
        try:
            self._listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise UserError(f"the address {host}:{port} for pages cannot be used: {error.strerror or error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._clients: set[_Client] = set()
        threading.Thread(target=self._accept, name="dsjax-transfer", daemon=True).start()

    def prefill(
        self, token_ids: Sequence[int], *, salt: str | None = None, priority: int = 0, room: int | None = None
    ) -> dict[str, str]:
        """Begin to compute a prompt; what its decode engine has to be told, at once.

        room: where the decode engine is told beforehand (`bootstrap_room`); it may have asked already.
        """
        params = handoff(self.address, room)
        end = (len(token_ids) - 1) // self.engine.core.scheduler.config.page_size
        if end:
            tokens = int32s(token_ids[: end * self.engine.core.scheduler.config.page_size + 1])
            self.engine.post(Ask(params["transfer"], tokens, 0, end, salt, priority), None)
        return params

    def cancel(self, transfer: str) -> None:
        """Nobody wants a prompt any more; the name as `prefill` gave it."""
        self.engine.post(Cancel(transfer), None)

    def shutdown(self) -> None:
        """End the connections and the engine."""
        self._listener.close()
        for client in list(self._clients):
            client.channel.close()
        self.engine.shutdown()

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
            hello = read(connection)
            error = self._objection(hello)
            write(connection, Welcome(self._carrier.address, error))
            if error:
                connection.close()
                return
            connection.settimeout(None)
        except (OSError, EOFError, msgspec.MsgspecError):
            connection.close()
            return
        client = _Client(self, connection)
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


class _Client:
    """One decode engine, as a server sees it."""

    def __init__(self, server: PrefillServer, connection: socket.socket):
        self._server = server
        self._transfers: set[str] = set()
        self._granted: dict[int, tuple[float, Parcel]] = {}
        self.channel = Channel(connection, self._take, self._leave)

    def _take(self, message: Any) -> None:
        server = self._server
        self._drain(time.monotonic() - server.engine.leases.timeout)
        if isinstance(message, Take):
            self._grant(message.number)
        elif isinstance(message, Ask | Cancel | Release | Forget):
            if isinstance(message, Ask):
                self._transfers.add(message.transfer)
            elif isinstance(message, Cancel):
                self._transfers.discard(message.transfer)
            elif isinstance(message, Release):
                self._granted.pop(message.number, None)
            server.engine.post(message, self.channel.send)

    def _grant(self, number: int) -> None:
        try:
            parcel = self._server.engine.leases.take(number)
            self._server._carrier.grant(number, parcel)
        except ParcelGoneError:
            self.channel.send(Granted(number, False))
            return
        self._granted[number] = time.monotonic(), parcel
        self.channel.send(Granted(number, True))

    def _drain(self, before: float) -> None:
        for number, (since, parcel) in list(self._granted.items()):
            if since < before:
                del self._granted[number]
                self._server._carrier.revoke(number, parcel)

    def _leave(self) -> None:
        """The decode engine has gone: nobody wants what it asked for."""
        self._drain(float("inf"))
        for name in self._transfers:
            self._server.engine.post(Cancel(name), self.channel.send)
        self._server._clients.discard(self)


class RemoteLink:
    """A prefill engine of another process, as of `PrefillLink`. It connects when it is asked for something, and again after a loss."""

    def __init__(self, address: str, carrier: ParcelCarrier, space: dict[str, Any], shapes: Shapes, timeout: float):
        self.address, self._host, self._port = address, *split_address(address)
        self._carrier, self._space, self._shapes, self._timeout = carrier, _plain(space), shapes, timeout
        self._receive: Receive = lambda message: None
        self._outbox: queue.SimpleQueue[ToPrefill | Take | None] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._from = ""
        self._grants: dict[int, Future[bool]] = {}
        self._thread = threading.Thread(target=self._run, name="dsjax-transfer", daemon=True)
        self._thread.start()

    def connect(self, receive: Receive) -> None:
        """Have its messages handed to `receive`."""
        self._receive = receive

    def send(self, message: ToPrefill) -> None:
        """Queue a message."""
        self._outbox.put(message)

    def pull(self, number: int, device: Any) -> Parcel:
        """A parcel on this device."""
        granted = self._grants[number] = Future()
        self._outbox.put(Take(number))
        try:
            if not granted.result(self._timeout):
                raise ParcelGoneError(f"parcel {number} is not kept any more at {self.address}")
        except FutureTimeoutError:
            raise ParcelGoneError(f"{self.address} does not answer") from None
        finally:
            self._grants.pop(number, None)
        found: Future[Parcel] = Future()
        threading.Thread(target=self._pull, args=(number, device, found), name="dsjax-pull", daemon=True).start()
        try:
            return found.result(self._timeout)
        except FutureTimeoutError:
            raise ParcelGoneError(f"{self.address} does not send parcel {number}") from None
        except Exception as error:  # of whatever carries it
            raise ParcelGoneError(f"parcel {number} could not be pulled from {self.address}: {error}") from error

    def warm_up(self, progress: Progress | None = None) -> None:
        """Its own process does that."""

    def close(self) -> None:
        """End the connection."""
        self._outbox.put(None)

    def _pull(self, number: int, device: Any, found: Future[Parcel]) -> None:
        try:
            found.set_result(self._carrier.pull(self._from, number, self._shapes, device))
        except BaseException as error:
            found.set_exception(error)

    def _run(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                if self._channel is None:
                    if not isinstance(message, Ask | Cancel):
                        self._take(Granted(message.number, False) if isinstance(message, Take) else None)
                        continue  # it has forgotten everything
                    self._channel = self._connected()
                self._channel.send(message)
            except (OSError, EOFError, msgspec.MsgspecError, UserError) as error:
                reason = f"the prefill engine at {self.address} cannot be reached: {error}"
                _log.warning("%s. Prompts are computed where they are decoded.", reason)
                self._receive(Failed("", reason))
        if self._channel is not None:
            self._channel.close()

    def _connected(self) -> Channel:
        connection = socket.create_connection((self._host, self._port), _CONNECT_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            write(connection, Hello(VERSION, self._space))
            answer = read(connection)
            if not isinstance(answer, Welcome) or answer.error:
                raise UserError(answer.error if isinstance(answer, Welcome) else "it is no prefill engine")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        self._from = answer.carrier
        channel = Channel(connection, self._take, lambda: self._lost(channel))
        channel.start()
        return channel

    def _take(self, message: Any) -> None:
        if isinstance(message, Granted):
            granted = self._grants.get(message.number)
            if granted is not None and not granted.done():
                granted.set_result(message.ok)
        elif isinstance(message, Offer | Failed):
            self._receive(message)

    def _lost(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
        for granted in list(self._grants.values()):
            if not granted.done():
                granted.set_result(False)
        self._receive(Failed("", f"the connection to the prefill engine at {self.address} is lost"))


def handoff(address: str, room: int | None = None) -> dict[str, str]:
    """What a decode engine has to be told of a prompt that a prefill engine computes for it: where, and under which name.

    room: `bootstrap_room`, where both sides are told of the request at the same time; None: a new name.
    """
    import uuid

    return {"address": address, "transfer": f"room-{room}" if room is not None else uuid.uuid4().hex}


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        UserError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{address!r} is no address of a prefill engine, expected HOST:PORT")
    return host.strip("[]"), int(port)


def _plain(space: dict[str, Any]) -> dict[str, Any]:
    """As the other side reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(space, enc_hook=str))

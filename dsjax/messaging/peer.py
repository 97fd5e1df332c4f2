"""`Peer`: a connection to another process, opened by either side; `Request`: a message received from it."""

from __future__ import annotations

import itertools
import os
import socket as sockets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from dsjax.background import contained
from dsjax.errors import UserError
from dsjax.messaging.wire import Kind, decode_value, encode


class PeerLostError(ConnectionError):
    """The other process has gone, hangs, or cannot be reached."""


class NotAMemberError(UserError):
    """The process at an address is not in this deployment: it has another cluster key, or is not dsjax."""


class RefusedError(UserError):
    """The other process belongs to the deployment but refuses the request, with a reason."""


class Reply(Future):
    """Future answer to a request. endpoint: this process's `Endpoint`, typed `Any` because its module imports this one."""

    def __init__(self, endpoint: Any):
        super().__init__()
        self._endpoint = endpoint

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            PeerLostError: the other process is gone. RefusedError, RuntimeError: it refuses, or failed. TimeoutError: no answer in time.
        """
        if not self.done() and self._endpoint.is_own_thread:
            raise RuntimeError("the messaging thread must not wait for an answer, which it would have to receive")
        return super().result(timeout)


class Request:
    """A request, or a one-way message (`expects_reply` is False), from another process. Any thread may answer, once.

    peer: the sender. body: decoded as the type that the service takes.
    """

    __slots__ = ("_number", "body", "expects_reply", "peer", "service")

    def __init__(self, peer: Peer, service: str, body: Any, number: int, expects_reply: bool):
        self.peer, self.service, self.body = peer, service, body
        self._number, self.expects_reply = number, expects_reply

    def reply(self, value: Any = None) -> None:
        """Send the answer."""
        self._answer(Kind.REPLY, value)

    def refuse(self, reason: str) -> None:
        """Refuse with a reason; the other side raises `RefusedError`."""
        self._answer(Kind.REFUSAL, reason)

    def fail(self, error: BaseException) -> None:
        """Report a failed attempt; the other side raises `RuntimeError`."""
        self._answer(Kind.FAILURE, f"{type(error).__name__}: {error}")

    def _answer(self, kind: Kind, value: Any) -> None:
        if self.expects_reply:
            self.peer.say(kind, self.service, self._number, value)


Handler = Callable[[Request], object]


class Peer:
    """A connection to another process. Any thread may use it.

    Attributes:
        address: of the other process, for error messages.
        role: authenticated role of the other process, one of `ROLES`; `LISTENER` if this process connected to it.
        lost: whether the connection has ended.
        socket, prefix: ZeroMQ socket, which the messaging thread owns, and routing id of the other process (empty if this one connected).
        descriptor: file descriptor of the TCP connection, set by the messaging thread if this process connected; else -1.
    """

    def __init__(self, endpoint: Any, socket: zmq.Socket, prefix: list[bytes], address: str, role: str):
        self.address, self.role, self.lost = address, role, False
        self._endpoint, self.socket, self.prefix = endpoint, socket, prefix
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._requests: dict[int, tuple[Reply, msgspec.msgpack.Decoder]] = {}
        self._on_lost: list[Callable[[], object]] = []
        self.descriptor = -1

    def request(self, service: str, body: Any = None, kind: Any = Any) -> Reply:
        """Send a request. kind: the type of the answer."""
        reply = Reply(self._endpoint)
        with self._lock:
            number = None if self.lost else next(self._numbers)
            if number is not None:
                self._requests[number] = reply, msgspec.msgpack.Decoder(kind)
        if number is None:
            reply.set_exception(self._lost_error())
        else:
            self.say(Kind.REQUEST, service, number, body)
        return reply

    def send(self, service: str, body: Any = None) -> None:
        """Send a one-way message. It is lost if the connection ends."""
        self.say(Kind.ONE_WAY, service, 0, body)

    def on_lost(self, call: Callable[[], object]) -> None:
        """Call `call()` in the messaging thread when the connection ends, or right away if it has ended."""
        with self._lock:
            if not self.lost:
                self._on_lost.append(call)
                return
        self._endpoint.post(call)

    def close(self) -> None:
        """Close the connection. The other side sees it end."""
        self._endpoint.post(lambda: self._endpoint.disconnect(self))

    def tcp_info(self) -> bytes:
        """Return Linux's `struct tcp_info` of the connection; empty if unavailable or if the other process connected."""
        if self.descriptor < 0 or self.lost or not hasattr(sockets, "TCP_INFO"):
            return b""
        try:
            with sockets.socket(fileno=os.dup(self.descriptor)) as connection:
                return connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 256)
        except OSError:
            return b""

    def say(self, kind: Kind, service: str, number: int, body: Any) -> None:
        """Send a message of any kind. number: of the request that it makes or answers; 0 for a one-way message."""
        frames = [*self.prefix, *encode(kind, service, number, body)]
        self._endpoint.post(lambda: self._endpoint.transmit(self, frames))

    def answered(self, kind: Kind, number: int, data: bytes) -> None:
        """Resolve the `Reply` of request `number`. data: the encoded answer, or the reason of a refusal or failure."""
        with self._lock:
            reply, decoder = self._requests.pop(number, (None, None))
        if reply is None or not reply.set_running_or_notify_cancel():
            return
        try:
            if kind is Kind.REPLY:
                reply.set_result(decode_value(decoder, data))
                return
            reason = msgspec.msgpack.decode(data, type=str)
            reply.set_exception(RefusedError(reason) if kind is Kind.REFUSAL else RuntimeError(reason))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            reply.set_exception(RuntimeError(f"{self.address} gives an answer that cannot be read: {error}"))

    def lose(self) -> None:
        """Mark the connection as ended, fail its requests and make the `on_lost` calls. Runs in the messaging thread."""
        with self._lock:
            if self.lost:
                return
            self.lost = True
            requests = self._requests
            self._requests = {}
            calls = self._on_lost
            self._on_lost = []
        for reply, _ in requests.values():
            if reply.set_running_or_notify_cancel():
                reply.set_exception(self._lost_error())
        for call in calls:
            with contained("messaging"):
                call()

    def _lost_error(self) -> PeerLostError:
        return PeerLostError(f"the connection to {self.address} has ended")

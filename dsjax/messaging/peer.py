"""`Peer`: a connection to another process, whichever of the two has made it; `Request`: what it asks for."""

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
from dsjax.messaging.wire import Kind, decoded, encode


class PeerLostError(ConnectionError):
    """The other process has gone, hangs, or cannot be reached."""


class NotAMemberError(UserError):
    """What answers at an address does not belong to this deployment: it has another cluster key, or is no dsjax process."""


class RefusedError(UserError):
    """The other process belongs to the deployment, and says why it does not do what it was asked for."""


class Reply(Future):
    """What will be answered to a request. endpoint: this process's `Endpoint`, which imports this module."""

    def __init__(self, endpoint: Any):
        super().__init__()
        self._endpoint = endpoint

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            PeerLostError: the other process is gone. RefusedError, RuntimeError: it refuses, or could not do it. TimeoutError: not in time.
        """
        if not self.done() and self._endpoint.is_own_thread:
            raise RuntimeError("the messaging thread must not wait for an answer, which it would have to receive")
        return super().result(timeout)


class Request:
    """What another process asks for, or just says (`expects_reply` is False then). Any thread may answer, once.

    peer: that asks. body: of the type that the service takes.
    """

    __slots__ = ("_number", "body", "expects_reply", "peer", "service")

    def __init__(self, peer: Peer, service: str, body: Any, number: int, expects_reply: bool):
        self.peer, self.service, self.body = peer, service, body
        self._number, self.expects_reply = number, expects_reply

    def reply(self, value: Any = None) -> None:
        """Answer."""
        self._answer(Kind.REPLY, value)

    def refuse(self, reason: str) -> None:
        """Say why it is not done: the other side raises `RefusedError`."""
        self._answer(Kind.REFUSAL, reason)

    def fail(self, error: BaseException) -> None:
        """Say that it was tried in vain: the other side raises `RuntimeError`."""
        self._answer(Kind.FAILURE, f"{type(error).__name__}: {error}")

    def _answer(self, kind: Kind, value: Any) -> None:
        if self.expects_reply:
            self.peer.say(kind, self.service, self._number, value)


Handler = Callable[[Request], object]


class Peer:
    """A connection to another process. Any thread may use it.

    Attributes:
        address: of the other side, for messages. role: that it has shown, one of `ROLES`; `LISTENER` where this process has connected.
        lost: whether the connection has ended. socket, prefix: by which it is reached; descriptor: of a connection that this process has
            made. They are the messaging thread's.
    """

    def __init__(self, endpoint: Any, socket: zmq.Socket, prefix: list[bytes], address: str, role: str):
        self.address, self.role, self.lost = address, role, False
        self._endpoint, self.socket, self.prefix = endpoint, socket, prefix
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._requests: dict[int, tuple[Reply, msgspec.msgpack.Decoder]] = {}
        self._on_lost: list[Callable[[], object]] = []
        self.descriptor = -1

    def request(self, service: str, body: Any = None, kind: Any = Any) -> Reply:
        """Ask for something. kind: the type of the answer."""
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
        """Say something that is not answered. It is lost where the connection ends."""
        self.say(Kind.ONE_WAY, service, 0, body)

    def on_lost(self, call: Callable[[], object]) -> None:
        """Have `call()` called once the connection has ended, in the messaging thread; at once if it has."""
        with self._lock:
            if not self.lost:
                self._on_lost.append(call)
                return
        self._endpoint.post(call)

    def close(self) -> None:
        """End the connection. The other side sees it end."""
        self._endpoint.post(lambda: self._endpoint.hang_up(self))

    def tcp_info(self) -> bytes:
        """What the kernel knows of a connection that this process has made (`struct tcp_info` of Linux); empty where it does not say."""
        if self.descriptor < 0 or self.lost or not hasattr(sockets, "TCP_INFO"):
            return b""
        try:
            with sockets.socket(fileno=os.dup(self.descriptor)) as connection:
                return connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, 256)
        except OSError:
            return b""

    def say(self, kind: Kind, service: str, number: int, body: Any) -> None:
        """Send a message of any kind."""
        frames = [*self.prefix, *encode(kind, service, number, body)]
        self._endpoint.post(lambda: self._endpoint.transmit(self, frames))

    def answered(self, kind: Kind, number: int, data: bytes) -> None:
        """Take an answer."""
        with self._lock:
            reply, decoder = self._requests.pop(number, (None, None))
        if reply is None or not reply.set_running_or_notify_cancel():
            return
        try:
            if kind is Kind.REPLY:
                reply.set_result(decoded(decoder, data))
                return
            reason = msgspec.msgpack.decode(data, type=str)
            reply.set_exception(RefusedError(reason) if kind is Kind.REFUSAL else RuntimeError(reason))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            reply.set_exception(RuntimeError(f"{self.address} gives an answer that cannot be read: {error}"))

    def lose(self) -> None:
        """End, in the messaging thread."""
        with self._lock:
            if self.lost:
                return
            self.lost = True
            requests, self._requests = self._requests, {}
            calls, self._on_lost = self._on_lost, []
        for reply, _ in requests.values():
            if reply.set_running_or_notify_cancel():
                reply.set_exception(self._lost_error())
        for call in calls:
            with contained("messaging"):
                call()

    def _lost_error(self) -> PeerLostError:
        return PeerLostError(f"the connection to {self.address} has ended")

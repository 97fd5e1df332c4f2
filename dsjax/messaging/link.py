"""`LinkListener` and `Link`: bulk data between threads of two processes, bypassing the messaging thread.

The calling thread waits at the socket. A message is a header and buffers, split into frames; buffers are sent without a copy. A peer must
authenticate before libzmq buffers its messages: on an unencrypted link (no `--encrypt-bulk`), with a ticket from a control message.
"""

import contextlib
import hmac
import itertools
import secrets
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from dsjax.addresses import split_address, zmq_endpoint
from dsjax.messaging.curve import connect_with_curve, listen_with_curve, require_zap, role_verifier, ticket_verifier
from dsjax.messaging.endpoint import CONNECT_SECONDS, Endpoint
from dsjax.messaging.peer import NotAMemberError, PeerLostError
from dsjax.messaging.wire import MOST_FRAME_BYTES, decode_value

_POLL_SECONDS = 0.05
_numbers = itertools.count()


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """The first message over a link."""

    name: str  # of the connecting side, as the listener knows it
    ticket: bytes


_openings = msgspec.msgpack.Decoder(Opening)


class Message(NamedTuple):
    """A message received over a link."""

    sender: str  # name of the other side
    header: bytes  # the first frame
    frames: Sequence[memoryview]  # of the buffers, without a copy

    def read_into(self, *buffers: np.ndarray) -> None:
        """Copy the buffers into arrays, in order; raise `PeerLostError` if the sizes differ."""
        frames = iter(self.frames)
        for buffer in buffers:
            target = buffer.reshape(-1).view(np.uint8)
            offset = 0
            while offset < target.size:
                frame = np.frombuffer(next(frames, b""), np.uint8)
                if not frame.size or offset + frame.size > target.size:
                    raise PeerLostError(f"{self.sender} has sent other data than was expected")
                target[offset : offset + frame.size] = frame
                offset += frame.size
        if next(frames, None) is not None:
            raise PeerLostError(f"{self.sender} has sent more data than was expected")


class _LinkSocket:
    """A socket with a monitor of its connections, and a wake-up for the thread that waits at it.

    A subclass holds the lock while it opens and calls `Endpoint.attach`. From then on, the messaging thread calls `tend` each second.
    """

    def __init__(self, endpoint: Endpoint, kind: int, host: str):
        self._socket = endpoint.socket(kind, host)
        self._monitor = endpoint.watch(self._socket)
        self._wake, self._wake_receiver = sockets.socketpair()
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_receiver.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._lock = threading.RLock()
        self._is_cancelled = False
        self._is_closed = False

    def wake(self) -> None:
        """Make `receive` return without a message, now or when it is called next. Any thread may call this."""
        with contextlib.suppress(OSError):  # closed, or it is about to wake already
            self._wake.send(b"\0", sockets.MSG_DONTWAIT)

    def cancel(self) -> None:
        """Make current and future waits raise `PeerLostError`. Any thread may call this."""
        self._is_cancelled = True
        self.wake()

    def tend(self) -> None:
        """Free ended connections if no thread uses the socket: libzmq keeps their state until the socket is used."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._socket.getsockopt(zmq.EVENTS)
                    self._check_connections()
            finally:
                self._lock.release()

    def close(self, linger: float = 0.0) -> None:
        """Close the socket, even while a thread waits at it. linger: seconds to send pending messages, in the background."""
        self.cancel()
        with self._lock:  # the waiting thread has woken
            if not self._is_closed:
                self._is_closed = True
                Endpoint.unwatch(self._socket, self._monitor, linger)
                self._wake.close()
                self._wake_receiver.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Lock the socket for the caller."""
        with self._lock:
            try:
                self._check()
                yield
            except zmq.ContextTerminated as error:
                raise PeerLostError("this process's endpoint was closed") from error

    def _check(self) -> None:
        if self._is_cancelled:
            raise PeerLostError("this link was closed")

    def _poll(self, seconds: float) -> bool:
        """Wait for a message or a connection event. Return whether `wake` was called instead."""
        ready = dict(self._poller.poll(max(0.0, seconds) * 1000))
        self._check()
        return self._wake_receiver.fileno() in ready and bool(self._wake_receiver.recv(4096))

    def _events(self) -> list[int]:
        events = []
        while self._monitor.poll(0):
            events.append(recv_monitor_message(self._monitor)["event"])
        return events

    def _send_frames(self, prefix: Sequence[bytes], header: bytes, buffers: Sequence[Any]) -> None:
        frames = [*prefix, header, *(frame for buffer in buffers for frame in _split_frames(buffer))]
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) <= len(prefix) + 1)


class LinkListener(_LinkSocket):
    """Receives from processes that connect with a ticket, and can answer them. One thread at a time uses it.

    names: names that may connect, each over one link at a time; None: any name. encrypted: encrypt even if the deployment does not encrypt
    its links; both sides must set it.

    address (`HOST:PORT`), ticket: what others need to connect; send both over control messages.
    """

    def __init__(self, endpoint: Endpoint, names: Sequence[str] | None = None, *, encrypted: bool = False):
        self._endpoint = endpoint
        self._domain = f"link {next(_numbers)}"
        self.ticket = secrets.token_hex(16).encode()
        self._names = None if names is None else set(names)
        self._names_by_id: dict[bytes, str] = {}
        self._ids_by_name: dict[str, bytes] = {}
        self._any_disconnected = False  # whether a disconnection has ever been reported
        self._sweeps = 0  # how often to probe all connections again
        self._sweep_at = 0.0  # time of the next probe
        self._disconnected: set[bytes] = set()  # gone, but their last messages may be unread
        self._lost_names: list[str] = []
        super().__init__(endpoint, zmq.ROUTER, endpoint.host)
        with self._lock:
            endpoint.attach(self)
            self._listen(encrypted)

    def _listen(self, encrypted: bool) -> None:
        endpoint = self._endpoint
        credentials = self._endpoint.credentials
        self._socket.router_mandatory = True
        if encrypted or credentials.encrypt_bulk:
            listen_with_curve(self._socket, credentials.key, self._domain)
            endpoint.admit(self._domain, role_verifier(credentials.key))
        else:
            self._socket.plain_server = True
            require_zap(self._socket, self._domain)
            endpoint.admit(self._domain, ticket_verifier(self.ticket))
        try:
            self.address = endpoint.bind(self._socket)
        except BaseException:
            self.close()
            raise

    def receive(self, seconds: float | None = None) -> Message | None:
        """Wait for a message; return None on timeout or `wake`.

        Raises:
            LinkLostError: a connected process is gone; raised once for each. PeerLostError: the listener was closed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._in_use():
            while True:
                message = self._next_message()
                if message is not None:
                    return message
                if self._lost_names:
                    raise LinkLostError(self._lost_names.pop(0))
                seconds_left = _POLL_SECONDS if self._sweeps else 1.0
                if deadline is not None:
                    seconds_left = min(seconds_left, deadline - time.monotonic())
                    if seconds_left <= 0:
                        return None
                if self._poll(seconds_left):
                    return None

    def send(self, name: str, header: bytes, *buffers: Any) -> None:
        """Send to a connected process; raise `PeerLostError` if it is gone. The buffers must not change before it answers."""
        with self._in_use():
            if name not in self._ids_by_name:
                raise PeerLostError(f"the link to {name} has ended")
            try:
                self._send_frames([self._ids_by_name[name]], header, buffers)
            except zmq.ZMQError as error:
                self._disconnected.add(self._ids_by_name[name])
                raise PeerLostError(f"the link to {name} has ended") from error

    def close(self, linger: float = 0.0) -> None:
        """Stop admitting peers and end all connections."""
        self._endpoint.admit(self._domain, None)
        super().close(linger)

    def _next_message(self) -> Message | None:
        """Return a pending message, without waiting."""
        while (frames := self._next_frames()) is not None:
            name = self._names_by_id.get(frames[0].bytes)
            if name is not None:
                return Message(name, frames[1].bytes, [frame.buffer for frame in frames[2:]])
            self._open(frames)
        return None

    def _next_frames(self) -> list[zmq.Frame] | None:
        """Return the frames of a pending message. Forget a process that is gone only after a second read, which takes its last messages."""
        for check in (self._check_connections, self._forget_disconnected):
            with contextlib.suppress(zmq.Again):
                while True:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    if len(frames) > 1:
                        return frames
            check()
        return None

    def _open(self, frames: Sequence[zmq.Frame]) -> None:
        """Register a connecting process. Ignore processes that may not connect, permanently."""
        try:
            opening = decode_value(_openings, frames[1].bytes)
        except msgspec.MsgspecError:
            return
        if not hmac.compare_digest(opening.ticket, self.ticket) or opening.name in self._ids_by_name:
            return
        if self._names is not None and opening.name not in self._names:
            return
        self._names_by_id[frames[0].bytes] = opening.name
        self._ids_by_name[opening.name] = frames[0].bytes
        # Probe only if its disconnection may have been reported before it had a name. A closed link reads no more, so a probe that arrives
        # while it sends its last messages would make the kernel reset the connection and drop them.
        self._sweeps, self._sweep_at = 20 * self._any_disconnected, 0.0

    def _check_connections(self) -> None:
        """After a disconnection, probe all processes several times. Those to which sending fails are gone."""
        if zmq.EVENT_DISCONNECTED in self._events():
            self._any_disconnected, self._sweeps, self._sweep_at = True, 20, 0.0
        if self._sweeps and time.monotonic() >= self._sweep_at:
            self._sweeps -= 1
            self._sweep_at = time.monotonic() + _POLL_SECONDS
            for routing_id in list(self._names_by_id):
                try:
                    self._socket.send_multipart([routing_id, b""], zmq.NOBLOCK)
                except zmq.ZMQError:
                    self._disconnected.add(routing_id)

    def _forget_disconnected(self) -> None:
        while self._disconnected:
            name = self._names_by_id.pop(self._disconnected.pop())
            del self._ids_by_name[name]
            self._lost_names.append(name)


class Link(_LinkSocket):
    """Sends to a `LinkListener`, and receives its answers. One thread at a time uses it.

    Args:
        address, ticket: of the listener.
        name: of this side, for the listener.
        role: this process's role in the deployment.
        encrypted: whether the listener is encrypted.

    Raises:
        PeerLostError: the listener does not answer in time. NotAMemberError: the ticket is not the listener's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        address: str,
        ticket: bytes,
        name: str,
        role: str = "member",
        *,
        encrypted: bool = False,
    ):
        host, port = split_address(address)
        endpoint.credentials.check_host(host)
        self.address, self._has_ended = address, False
        self._received: deque[Message] = deque()
        super().__init__(endpoint, zmq.DEALER, host)
        with self._lock:
            endpoint.attach(self)
            if encrypted or endpoint.credentials.encrypt_bulk:
                connect_with_curve(self._socket, endpoint.credentials.key, role)
            else:
                self._socket.plain_username = b"link"
                self._socket.plain_password = ticket
            try:
                self._socket.connect(zmq_endpoint(host, port))
                deadline = time.monotonic() + 2 * CONNECT_SECONDS
                while not self._is_connected():
                    if time.monotonic() > deadline:
                        raise PeerLostError(f"nobody answers at {address}")
                    self._poll(_POLL_SECONDS)
                self._socket.send(msgspec.msgpack.encode(Opening(name, ticket)))
            except BaseException:
                self.close()
                raise

    def send(self, header: bytes, *buffers: Any) -> None:
        """Send a message; raise `PeerLostError` if the other side is gone. The buffers must not change before it answers."""
        with self._in_use():
            if self._check_connections():
                raise self._lost_error()
            self._send_frames([], header, buffers)

    def receive(self, seconds: float | None = None) -> Message | None:
        """Wait for a message; return None on timeout or `wake`; raise `PeerLostError` if the link has ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._in_use():
            while True:
                has_ended = self._has_ended
                self._read_pending()
                if self._received:
                    return self._received.popleft()
                if has_ended:
                    raise self._lost_error()
                if self._check_connections():
                    continue  # first return what it sent before it ended
                seconds_left = 1.0 if deadline is None else deadline - time.monotonic()
                if seconds_left <= 0 or self._poll(min(seconds_left, 1.0)):
                    return None

    def _is_connected(self) -> bool:
        for event in self._events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise NotAMemberError(f"the link at {self.address} does not take this process's ticket")
            if event != zmq.EVENT_CONNECTED:
                raise PeerLostError(f"nobody answers at {self.address}")
        return False

    def _check_connections(self) -> bool:
        """Return whether the other side is gone. Also drain the socket: a side that only sends gets the listener's liveness probes, too."""
        self._read_pending()
        self._has_ended |= zmq.EVENT_DISCONNECTED in self._events()
        return self._has_ended

    def _read_pending(self) -> None:
        """Move pending messages from the socket to `_received`."""
        with contextlib.suppress(zmq.Again):
            while True:
                header, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                if header.bytes or frames:  # else it is the listener's liveness probe
                    self._received.append(Message(self.address, header.bytes, [frame.buffer for frame in frames]))

    def _lost_error(self) -> PeerLostError:
        return PeerLostError(f"the link to {self.address} has ended")


class LinkLostError(PeerLostError):
    """A process that was connected to a listener is gone. name: of the process."""

    def __init__(self, name: str):
        super().__init__(f"the link to {name} has ended")
        self.name = name


def _split_frames(buffer: Any) -> list[memoryview]:
    """Return a buffer's bytes as frames; none if it is empty."""
    if isinstance(buffer, np.ndarray):
        buffer = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
    view = memoryview(buffer).cast("B")
    return [view[offset : offset + MOST_FRAME_BYTES] for offset in range(0, len(view), MOST_FRAME_BYTES)]

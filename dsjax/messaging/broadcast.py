"""`BroadcastLog` and `LogReader`: one ordered log that one process writes and others read from the time they are admitted.

The appending thread sends directly, however busy the messaging thread is. A reader detects a gap by the entries' numbers.
"""

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dsjax.addresses import split_address, zmq_endpoint
from dsjax.background import note_failure
from dsjax.messaging.curve import connect_with_curve, listen_with_curve, role_verifier
from dsjax.messaging.endpoint import Endpoint
from dsjax.messaging.peer import Peer, PeerLostError, Request
from dsjax.messaging.wire import MOST_FRAME_BYTES, MOST_MESSAGE_BYTES, decode_value

_SERVICE = "log"
_HELLO_SECONDS = 0.05
_MOST_NAME_BYTES = 256


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of an entry. Further frames carry the rest of a long body."""

    number: int
    epoch: int
    body: bytes = b""
    # name of a reader that asks whether it already receives the log; such an entry has no number of its own
    hello: bytes = b""


_entries = msgspec.msgpack.Decoder(Entry)


class BroadcastLog:
    """The writer of a log. Any thread may append. address: where readers connect."""

    def __init__(self, endpoint: Endpoint):
        self._lock = threading.Lock()
        self._next_number = 0
        self._socket = endpoint.socket(zmq.PUB, endpoint.host)
        listen_with_curve(self._socket, endpoint.credentials.key, _SERVICE)
        endpoint.admit(_SERVICE, role_verifier(endpoint.credentials.key))
        self.address = endpoint.bind(self._socket)
        endpoint.attach(self)
        endpoint.serve(_SERVICE, self._admit_reader, roles=("member",), kind=bytes)

    def append(self, epoch: int, body: bytes) -> None:
        """Add an entry."""
        if len(body) > MOST_MESSAGE_BYTES:
            raise ValueError(f"an entry has {len(body):,} bytes, at most {MOST_MESSAGE_BYTES:,} can be sent")
        with self._lock:
            number = self._next_number
            self._next_number += 1
            short = len(body) <= MOST_FRAME_BYTES
            starts = () if short else range(0, len(body), MOST_FRAME_BYTES)
            rest = [body[start : start + MOST_FRAME_BYTES] for start in starts]
            self._send(Entry(number, epoch, body if short else b""), rest)

    def tend(self) -> None:
        """Free readers that have gone while nothing is appended: libzmq frees their memory only when the socket is used."""
        with self._lock, contextlib.suppress(zmq.ZMQError):  # closed
            self._socket.getsockopt(zmq.EVENTS)

    def close(self, linger: float = 0.0) -> None:
        """Close the log. linger: seconds to send pending entries."""
        with self._lock:
            self._socket.close(int(linger * 1000))

    def _admit_reader(self, request: Request) -> None:
        if len(request.body) > _MOST_NAME_BYTES:  # all readers receive it, and end connections with longer frames
            request.refuse(
                f"the name of a reader has {len(request.body):,} bytes, at most {_MOST_NAME_BYTES} are expected"
            )
            return
        with self._lock:
            self._send(Entry(self._next_number - 1, 0, hello=request.body), [])
        request.reply()

    def _send(self, entry: Entry, rest: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # closed
            self._socket.send_multipart([msgspec.msgpack.encode(entry), *rest], zmq.NOBLOCK)


class LogReader:
    """The reader of a log.

    Args:
        leader: control connection to the writer's process.
        address: of its log.
        name: of this reader, unique.
        take: called with each entry's epoch and body, in order, in the messaging thread.
        fail: called once in that thread if an admitted reader gets no further entry: the writer is gone, or an entry is missing.

    Raises:
        PeerLostError: the log cannot be received.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        leader: Peer,
        address: str,
        name: bytes,
        take: Callable[[int, bytes], object],
        fail: Callable[[Exception], object],
    ):
        self._endpoint, self._name, self._take, self._fail = endpoint, name, take, fail
        self._last_number: int | None = None
        self._is_admitted = threading.Event()
        self._closed = False
        host, port = split_address(address)
        self._socket = endpoint.socket(zmq.SUB, host)
        connect_with_curve(self._socket, endpoint.credentials.key, "member")
        self._socket.subscribe(b"")
        self._monitor = endpoint.watch(self._socket)
        self._socket.connect(zmq_endpoint(host, port))
        endpoint.at_end.append(self._close)
        endpoint.post(self._begin)
        deadline = time.monotonic() + endpoint.silence
        while not self._is_admitted.is_set():
            try:
                leader.request(_SERVICE, name).result(endpoint.silence)
            except TimeoutError:
                deadline = 0.0
            self._is_admitted.wait(_HELLO_SECONDS)
            if (self._closed or time.monotonic() > deadline) and not self._is_admitted.is_set():
                endpoint.post(self._close)
                raise PeerLostError(f"the log at {address} cannot be heard")

    def _begin(self) -> None:
        self._endpoint.read(self._socket, self._receive)
        self._endpoint.read(self._monitor, self._watch)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._endpoint.unread(self._monitor)
            self._endpoint.unread(self._socket)
            self._endpoint.unwatch(self._socket, self._monitor)

    def _receive(self) -> None:
        while not self._closed:
            try:
                first, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take_entry(decode_value(_entries, first), rest)
            except Exception as error:
                note_failure("messaging", error, "The log can be read no further.")
                self._fail_reader(error)

    def _take_entry(self, entry: Entry, rest: list[bytes]) -> None:
        if entry.hello:
            if entry.hello == self._name and not self._is_admitted.is_set():
                self._last_number = entry.number
                self._is_admitted.set()
            return
        if self._last_number is None:
            return  # not admitted yet
        if entry.number != self._last_number + 1:
            raise PeerLostError(f"entry {self._last_number + 1} of the log is missing, {entry.number} has come")
        self._last_number = entry.number
        self._take(entry.epoch, b"".join(rest) if rest else entry.body)

    def _watch(self) -> None:
        while not self._closed and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event not in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
                self._receive()  # entries appended before
                if not self._closed:
                    self._fail_reader(PeerLostError("the connection to the log has ended"))

    def _fail_reader(self, error: Exception) -> None:
        self._close()
        if self._is_admitted.is_set():  # else the constructor raises
            self._fail(error)

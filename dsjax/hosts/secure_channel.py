"""`SecureChannel`: a connection between two processes of a deployment, each of which knows that the other one belongs to it.

How it begins, and what its frames are, is in docs/security.md. `connect` makes the caller's side, `SecureListener` the listener's.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from dsjax.errors import UserError
from dsjax.messaging.credentials import Credentials

PROTOCOL = b"dsjaxsc1"
"""Name and version of the protocol; the first bytes of both sides."""
GREETING_SECONDS = 5.0
"""In which the whole greeting must be over."""
SERVICES = ("rendezvous", "links", "probes", "pages", "chunks", "experts", "attention", "stages")
BLOCK_BYTES = 1 << 20
"""Bytes of large data that have one MAC."""

_FAMILY = 7
_NONCE, _PROOF, _MAC = 32, 32, 32
_MOST_REFUSAL = 2048
_TOGETHER = 1 << 16
_MESSAGE, _BLOCK = b"m", b"b"
_RETRY_SECONDS = 0.02
_LINUX = sys.platform == "linux"
_ESTABLISHED = 1  # of the states that `struct tcp_info` begins with


class ProtocolError(ConnectionError):
    """What answers at an address is no process of a deployment, or one of another version."""


class TamperedError(ConnectionError):
    """A frame is not the one that the other side sent at this place; the connection has ended."""


class NotAMemberError(UserError):
    """One of the two sides does not belong to the other one's deployment: it has another key, or no certificate of its authority."""


class RefusedError(UserError):
    """The other side belongs to the deployment, and says why it does not serve this caller."""


class Stream(Protocol):
    """What carries bytes: a socket, or TLS over one."""

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes, and give how many have come; 0 where the other side has ended."""

    def sendall(self, data: bytes | memoryview) -> None:
        """Send bytes."""


class SecureChannel:
    """Sends and receives messages and large data over a connection that has begun.

    Any thread may send, and any thread may receive; what several send at once goes one after the other. A frame that was changed,
    replayed, reordered or left out ends the connection with a `TamperedError`. Every error ends it, a time limit too.

    Attributes:
        service: what the caller asked for. peer: the other side's address, for messages.
    """

    def __init__(self, connection: socket.socket, stream: Stream, service: str, sending: bytes, receiving: bytes):
        self._connection, self._stream = connection, stream
        self.service, self.peer = service, _peer_of(connection)
        self._sending = _Direction(sending)
        self._receiving = _Direction(receiving)
        self._on_close: Callable[[], None] = lambda: None

    def send(self, data: bytes) -> None:
        """Send a message of at most 4 GiB.

        Raises:
            OSError: the other side has gone.
        """
        with self._sending.lock, self._closed_by_errors():
            self._send_frame(_MESSAGE, data)

    def receive(self, most_bytes: int) -> bytes:
        """Wait for a message of at most so many bytes. It is given when its MAC is right.

        Raises:
            EOFError, OSError: the other side has gone, or the time limit is over. TamperedError: what came is not what was sent.
        """
        with self._receiving.lock, self._closed_by_errors():
            header, length = self._receive_header()
            if length > most_bytes:
                raise TamperedError(
                    f"a message of {length:,} bytes has come from {self.peer}, where {most_bytes:,} are the most"
                )
            data = bytearray()
            while (start := len(data)) < length:  # as it comes, so that a length alone takes no memory
                data += bytes(min(length - start, BLOCK_BYTES))
                with memoryview(data) as view, view[start:] as rest:
                    _read(self._stream, rest)
            self._check(_MESSAGE, header, data)
            return bytes(data)

    def send_bytes(self, data: memoryview | bytes) -> None:
        """Send large data, which the other side takes with `receive_into`. Both must know its length.

        Raises:
            OSError: the other side has gone.
        """
        view = memoryview(data).cast("B")
        with self._sending.lock, self._closed_by_errors():
            for start in range(0, len(view), BLOCK_BYTES):
                self._send_frame(_BLOCK, view[start : start + BLOCK_BYTES])

    def receive_into(self, view: memoryview) -> None:
        """Fill memory with what `send_bytes` sends. After an error nothing in it may be used.

        Raises:
            EOFError, OSError: the other side has gone, or the time limit is over. TamperedError: what came is not what was sent, or has
                another length.
        """
        view = memoryview(view).cast("B")
        with self._receiving.lock, self._closed_by_errors():
            for start in range(0, len(view), BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                header, length = self._receive_header()
                if length != len(block):
                    raise TamperedError(
                        f"a block of {length:,} bytes has come from {self.peer}, expected {len(block):,}"
                    )
                _read(self._stream, block)
                self._check(_BLOCK, header, block)

    def settimeout(self, seconds: float | None) -> None:
        """Bound how long one wait for the other side may last; None: no bound."""
        self._connection.settimeout(seconds)

    def keep_alive(self, seconds: int, *, unacknowledged: bool = False) -> None:
        """Have the kernel notice within about so many seconds that the other host is gone while both sides are silent.

        unacknowledged: likewise where something was sent.
        """
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", max(1, seconds // 2)), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, name):
                self._connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if unacknowledged and hasattr(socket, "TCP_USER_TIMEOUT"):
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)

    def tcp_info(self) -> bytes:
        """What the kernel knows of the connection: Linux's `struct tcp_info`; empty on another system, or of a closed connection."""
        try:
            return self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) if _LINUX else b""
        except OSError:
            return b""

    @property
    def is_established(self) -> bool:
        """Whether no side has ended the connection, as far as the kernel knows; on other systems than Linux, whether this side has not.

        Any thread may ask, also while another one sends or receives.
        """
        info = self.tcp_info()
        return info[0] == _ESTABLISHED if info else not _LINUX and self._connection.fileno() >= 0

    def wait_for_end(self) -> None:
        """Wait until the other side goes away; one that speaks instead is closed."""
        with contextlib.suppress(OSError, EOFError):
            self.receive(0)
        self.close()

    @property
    def has_ended(self) -> bool:
        """Whether the other side of a channel over which it has nothing to say has gone. Nobody may be reading."""
        try:
            return bool(select.select([self._connection], [], [], 0)[0])
        except (OSError, ValueError):  # it is closed here
            return True

    def on_close(self, call: Callable[[], None]) -> None:
        """Have a function called when this side closes the connection; it may be called twice."""
        self._on_close = call

    def close(self) -> None:
        """End the connection, also under a thread that waits for it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
        self._connection.close()
        self._on_close()

    def __enter__(self) -> SecureChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _closed_by_errors(self):
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _send_frame(self, kind: bytes, data: bytes | memoryview) -> None:
        header = len(data).to_bytes(4, "little")
        head = header + self._sending.mac(kind, header, data)
        if len(data) <= _TOGETHER:
            self._stream.sendall(head + data)
        else:
            self._stream.sendall(head)
            self._stream.sendall(data)

    def _receive_header(self) -> tuple[bytes, int]:
        header = read_exactly(self._stream, 4 + _MAC)
        return header, int.from_bytes(header[:4], "little")

    def _check(self, kind: bytes, header: bytes, data: bytearray | memoryview) -> None:
        if not hmac.compare_digest(header[4:], self._receiving.mac(kind, header[:4], data)):
            raise TamperedError(f"what came from {self.peer} is not what it sent, or not in this order")


class _Direction:
    """The frames of one direction: their key and their count."""

    def __init__(self, key: bytes):
        self.lock = threading.Lock()
        self._keyed, self._number = hmac.new(key, digestmod="sha256"), 0

    def mac(self, kind: bytes, header: bytes, data: bytes | bytearray | memoryview) -> bytes:
        """Authenticate the next frame."""
        code = self._keyed.copy()
        code.update(self._number.to_bytes(8, "little") + kind + header)
        code.update(data)
        self._number += 1
        return code.digest()


class Deadline:
    """The end of the time that both sides have for a greeting: `apply` bounds the next wait by what is left of it."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._end = connection, time.monotonic() + seconds

    def end_now(self) -> None:
        """Let no further wait begin."""
        self._end = 0.0

    def apply(self) -> None:
        """Bound the next wait.

        Raises:
            TimeoutError: the time is over.
        """
        rest = self._end - time.monotonic()
        if rest <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(rest)


def connect(
    address: tuple[str, int], service: str, credentials: Credentials, seconds: float = GREETING_SECONDS
) -> SecureChannel:
    """Connect to a `SecureListener`, and make sure that both sides belong to one deployment. Nothing waits longer than `seconds` in all.

    Raises:
        NotAMemberError: the other side has another key, or another authority's certificate. RefusedError: it says why it does not serve
            this caller. OSError, EOFError: it cannot be reached in time, or speaks something else (`ProtocolError`). UserError: the
            address is beyond loopback, and no key was given.
    """
    credentials.check_host(address[0])
    end = time.monotonic() + seconds
    while True:
        connection = socket.create_connection(address, max(0.001, end - time.monotonic()))
        try:
            channel = _call(connection, service, credentials, Deadline(connection, end - time.monotonic()))
            channel.settimeout(None)
            return channel
        except (ConnectionResetError, BrokenPipeError):  # a listener that has too many strangers makes room so
            connection.close()
            if time.monotonic() + _RETRY_SECONDS > end:
                raise
            time.sleep(_RETRY_SECONDS)
        except BaseException:
            connection.close()
            raise


@contextlib.contextmanager
def closed_on_failure(channel: SecureChannel) -> Iterator[SecureChannel]:
    """Close a new connection where what makes it ready fails: nobody else has it yet."""
    try:
        yield channel
    except BaseException:
        channel.close()
        raise


def _call(connection: socket.socket, service: str, credentials: Credentials, deadline: Deadline) -> SecureChannel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    where = _peer_of(connection)
    stream: Stream = connection
    try:
        theirs = read_exactly(stream, len(PROTOCOL), deadline)
        if theirs != PROTOCOL:
            raise ProtocolError(_other_protocol(theirs))
        listener_nonce = read_exactly(stream, _NONCE, deadline)
    except EOFError:
        raise ProtocolError("what answers there ends the connection at once") from None
    nonce = secrets.token_bytes(_NONCE)
    transcript = _Transcript(credentials, service, listener_nonce, nonce, stream, is_listener=False)
    name = service.encode()
    deadline.apply()
    stream.sendall(PROTOCOL + nonce + bytes([len(name)]) + name + transcript.proof("caller"))
    try:
        proof = read_exactly(stream, _PROOF, deadline)
    except EOFError:
        raise NotAMemberError(
            f"{where} has ended the connection when this process showed its cluster key, which is from {credentials.key.source}: that side "
            "has another one, or is just ending. Give all processes the same"
        ) from None
    if not hmac.compare_digest(proof, transcript.proof("listener")):
        raise NotAMemberError(f"what answers at {where} does not know the cluster key; it may be somebody else's")
    channel = transcript.channel(connection, "caller")
    deadline.apply()
    refusal = channel.receive(_MOST_REFUSAL)
    if refusal:
        channel.close()
        raise RefusedError(refusal.decode(errors="replace"))
    return channel


def _other_protocol(theirs: bytes) -> str:
    if theirs[:_FAMILY] == PROTOCOL[:_FAMILY]:
        return f"what answers there speaks another version of these connections, {theirs!r}, not {PROTOCOL!r}: use one dsjax everywhere"
    return "what answers there is no dsjax that waits for other processes"


class Stranger(Exception):
    """Who came shows no sign of the deployment. `str` says what was wrong, in words that a log can count.

    may_try_again: it may be a member that was too slow. Its connection is to be reset, where one with a wrong proof is ended.
    """

    def __init__(self, reason: str, *, may_try_again: bool = False):
        super().__init__(reason)
        self.may_try_again = may_try_again


def answer(
    connection: socket.socket, credentials: Credentials, deadline: Deadline, services: Collection[str]
) -> tuple[SecureChannel, Callable[[str], None]]:
    """Do the listener's part of a greeting up to the caller's proof. Return the channel, and what ends the greeting: it is called with a
    refusal for the caller, or with an empty text.

    Raises:
        Stranger: the caller has not proved that it knows the key.
    """
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream: Stream = connection
        nonce = secrets.token_bytes(_NONCE)
        deadline.apply()
        stream.sendall(PROTOCOL + nonce)
        theirs = read_exactly(stream, len(PROTOCOL), deadline)
        if theirs != PROTOCOL:
            same = theirs[:_FAMILY] == PROTOCOL[:_FAMILY]
            raise Stranger("of another version" if same else "that spoke another protocol")
        caller_nonce = read_exactly(stream, _NONCE, deadline)
        name = read_exactly(stream, read_exactly(stream, 1, deadline)[0], deadline)
        proof = read_exactly(stream, _PROOF, deadline)
    except TimeoutError as error:
        raise Stranger("that did not end their greeting in time", may_try_again=True) from error
    except (OSError, EOFError) as error:
        raise Stranger("that went away during their greeting") from error
    transcript = _Transcript(credentials, name, nonce, caller_nonce, stream, is_listener=True)
    if not hmac.compare_digest(proof, transcript.proof("caller")):
        raise Stranger("with another cluster key")
    service = name.decode(errors="replace")
    channel = transcript.channel(connection, "listener", service)

    def end(refusal: str) -> None:
        if not refusal and service not in services:
            refusal = f"{channel.peer} asked for {service!r} at a port for {' and '.join(services)}; check the address"
        channel.settimeout(GREETING_SECONDS)
        stream.sendall(transcript.proof("listener"))
        channel.send(refusal.encode()[:_MOST_REFUSAL])
        if refusal:
            raise RefusedError(refusal)
        channel.settimeout(None)

    return channel, end


class _Transcript:
    """What both sides have said, which proofs and keys depend on: service, nonces, and with TLS both certificates.

    Whoever sits between two TLS connections with a certificate of the authority, and no key, cannot pass the proofs on.
    """

    def __init__(
        self,
        credentials: Credentials,
        service: str | bytes,
        listener_nonce: bytes,
        caller_nonce: bytes,
        stream: Stream,
        *,
        is_listener: bool,
    ):
        self._credentials, self._stream, self._service = credentials, stream, service
        name = service.encode() if isinstance(service, str) else service
        self._parts = PROTOCOL, name, listener_nonce, caller_nonce

    def proof(self, role: str) -> bytes:
        """The proof that a role of the two gives."""
        return self._credentials.key.mac(f"dsjax proof of the {role}", *self._parts)

    def channel(self, connection: socket.socket, role: str, service: str | None = None) -> SecureChannel:
        """The channel of a role, with a key for each direction."""
        keys = [self._credentials.key.mac(f"dsjax frames of the {one}", *self._parts) for one in ("caller", "listener")]
        sending, receiving = keys if role == "caller" else reversed(keys)
        return SecureChannel(connection, self._stream, service or str(self._service), sending, receiving)


def read_exactly(stream: Stream, count: int, deadline: Deadline | None = None) -> bytes:
    """Wait for so many bytes.

    Raises:
        EOFError, OSError: the other side has gone, or the time is over.
    """
    data = bytearray(count)
    _read(stream, memoryview(data), deadline)
    return bytes(data)


def _read(stream: Stream, view: memoryview, deadline: Deadline | None = None) -> None:
    at = 0
    while at < len(view):
        if deadline is not None:
            deadline.apply()
        count = stream.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count


def _peer_of(connection: socket.socket) -> str:
    try:
        name = connection.getpeername()
    except OSError:
        return "a process that has gone"
    if not isinstance(name, tuple):
        return "this host"
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

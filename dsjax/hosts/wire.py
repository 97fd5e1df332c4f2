"""What the processes of a group say to each other before JAX joins them: messages in MessagePack, over a `SecureChannel`."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from dsjax.errors import UserError
from dsjax.hosts.options import HostOptions
from dsjax.hosts.secure_channel import SecureChannel

_MOST_BYTES = 1 << 20


class JoinRequest(msgspec.Struct, frozen=True, tag="join_request"):
    """What a process says when it comes.

    machine: equal for processes that reach each other over the loopback interface. port: where it answers who looks at links
    (`dsjax/hosts/links.py`); 0: nowhere.
    """

    process_id: int
    num_processes: int
    host: str
    pid: int
    address: str
    machine: str
    port: int = 0

    @classmethod
    def of(cls, options: HostOptions, port: int = 0) -> JoinRequest:
        """This process."""
        return cls(
            options.process_id,
            options.num_processes,
            socket.gethostname(),
            os.getpid(),
            options.address,
            _machine(),
            port,
        )

    @property
    def name(self) -> str:
        """For messages."""
        return f"process {self.process_id} ({self.host}, pid {self.pid})"

    @property
    def identity(self) -> str:
        """What tells it from another process under its id. In containers both may have the same pid, and the port is whatever was free."""
        return f"{self.process_id}/{self.pid}/{self.port}"


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """What must be alike in all processes, by name as messages have it; or why this process cannot start."""

    alike: dict[str, Any] = {}
    error: str | None = None


class JoinResponse(msgspec.Struct, frozen=True, tag="join_response"):
    """Who is in the group, or why there is none.

    service: `HOST:PORT` of JAX's coordination service. generation: the first one that this process may be in. here: where the group had
    formed before, the ids of those that live. wanted: the mesh that was asked for last; empty: that of the start.
    """

    members: list[JoinRequest] = []
    error: str | None = None
    service: str = ""
    generation: int = 0
    here: list[int] = []
    wanted: str = ""


Message = JoinRequest | Prepared | JoinResponse
encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Read a message.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return decoded(_decoder, data)


def decoded(decoder: msgspec.msgpack.Decoder, data: bytes) -> Any:
    """Read a message of any kind.

    Raises:
        msgspec.MsgspecError: it is none, also where msgspec itself raises something else: for text that is no UTF-8, or for deep nesting.
    """
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def send(channel: SecureChannel, message: Message) -> None:
    """Send a message."""
    channel.send(encode(message))


def receive(channel: SecureChannel) -> Message:
    """Wait for a message.

    Raises:
        EOFError, OSError: the other side has gone. msgspec.MsgspecError: it sent something else.
    """
    return decode(channel.receive(_MOST_BYTES))


def receive_frame(connection: socket.socket, most_bytes: int) -> bytes:
    """Wait for bytes behind four little-endian bytes with their number, over a connection between processes of one host.

    Raises:
        EOFError, OSError: the other side has gone. msgspec.MsgspecError: it says that more than `most_bytes` come.
    """
    length = int.from_bytes(exactly(connection, 4), "little")
    if length > most_bytes:
        raise msgspec.DecodeError(f"a frame of {length:,} bytes, where {most_bytes:,} are the most")
    return exactly(connection, length)


def exactly(connection: socket.socket, count: int) -> bytes:
    """Wait for so many bytes."""
    received, at = bytearray(count), 0
    while at < count:
        size = connection.recv_into(memoryview(received)[at:])
        if not size:
            raise EOFError
        at += size
    return bytes(received)


def _machine() -> str:
    """Name what processes share that share a loopback interface: this boot of this kernel, and the network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def split_address(address: str) -> tuple[str, int]:
    """Divide `HOST:PORT` into host and port.

    Raises:
        UserError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{address!r} is no address of a prefill engine, expected HOST:PORT")
    return host.strip("[]"), int(port)

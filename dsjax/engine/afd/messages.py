"""What the two sides say to each other where they are processes of their own: messages in MessagePack, rows and answers as bytes.

The attention side connects, sends a `Hello`, and then calls: a `Call` with the bytes of its rows behind it, answered by an `Answered` with
the bytes of the answers behind it. A call depends on nothing that was said before, so that it can be made again to another process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dsjax.hosts.secure_channel import SecureChannel
from dsjax.hosts.wire import decoded

SERVICE = "experts"
VERSION = 1
_MOST_BYTES = 1 << 20


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The attention side's first message.

    Attributes:
        space: what both sides must have alike: everything that an answer depends on beside its rows.
    """

    version: int
    space: dict[str, Any]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to a `Hello`. error: why no call will be answered; empty where they will."""

    error: str = ""


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Rows for the experts of one layer.

    Attributes:
        stack: path of the layers among the parameters. layer: number in the stack; -1: compile for so many rows, which do not follow.
        rows: how many packed rows.
    """

    stack: str
    layer: int
    rows: int


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The answers of a call follow, of one expert device after the other. error: why none follow."""

    error: str = ""


Message = Hello | Welcome | Call | Answered
_decoder = msgspec.msgpack.Decoder(Message)


def send(channel: SecureChannel, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: the other side has gone.
    """
    channel.send(msgspec.msgpack.encode(message))


def receive(channel: SecureChannel, kind: type) -> Any:
    """Wait for a message of a kind.

    Raises:
        OSError, EOFError: the other side has gone, or sends something else.
    """
    try:
        message = decoded(_decoder, channel.receive(_MOST_BYTES))
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"{channel.peer} sends no messages about experts: {error}") from error
    if not isinstance(message, kind):
        raise ConnectionError(f"{channel.peer} sends {type(message).__name__}, expected {kind.__name__}")
    return message

"""What the two sides say to each other where they are processes of their own: messages in MessagePack, rows and answers as bytes.

The attention side connects, sends a `Hello`, and then calls: a `Call` with the bytes of its rows behind it, answered by an `Answered` with
the bytes of the answers behind it. A call depends on nothing that was said before, so that it can be made again to another process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dsjax.hosts.secure_channel import SecureChannel
from dsjax.messaging.wire import decoded

SERVICE = "experts"
VERSION = 7
_MOST_BYTES = 1 << 22


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The attention side's first message.

    Attributes:
        space: what both sides must have alike: everything that an answer depends on beside its rows and where experts are.
        placement: ``[MoE layers, slots]`` int32, the logical expert in each physical slot. The process makes its slots hold these before it
            answers.
        side: which attention side it is, whichever of its connections. Where one moves experts, no other may be connected.
        first: the first of the expert devices that the attention side expects at this address.
        generation: of the attention side's mesh. A connection of an earlier one than was heard of is late, and its placement old.
        process, processes: which process of the attention side it is, and of how many.
        change: which of the sides of experts that the attention side has had in its generation it calls, from 0 on: the one of now, or the
            one that is to take over. No process is on both.
    """

    version: int
    space: dict[str, Any]
    placement: bytes = b""
    side: bytes = b""
    first: int = 0
    generation: int = 0
    process: int = 0
    processes: int = 1
    change: int = 0


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to a `Hello`. error: why no call will be answered; empty where they will."""

    error: str = ""


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Rows for the experts of one layer.

    Attributes:
        stack: path of the layers among the parameters. layer: number in the stack; -1: compile for such calls, and no row follows.
        tokens: of the step, in all. cells: rows that each expert device has room for.
        filled: ``[devices of the process, senders]`` int32: of a device's cells, how many of each sender's equal part are filled. These
            rows alone follow, and their answers alone come back, sorted by device, sender and place. Senders of other processes of the
            attention side fill none: what these send in calls of the same number is computed with it.
        number: of the call, where the attention side is several processes. again: it was made before, and had no answer.
    """

    stack: str
    layer: int
    tokens: int
    cells: int
    filled: bytes
    number: int = 0
    again: bool = False


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    """The answers of a call follow. error: why none follow."""

    error: str = ""


class Stage(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """Bring experts of a layer to the devices that will have them. Answered by an `Answered` when it is done.

    Attributes:
        row: of the placement. moves: int32 pairs (physical slot that has an expert, physical slot that gets it), of all processes.
    """

    row: int
    moves: bytes


class Place(msgspec.Struct, frozen=True, array_like=True, tag="place"):
    """Have the slots of a layer hold these logical experts. Answered by an `Answered`.

    Attributes:
        row: of the placement. experts: int32, of all slots.
    """

    row: int
    experts: bytes


Message = Hello | Welcome | Call | Answered | Stage | Place
_decoder = msgspec.msgpack.Decoder(Message)


def send(channel: SecureChannel, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: the other side has gone.
    """
    channel.send(msgspec.msgpack.encode(message))


def reason_of(error: Exception) -> str:
    """Say why a connection has ended: `EOFError` has no text."""
    return str(error) or "it ended the connection"


def receive(channel: SecureChannel, *kinds: type) -> Any:
    """Wait for a message of one of some kinds.

    Raises:
        OSError, EOFError: the other side has gone, or sends something else.
    """
    try:
        message = decoded(_decoder, channel.receive(_MOST_BYTES))
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"{channel.peer} sends no messages about experts: {error}") from error
    if not isinstance(message, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ConnectionError(f"{channel.peer} sends {type(message).__name__}, expected {expected}")
    return message

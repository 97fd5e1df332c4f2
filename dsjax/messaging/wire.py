"""Control messages as frames: one frame of MessagePack, and further ones where the body is long."""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

MOST_FRAME_BYTES = 1 << 20
"""Largest frame that is sent. A slow network must carry one within the silence after which a peer counts as lost."""
MOST_MESSAGE_BYTES = 64 << 20
_NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


class Kind(enum.IntEnum):
    """What a message is. A reply, a refusal and a failure answer the request of the same number."""

    ONE_WAY, REQUEST, REPLY, REFUSAL, FAILURE, GOODBYE = range(6)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame. is_long: the body is in the frames that follow."""

    kind: Kind
    service: str
    number: int
    body: msgspec.Raw = _NOTHING
    is_long: bool = False


_header_decoder = msgspec.msgpack.Decoder(Header)


def encode(kind: Kind, service: str, number: int, body: Any) -> list[bytes]:
    """Give a message's frames. body: anything that msgspec knows; what it does not is sent as text."""
    data = msgspec.msgpack.encode(body, enc_hook=str)
    if len(data) > MOST_MESSAGE_BYTES:
        raise ValueError(
            f"a message to {service!r} has {len(data):,} bytes, at most {MOST_MESSAGE_BYTES:,} can be sent"
        )
    if len(data) <= MOST_FRAME_BYTES:
        return [msgspec.msgpack.encode(Header(kind, service, number, msgspec.Raw(data)))]
    header = msgspec.msgpack.encode(Header(kind, service, number, is_long=True))
    return [header, *(data[at : at + MOST_FRAME_BYTES] for at in range(0, len(data), MOST_FRAME_BYTES))]


def decode(frames: Sequence[bytes]) -> tuple[Header, bytes]:
    """Read a message: its header, and its body in MessagePack; a `msgspec.MsgspecError` where it is none."""
    header = decoded(_header_decoder, frames[0])
    if sum(map(len, frames)) > MOST_MESSAGE_BYTES + MOST_FRAME_BYTES or (len(frames) > 1) != header.is_long:
        raise msgspec.DecodeError(f"{len(frames)} frames with {sum(map(len, frames)):,} bytes are no message")
    return header, b"".join(frames[1:]) if header.is_long else bytes(header.body)


def decoded(decoder: msgspec.msgpack.Decoder, data: bytes) -> Any:
    """Read a value; a `msgspec.MsgspecError` where it is none, also for text that is no UTF-8 and for deep nesting."""
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error

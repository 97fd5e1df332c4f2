"""Frames of control messages: one MessagePack frame, followed by more frames if the body is long."""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

MOST_FRAME_BYTES = 1 << 20
"""Largest frame sent. A slow network must carry one frame before the peer timeout expires."""
MOST_MESSAGE_BYTES = 64 << 20
_NO_BODY = msgspec.Raw(msgspec.msgpack.encode(None))


class Kind(enum.IntEnum):
    """Kind of a message. A reply, a refusal or a failure answers the request with the same number."""

    ONE_WAY, REQUEST, REPLY, REFUSAL, FAILURE, GOODBYE = range(6)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a message."""

    kind: Kind
    service: str
    number: int  # of the request; each sender numbers its own
    body: msgspec.Raw = _NO_BODY
    is_long: bool = False  # the body is in the frames that follow


_header_decoder = msgspec.msgpack.Decoder(Header)


def encode(kind: Kind, service: str, number: int, body: Any) -> list[bytes]:
    """Return a message's frames. body: any value that msgspec can encode; others are converted with ``str``."""
    data = msgspec.msgpack.encode(body, enc_hook=str)
    if len(data) > MOST_MESSAGE_BYTES:
        raise ValueError(
            f"a message to {service!r} has {len(data):,} bytes, at most {MOST_MESSAGE_BYTES:,} can be sent"
        )
    if len(data) <= MOST_FRAME_BYTES:
        return [msgspec.msgpack.encode(Header(kind, service, number, msgspec.Raw(data)))]
    header = msgspec.msgpack.encode(Header(kind, service, number, is_long=True))
    return [header, *(data[start : start + MOST_FRAME_BYTES] for start in range(0, len(data), MOST_FRAME_BYTES))]


def decode(frames: Sequence[bytes]) -> tuple[Header, bytes]:
    """Return a message's header and its body in MessagePack. Raises `msgspec.MsgspecError` if the frames are invalid."""
    header = decode_value(_header_decoder, frames[0])
    if sum(map(len, frames)) > MOST_MESSAGE_BYTES + MOST_FRAME_BYTES or (len(frames) > 1) != header.is_long:
        raise msgspec.DecodeError(f"{len(frames)} frames with {sum(map(len, frames)):,} bytes are no message")
    return header, b"".join(frames[1:]) if header.is_long else bytes(header.body)


def decode_value(decoder: msgspec.msgpack.Decoder, data: bytes) -> Any:
    """Decode a value. Raises `msgspec.MsgspecError` if it is invalid, including invalid UTF-8 and excessive nesting."""
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error

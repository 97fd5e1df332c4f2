"""Control messages as frames."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.messaging import wire
from dsjax.messaging.wire import Kind, decode, encode


@pytest.mark.parametrize("size", [0, wire.MOST_FRAME_BYTES - 5, wire.MOST_FRAME_BYTES, 5 * wire.MOST_FRAME_BYTES // 2])
def test_a_message_reads_as_it_was_written_in_frames_that_a_slow_network_carries(size):
    frames = encode(Kind.REQUEST, "service", 7, b"x" * size)
    header, data = decode(frames)
    assert (header.kind, header.service, header.number) == (Kind.REQUEST, "service", 7)
    assert msgspec.msgpack.decode(data) == b"x" * size
    assert all(len(frame) <= wire.MOST_FRAME_BYTES + 64 for frame in frames)


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(ValueError, match="at most"):
        encode(Kind.ONE_WAY, "service", 0, bytes(wire.MOST_MESSAGE_BYTES))


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=3))
def test_nonsense_is_an_error_of_its_own_kind(frames):
    with contextlib.suppress(msgspec.MsgspecError):
        decode(frames)

"""The greeting and the frames between processes of a deployment: who comes in, what a stranger gets, and what a changed byte does."""

import contextlib
import socket

import pytest

from dsjax.hosts.cluster_key import ClusterKey
from dsjax.hosts.credentials import Credentials
from dsjax.hosts.secure_channel import (
    NotAMemberError,
    SecureChannel,
    connect,
)
from dsjax.hosts.secure_listener import SecureListener

KEY = Credentials(ClusterKey("k" * 32, "the test"))
OTHER = Credentials(ClusterKey("o" * 32, "the other test"))


@contextlib.contextmanager
def listening(serve, credentials=KEY, services=("pages",), **options):
    listener = SecureListener(
        socket.create_server(("127.0.0.1", 0)), credentials, dict.fromkeys(services, serve), "test", **options
    )
    try:
        yield listener
    finally:
        listener.close(connections=True)


def echo(channel: SecureChannel) -> None:
    while True:
        channel.send(channel.receive(1 << 24))


def address_of(listener: SecureListener) -> tuple[str, int]:
    return "127.0.0.1", listener.port


def test_members_send_messages_and_large_data_both_ways():
    large = bytes(range(256)) * 20_001  # not a whole number of blocks

    def serve(channel):
        channel.send(channel.receive(1 << 24) + channel.service.encode())
        received = bytearray(len(large))
        channel.receive_into(memoryview(received))
        channel.send_bytes(bytes(received)[::-1])

    with listening(serve) as listener, connect(address_of(listener), "pages", KEY) as channel:
        channel.send(large)
        assert channel.receive(1 << 24) == large + b"pages"
        channel.send_bytes(large)
        received = bytearray(len(large))
        channel.receive_into(memoryview(received))
        assert received == large[::-1]


def test_who_has_another_key_hears_nothing_and_says_so():
    with listening(echo) as listener:
        with pytest.raises(NotAMemberError, match="from the other test: that side has another one"):
            connect(address_of(listener), "pages", OTHER)
        assert listener.turned_away == {"with another cluster key": 1}
    assert "k" * 32 not in repr(KEY)
    assert "k" * 32 not in str(KEY.key)

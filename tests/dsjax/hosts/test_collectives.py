"""Connections of collectives are found among a process's sockets and closed, and no others."""

import contextlib
import socket

import pytest

from dsjax.hosts.gloo.collectives import Collectives


class Peer:
    """Another process's side, in this one: what it listens with is none of `Collectives`' own."""

    def __init__(self):
        self.listener, self.kept = listener(), []
        self.endpoint = self.listener.getsockname()

    def reached(self) -> socket.socket:
        """A connection to it, as this process has it; the peer's side of it stays open."""
        mine = socket.create_connection(self.endpoint)
        self.kept.append(self.listener.accept()[0])
        return mine


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1) != b""
    return True


@pytest.fixture
def collectives():
    found = Collectives()
    with found.made_by(listener) as own:
        assert found.endpoint == own.getsockname()
        yield found, own


def test_connections_in_both_directions_are_cut_and_neither_listeners_nor_strangers(collectives):
    found, own = collectives
    peer, stranger = Peer(), Peer()
    found.begin(3, [0, 1], [found.endpoint, peer.endpoint, None])
    there = peer.reached()
    came_from = socket.create_connection(own.getsockname())
    came, _ = own.accept()
    others = stranger.reached()
    assert found.cut(2) == 0  # that generation is over
    assert found.cut(3) == 3  # both ends of what this process has with itself
    assert not any(map(is_open, (there, came, came_from)))
    assert is_open(others)
    socket.create_connection(own.getsockname()).close()  # it still listens


def test_connections_of_another_order_of_devices_stay_until_that_order_breaks(collectives):
    found, _ = collectives
    peer = Peer()
    found.begin(0, [0, 1, 2], [peer.endpoint])
    first = peer.reached()
    found.begin(1, [0, 1], [peer.endpoint])
    second = peer.reached()
    assert found.cut(1) == 1
    assert is_open(first)
    assert not is_open(second)
    found.begin(2, [0, 1, 2], [peer.endpoint])  # gloo uses the connections that this order has
    assert found.cut(2) == 1
    assert not is_open(first)


def test_where_it_is_not_known_where_gloo_listens_nothing_is_cut():
    found = Collectives()
    two = found.made_by(lambda: (listener(), listener()))
    assert found.endpoint is None
    peer = Peer()
    found.begin(0, [0], [peer.endpoint])
    connection = peer.reached()
    assert found.cut(0) == 0
    assert is_open(connection)
    for each in two:
        each.close()


def test_what_waits_beside_collectives_is_cut_with_them_once_and_in_no_other_generation():
    found, cut = Collectives(), []
    found.cut_with(1, lambda: cut.append(1))
    assert found.cut(0) == 0
    assert not cut
    found.cut_with(2, lambda: cut.append(2))  # generation 1 is over
    for generation in (1, 2, 2):
        found.cut(generation)
    assert cut == [2]

"""A link to a process with experts: who is waited for, and who is not."""

import contextlib
import socket
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hosts"))
from deployments import KEY, OTHER

from dsjax.engine.afd.expert_link import Errand, ExpertLink, ExpertsGoneError
from dsjax.engine.afd.messages import SERVICE, VERSION, Answered, Hello, Place, Welcome, receive, send
from dsjax.hosts.secure_channel import PROTOCOL, NotAMemberError
from dsjax.hosts.secure_listener import SecureListener


def serve(channel):
    """A process with experts that does everything at once."""
    receive(channel, Hello)
    send(channel, Welcome())
    with contextlib.suppress(EOFError, OSError):
        while True:
            receive(channel, Place)
            send(channel, Answered())


def listener(port=0):
    return SecureListener(socket.create_server(("127.0.0.1", port)), KEY, {SERVICE: serve}, "test")


def link(port, credentials=KEY, patience=20.0):
    return ExpertLink(
        f"127.0.0.1:{port}", credentials, lambda: Hello(VERSION, {}, b"", b""), patience=patience, silence=5
    )


def die_in_greeting(port):
    """Play a process that is killed when it has begun to greet, once."""
    with socket.create_server(("127.0.0.1", port)) as dying:
        connection, _ = dying.accept()
        with connection:
            connection.sendall(PROTOCOL + bytes(32))
            connection.recv(1 << 12)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)


def test_a_process_that_is_killed_while_it_greets_is_waited_for():
    first = listener()
    port, own = first.port, link(first.port)
    errand = Errand(Place(0, b""))
    try:
        own.begin(lambda: errand).result(20)
        first.close(connections=True)
        dying = threading.Thread(target=die_in_greeting, args=(port,))
        dying.start()
        done = own.begin(lambda: errand)
        dying.join(20)
        second = listener(port)
        done.result(20)
        assert (own.calls, own.losses) == (2, 1)
        second.close(connections=True)
    finally:
        own.close()


def test_a_process_with_another_key_is_no_loss_but_a_mistake():
    process = listener()
    own = link(process.port, OTHER)
    try:
        with pytest.raises(NotAMemberError, match="another one"):
            own.connect()
    finally:
        own.close()
        process.close(connections=True)


def test_who_stays_away_longer_than_there_is_patience_for_ends_the_call():
    process = listener()
    own = link(process.port, patience=0.5)
    own.connect()
    process.close(connections=True)
    try:
        with pytest.raises(ExpertsGoneError, match=r"for 0.5 s .*--afd-role expert"):
            own.begin(lambda: Errand(Place(0, b""))).result(20)
    finally:
        own.close()

"""A link to a process with experts: who is waited for, and who is not."""

import contextlib
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hosts"))
from deployments import KEY, OTHER

from dsjax.engine.afd.expert_link import Errand, ExpertLink, ExpertsGoneError, LinkClosedError
from dsjax.engine.afd.messages import SERVICE, VERSION, Answered, Call, Hello, Place, Welcome, receive, send
from dsjax.errors import UserError
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


def refuse(channel):
    """A process with experts that lets no side in."""
    receive(channel, Hello)
    send(channel, Welcome("the checkpoint cannot be read"))


def listener(port=0, serve=serve, **options):
    return SecureListener(socket.create_server(("127.0.0.1", port)), KEY, {SERVICE: serve}, "test", **options)


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
        own.begin(lambda: errand).result(60)
        first.close(connections=True)
        dying = threading.Thread(target=die_in_greeting, args=(port,))
        dying.start()
        done = own.begin(lambda: errand)
        dying.join(60)
        second = listener(port)
        done.result(60)
        assert (own.calls, own.losses) == (2, 1)
        second.close(connections=True)
    finally:
        own.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"most_connections": 0}, "there are 0 connections already"),  # as one that is told to end refuses, too
        ({"serve": refuse}, "refuses: the checkpoint cannot be read"),
    ],
)
def test_a_process_that_refuses_is_waited_for_if_it_was_there_before(options, reason, caplog):
    first = listener()
    port, own = first.port, link(first.port)
    errand = Errand(Place(0, b""))
    try:
        own.begin(lambda: errand).result(60)
        first.close(connections=True)
        refusing = listener(port, **options)
        done = own.begin(lambda: errand)
        end = time.monotonic() + 60
        while reason not in caplog.text and time.monotonic() < end and not done.done():
            time.sleep(0.05)
        refusing.close(connections=True)
        second = listener(port)
        done.result(60)
        assert caplog.text.count(reason + "); it is waited for") == 1
        second.close(connections=True)
        with pytest.raises(UserError, match=reason):  # at the first connection it is a mistake
            meet(**options)
    finally:
        own.close()


def meet(**options):
    """Connect to a process for the first time."""
    process = listener(**options)
    own = link(process.port)
    try:
        own.connect()
    finally:
        own.close()
        process.close(connections=True)


@pytest.fixture
def silent():
    """A process with experts that welcomes nobody, and how many have asked it."""
    end, asked = threading.Event(), threading.Semaphore(0)

    def serve(channel):
        receive(channel, Hello)
        asked.release()
        end.wait(60)

    process = listener(serve=serve)
    yield process, asked
    end.set()
    process.close(connections=True)


def test_a_process_that_is_there_and_says_nothing_is_waited_for_as_long_as_one_that_is_not(silent):
    process, _ = silent
    own = link(process.port, patience=0.5)
    try:
        with pytest.raises(ExpertsGoneError, match=r"for 0.5 s .*timed out"):
            own.begin(lambda: Errand(Place(0, b""))).result(60)
    finally:
        own.close()


def test_a_link_that_is_closed_waits_for_no_welcome(silent):
    process, asked = silent
    own = link(process.port, patience=60.0)
    done = own.begin(lambda: Errand(Place(0, b"")))
    assert asked.acquire(timeout=60)
    closing = threading.Thread(target=own.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(LinkClosedError, match="is closed"):
        done.result(0)


def test_a_link_that_is_given_up_in_a_call_fails_it_and_calls_nobody_else():
    asked = threading.Semaphore(0)

    def take(channel):
        receive(channel, Hello)
        send(channel, Welcome())
        receive(channel, Place)
        asked.release()
        channel.wait_for_end()

    process = listener(serve=take)
    own = link(process.port)
    try:
        done = own.begin(lambda: Errand(Place(0, b"")))
        assert asked.acquire(timeout=60)
        own.give_up()
        with pytest.raises(LinkClosedError, match="closed under a call"):
            done.result(60)
    finally:
        own.close()
        process.close(connections=True)


def test_a_call_that_is_made_again_says_so():
    calls = []

    def answer(channel):
        receive(channel, Hello)
        send(channel, Welcome())
        with contextlib.suppress(EOFError, OSError):
            while True:
                calls.append(receive(channel, Call))
                if len(calls) == 2:
                    channel.close()
                    return
                send(channel, Answered())

    process = listener(serve=answer)
    own = link(process.port)
    try:
        for number in range(3):
            call = Call("moe_layers", 0, 8, 8, b"", number)
            own.begin(lambda call=call: Errand(call)).result(60)
        assert [(call.number, call.again) for call in calls] == [(0, False), (1, False), (1, True), (2, False)]
    finally:
        own.close()
        process.close(connections=True)


@pytest.mark.skipif(sys.platform != "linux", reason="another system's kernel is not asked")
def test_a_process_that_has_gone_is_not_connected_though_nobody_calls_it():
    process = listener()
    own = link(process.port)
    try:
        own.begin(lambda: Errand(Place(0, b""))).result(60)
        assert own.counts.connected
        process.close(connections=True)
        deadline = time.monotonic() + 60
        while own.counts.connected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not own.counts.connected
        assert own.counts.losses == 0, "a loss is one of a call"
    finally:
        own.close()


def test_a_process_is_looked_for_beside_a_call_that_is_under_way():
    process = listener()
    own = link(process.port)
    try:
        own.check()
        assert not own.counts.connected
        process.close(connections=True)
        with pytest.raises(
            UserError, match=r"no process with experts answers at 127.0.0.1:.* ask again when it is back"
        ):
            own.check()
    finally:
        own.close()


def test_who_was_there_before_the_link_is_waited_for_though_it_refuses():
    process = listener(serve=refuse)
    first, later = link(process.port), link(process.port, patience=0.5)
    try:
        with pytest.raises(UserError, match="refuses: the checkpoint cannot be read"):
            first.connect()
        with pytest.raises(ExpertsGoneError, match=r"for 0.5 s .*the checkpoint cannot be read"):
            later.connect(known=True)
    finally:
        for own in (first, later):
            own.close()
        process.close(connections=True)


def test_who_refuses_for_too_long_is_named_with_its_reason():
    first = listener()
    port, own = first.port, link(first.port, patience=0.5)
    own.connect()
    first.close(connections=True)
    refusing = listener(port, serve=refuse)
    try:
        with pytest.raises(ExpertsGoneError, match=r"for 0.5 s .*the checkpoint cannot be read"):
            own.begin(lambda: Errand(Place(0, b""))).result(60)
    finally:
        own.close()
        refusing.close(connections=True)


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
            own.begin(lambda: Errand(Place(0, b""))).result(60)
    finally:
        own.close()

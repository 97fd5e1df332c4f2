"""A link to a process with experts: who is waited for, and who is not."""

import contextlib
import socket
import sys
import threading

import pytest
from deployments import KEY, OTHER
from waits import until

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


@contextlib.contextmanager
def serving(serve=serve, port=0, **options):
    """Listen as a process with experts does; its connections end with it."""
    listener = SecureListener(socket.create_server(("127.0.0.1", port)), KEY, {SERVICE: serve}, "test", **options)
    try:
        yield listener
    finally:
        listener.close(connections=True)


@contextlib.contextmanager
def linked(port, credentials=KEY, patience=20.0):
    """A link to the process at a port."""
    hello = lambda: Hello(VERSION, {}, b"", b"")  # noqa: E731
    own = ExpertLink(f"127.0.0.1:{port}", credentials, hello, patience=patience, silence=5)
    try:
        yield own
    finally:
        own.close()


def call(own):
    """Begin a call, and give what tells its end."""
    return own.begin(lambda: Errand(Place(0, b"")))


@contextlib.contextmanager
def left(**options):
    """A link to a process that has answered a call and gone, and the port that it had."""
    with serving() as first:
        port = first.port
        stack = contextlib.ExitStack()
        own = stack.enter_context(linked(port, **options))
        call(own).result(60)
    with stack:
        yield own, port


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
    with left() as (own, port):
        dying = threading.Thread(target=die_in_greeting, args=(port,))
        dying.start()
        done = call(own)
        dying.join(60)
        with serving(port=port):
            done.result(60)
        assert (own.calls, own.losses) == (2, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"most_connections": 0}, "there are 0 connections already"),  # as one that is told to end refuses, too
        ({"serve": refuse}, "refuses: the checkpoint cannot be read"),
    ],
)
def test_a_process_that_refuses_is_waited_for_if_it_was_there_before(options, reason, caplog):
    with left() as (own, port):
        with serving(port=port, **options):
            done = call(own)
            until(lambda: reason in caplog.text or done.done())
        with serving(port=port):
            done.result(60)
    assert caplog.text.count(reason + "); it is waited for") == 1
    mistake = pytest.raises(UserError, match=reason)
    with serving(**options) as process, linked(process.port) as first, mistake:  # at the first connection
        first.connect()


def test_a_process_that_is_there_and_says_nothing_is_waited_for_as_long_as_one_that_is_not():
    def say_nothing(channel):
        receive(channel, Hello)
        channel.wait_for_end()

    gone = pytest.raises(ExpertsGoneError, match=r"for 0.5 s .*timed out")
    with serving(say_nothing) as process, linked(process.port, patience=0.5) as own, gone:
        call(own).result(60)


@pytest.mark.parametrize(
    ("welcomes", "end", "says"),
    [(False, ExpertLink.close, "is closed"), (True, ExpertLink.give_up, "closed under a call")],
)
def test_a_link_that_is_ended_waits_for_no_welcome_and_no_answer_and_calls_nobody_else(welcomes, end, says):
    asked = threading.Semaphore(0)

    def take(channel):
        receive(channel, Hello)
        if welcomes:
            send(channel, Welcome())
            receive(channel, Place)
        asked.release()
        channel.wait_for_end()

    with serving(take) as process, linked(process.port, patience=60.0) as own:
        done = call(own)
        assert asked.acquire(timeout=60)
        ending = threading.Thread(target=end, args=(own,), daemon=True)
        ending.start()
        ending.join(60)
        assert not ending.is_alive()
        with pytest.raises(LinkClosedError, match=says):
            done.result(60)


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

    with serving(answer) as process, linked(process.port) as own:
        for number in range(3):
            own.begin(lambda number=number: Errand(Call("moe_layers", 0, 8, 8, b"", number))).result(60)
    assert [(call.number, call.again) for call in calls] == [(0, False), (1, False), (1, True), (2, False)]


@pytest.mark.skipif(sys.platform != "linux", reason="another system's kernel is not asked")
def test_a_process_that_has_gone_is_not_connected_though_nobody_calls_it():
    with serving() as process, linked(process.port) as own:
        call(own).result(60)
        assert own.counts.connected
        process.close(connections=True)
        until(lambda: not own.counts.connected)
        assert own.counts.losses == 0, "a loss is one of a call"


def test_a_process_is_looked_for_beside_a_call_that_is_under_way():
    with serving() as process, linked(process.port) as own:
        own.check()
        assert not own.counts.connected
        process.close(connections=True)
        gone = r"no expert process answers at 127.0.0.1:.* ask again when it is there"
        with pytest.raises(UserError, match=gone):
            own.check()


def test_who_was_there_before_the_link_is_waited_for_though_it_refuses():
    with serving(refuse) as process, linked(process.port) as first, linked(process.port, patience=0.5) as later:
        with pytest.raises(UserError, match="refuses: the checkpoint cannot be read"):
            first.connect()
        with pytest.raises(ExpertsGoneError, match=r"for 0.5 s .*the checkpoint cannot be read"):
            later.connect(known=True)


@pytest.mark.parametrize(("refuses", "reason"), [(True, "the checkpoint cannot be read"), (False, "--afd-role expert")])
def test_who_refuses_or_stays_away_for_too_long_ends_the_call_with_the_reason(refuses, reason):
    with left(patience=0.5) as (own, port), contextlib.ExitStack() as refusing:
        if refuses:
            refusing.enter_context(serving(refuse, port))
        with pytest.raises(ExpertsGoneError, match=rf"for 0.5 s .*{reason}"):
            call(own).result(60)


def test_a_process_with_another_key_is_no_loss_but_a_mistake():
    with serving() as process, linked(process.port, OTHER) as own, pytest.raises(NotAMemberError, match="another one"):
        own.connect()

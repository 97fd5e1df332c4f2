"""`SecureListener` among strangers: they hold no place for ever, keep no member out, and leave no thread or file behind."""

import contextlib
import logging
import os
import socket
import threading
import time

import pytest
from deployments import KEY, OTHER, address_of, listening

from dsjax.hosts import secure_channel, secure_listener
from dsjax.hosts.secure_channel import PROTOCOL, NotAMemberError, RefusedError, SecureChannel, connect
from dsjax.hosts.secure_listener import MOST_GREETINGS


def echo(channel: SecureChannel) -> None:
    while True:
        channel.send(channel.receive(1 << 16))


def eventually(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def threads() -> int:
    return sum(thread.name == "test" for thread in threading.enumerate())


def test_a_greeting_that_comes_byte_by_byte_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr(secure_listener, "GREETING_SECONDS", 0.3)
    with listening(echo) as listener, socket.create_connection(address_of(listener)) as slow:
        with contextlib.suppress(OSError):
            for byte in PROTOCOL * 1000:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
                if listener.turned_away:
                    break
        assert listener.turned_away == {"that did not end their greeting in time": 1}


def test_strangers_on_all_places_keep_no_member_out():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with listening(echo) as listener, contextlib.ExitStack() as stack:
        member = stack.enter_context(connect(address_of(listener), "pages", KEY))
        for _ in range(3 * MOST_GREETINGS):
            stack.enter_context(socket.create_connection(address_of(listener)))
        # Nobody waits for the deadline of those that say nothing.
        with connect(address_of(listener), "pages", KEY, seconds=4.0) as other:
            other.send(b"in")
            assert other.receive(10) == b"in"
            assert threads() <= MOST_GREETINGS + 3
        assert listener.turned_away["for which there was no place"] >= 2 * MOST_GREETINGS
        member.send(b"still in")
        assert member.receive(10) == b"still in"
        stack.pop_all().close()
        eventually(lambda: threads() == 1)
    assert not before or len(os.listdir("/proc/self/fd")) <= before


def test_a_flood_of_connections_keeps_no_member_out():
    ended = threading.Event()

    def flood(address):
        held = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(address, 1))
            if len(held) > 100:
                held.pop(0).close()
        for connection in held:
            connection.close()

    with listening(echo) as listener:
        flooding = [threading.Thread(target=flood, args=(address_of(listener),)) for _ in range(2)]
        for thread in flooding:
            thread.start()
        try:
            for number in range(20):
                with connect(address_of(listener), "pages", KEY) as channel:
                    channel.send(bytes([number]))
                    assert channel.receive(10) == bytes([number])
        finally:
            ended.set()
            for thread in flooding:
                thread.join()


def test_a_member_whose_place_is_taken_as_it_proves_itself_comes_in_at_its_next_try(monkeypatch):
    answer, resets = secure_listener.answer, []

    def answer_and_lose_the_place(*arguments):
        answered = answer(*arguments)
        if not resets:
            [greeting] = listener._greetings
            greeting.reset()
            resets.append(greeting)
        return answered

    monkeypatch.setattr(secure_listener, "answer", answer_and_lose_the_place)
    with listening(echo) as listener, connect(address_of(listener), "pages", KEY) as channel:
        channel.send(b"in")
        assert channel.receive(10) == b"in"
        assert resets
        assert listener.turned_away == {"for which there was no place": 1}


def test_a_member_that_was_too_slow_is_not_told_that_its_key_is_wrong(monkeypatch):
    monkeypatch.setattr(secure_listener, "GREETING_SECONDS", 0.2)
    tokens = secure_channel.secrets.token_bytes
    with listening(echo) as listener:

        def slow(count: int) -> bytes:  # each side draws its nonce by this
            if len(listener._greetings) and threading.current_thread() is threading.main_thread():
                while not listener.turned_away:
                    time.sleep(0.01)
                monkeypatch.setattr(secure_listener, "GREETING_SECONDS", 60)
            return tokens(count)

        monkeypatch.setattr(secure_channel.secrets, "token_bytes", slow)
        with connect(address_of(listener), "pages", KEY) as channel:
            channel.send(b"in")
            assert channel.receive(10) == b"in"
        assert listener.turned_away == {"that did not end their greeting in time": 1}


def test_more_members_than_there_is_room_for_are_told_so():
    with listening(echo, most_connections=2) as listener, contextlib.ExitStack() as stack:
        first, _second = (stack.enter_context(connect(address_of(listener), "pages", KEY)) for _ in range(2))
        with pytest.raises(RefusedError, match="there are 2 connections already"):
            connect(address_of(listener), "pages", KEY)
        first.close()
        eventually(lambda: listener.num_connections == 1)
        with connect(address_of(listener), "pages", KEY) as third:
            third.send(b"in")
            assert third.receive(10) == b"in"


def test_a_listener_outlives_a_shortage_of_files(monkeypatch):
    failures = [OSError(24, "Too many open files"), OSError(103, "Software caused connection abort")]

    class Short:
        """A socket whose first `accept` calls fail."""

        def __init__(self, inner):
            self._inner = inner

        def accept(self):
            if failures:
                raise failures.pop()
            return self._inner.accept()

        def __getattr__(self, name):
            return getattr(self._inner, name)

    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *address: Short(create(*address)))
    with listening(echo) as listener, connect(address_of(listener), "pages", KEY) as channel:
        assert not failures
        channel.send(b"in")
        assert channel.receive(10) == b"in"


def test_strangers_fill_no_log(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    with listening(echo) as listener:
        for _ in range(5):
            with pytest.raises(NotAMemberError):
                connect(address_of(listener), "pages", OTHER)
        assert [record.message for record in caplog.records] == [
            f"Connections to port {listener.port} of 127.0.0.1 were turned away: 1 with another cluster key."
        ]
    # What was not said is said at the end.
    assert caplog.records[1].message.endswith("turned away: 4 with another cluster key.")
    assert len(caplog.records) == 2
    assert "oooo" not in caplog.text
    assert "kkkk" not in caplog.text


def test_what_a_service_raises_closes_its_connection(caplog):
    def serve(channel: SecureChannel) -> None:
        channel.receive(10)
        raise ConnectionError("it has gone")

    with listening(serve) as listener, connect(address_of(listener), "pages", KEY) as channel:
        channel.send(b"one")
        with pytest.raises(EOFError):
            channel.receive(10)
        eventually(lambda: listener.num_connections == 0)

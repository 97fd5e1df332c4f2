"""The greeting and the frames between processes of a deployment: who comes in, what a stranger gets, and what a changed byte does.

Listeners under a flood are in `test_secure_listener.py`.
"""

import contextlib
import queue
import re
import shutil
import socket
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from deployments import KEY, OTHER, address_of, listening, make_certificates, relay
from dsjax.hosts.tls import ClusterTls

from dsjax.engine.pipeline import process_links
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.hosts import link_monitor, rendezvous
from dsjax.hosts.group import GroupError
from dsjax.hosts.secure_channel import (
    BLOCK_BYTES,
    PROTOCOL,
    SERVICES,
    NotAMemberError,
    ProtocolError,
    RefusedError,
    SecureChannel,
    TamperedError,
    connect,
)
from dsjax.hosts.secure_listener import SecureListener
from dsjax.messaging.cluster_key import ClusterKey
from dsjax.messaging.credentials import CredentialOptions, Credentials

GREETING = len(PROTOCOL) + 32 + 1 + len("pages") + 32
"""Bytes that a caller sends before its first frame."""
HEADER = 4 + 32


def echo(channel: SecureChannel) -> None:
    while True:
        channel.send(channel.receive(1 << 24))


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


def test_messages_of_several_threads_arrive_whole_while_others_are_read():
    with listening(echo) as listener, connect(address_of(listener), "pages", KEY) as channel:
        expected = {bytes([writer]) * (1 + 40_000 * writer) for writer in range(6)}
        threads = [threading.Thread(target=channel.send, args=(message,)) for message in expected]
        for thread in threads:
            thread.start()
        assert {channel.receive(1 << 20) for _ in threads} == expected


def test_who_has_another_key_hears_nothing_and_says_so():
    with listening(echo) as listener:
        with pytest.raises(NotAMemberError, match="which is from the other test: that side has another one"):
            connect(address_of(listener), "pages", OTHER)
        assert listener.turned_away == {"with another cluster key": 1}


def test_a_listener_that_does_not_know_the_key_is_not_believed():
    def impostor(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.sendall(PROTOCOL + bytes(32))
        connection.recv(GREETING, socket.MSG_WAITALL)
        connection.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=impostor, args=(listener,), daemon=True).start()
        with pytest.raises(NotAMemberError, match="does not know the cluster key"):
            connect(listener.getsockname(), "pages", KEY)


def test_a_callers_own_proof_and_an_old_one_are_no_proofs():
    recorded: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def record(offset: int, data: bytes) -> bytes:
        recorded.put(data)
        return data

    with listening(echo) as listener:
        with relay(address_of(listener), record) as address, connect(address, "pages", KEY) as channel:
            channel.send(b"first")
            assert channel.receive(100) == b"first"
        replayed = recorded.get()
        assert len(replayed) == GREETING
        with socket.create_connection(address_of(listener)) as stranger:
            stranger.sendall(replayed)
            assert stranger.recv(1000, socket.MSG_WAITALL)[40:] == b""  # not a byte but the listener's nonce
        assert listener.turned_away == {"with another cluster key": 1}


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), ProtocolError, "is no dsjax that waits for other processes"),
        (PROTOCOL[:7] + b"9" + bytes(32), ProtocolError, "speaks another version of these connections"),
        (b"", ProtocolError, "ends the connection at once"),
    ],
)
def test_a_caller_says_what_it_has_met(answer, error, message):
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        with pytest.raises(error, match=message):
            connect(listener.getsockname(), "pages", KEY)


def test_a_member_that_asks_for_what_a_port_has_not_is_told():
    with listening(echo, services=("pages", "chunks")) as listener:
        with pytest.raises(
            RefusedError, match="asked for 'rendezvous' at a port for pages and chunks; check the address"
        ):
            connect(address_of(listener), "rendezvous", KEY)
        with connect(address_of(listener), "chunks", KEY) as channel:
            assert channel.service == "chunks"


CHANGES = {
    "flipped": lambda first, second: first[:-1] + bytes([first[-1] ^ 1]) + second,
    "flipped MAC": lambda first, second: first[:5] + bytes([first[5] ^ 1]) + first[6:] + second,
    "replayed": lambda first, second: first + first,
    "reordered": lambda first, second: second + first,
    "dropped": lambda first, second: second,
    "shortened": lambda first, second: (3).to_bytes(4, "little") + first[4 : HEADER + 3] + second,
    "oversized": lambda first, second: (0xFFFFFFFF).to_bytes(4, "little") + first[4:] + second,
}
"""Ways to change what a caller sends after its greeting: two whole frames, each of a message."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_large", [False, True], ids=["message", "large"])
def test_frames_that_are_not_what_was_sent_end_the_connection(change, is_large):
    frames: list[bytes] = []

    def alter(offset: int, data: bytes) -> bytes:
        if offset < GREETING:
            assert len(data) == GREETING
            return data
        frames.append(data)
        joined = b"".join(frames)
        if len(joined) < 2 * (HEADER + 4):
            return b""
        assert len(joined) == 2 * (HEADER + 4)
        return CHANGES[change](joined[: HEADER + 4], joined[HEADER + 4 :])

    received: list[bytes] = []
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def serve(channel: SecureChannel) -> None:
        try:
            while True:
                if is_large:
                    block = bytearray(4)
                    channel.receive_into(memoryview(block))
                    received.append(bytes(block))
                else:
                    received.append(channel.receive(1 << 16))
        except (OSError, EOFError) as error:
            ended.put(error)

    with listening(serve) as listener, relay(address_of(listener), alter) as address:
        with connect(address, "pages", KEY) as channel:
            (channel.send_bytes if is_large else channel.send)(b"1111")
            (channel.send_bytes if is_large else channel.send)(b"2222")
            assert isinstance(ended.get(timeout=60), TamperedError)
        assert received == ([b"1111"] if change == "replayed" else [])
        assert listener.num_connections == 0


def test_a_message_is_no_block_and_a_block_no_message():
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def serve(channel: SecureChannel) -> None:
        try:
            channel.receive(100)
        except OSError as error:
            ended.put(error)

    with listening(serve) as listener, connect(address_of(listener), "pages", KEY) as channel:
        channel.send_bytes(b"four")
        assert isinstance(ended.get(timeout=60), TamperedError)


def test_a_length_alone_takes_no_memory():
    one, other = socket.socketpair()
    channel = SecureChannel(one, one, "pages", b"1", b"2")
    other.sendall((1 << 30).to_bytes(4, "little") + bytes(32 + 10))
    other.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    with other, pytest.raises(EOFError):
        channel.receive(1 << 31)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * BLOCK_BYTES


def test_a_time_limit_ends_a_connection_instead_of_leaving_half_a_frame():
    with listening(lambda channel: None) as listener, connect(address_of(listener), "pages", KEY) as channel:
        channel.settimeout(0.05)
        with pytest.raises(TimeoutError):
            channel.receive(100)
        with pytest.raises(OSError, match="Bad file descriptor"):
            channel.send(b"more")


def test_a_key_that_was_made_for_this_user_serves_loopback_alone(monkeypatch):
    local = Credentials(ClusterKey("l" * 64, "a file", is_local=True))
    with pytest.raises(UserError, match="--cluster-key-file FILE or in the environment variable DSJAX_CLUSTER_KEY"):
        connect(("192.0.2.1", 1), "pages", local)
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        probe.listen()
        with pytest.raises(UserError, match="beyond the loopback interface"):
            SecureListener(probe, local, {}, "test")


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture
def certificates(tmp_path):
    return make_certificates(tmp_path, "one", "two") | make_certificates(tmp_path, "foreign", authority="elsewhere")


def with_tls(files: tuple[str, str, str], key: Credentials = KEY) -> Credentials:
    return Credentials(key.key, ClusterTls(*files))


@needs_openssl
def test_with_certificates_connections_are_encrypted_and_may_be_read_while_they_are_written(certificates):
    seen: list[bytes] = []

    def watch(offset: int, data: bytes) -> bytes:
        seen.append(data)
        return data

    large = b"a page of a prompt " * 100_000
    with (
        listening(echo, with_tls(certificates["one"])) as listener,
        relay(address_of(listener), watch) as address,
        connect(address, "pages", with_tls(certificates["two"])) as channel,
    ):
        writer = threading.Thread(target=lambda: [channel.send(large) for _ in range(4)])
        writer.start()
        assert [channel.receive(1 << 24) for _ in range(4)] == [large] * 4
        writer.join()
    assert b"a page of a prompt" not in b"".join(seen)


@needs_openssl
def test_both_certificates_and_the_key_are_asked_for(certificates):
    with listening(echo, with_tls(certificates["one"])) as listener:
        with pytest.raises(NotAMemberError, match=r"certificate of .* is not of --cluster-tls-ca"):
            connect(address_of(listener), "pages", with_tls(certificates["foreign"]))
        with pytest.raises(NotAMemberError, match="another one"):
            connect(address_of(listener), "pages", with_tls(certificates["two"], OTHER))
        # It knows the authority, and has no certificate of it.
        foreign = certificates["foreign"][:2] + (certificates["one"][2],)
        with pytest.raises(NotAMemberError, match="does not take this process's certificate"):
            connect(address_of(listener), "pages", with_tls(foreign))
        with pytest.raises(OSError, match=r"timed out|ends the connection|no dsjax"):
            connect(address_of(listener), "pages", KEY, seconds=0.5)
    with listening(echo) as plain, pytest.raises(ProtocolError, match="to all processes, or to none"):
        connect(address_of(plain), "pages", with_tls(certificates["one"]))


@needs_openssl
def test_who_has_a_certificate_and_no_key_cannot_stand_between_two_members(certificates):
    """A thief of a certificate ends TLS on both sides and passes on all that is inside."""
    member, thief = with_tls(certificates["one"]), ClusterTls(*certificates["two"])
    with listening(echo, member) as listener, socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on(one, other):
            buffer = bytearray(1 << 16)
            with contextlib.suppress(OSError, EOFError):
                while count := one.recv_into(memoryview(buffer)):
                    other.sendall(bytes(buffer[:count]))

        def stand_between():
            caller, _ = between.accept()
            with caller, socket.create_connection(address_of(listener)) as there:
                streams = [
                    thief.stream(end, is_listener=is_listener, before_wait=lambda: None)
                    for end, is_listener in ((caller, True), (there, False))
                ]
                back = threading.Thread(target=pass_on, args=streams[::-1], daemon=True)
                back.start()
                threading.Thread(target=pass_on, args=streams, daemon=True).start()
                back.join(60)
                caller.shutdown(socket.SHUT_RDWR)  # also for the thread that waits for it

        threading.Thread(target=stand_between, daemon=True).start()
        with pytest.raises(NotAMemberError):
            connect(between.getsockname(), "pages", member)
        assert listener.turned_away == {"with another cluster key": 1}


@needs_openssl
def test_certificates_that_cannot_be_used_are_named(certificates, tmp_path):
    certificate, key, authority = certificates["one"]
    given = {"cluster_tls_cert": certificate, "cluster_tls_key": key, "cluster_tls_ca": authority}
    assert CredentialOptions(**given).read("127.0.0.1").tls is not None
    for missing in given:
        with pytest.raises(UserError, match=rf"^--{missing.replace('_', '-')} missing: give all of"):
            EngineArgs(**{**given, missing: None})
        with pytest.raises(UserError, match=rf"--{missing.replace('_', '-')} .*nowhere"):
            CredentialOptions(**{**given, missing: str(tmp_path / "nowhere")}).read("127.0.0.1")
        (tmp_path / "empty").touch()
        with pytest.raises(UserError, match=rf"--{missing.replace('_', '-')} .* cannot be used"):
            CredentialOptions(**{**given, missing: str(tmp_path / "empty")}).read("127.0.0.1")
    with pytest.raises(UserError, match="--cluster-tls-key"):
        CredentialOptions(**{**given, "cluster_tls_key": certificates["two"][1]}).read("127.0.0.1")


def test_every_service_is_listed_and_documented():
    root = Path(__file__).parents[3]
    named = re.compile(r'^_?SERVICE = "(\w+)"$', re.MULTILINE)
    found = {name for file in (root / "dsjax").rglob("*.py") for name in named.findall(file.read_text())}
    assert {"links", "experts"} <= found <= set(SERVICES)
    listed = ", ".join(f"`{name}`" for name in SERVICES)
    assert f"(a *service*: {listed})" in (root / "docs/security.md").read_text()


class Member(NamedTuple):
    address: str
    port: int


class Unusable:
    """A connection that was greeted, and then ends."""

    def __init__(self):
        self.is_closed = False

    def close(self):
        self.is_closed = True

    def fail(self, *arguments, **options):
        raise ConnectionResetError("it has ended")

    keep_alive = settimeout = send = fail


@pytest.mark.parametrize("module", [process_links, rendezvous, link_monitor])
def test_a_connection_that_ends_before_anybody_has_it_is_closed(module, monkeypatch):
    made = []
    monkeypatch.setattr(module, "connect", lambda *some: made.append(Unusable()) or made[-1])
    options = SimpleNamespace(
        heartbeat_timeout=5, process_id=1, coordinator=("here", 1), coordinator_text="here:1", start_timeout=0
    )
    group = SimpleNamespace(credentials=None, options=options)
    if module is process_links:
        links = object.__new__(process_links.ProcessLinks)
        links._group = group
        group.check = lambda error: None
        with pytest.raises(GroupError, match="process 0 cannot be reached at here port 1"):
            links._connect(SimpleNamespace(address="here", name="process 0"), 1, b"", "hidden")
    elif module is rendezvous:
        with pytest.raises(rendezvous.GroupError, match="it has ended"):
            rendezvous._connect(options, None)
    else:
        monitor = link_monitor.LinkMonitor(group, 1.0)
        with pytest.raises(ConnectionResetError):
            monitor._probe(Member("here", 1), None, None)
    assert made
    assert all(one.is_closed for one in made)

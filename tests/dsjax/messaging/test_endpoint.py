"""`Endpoint` and `Peer`: requests, messages, who is admitted, and who has gone."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest
import zmq
from deployments import KEY, OTHER
from waits import until

from dsjax.errors import UserError
from dsjax.messaging import Credentials, Endpoint, NotAMemberError, PeerLostError, RefusedError
from dsjax.messaging.cluster_key import ClusterKey
from dsjax.messaging.endpoint import PING, _dial_error

HOST = "127.0.0.1"
SECONDS = 60.0
SILENCE = 4.0
"""Timeout of endpoints that lose a process: long, because a busy machine may stall a process for a second."""


@pytest.fixture
def pair(endpoints):
    return endpoints(), endpoints()


@pytest.fixture
def connected(pair):
    """Two endpoints, and the second one's connection to the first."""
    server, client = pair
    return server, client, client.connect(server.address, "member")


def greeted(server):
    """The peers that say to a server that they are here."""
    peers = []
    server.serve("here", lambda request: (peers.append(request.peer), request.reply()), roles=("member",))
    return peers


def test_a_request_is_answered_with_a_value_of_the_type_that_was_asked_for(connected):
    server, _, peer = connected
    server.serve("double", lambda request: request.reply(2 * request.body), roles=("member",), kind=int)
    assert peer.request("double", 21, kind=int).result(SECONDS) == 42
    with pytest.raises(RuntimeError, match="cannot be read"):
        peer.request("double", 21, kind=str).result(SECONDS)


def test_messages_come_in_the_order_in_which_they_were_sent_however_long_they_are(connected):
    server, _, peer = connected
    heard = []
    server.serve("say", lambda request: heard.append(request.body), roles=("member",), kind=bytes)
    said = [bytes([number]) * (1 if number % 2 else 3_000_001) for number in range(6)]
    for one in said:
        peer.send("say", one)
    until(lambda: len(heard) == len(said))
    assert heard == said


@pytest.mark.parametrize(
    ("body", "service", "said"),
    [
        (1, "unknown", "not served here"),
        (1, "experts", "not served here to 'member'"),
        ("text", "number", "cannot be read"),
        (1, "number", "no number today"),
    ],
)
def test_who_asks_for_what_cannot_be_is_told_why(pair, body, service, said):
    server, client = pair
    server.serve("number", lambda request: request.refuse("no number today"), roles=("member",), kind=int)
    server.serve("experts", lambda request: request.reply(), roles=("attention",))
    with pytest.raises(RefusedError, match=said):
        client.connect(server.address, "member").request(service, body).result(SECONDS)


def test_what_comes_for_a_service_before_it_is_served_waits_in_order(endpoints):
    server, client = endpoints(holds=["say"]), endpoints()
    peer, heard = client.connect(server.address, "member"), []
    for number in range(3):
        peer.send("say", number)
    reply = peer.request("say", 3)
    peer.request("ping").result(SECONDS)
    assert not reply.done()
    server.serve("say", lambda request: (heard.append(request.body), request.reply()), roles=("member",))
    reply.result(SECONDS)
    assert heard == [0, 1, 2, 3]


def test_what_was_answered_last_arrives_though_the_process_ends(endpoints):
    """With a reconnection interval of −1 libzmq drops what was received and not read when the connection ends."""
    for _ in range(30):
        server, client, held = endpoints(), endpoints(), []
        server.serve("wait", held.append, roles=("member",))
        reply = client.connect(server.address, "member").request("wait")
        until(lambda: held)  # noqa: B023
        held[0].reply("last words")
        server.close(linger=SECONDS)
        assert reply.result(SECONDS) == "last words"
        client.close()


def test_a_handler_that_fails_fails_its_request_alone(connected):
    server, _, peer = connected
    server.serve("divide", lambda request: request.reply(1 // request.body), roles=("member",), kind=int)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        peer.request("divide", 0).result(SECONDS)
    assert peer.request("divide", 1).result(SECONDS) == 1


def test_a_process_with_another_key_gets_nowhere_and_is_counted(endpoints):
    server = endpoints()
    with pytest.raises(NotAMemberError, match="another cluster key"):
        endpoints(OTHER).connect(server.address, "member")
    until(lambda: server.turned_away)
    assert list(server.turned_away) == ["with another cluster key"]


def test_what_is_no_dsjax_process_is_told_from_one_that_does_not_answer(endpoints):
    client = endpoints()
    with socket.create_server((HOST, 0)) as silent:
        address = f"{HOST}:{silent.getsockname()[1]}"
        with pytest.raises(PeerLostError, match="does not answer"):
            client.connect(address, "member", 1.0)
    with pytest.raises(PeerLostError, match="nobody answers"):
        client.connect(address, "member")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_a_handshake_that_took_too_long_is_no_proof_of_another_key_though_this_process_was_stopped_in_it(number):
    error = _dial_error("there:1", zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, number)
    assert isinstance(error, PeerLostError)
    assert str(error) == "what is at there:1 does not answer"


def test_a_connection_for_which_the_system_has_no_room_fails_and_is_not_waited_for(pair, monkeypatch):
    server, client = pair
    with monkeypatch.context() as context:
        context.setattr(client, "socket", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
        with pytest.raises(PeerLostError, match="open files"):
            client.connect(server.address, "member")
    with monkeypatch.context() as context:  # libzmq's own attempt fails, of which it does not tell
        context.setattr(client, "watch", lambda socket: Endpoint.watch(client.socket(zmq.DEALER, HOST)))
        with pytest.raises(PeerLostError, match="cannot be reached"):
            client.connect(server.address, "member", 0.1)
    assert client.connect(server.address, "member").request("ping").result(SECONDS) is None
    assert not client._dialling


def test_what_is_asked_of_an_endpoint_that_has_ended_fails(pair):
    server, client = pair
    peer, lost = client.connect(server.address, "member"), []
    client.close()
    with pytest.raises(PeerLostError, match="is ending"):
        client.connect(server.address, "member")
    with pytest.raises(PeerLostError):
        peer.request("ping").result(SECONDS)
    peer.on_lost(lambda: lost.append(peer))
    assert lost == [peer]


def test_all_addresses_of_a_name_are_tried(pair, monkeypatch):
    server, client = pair
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (one, 0)) for one in ("127.0.0.9", HOST)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert client.connect(f"process-0:{server.port}", "member").request("ping").result(SECONDS) is None


def test_a_flood_of_strangers_keeps_no_member_out_and_fills_no_log(endpoints, caplog):
    server, client = endpoints(), endpoints()
    with contextlib.ExitStack() as opened:
        for number in range(300):  # half of them say nothing, and the rest nonsense
            stranger = opened.enter_context(socket.create_connection((HOST, server.port)))
            if number % 2:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
        assert client.connect(server.address, "member").request("ping").result(SECONDS) is None
        until(lambda: sum(server.turned_away.values()) >= 150)
    assert len([record for record in caplog.records if "turned away" in record.message]) == 1


def test_a_local_key_serves_the_loopback_interface_alone():
    with pytest.raises(UserError, match="--cluster-key-file"):
        Endpoint("0.0.0.0", Credentials(ClusterKey("k" * 32, "a test", is_local=True)))


def test_the_port_that_was_asked_for_is_taken_and_free_after_the_end(endpoints):
    first = endpoints()
    with pytest.raises(OSError, match="Address already in use"):
        endpoints(port=first.port)
    for _ in range(20):
        first.close()
        first = endpoints(port=first.port)


def test_both_sides_hear_of_a_connection_that_ends(connected):
    server, _, peer = connected
    peers, lost = [], []
    server.serve("hold", lambda request: peers.append(request.peer), roles=("member",))
    reply = peer.request("hold")
    until(lambda: peers)
    peers[0].on_lost(lambda: lost.append("server"))
    peer.on_lost(lambda: lost.append("client"))
    peer.close()
    with pytest.raises(PeerLostError):
        reply.result(SECONDS)
    until(lambda: sorted(lost) == ["client", "server"])
    with pytest.raises(PeerLostError):
        peers[0].request("anything").result(SECONDS)


@pytest.mark.parametrize("connected_to", [False, True])
def test_what_a_process_says_last_is_heard_before_its_connection_is_lost(connected, connected_to):
    """Whichever of the two it is."""
    server, client, peer = connected
    heard = []

    def hear(request):
        if not request.body:
            request.peer.on_lost(lambda: heard.append("lost"))
            time.sleep(0.3)  # busy, until all has come and the connection has ended
        heard.append(request.body)

    hearer, sayer = (client, server) if connected_to else (server, client)
    hearer.serve("say", hear, roles=("listener" if connected_to else "member",), kind=int)
    asked = greeted(server)
    peer.request("here").result(SECONDS)
    for number in range(200):
        (asked[0] if connected_to else peer).send("say", number)
    sayer.close(linger=SECONDS)
    until(lambda: "lost" in heard)
    assert heard == [*range(200), "lost"]
    assert not hearer._accepted


def test_the_process_that_was_connected_to_can_end_a_connection(pair):
    server, client = pair
    peers = greeted(server)
    peer = client.connect(server.address, "member")
    peer.request("here").result(SECONDS)
    peers[0].close()
    until(lambda: peer.lost)
    assert client.connect(server.address, "member").request("ping").result(SECONDS) is None


def test_the_messaging_thread_does_not_wait_for_itself(connected):
    server, client, peer = connected
    client.serve("ask", lambda request: peer.request("nothing").result(), roles=("listener",))
    server.serve("go", lambda request: request.peer.send("ask"), roles=("member",))
    peer.send("go")
    assert peer.request("ping").result(SECONDS) is None


PROCESS = f"""
import sys, time
from dsjax.messaging import Credentials, Endpoint
from dsjax.messaging.cluster_key import ClusterKey
from dsjax.messaging.endpoint import PING
endpoint = Endpoint("{HOST}", Credentials(ClusterKey("k" * 32, "a test")), silence={SILENCE})
peer = endpoint.connect(sys.argv[1], "member")
peer.on_lost(lambda: print("lost", flush=True))
peer.request("here").result({SECONDS})
print("here", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def connected_process(server):
    """A process that is connected to a server, and the peers that this one has heard of."""
    peers = greeted(server)
    command = [sys.executable, "-c", PROCESS, server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "here\n"
            yield process, peers
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_lost(endpoints, number):
    with connected_process(endpoints(silence=SILENCE)) as (process, peers):
        os.kill(process.pid, number)
        until(lambda: peers[0].lost)
        if number == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "lost\n"  # a continued process finds its connection closed


def test_members_stay_though_strangers_come_while_nobody_looks(endpoints):
    """Of each libzmq tells the messaging thread, which may not get the GIL for seconds; when a queue was full it waited, heartbeats too."""
    with connected_process(server := endpoints(silence=SILENCE)) as (_, peers):
        looks = threading.Event()
        server.post(lambda: looks.wait(SECONDS))
        for _ in range(1500):
            with socket.create_connection((HOST, server.port), timeout=SECONDS) as stranger:
                stranger.sendall(b"\xff" * 70)
        time.sleep(1.5 * SILENCE)  # in which heartbeats would be missing
        looks.set()
        until(lambda: server.turned_away.total() >= 1400)
        assert not peers[0].lost
        assert peers[0].request(PING).exception(SECONDS) is None


def test_an_ipv6_address_may_be_given_by_name(endpoints, monkeypatch):
    found, known = [(socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 0, 0, 0))], socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: found if host == "six" else known(host, *a, **k))
    server = Endpoint("six", KEY)
    assert server.address == f"[::1]:{server.port}"
    for address in (server.address, f"six:{server.port}"):
        assert endpoints().connect(address, "member").request("ping").result(SECONDS) is None
    server.close()

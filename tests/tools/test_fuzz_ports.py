"""A small fuzz of every kind of internal port in this process; `tools/fuzz_ports.py` fuzzes running engines with thousands of cases."""

import contextlib
import os
import queue
import socketserver
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from fuzz_ports import Fuzzer, UnderWay
from group_in_threads import close_groups
from links_in_threads import links_of
from processes import free_port
from waits import until

from dsjax.addresses import split_address
from dsjax.messaging import Credentials, Endpoint, Link, LinkListener
from dsjax.messaging.broadcast import BroadcastLog, LogReader
from dsjax.messaging.cluster_key import ClusterKey, local_credentials
from dsjax.messaging.curve import ROLES
from tools.labs.port_cases import MEMBERS, STRANGERS, greeting, mechanism_of, ports_of

pytestmark = pytest.mark.slow

CREDENTIALS = local_credentials()
CASES = 200
SECONDS = 60.0


@pytest.fixture
def ends():
    """Two endpoints. No thread and no open file is left over when they are closed."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("only Linux says in /proc what is open")
    # pyzmq has a thread of its own from the first message on that it does not copy.
    zmq.Frame(bytes(1 << 17), copy=False)
    free_port()  # from the first one on this process holds its block of ports
    held = lambda: (len(os.listdir("/proc/self/fd")), threading.active_count())  # noqa: E731
    files, threads = held()
    ends = [Endpoint("127.0.0.1", CREDENTIALS) for _ in range(2)]
    yield ends
    for end in ends:
        end.close()
    until(lambda: held()[0] <= files and held()[1] <= threads, SECONDS, every=0.05, what="a file or thread is left")


def wrong_at(address, ask=None, **options):
    """What a fuzz of a port finds, while something is asked beside it."""
    fuzzer = Fuzzer(split_address(address), CREDENTIALS, **options)
    with UnderWay(ask, 1) as under_way:
        wrong = fuzzer.run(CASES).wrong
    kinds = {*STRANGERS, "slow greeting"} | (set(MEMBERS) if fuzzer.mechanism == "CURVE" else set())
    assert set(fuzzer.kinds) >= kinds
    return wrong + under_way.take()


def test_an_endpoint_serves_members_what_they_may_ask_for_and_nothing_else(ends):
    server, client = ends
    heard, waiting = [], queue.SimpleQueue()
    server.serve("count", lambda request: (heard.append(request.body), request.reply()), roles=ROLES, kind=int)
    server.serve("wait", waiting.put, roles=("member",), kind=list[int])
    server.serve("fail", lambda request: 1 / request.body, roles=ROLES)
    server.serve("inner", lambda request: heard.append("inner"), roles=("listener",))
    log, peer = BroadcastLog(server), client.connect(server.address, "member")
    own = peer.request("wait", [7])
    services = [*server._services, "nobody's"]

    def ask(number):
        return peer.request("count", 5).result(SECONDS)

    assert wrong_at(server.address, ask, services=services, said=[("count", 3)]) == []
    assert set(map(type, heard)) == {int}
    waiting.get_nowait().reply("at last")
    assert own.result(SECONDS) == "at last"
    assert not peer.lost
    log.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_link_hears_nobody_but_those_that_have_its_ticket(ends, encrypted):
    listener = LinkListener(ends[0], ["one", "two"], encrypted=encrypted)
    link = Link(ends[1], listener.address, listener.ticket, "one", encrypted=encrypted)
    assert mechanism_of(split_address(listener.address)) == ("CURVE" if encrypted else "PLAIN")

    def ask(number):
        link.send(b"there", np.ones(3_000_000, np.uint8))
        message = listener.receive(SECONDS)
        listener.send("one", b"back")
        return message.sender, message.header, sum(map(len, message.frames)), link.receive(SECONDS).header

    assert wrong_at(listener.address, ask) == []
    assert set(listener._ids_by_name) == {"one"}, "nobody else is connected"
    link.close()
    listener.close()


def test_a_log_is_read_by_members_and_written_by_nobody_else(ends):
    log, heard = BroadcastLog(ends[0]), queue.SimpleQueue()
    leader = ends[1].connect(ends[0].address, "member")
    LogReader(ends[1], leader, log.address, b"a", lambda *entry: heard.put(entry), heard.put)

    def ask(number):
        log.append(number, b"entry")
        return heard.get(timeout=SECONDS)

    assert wrong_at(log.address, ask) == []
    log.close()


def test_stages_go_on_whatever_strangers_and_other_members_say(ends):
    before = ports_of(os.getpid())
    first, last = links_of([0, 1])
    found = [address for address in ports_of(os.getpid()) if address not in before]
    assert len(found) == 5, "an endpoint and a link of each, and the log of process 0"
    with contextlib.closing(first), contextlib.closing(last):
        for host, port in found:
            assert wrong_at(f"{host}:{port}") == []
        hidden = np.arange(6, dtype=np.float32).reshape(2, 3)
        first.send_hidden(hidden)
        np.testing.assert_array_equal(last.incoming(lambda array: array).popleft(), hidden)
        last.send_results(lambda: hidden)
        np.testing.assert_array_equal(first.receive_results(0), hidden)
    close_groups()


def test_the_fuzz_finds_a_port_that_answers_strangers_or_keeps_them_or_lets_no_member_in(ends, monkeypatch):
    monkeypatch.setattr(socketserver.ThreadingTCPServer, "daemon_threads", True)

    class Talkative(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                self.request.sendall(greeting("PLAIN") + b"what would be accepted")
                self.server.sleep()

    for sleep, found in ((lambda: None, "a stranger heard 86 bytes"), (lambda: time.sleep(1), "TimeoutError")):
        with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talkative) as server:
            server.sleep = sleep
            threading.Thread(target=server.serve_forever).start()
            with monkeypatch.context() as patch:
                patch.setattr("fuzz_ports.PATIENCE", 0.3)
                wrong = Fuzzer(server.server_address, CREDENTIALS).run(5).wrong
            server.shutdown()
        assert any(found in one for one in wrong)
    other = Credentials(ClusterKey("o" * 32, "another test", is_local=True))
    assert Fuzzer(split_address(ends[0].address), other).run(20).wrong == ["no member is let in"]

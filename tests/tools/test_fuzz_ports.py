"""A small fuzz of every internal port, in this process; `tools/fuzz_ports.py` does it to running engines, with thousands of cases."""

import contextlib
import os
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "dsjax" / "hosts"))
sys.path.insert(0, str(Path(__file__).parents[1] / "dsjax" / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "dsjax" / "engine" / "pipeline"))
sys.path.insert(0, str(Path(__file__).parents[1] / "dsjax" / "engine" / "elastic"))

from deployments import KEY
from fuzz_ports import FUZZES, OPEN_BRIEFLY, Fuzzer, join_request, stage_messages
from links_in_threads import CREDENTIALS, links_of
from processes import free_port

from dsjax.engine.transfer.messages import PullRequest
from dsjax.engine.transfer.page_channel import CHUNKS, PAGES, VERSION, Greeting, TransferListener
from dsjax.hosts import HostOptions
from dsjax.hosts.links import Answerer
from dsjax.hosts.rendezvous import Rendezvous, meet
from dsjax.hosts.secure_channel import PROTOCOL, SERVICES, SecureChannel

CASES = 120
SPACE = {"page_size": 4}


class Meeting:
    """A group of two, played by threads, of which the second one comes when it is told to."""

    def __init__(self):
        port = free_port()
        self._options = [HostOptions(("127.0.0.1", port), 2, i, "127.0.0.1", 20, 10) for i in range(2)]
        self._met: list[Rendezvous] = []
        self._threads = [threading.Thread(target=self._meet, args=(options,)) for options in self._options]
        self._threads[0].start()
        self.address = self._options[0].coordinator

    def form(self) -> None:
        self._threads[1].start()
        for thread in self._threads:
            thread.join(60)
        assert [len(one.members) for one in self._met] == [2, 2]

    def close(self) -> None:
        for one in self._met:
            one.close()

    def _meet(self, options: HostOptions) -> None:
        self._met.append(meet(options, dict, credentials=KEY))


@pytest.fixture
def nothing_stays():
    """No thread and no open file is left over when the listeners are closed."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("only Linux says in /proc what is open")
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/fd")) > files or threading.active_count() > threads:
        assert time.monotonic() < deadline, (os.listdir("/proc/self/fd"), threading.enumerate())
        time.sleep(0.05)


@pytest.mark.parametrize("forming", [True, False], ids=["forming", "formed"])
def test_nothing_keeps_a_group_from_forming_or_ends_it(nothing_stays, forming):
    meeting = Meeting()
    with contextlib.closing(meeting):
        if not forming:
            meeting.form()
        fuzzer = Fuzzer(meeting.address, "rendezvous", KEY, [join_request(1, 99), join_request(7, 2)])
        while not _listens(meeting.address):
            time.sleep(0.01)
        assert fuzzer.run(CASES).wrong == []
        if forming:
            meeting.form()
        else:
            leader = next(one for one in meeting._met if one.listener is not None)
            assert leader.listener.has(leader.members[1])  # its connection is the one that it had


@pytest.mark.parametrize("service", ["links", "probes"])
def test_links_answer_members_and_nobody_else(nothing_stays, service):
    with contextlib.closing(Answerer("127.0.0.1", KEY)) as answerer:
        assert Fuzzer(("127.0.0.1", answerer.port), service, KEY, [bytes(64)]).run(CASES).wrong == []


@pytest.mark.parametrize("service", [PAGES, CHUNKS])
def test_the_ports_of_transfers_hand_on_what_members_have_sent_and_nothing_else(nothing_stays, service):
    received, left = [], []
    peer = SimpleNamespace(receive=received.append, leave=lambda: left.append(1))
    listener = TransferListener(lambda channel: peer, SPACE, "127.0.0.1", service=service, credentials=KEY)
    with contextlib.closing(listener):
        greeting, request = map(msgspec.msgpack.encode, (Greeting(VERSION, SPACE), PullRequest(1, "ticket")))
        host, port = listener.address.split(":")
        assert Fuzzer((host, int(port)), service, KEY, [greeting, request]).run(CASES).wrong == []
        assert request in map(msgspec.msgpack.encode, received)
        assert set(map(msgspec.msgpack.encode, received)) <= {greeting, request}
        deadline = time.monotonic() + 60
        while listener._channels and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not listener._channels
    assert left


def test_stages_hear_nobody_who_has_no_ticket_of_their_generation(nothing_stays):
    first, last = links_of([0, 1])
    with contextlib.closing(first), contextlib.closing(last):
        assert set(stage_messages()) == set(first._inboxes) > set(last._inboxes), "all roles"
        for links in (first, last):
            for role, said in stage_messages().items():
                address = "127.0.0.1", links._listener.port
                assert Fuzzer(address, "stages", CREDENTIALS, said, name=role).run(CASES // 3).wrong == []
        hidden = np.arange(6, dtype=np.float32).reshape(2, 3)
        first.pass_on(hidden)
        np.testing.assert_array_equal(last.arriving(lambda array: array).popleft(), hidden)


def test_every_service_is_fuzzed():
    running = [service for services, _ in FUZZES.values() for service in services]
    assert sorted([*running, *OPEN_BRIEFLY]) == sorted(SERVICES)


def test_the_fuzz_finds_a_port_that_answers_strangers_or_keeps_a_tampered_connection(monkeypatch):
    monkeypatch.setattr("fuzz_ports.PATIENCE", 0.3)
    monkeypatch.setattr(socketserver.ThreadingTCPServer, "daemon_threads", True)

    class Talkative(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                self.request.sendall(PROTOCOL + bytes(32) + b"what would be accepted")
                self.request.recv(2)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talkative) as server:
        threading.Thread(target=server.serve_forever).start()
        wrong = Fuzzer(server.server_address, "pages", KEY).run(20).wrong
        server.shutdown()
    assert any("a stranger heard 62 bytes" in one for one in wrong)

    monkeypatch.setattr(SecureChannel, "_check", lambda *_: None)  # every frame is believed
    received = []
    peer = SimpleNamespace(receive=received.append, leave=lambda: None)
    listener = TransferListener(lambda channel: peer, SPACE, "127.0.0.1", service=PAGES, credentials=KEY)
    with contextlib.closing(listener):
        greeting, request = map(msgspec.msgpack.encode, (Greeting(VERSION, SPACE), PullRequest(1, 500 * "ticket")))
        host, port = listener.address.split(":")
        fuzzer = Fuzzer((host, int(port)), "pages", KEY, [greeting, request])
        fuzzer.run(CASES)
    assert set(map(msgspec.msgpack.encode, received)) - {greeting, request}, "what was changed is handed on"


def _listens(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(address, 1).close()
        return True
    return False

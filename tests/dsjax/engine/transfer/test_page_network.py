"""What a prefill and a decode side say over real connections, and that nothing is kept of a side that goes.
Also tests `transfer/messages.py` and `transfer/send_buffers.py`."""

import contextlib
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from engine_pair import prefill_request
from fake_executor import FakeExecutor
from waits import until

from dsjax.engine.elastic.joining import join_group
from dsjax.engine.elastic.transfer_processes import endpoint_of, host_of, space_of
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.transfer import messages
from dsjax.engine.transfer.chunk_network import ChunkServer, RemoteChunks
from dsjax.engine.transfer.messages import ChunkGoneError, FlushPages, PublishedChunk, ReleaseChunk, TransferFailed
from dsjax.engine.transfer.page_network import PrefillServer, RemoteLinks
from dsjax.engine.transfer.send_buffers import ChunkOwner
from dsjax.errors import UserError
from dsjax.messaging import Endpoint, RefusedError
from dsjax.messaging.cluster_key import local_credentials


class FakeTransport:
    address = "here"

    def __init__(self):
        self.published, self.pulled, self.withdrawn, self.disconnected, self.pulls = {}, [], [], [], True

    def publish(self, number, chunk):
        self.published[number] = chunk
        return b"ticket %d" % number

    def withdraw(self, number, chunk, *, pulled):
        assert self.published.pop(number) is chunk
        (self.pulled if pulled else self.withdrawn).append(number)

    def pull(self, address, number, ticket, shapes, device):
        assert ticket == b"ticket %d" % number
        if not self.pulls:
            raise OSError("the link is down")
        return self.published[number]

    def disconnect(self, address):
        self.disconnected.append(address)


def opened():
    return Endpoint("127.0.0.1", local_credentials())


def dialer(transport, space=None):
    return RemoteLinks(RemoteChunks(opened(), transport, {}, 60), space or {})


def engine_of(ranks=1, timeout=60):
    executor = FakeExecutor(num_ranks=ranks, transfers=True)
    return PrefillEngine(executor, executor.config, timeout=timeout)


class Linked:
    """A server in front of an engine without JAX, and the link of a decode engine to it.

    lease: seconds for which the server keeps what nobody asks for. here, there: of the sides' pages.

    Attributes:
        messages: what has come from the server, but for what is under way, which may be said any number of times.
    """

    def __init__(self, lease: float = 60, here=None, there=None):
        self.engine, self.transport, endpoint, self.messages = engine_of(timeout=lease), FakeTransport(), opened(), []
        take = lambda number, take: take(self.engine.buffers.take(number))  # noqa: E731
        chunks = ChunkServer(endpoint, take, self.transport, lease)
        self.server = PrefillServer(self.engine, chunks, here or {}, endpoint)
        self.engine.buffers.reset([ChunkOwner(endpoint.address)])
        self.engine.start()
        self.links = dialer(self.transport, there)
        self.link = self.links.link_to(self.server.address)
        self.link.receive = self.receive

    def receive(self, message):
        if not isinstance(message, messages.TransfersUnderWay):
            self.messages.append(message)

    def ask(self, name="a", tokens=33):
        self.link.send(prefill_request(name, range(tokens)))

    def offered(self):
        """Ask for a prompt of eight pages, and wait until all are offered; give the offers."""
        self.ask()
        until(lambda: sum(message.count for message in self.messages) == 8)
        return self.messages

    def pull(self, offer):
        return self.link.pull(offer.number, None, offer.address)

    def close(self):
        self.links.close()
        self.server.shutdown()


@pytest.fixture
def linked():
    with contextlib.ExitStack() as made:
        yield lambda **options: made.enter_context(contextlib.closing(Linked(**options)))


def test_the_transport_and_the_version_of_messages_are_of_what_both_sides_have_alike():
    args, loaded = EngineArgs(disaggregation_mode="decode"), SimpleNamespace(page_space={"page_size": 4})
    own = {"disaggregation_transfer_backend": "jax", "transfer_messages": messages.VERSION}
    assert space_of(args, loaded) == {"page_size": 4} | own


def test_sides_whose_pages_differ_are_told_in_what(linked):
    sides = linked(here={"page_size": 4, "dtype": "bfloat16"}, there={"page_size": 4, "dtype": "float32"})
    sides.ask(tokens=9)
    until(lambda: sides.messages)
    assert isinstance(sides.messages[0], TransferFailed)
    assert "pages of the two sides differ in dtype ('bfloat16' here, 'float32' there)" in sides.messages[0].reason


def test_a_chunk_that_was_granted_and_not_taken_is_taken_back_when_decode_goes(linked):
    sides = linked()
    first, *others = sides.offered()
    assert sides.pull(first)["tokens"][0] == [0, 1, 2, 3]
    sides.link.send(ReleaseChunk(first.number))
    with pytest.raises(ChunkGoneError, match="is not kept any more"):
        sides.link.pull(12345, None, first.address)
    transport, buffers = sides.transport, sides.engine.buffers
    transport.pulls = False
    with pytest.raises(ChunkGoneError, match="the link is down"):
        sides.pull(others[0])
    sides.link.close()
    until(lambda: (transport.pulled, transport.withdrawn, transport.published) == ([1], [2], {}))
    until(lambda: sides.engine.num_jobs == buffers.num_kept == 0)


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_chunk_that_could_not_be_pulled_is_taken_back_though_decode_says_nothing_more(linked, fault):
    sides = linked()
    [first, *_], transport, ended = sides.offered(), sides.transport, threading.Event()
    transport.pulls, pull = fault == "hangs", transport.pull
    transport.pull = lambda *arguments: pull(*arguments) if fault == "fails" else ended.wait(60)
    chunks = RemoteChunks(opened(), transport, {}, 60 if fault == "fails" else 2)
    with pytest.raises(ChunkGoneError, match="the link is down" if fault == "fails" else "does not send chunk"):
        chunks.pull(first.address, first.number, None)
    until(lambda: (transport.pulled, transport.withdrawn, transport.published) == ([], [1], {}))
    ended.set()
    transport.pulls, transport.pull, chunks._timeout = True, pull, 60
    # It is kept until it is released.
    assert chunks.pull(first.address, first.number, None)["tokens"][0] == [0, 1, 2, 3]
    until(lambda: (transport.pulled, transport.published) == ([2], {}))
    chunks.endpoint.close()


def test_what_finds_no_room_in_chunks_is_said_to_be_under_way_again_and_again(linked):
    sides, told = linked(lease=0.5), []
    sides.engine.buffers.room = lambda rank: 0
    sides.link.receive = told.append
    sides.ask()
    until(lambda: told.count(messages.TransfersUnderWay(["a"])) > 4)  # half a second, which is all that leases have
    del sides.engine.buffers.room
    until(lambda: sum(message.count for message in told if isinstance(message, messages.ChunkReady)) == 8)
    assert not any(isinstance(message, TransferFailed) for message in told)


@pytest.mark.parametrize(("chosen", "computes"), [(0, [3, 0]), (1, [0, 3]), (2, [2, 1]), (None, [2, 1])])
def test_a_prompt_is_computed_by_the_rank_that_a_router_has_chosen(chosen, computes):
    engine = engine_of(ranks=2)
    server = PrefillServer(engine, None, {}, opened())
    for number in range(3):
        server.prefill([number] * 33, dp_rank=chosen)
    engine.turn(wait=False)
    assert [load.running + load.waiting for load in engine.core.loads()] == computes
    server.endpoint.close()


def test_what_nobody_asks_for_or_pulls_is_dropped_after_its_lease(linked):
    sides = linked(lease=0.5)
    sides.server.prefill(list(range(33)))
    until(lambda: sides.engine.buffers.pages_sent == 8)
    until(lambda: sides.engine.num_jobs == sides.engine.buffers.num_kept == 0)
    assert sides.engine.buffers.expired


def transfer_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("dsjax-transfer")}


def test_a_side_that_cannot_be_reached_is_told_of_once_for_all_that_waits_and_keeps_no_thread(caplog):
    before = transfer_threads()  # some of another test's may still be ending
    nobody = socket.create_server(("127.0.0.1", 0))  # connections are made, and nobody answers until it is closed
    links = dialer(FakeTransport())
    link = links.link_to(f"127.0.0.1:{nobody.getsockname()[1]}")
    heard = []
    link.receive = heard.append
    for name in "abc":
        link.send(messages.PrefillRequest(name, b"", 0, 1))
    nobody.close()
    until(lambda: heard)
    assert "cannot be reached" in heard[0].reason
    assert len(heard) == caplog.text.count("cannot be reached") == 1
    until(lambda: transfer_threads() <= before)
    link.send(messages.PrefillRequest("d", b"", 0, 1))
    until(lambda: len(heard) == 2)
    links.close()


def test_a_flush_that_finds_no_prefill_engine_is_the_first_thing_that_the_next_connection_brings(linked, monkeypatch):
    sides, flushed = linked(), []
    link, heard, endpoint = sides.link, sides.messages, sides.links.chunks.endpoint
    sides.engine.service.flush_core = lambda: flushed.append(True)
    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "connect", Mock(side_effect=OSError("no route")))
        for _ in range(2):
            link.send(FlushPages())
        assert link.is_idle, "a flush connects to nobody"
        sides.ask("b")
        until(lambda: heard and link.is_idle)
        assert "cannot be reached" in heard.pop().reason
    sides.offered()
    assert flushed == [True]
    link.send(FlushPages())
    until(lambda: len(flushed) == 2)
    link.close()
    link.send(FlushPages())
    assert link._outbox == []


def test_nothing_is_kept_of_a_side_that_has_gone(linked):
    before = transfer_threads()  # some of another test's may still be ending
    sides = linked()
    offer = sides.offered()[0]
    sides.pull(offer)
    assert sides.transport.disconnected == []
    sides.server.shutdown()
    until(lambda: sides.transport.disconnected == ["here"])
    until(lambda: transfer_threads() <= before)
    until(lambda: isinstance(sides.messages[-1], TransferFailed) and sides.link.is_idle)
    with pytest.raises(ChunkGoneError, match="nobody answers"):
        sides.pull(offer)


def test_nothing_is_kept_of_a_side_that_goes_while_its_transport_is_noted():
    class Going:
        """A connection that ends as soon as it was found to be there."""

        was_lost = False

        @property
        def lost(self):
            found, self.was_lost = self.was_lost, True
            while calls:
                calls.pop()()
            return found

    transport, calls, answer = FakeTransport(), [], Future()
    transport.published[7] = "chunk"
    answer.set_result(PublishedChunk(7, "there", b"ticket 7"))
    going = Going()
    going.on_lost, going.request, going.send = calls.append, lambda *asked: answer, Mock()
    chunks = RemoteChunks(SimpleNamespace(connect=lambda address, role: going), transport, {}, 60)
    assert chunks.pull("side:1", 7, None) == "chunk"
    assert going.send.call_args.args[1].ok
    until(lambda: transport.disconnected == ["there"])
    assert (chunks._peers, chunks._transports) == ({}, {})


def test_a_host_that_is_gone_is_waited_for_once_and_by_nobody_who_pulls_from_another():
    tried, limit = [], threading.Event()

    def connect(address, role):
        tried.append(address)
        if address == "gone:1":
            limit.wait(60)
        raise OSError("no route")

    chunks = RemoteChunks(SimpleNamespace(connect=connect), FakeTransport(), {}, 60)
    with ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(chunks.pull, "gone:1", number, None) for number in (1, 2)]
        until(lambda: tried)
        with pytest.raises(ChunkGoneError, match="chunk 3 cannot be had from other:1: no route"):
            chunks.pull("other:1", 3, None)
        assert not any(pull.done() for pull in pulls)
        limit.set()
        for pull in pulls:
            with pytest.raises(ChunkGoneError, match="from gone:1: no route"):
                pull.result()
    assert tried == ["gone:1", "other:1"]


def test_a_member_that_says_what_it_should_not_harms_nobody_elses_transfers(linked, caplog):
    sides = linked()
    sides.offered()
    stranger = opened()
    peer, done = stranger.connect(sides.server.address, "decode"), messages.PullDone(1)
    for _ in range(2):  # before it has greeted, and after
        for message in (messages.CancelTransfer("a"), ReleaseChunk(sides.messages[0].number), "no message", done):
            peer.send("prefill", message)
        peer.send("done", done)
        with pytest.raises(RefusedError, match="is not kept any more"):
            peer.request("pull", 2**40).result(60)
        peer.request("prefill", messages.Greeting({})).result(60)
    # What it has others publish for it is its own affair.
    pull = peer.request("pull", sides.messages[0].number, PublishedChunk).result(60)
    sides.link.send(ReleaseChunk(2**40))
    assert sides.pull(sides.messages[0])["tokens"][0] == [0, 1, 2, 3]
    stranger.close()
    until(lambda: pull.pull in sides.transport.withdrawn and not sides.transport.published)
    assert sides.engine.num_jobs == 1
    assert "cannot be read" not in str(sides.messages)


def test_an_engine_that_is_reached_beyond_loopback_needs_a_key_before_it_loads_anything():
    for mode in ("prefill", "decode"):
        args = EngineArgs(disaggregation_mode=mode, transfer_host="192.0.2.1")
        for begin in (join_group, endpoint_of):
            with pytest.raises(UserError, match=r"192\.0\.2\.1 is beyond the loopback.*--cluster-key-file FILE"):
                begin(args, None)


def test_a_process_alone_and_one_with_an_address_for_its_transfers_have_an_endpoint_for_them():
    group = Mock(**{"options.address": "127.0.0.1", "options.heartbeat_timeout": 7})
    group.endpoint.credentials = local_credentials()
    args = EngineArgs(disaggregation_mode="prefill", heartbeat_timeout=8)
    assert endpoint_of(args, group) is group.endpoint
    alone, of_address = endpoint_of(args, None), endpoint_of(replace(args, transfer_host="localhost"), group)
    assert (alone.silence, of_address.silence) == (8, 7)
    with pytest.raises(UserError, match=f"the address 127.0.0.1:{alone.port} for pages cannot be used: "):
        endpoint_of(args, group, alone.port)
    for endpoint in (alone, of_address):
        endpoint.close()


def test_without_an_address_the_loopback_interface_is_taken(monkeypatch):
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.7.7.7", 0))]  # as the host's name is on most machines
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    args = EngineArgs(disaggregation_mode="prefill")
    assert host_of(args, None) == "127.0.0.1"
    group = SimpleNamespace(options=SimpleNamespace(address="10.1.2.3"))
    assert host_of(args, group) == "10.1.2.3"
    assert host_of(replace(args, transfer_host="10.9.9.9"), group) == "10.9.9.9"

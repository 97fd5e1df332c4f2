"""Prompts that another process computes make the tokens of one plain engine, and a process that dies costs no request and no page.

These are the tests of `transfer/page_channel.py`, `transfer/messages.py` and `transfer/send_buffers.py` too.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint
from engine_pair import prefill_request
from fake_executor import FakeExecutor
from listening_sockets import all_loopback, listening_addresses
from quick_compilation import QUICK_COMPILATION
from transports import EACH_BACKEND

from dsjax import LLM, SamplingParams
from dsjax.engine.elastic.joining import join_group
from dsjax.engine.elastic.transfer_processes import host_of
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.schedule.request import RequestOptions
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.transfer import page_channel, page_network
from dsjax.engine.transfer.chunk_network import ChunkServer, RemoteChunks
from dsjax.engine.transfer.messages import (
    CancelTransfer,
    ChunkGoneError,
    ChunkReady,
    FlushPages,
    PrefillRequest,
    ReleaseChunk,
    TransferFailed,
    TransfersUnderWay,
)
from dsjax.engine.transfer.page_channel import PAGES, VERSION, TransferListener, connect_to, write
from dsjax.engine.transfer.page_network import PrefillServer, RemoteLink, handoff
from dsjax.engine.transfer.prefill_links import PrefillLinks
from dsjax.engine.transfer.send_buffers import Keeper
from dsjax.errors import UserError
from dsjax.hosts.cluster_key import ClusterKey
from dsjax.hosts.credentials import Credentials, local_credentials
from dsjax.hosts.secure_channel import PROTOCOL
from dsjax.hosts.wire import split_address

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "max_model_len": 96}


OPTIONS = {
    "dtype": "float32",
    "transfer_host": "127.0.0.1",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
}


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class PrefillProcess:
    def __init__(self, checkpoint, **options):
        script = Path(__file__).with_name("side_process.py")
        given = {
            "disaggregation_mode": "prefill",
            "model": str(checkpoint),
            "mesh": "tp=2",
            **SIZES,
            **OPTIONS,
            **options,
        }
        root = str(Path(__file__).parents[4])
        environment = os.environ | {
            "PYTHONPATH": root,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(QUICK_COMPILATION),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.address = self._answer()["address"]

    def _answer(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def is_empty(self):
        """Whether it comes to keep nothing."""
        for _ in range(1200):
            counts = self.ask()
            if counts["jobs"] == counts["chunks"] == counts["pages"] == 0:
                return True
            time.sleep(0.05)
        return counts

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("network")
    write_drafting_checkpoint(directory)
    return directory


@pytest.fixture(scope="module", params=EACH_BACKEND)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def decode(checkpoint, backend):
    llm = LLM(
        str(checkpoint),
        mesh="dp=2",
        disaggregation_mode="decode",
        local_prefill_tokens=1,
        transfer_timeout=60,
        disaggregation_transfer_backend=backend,
        **SIZES,
        **OPTIONS,
    )
    llm.executor.buckets = replace(llm.executor.buckets, decode=(SIZES["max_num_seqs"],))  # one program instead of two
    yield llm
    llm.shutdown()


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 290, size=int(rng.integers(20, 70))).tolist() for _ in range(count)]


def run(llm, requests, between=lambda step: None):
    """Tokens of (name, prompt, what prefill said)."""
    for name, tokens, prefill in requests:
        llm.engine.add_request(name, {"prompt_token_ids": tokens}, GREEDY, RequestOptions(prefill=prefill))
    token_ids, steps = {}, 0
    while llm.engine.has_unfinished():
        between(steps)
        steps += 1
        for output in llm.engine.step():
            if output.finished:
                token_ids[output.request_id] = list(output.outputs[0].token_ids)
    return token_ids


def alone(llm, given):
    """What decode makes by itself."""
    llm.engine.flush_prefix_cache()
    expected = run(llm, [(f"{i}", tokens, None) for i, tokens in enumerate(given)])
    llm.engine.flush_prefix_cache()
    return expected


@pytest.mark.slow
def test_tokens_are_those_of_one_engine_whichever_side_hears_of_a_request_first_and_whoever_dies(
    checkpoint, decode, backend
):
    given = prompts(8)
    expected = alone(decode, given)
    incoming = decode.engine.core.part(PrefillLinks).source
    process = PrefillProcess(checkpoint, transfer_timeout=60, disaggregation_transfer_backend=backend)
    try:
        # Prefill first: what it answers goes with the request.
        requests = [(f"{i}", tokens, process.ask(tokens=tokens)) for i, tokens in enumerate(given)]
        assert run(decode, requests) == expected
        assert incoming.transfer_counts.completed == len(given)
        assert incoming.transfer_counts.given_up == 0
        assert process.is_empty() is True
        if backend == "jax":  # NIXL's UCX listens at all addresses of this host
            for addresses in map(listening_addresses, (process.process.pid, os.getpid())):
                assert addresses
                assert all_loopback(addresses), addresses

        # Both at once, each side told of the same room: decode asks first, then prefill does.
        decode.engine.flush_prefix_cache()
        rooms = [(f"{i}", tokens, handoff(process.address, 100 + i)) for i, tokens in enumerate(given)]

        def tell(step):
            if step in range(2, 10):
                assert process.ask(tokens=given[step - 2], room=98 + step) == rooms[step - 2][2]

        assert run(decode, rooms, tell) == expected
        assert incoming.transfer_counts.completed == 2 * len(given)
        assert process.is_empty() is True

        # Aborted at some moments; nothing of it stays.
        decode.engine.flush_prefix_cache()
        for turns in range(0, 9, 2):
            decode.engine.add_request(
                "gone", {"prompt_token_ids": given[0]}, GREEDY, RequestOptions(prefill=process.ask(tokens=given[0]))
            )
            for _ in range(turns):
                decode.engine.step()
            decode.engine.abort("gone")
            assert run(decode, [("other", given[1], process.ask(tokens=given[1]))])["other"] == expected["1"]
            decode.engine.flush_prefix_cache()
        assert process.is_empty() is True
        assert all(rank.pool.num_used == 0 for rank in decode.engine.core.scheduler.ranks)

        # It dies in the middle: decode computes what has not come.
        requests = [(f"{i}", tokens, process.ask(tokens=tokens)) for i, tokens in enumerate(given)]
        assert run(decode, requests, lambda step: step == 3 and process.kill()) == expected
        assert all(rank.pool.num_used == 0 for rank in decode.engine.core.scheduler.ranks)
        assert incoming.num_under_way == 0
        decode.engine.flush_prefix_cache()
        assert run(decode, [("0", given[0], handoff(process.address))])["0"] == expected["0"]
    finally:
        process.kill()


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


def served(lease: float = 60, **fields):
    """A server in front of an engine without JAX, and what its transport holds. lease: seconds for which it keeps what nobody asks for."""
    executor = FakeExecutor(transfers=True)
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
    engine = PrefillEngine(executor, config, timeout=lease)
    transport, space = FakeTransport(), {"page_size": 4, **fields}
    chunks = ChunkServer(engine.buffers.open, transport, space, "127.0.0.1", lease)
    server = PrefillServer(engine, chunks, space, "127.0.0.1")
    engine.buffers.reset([Keeper(chunks.address)])
    engine.start()
    return server, transport


def linked(server, transport, **space):
    """The way to a server, and what comes from it but for what is under way, which may be said any number of times."""
    link = RemoteLink(server.address, RemoteChunks(transport, space, {}, 60), space)
    messages = []
    link.connect(lambda message: None if isinstance(message, TransfersUnderWay) else messages.append(message))
    return link, messages


def until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert true()


def test_sides_that_move_pages_by_different_transports_are_told_so(decode, backend, caplog):
    server, _ = served(disaggregation_transfer_backend="mooncake")
    [tokens] = prompts(1)
    expected = alone(decode, [tokens])
    assert run(decode, [("0", tokens, handoff(server.address))]) == expected
    assert f"disaggregation_transfer_backend ('mooncake' here, '{backend}' there)" in caplog.text
    server.shutdown()


def test_sides_whose_pages_differ_are_told_in_what():
    server, transport = served(dtype="bfloat16")
    link, messages = linked(server, transport, page_size=4, dtype="float32")
    link.send(prefill_request("a", range(9)))
    until(lambda: messages)
    assert "pages of the two sides differ in dtype ('bfloat16' here, 'float32' there)" in messages[0].reason
    assert isinstance(messages[0], TransferFailed)
    link.close()
    server.shutdown()


def test_a_chunk_that_was_granted_and_not_taken_is_taken_back_when_decode_goes():
    server, transport = served()
    link, messages = linked(server, transport, page_size=4)
    link.send(prefill_request("a", range(33)))
    until(lambda: sum(message.count for message in messages) == 8)
    first, *others = messages
    assert link.pull(first.number, None, first.address)["tokens"][0] == [0, 1, 2, 3]
    link.send(ReleaseChunk(first.number))
    with pytest.raises(ChunkGoneError, match="is not kept any more"):
        link.pull(12345, None, first.address)
    with pytest.raises(ChunkGoneError, match="is not kept any more"):
        link.pull(others[0].number, None, first.address)  # with another chunk's ticket
    transport.pulls = False
    with pytest.raises(ChunkGoneError, match="the link is down"):
        link.pull(others[0].number, None, others[0].address)
    link.close()
    until(lambda: (transport.pulled, transport.withdrawn, transport.published) == ([1], [2], {}))
    until(lambda: server.engine.num_jobs == server.engine.buffers.num_kept == 0)
    server.shutdown()


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_chunk_that_could_not_be_pulled_is_taken_back_though_decode_says_nothing_more(fault):
    server, transport = served()
    link, messages = linked(server, transport, page_size=4)
    link.send(prefill_request("a", range(33)))
    until(lambda: sum(message.count for message in messages) == 8)
    first, *_ = messages
    ended = threading.Event()
    transport.pulls, pull = fault == "hangs", transport.pull
    transport.pull = lambda *arguments: pull(*arguments) if fault == "fails" else ended.wait(60)
    chunks = RemoteChunks(transport, {"page_size": 4}, {}, 60 if fault == "fails" else 0.5)
    with pytest.raises(ChunkGoneError, match="the link is down" if fault == "fails" else "does not send chunk"):
        chunks.pull(first.address, first.number, None)
    until(lambda: (transport.pulled, transport.withdrawn, transport.published) == ([], [1], {}))
    ended.set()
    transport.pulls, transport.pull = True, pull
    assert chunks.pull(first.address, first.number, None)["tokens"][0] == [
        0,
        1,
        2,
        3,
    ]  # it is kept until it is released
    until(lambda: (transport.pulled, transport.published) == ([2], {}))
    chunks.close()
    link.close()
    server.shutdown()


def test_what_finds_no_room_in_chunks_is_said_to_be_under_way_again_and_again():
    server, transport = served(lease=0.5)
    buffers, told = server.engine.buffers, []
    buffers.room = lambda rank: 0
    link, _ = linked(server, transport, page_size=4)
    link.connect(told.append)
    link.send(prefill_request("a", range(33)))
    until(lambda: told.count(TransfersUnderWay(["a"])) > 4)  # half a second, which is all that leases have
    del buffers.room
    until(lambda: sum(message.count for message in told if isinstance(message, ChunkReady)) == 8)
    assert not any(isinstance(message, TransferFailed) for message in told)
    link.close()
    server.shutdown()


@pytest.mark.parametrize(("chosen", "computes"), [(0, [3, 0]), (1, [0, 3]), (2, [2, 1]), (None, [2, 1])])
def test_a_prompt_is_computed_by_the_rank_that_a_router_has_chosen(chosen, computes):
    executor = FakeExecutor(num_ranks=2, transfers=True)
    engine = PrefillEngine(
        executor, SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16), timeout=60
    )
    server = PrefillServer(engine, None, {}, "127.0.0.1")
    for number in range(3):
        server.prefill([number] * 33, dp_rank=chosen)
    engine.turn(wait=False)
    assert [load.running + load.waiting for load in engine.core.loads()] == computes
    server.listener.close()


def test_what_nobody_asks_for_or_pulls_is_dropped_after_its_lease():
    server, _ = served(lease=0.5)
    server.prefill(list(range(33)))
    until(lambda: server.engine.buffers.pages_sent == 8)
    until(lambda: server.engine.num_jobs == server.engine.buffers.num_kept == 0)
    assert server.engine.buffers.expired
    server.shutdown()


def transfer_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("dsjax-transfer")}


def test_a_side_that_cannot_be_reached_is_told_of_once_for_all_that_waits_and_keeps_no_thread(caplog):
    before = transfer_threads()  # some of another test's may still be ending
    nobody = socket.create_server(("127.0.0.1", 0))  # connections are made, and nobody answers until it is closed
    link = RemoteLink(f"127.0.0.1:{nobody.getsockname()[1]}", RemoteChunks(FakeTransport(), {}, {}, 60), {})
    messages = []
    link.connect(messages.append)
    for name in "abc":
        link.send(PrefillRequest(name, b"", 0, 1))
    nobody.close()
    until(lambda: messages)
    assert "cannot be reached" in messages[0].reason
    assert len(messages) == len(caplog.records) == 1
    until(lambda: transfer_threads() <= before)
    link.send(PrefillRequest("d", b"", 0, 1))
    until(lambda: len(messages) == 2)
    link.close()


def test_a_flush_that_finds_no_prefill_engine_is_the_first_thing_that_the_next_connection_brings(monkeypatch):
    server, transport = served()
    flushed, reachable = [], []
    server.engine.service.flush_core = lambda: flushed.append(True)
    connect = page_network.connect_to

    def connect_to(*arguments):
        if not reachable:
            raise OSError("no route")
        return connect(*arguments)

    monkeypatch.setattr(page_network, "connect_to", connect_to)
    link, messages = linked(server, transport, page_size=4)
    for _ in range(2):
        link.send(FlushPages())
        until(lambda: messages and not link._connecting)
        assert "cannot be reached" in messages.pop().reason
    reachable.append(True)
    link.send(prefill_request("a", range(33)))
    until(lambda: sum(message.count for message in messages) == 8)
    assert flushed == [True]
    link.send(FlushPages())
    until(lambda: len(flushed) == 2)
    link.close()
    link.send(FlushPages())
    assert link._outbox == []
    server.shutdown()


def test_a_connection_that_no_thread_can_be_had_for_is_closed(monkeypatch):
    server, transport = served()
    made, connect = [], page_network.connect_to
    monkeypatch.setattr(page_network, "connect_to", lambda *some: made.append(connect(*some)) or made[-1])

    def start_thread(*arguments, **options):
        raise RuntimeError("can't start new thread")

    link, messages = linked(server, transport, page_size=4)
    link.send(prefill_request("a", range(33)))
    until(lambda: sum(message.count for message in messages) == 8)
    [(connection, _)] = made
    link._channel.close()
    until(lambda: link._channel is None)
    with monkeypatch.context() as without:
        without.setattr(page_channel, "start_thread", start_thread)
        link.send(prefill_request("b", range(33)))
        until(lambda: len(made) == 2 and not link._connecting)
    assert link._channel is None
    for connection, _ in made:
        until(lambda connection=connection: connection._connection.fileno() == -1)
    link.close()
    server.shutdown()


def test_nothing_is_kept_of_a_side_that_has_gone():
    before = transfer_threads()  # some of another test's may still be ending
    server, transport = served()
    link, messages = linked(server, transport, page_size=4)
    link.send(prefill_request("a", range(33)))
    until(lambda: sum(message.count for message in messages) == 8)
    link.pull(messages[0].number, None, messages[0].address)
    assert transport.disconnected == []
    server.shutdown()
    until(lambda: transport.disconnected == ["here"])
    until(lambda: transfer_threads() <= before)
    assert isinstance(messages[-1], TransferFailed)
    with pytest.raises(ChunkGoneError, match="cannot be reached"):
        link.pull(messages[0].number, None, messages[0].address)
    link.close()


def test_both_ends_look_whether_the_other_host_is_there_while_nothing_is_said():
    server, transport = served()
    link, messages = linked(server, transport, page_size=4)
    link.send(prefill_request("a", range(33)))
    until(lambda: sum(message.count for message in messages) == 8)
    link.pull(messages[0].number, None, messages[0].address)
    [client], [puller] = server.listener._channels, server._chunks.listener._channels
    [pulling] = link._chunks._connections.values()
    for channel in (client, puller, link._channel, pulling.result().channel):
        assert channel._connection._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    link.close()
    server.shutdown()


def test_a_host_that_is_gone_is_waited_for_once_and_by_nobody_who_pulls_from_another(monkeypatch):
    tried, limit = [], threading.Event()

    def connect_to(address, *_):
        tried.append(address)
        if address == "gone:1":
            limit.wait(60)
        raise OSError("no route")

    monkeypatch.setattr("dsjax.engine.transfer.chunk_network.connect_to", connect_to)
    chunks = RemoteChunks(FakeTransport(), {}, {}, 60)
    with ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(chunks.pull, "gone:1", number, None) for number in (1, 2)]
        until(lambda: tried)
        with pytest.raises(ChunkGoneError, match="other:1 cannot be reached: no route"):
            chunks.pull("other:1", 3, None)
        assert not any(pull.done() for pull in pulls)
        limit.set()
        for pull in pulls:
            with pytest.raises(ChunkGoneError, match=r"gone:1 .* reached"):
                pull.result()
    assert tried == ["gone:1", "other:1"]


def frame(*message) -> bytes:
    """A message as all who connected could send it before they had to know the cluster key."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize("page_size", [4, 8], ids=["alike", "otherwise"])
def test_a_stranger_takes_no_pages_and_is_not_told_what_would_be_accepted(page_size):
    server, transport = served()
    link, messages = linked(server, transport, page_size=4)
    link.send(prefill_request("a", range(33)))
    until(lambda: sum(message.count for message in messages) == 8)
    number, engine = messages[0].number, server.engine
    chunk_address, ticket = messages[0].address.split("#")
    for address in (server.address, chunk_address):
        with socket.create_connection(split_address(address), 10) as stranger:
            with contextlib.suppress(OSError):  # the listener has ended the connection already
                stranger.sendall(frame("hello", VERSION, {"page_size": page_size}))
                stranger.sendall(frame("pull_request", number, ticket) + frame("release_chunk", number))
                stranger.sendall(frame("cancel_transfer", "a") + frame("flush_pages"))
                stranger.shutdown(socket.SHUT_WR)
            heard = b""
            with contextlib.suppress(ConnectionResetError):
                while data := stranger.recv(1 << 16):
                    heard += data
        assert heard[len(PROTOCOL) + 32 :] == b""  # a nonce, and nothing that says more than that this is dsjax
    assert not transport.published
    assert engine.buffers.take(number) is link.pull(number, None, messages[0].address)
    assert len(server.listener._channels) == 1
    link.close()
    server.shutdown()


def test_a_side_with_another_key_is_told_so(monkeypatch, caplog):
    server, transport = served()
    other = Credentials(ClusterKey("o" * 32, "another file"))
    link = RemoteLink(server.address, RemoteChunks(transport, {}, {}, 5, other), {"page_size": 4}, other)
    messages = []
    link.connect(messages.append)
    link.send(prefill_request("a", range(33)))
    until(lambda: messages)
    assert (
        "this process showed its cluster key, which is from another file: that side has another one"
        in messages[0].reason
    )
    assert server.engine.num_jobs == 0
    link.close()
    server.shutdown()


@pytest.mark.parametrize("message", [b"\x93\xacpull_request\x01\xa2\xff\xff", b"\x91" * 100_000, "handled"])
def test_a_message_that_cannot_be_read_or_handled_ends_its_connection(message, caplog):
    left = threading.Event()

    def receive(_):
        raise ValueError("a fault of ours")

    peer = SimpleNamespace(receive=receive, leave=left.set)
    key = local_credentials()
    listener = TransferListener(lambda channel: peer, {}, "127.0.0.1", service=PAGES, credentials=key)
    channel, _ = connect_to(listener.address, {}, PAGES, key)
    if message == "handled":
        write(channel, CancelTransfer("a"))
    else:
        channel.send(message)
    assert left.wait(60)
    with pytest.raises(EOFError):
        channel.receive(100)
    assert "A connection for pages was closed, because" in caplog.text
    listener.close()


def test_an_engine_that_is_reached_beyond_loopback_needs_a_key_before_it_loads_anything():
    for mode in ("prefill", "decode"):
        args = EngineArgs(disaggregation_mode=mode, transfer_host="192.0.2.1")
        with pytest.raises(
            UserError, match=r"192\.0\.2\.1 is beyond the loopback interface.*--cluster-key-file FILE or"
        ):
            join_group(args, None)
    engine = SimpleNamespace(page_size=4)
    with pytest.raises(UserError, match="beyond the loopback interface"):
        PrefillServer(engine, None, {}, "0.0.0.0")


def test_without_an_address_the_loopback_interface_is_taken(monkeypatch):
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.7.7.7", 0))]  # as the host's name is on most machines
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    args = EngineArgs(disaggregation_mode="prefill")
    assert host_of(args, None) == "127.0.0.1"
    group = SimpleNamespace(options=SimpleNamespace(address="10.1.2.3"))
    assert host_of(args, group) == "10.1.2.3"
    assert host_of(replace(args, transfer_host="10.9.9.9"), group) == "10.9.9.9"


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:0", "host:x"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match="expected HOST:PORT"):
        split_address(address)

"""Subscribers of vLLM's events learn which pages lie where, and can ask for what they missed. Also tests `schedule/page_events.py`."""

import contextlib
import itertools
import json
import os
import socket as sockets
import threading
import time
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import zmq
from event_subscriber import hashes_of
from fake_executor import FakeExecutor
from greedy_requests import greedy, small_core
from waits import until
from zmq import auth

from dsjax.engine.engine import EngineParts
from dsjax.engine.llm_engine import LLMEngine
from dsjax.engine.schedule.page_events import BlockRemoved
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.tiers import event_publisher
from dsjax.engine.tiers.event_publisher import EventPublisher, KvEventsConfig, endpoint_of
from dsjax.errors import UserError


# The messages as vLLM declares them (vllm/distributed/kv_events.py, with array_like, as in its releases).
class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


class BlockRemovedOfVllm(KVCacheEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemovedOfVllm | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def run(engine, *prompts):
    for number, tokens in enumerate(prompts):
        engine.add(greedy(number, tokens, 2))
    while engine.has_unfinished:
        engine.step()


@pytest.fixture
def client():
    with contextlib.ExitStack() as opened:

        def make(kind, endpoint=None, **options):
            socket = opened.enter_context(zmq.Context.instance().socket(getattr(zmq, kind)))
            for name, value in {"linger": 0, "rcvtimeo": 60_000, **options}.items():
                setattr(socket, name, value)
            if endpoint is not None:
                socket.connect(endpoint)
            return socket

        yield make


@pytest.fixture
def publisher(tmp_path):
    made, names = [], {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}

    def make(ranks=1, **options):
        config = KvEventsConfig(enable_kv_cache_events=True, **names | options)
        made.append(EventPublisher(config, ranks))
        return made[-1], config

    yield make
    for one in made:
        one.close()
        one._thread.join(60)
        assert not one._thread.is_alive()


def replay(socket, first):
    """Batches by their numbers, from `first` on."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    parts = [*iter(socket.recv_multipart, [b"", b"\xff" * 8, b""])]
    assert {empty for empty, _, _ in parts} <= {b""}
    return {int.from_bytes(number, "big"): DECODER.decode(payload) for _, number, payload in parts}


def test_a_subscriber_that_came_late_learns_the_rest_by_a_replay(publisher, client):
    published, config = publisher(ranks=2, topic="kv")
    engine = small_core([published], num_ranks=2)
    subscribers = [client("SUB", endpoint_of(config.endpoint, rank), subscribe=b"kv") for rank in range(2)]
    replays = client("DEALER", config.replay_endpoint)
    prompts = [list(range(100 * n, 100 * n + 24)) for n in range(4)]
    while not subscribers[0].poll(20):  # it takes a while until a subscription is in force
        published.publish(0, [BlockRemoved([], "GPU")])
    run(engine, *prompts)
    last = published._next[0] - 1
    heard = {}
    while last not in heard:
        topic, number, payload = subscribers[0].recv_multipart()
        assert topic == b"kv"
        heard[int.from_bytes(number, "big")] = DECODER.decode(payload)
    assert sorted(heard) == list(range(min(heard), last + 1)), "no number is left out"
    everything = replay(replays, 0)
    assert sorted(everything) == list(range(last + 1))
    assert {number: everything[number] for number in heard} == heard
    assert sorted(replay(replays, last)) == [last]
    assert {batch.data_parallel_rank for batch in heard.values()} == {0}
    stored = {}
    for batch in heard.values():
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert (event.medium, event.block_size, event.lora_id) == ("GPU", 4, None)
                stored |= dict.fromkeys(event.block_hashes, event)
    told_prompts = [tokens for tokens in prompts if set(hashes_of(tokens, 4)) <= stored.keys()]
    assert len(told_prompts) in (1, 2, 3), "each rank tells of its own"
    first = stored[hashes_of(told_prompts[0], 4)[0]]
    assert (first.parent_block_hash, first.token_ids[:4]) == (None, told_prompts[0][:4])
    assert DECODER.decode(subscribers[1].recv_multipart()[2]).data_parallel_rank == 1


def test_what_the_publisher_cannot_keep_up_with_leaves_a_gap_in_the_numbers(publisher, caplog):
    told, _ = publisher(max_queue_size=1)
    go_on, encoder = threading.Event(), msgspec.msgpack.Encoder()
    told._encoder = SimpleNamespace(encode=lambda batch: go_on.wait(60) and encoder.encode(batch))
    told.publish(0, [])
    until(lambda: not told._queue.qsize())
    for _ in range(4):
        told.publish(0, [])  # keeps nobody waiting
    go_on.set()
    until(lambda: not told._queue.qsize())
    told.publish(0, [])
    told.close()
    told._thread.join(60)
    assert [number for number, _ in told._kept[0]] == [0, 1, 5]
    assert caplog.text.count("some are lost") == 1


def test_a_publisher_whose_queue_is_full_ends_too(publisher):
    full, _ = publisher(max_queue_size=1)
    encoder, is_slow = full._encoder, threading.Event()
    full._encoder = SimpleNamespace(encode=lambda batch: is_slow.wait(0.2) or encoder.encode(batch))
    full.publish(0, [])
    until(lambda: not full._queue.qsize())
    full.publish(0, [])  # waits for the one before; `publisher` closes it


def test_an_engine_publishes_what_its_options_say_and_gives_the_endpoint_back(tmp_path, client):
    options = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    args = EngineArgs.from_options(kv_events_config=json.dumps(options))
    subscriber = client("SUB", options["endpoint"], subscribe=b"")
    for turn in range(2):
        executor, numbers = FakeExecutor(), itertools.count()
        engine = LLMEngine(EngineParts(executor, None, executor.config, args))
        while not subscriber.poll(20):
            run(engine.core, [turn, next(numbers) % 256, 2, 3, 4])
        batch = DECODER.decode(subscriber.recv_multipart()[2])
        assert batch.events[0].token_ids[0] == turn
        engine.shutdown()
        while subscriber.poll(20):
            subscriber.recv_multipart()


def test_ports_follow_the_ranks():
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://*:5557", 31) == "tcp://*:5588"
    assert endpoint_of("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert endpoint_of("ipc:///tmp/x", 2) == "ipc:///tmp/x_dp2"


def test_a_port_that_is_taken_is_refused(tmp_path):
    with zmq.Context.instance().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}", bind=True)
        with pytest.raises(UserError, match=f"{port} cannot be used: Address already in use"):
            EventPublisher(config, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"publisher": "kafka"}, "expected zmq or null"),
        ({"endpoint": "tcp://*"}, "expected tcp://HOST:PORT"),
        ({"replay_endpoint": "5558"}, "replay_endpoint"),
        ({"buffer_steps": 0}, "an integer of at least 1"),
        ({"enable_kv_cache_events": "yes"}, "true or false"),
        ({"curve_key_file": "key"}, "CURVE needs both"),
        ({"curve_key_file": 1, "curve_clients": "keys"}, "expected a path"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(given, says):
    with pytest.raises(UserError, match=says):
        KvEventsConfig.parse({"enable_kv_cache_events": True} | given)


@pytest.mark.parametrize(
    ("given", "is_open"),
    [
        ({"endpoint": "tcp://*:5557"}, True),
        ({"endpoint": "tcp://10.0.0.1:5557", "bind": True}, True),
        ({"endpoint": "tcp://[::]:5557"}, True),
        ({"endpoint": "tcp://eth0:5557", "bind": True}, True),
        ({"replay_endpoint": "tcp://10.0.0.1:5558"}, True),
        ({}, False),
        ({"endpoint": "tcp://[::1]:6000"}, False),
        ({"endpoint": "ipc:///tmp/x", "replay_endpoint": "tcp://127.0.0.1:5558"}, False),
        ({"endpoint": "tcp://router.example:5557"}, False),  # connected to: the operator has named who reads
    ],
)
def test_a_socket_that_other_machines_reach_is_refused_unless_it_is_protected_or_meant(given, is_open):
    events = {"enable_kv_cache_events": True}
    with pytest.raises(UserError, match="allow_unauthenticated") if is_open else contextlib.nullcontext():
        KvEventsConfig.parse(events | given)
    KvEventsConfig.parse(events | given | {"allow_unauthenticated": True})
    KvEventsConfig.parse(events | given | {"curve_key_file": "key", "curve_clients": "keys"})
    KvEventsConfig.parse(given)  # nothing is published


def test_the_default_is_bound_and_other_addresses_are_bound_as_vllm_does():
    bound = {"tcp://[::]:1": True, "ipc://x": True, "tcp://127.0.0.1:1": False}
    assert {endpoint: KvEventsConfig(endpoint=endpoint).is_bound for endpoint in bound} == bound
    assert KvEventsConfig().is_bound
    assert not KvEventsConfig(bind=False).is_bound


def greet(path, kind):
    """Connect to a bound `ipc://` endpoint as a socket of a kind, and speak ZMTP 3.0 up to the handshake's end; give the connection."""
    connection = sockets.socket(sockets.AF_UNIX)
    connection.settimeout(60)
    connection.connect(path.removeprefix("ipc://"))
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    with contextlib.suppress(ConnectionError):  # the other side may have ended it already
        connection.sendall(b"\x04" + bytes([len(body)]) + body)
    return connection


def is_closed(connection):
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while connection.recv(4096):
            pass
    return True


def test_over_curve_a_client_with_a_known_key_reads_and_nobody_else(tmp_path, publisher, client, caplog):
    caplog.set_level("DEBUG", logger="zmq.auth")
    for folder in ("server", "clients", "others"):
        (tmp_path / folder).mkdir()
    public, secret = auth.create_certificates(tmp_path / "server", "events")
    os.chmod(secret, 0o600)
    auth.create_certificates(tmp_path / "clients", "router")
    auth.create_certificates(tmp_path / "others", "stranger")
    server = auth.load_certificate(public)[0]
    told, config = publisher(curve_key_file=secret, curve_clients=str(tmp_path / "clients"))

    def keyed(kind, name, folder):
        own = auth.load_certificate(tmp_path / folder / f"{name}.key_secret")
        return client(kind, curve_serverkey=server, curve_publickey=own[0], curve_secretkey=own[1])

    for endpoint, kind in ((config.endpoint, b"SUB"), (config.replay_endpoint, b"DEALER")):
        with greet(endpoint, kind) as plain:
            assert is_closed(plain)
    stranger = keyed("DEALER", "stranger", "others")
    stranger.setsockopt(zmq.IMMEDIATE, 1)  # it can be written to once it has been let in
    stranger.connect(config.replay_endpoint)
    until(lambda: "ZAP reply code=b'400'" in caplog.text)
    assert not stranger.poll(0, zmq.POLLOUT)
    router = keyed("SUB", "router", "clients")
    router.connect(config.endpoint)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    while not router.poll(20):
        told.publish(0, [])
    assert router.recv_multipart()[0] == b""
    replays = keyed("DEALER", "router", "clients")
    replays.connect(config.replay_endpoint)
    assert 0 in replay(replays, 0)


def test_keys_of_curve_that_cannot_be_used_are_refused(tmp_path):
    public, secret = auth.create_certificates(tmp_path, "events")
    (tmp_path / "none").mkdir()
    for key, clients, mode, says in (
        (tmp_path / "nothing", tmp_path, 0o600, "cannot be read"),
        (public, tmp_path, 0o600, "no secret key"),
        (secret, tmp_path / "none", 0o600, "nobody could come in"),
        (secret, tmp_path, 0o644, "chmod 600"),
    ):
        os.chmod(secret, mode)
        config = KvEventsConfig(enable_kv_cache_events=True, curve_key_file=str(key), curve_clients=str(clients))
        with pytest.raises(UserError, match=says):
            EventPublisher(config, 1)


PAGES = [BlockRemoved(list(range(2**63, 2**63 + 200)), "GPU")]
"""An event of nearly 2 kB: 3,000 of them are more than sockets and the system keep for a client that reads nothing."""


def test_few_replays_are_under_way_at_once_and_a_place_is_free_again_when_a_client_has_gone(
    publisher, client, monkeypatch, caplog
):
    monkeypatch.setattr(event_publisher, "_MOST_REPLAYS", 2)
    told, config = publisher()
    for _ in range(3000):
        told.publish(0, PAGES)
    until(lambda: len(told._kept[0]) >= 3000)
    stalled = [client("DEALER", config.replay_endpoint, rcvhwm=1) for _ in range(2)]
    for socket in stalled:
        socket.send_multipart([b"", bytes(8)])
    until(lambda: len(told._running_replays[0]) == 2)
    third = client("DEALER", config.replay_endpoint)
    for _ in range(100):
        third.send_multipart([b"", bytes(8)])
    until(lambda: "further requests are ignored" in caplog.text)
    assert caplog.text.count("further requests are ignored") == 1
    stalled[0].close()
    until(lambda: len(told._running_replays[0]) < 2)
    assert sorted(replay(third, 2990))[-1] == 2999


@pytest.mark.parametrize(("name", "kind"), [("endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
@pytest.mark.parametrize("size", [1025, 1 << 40])
def test_a_stranger_s_oversized_frame_ends_its_connection_unread(publisher, client, name, kind, size):
    told, config = publisher()
    with greet(getattr(config, name), kind) as stranger:
        stranger.sendall(b"\x02" + size.to_bytes(8, "big") + bytes(100))
        assert is_closed(stranger)
    told.publish(0, [])
    other = client("DEALER", config.replay_endpoint)
    until(lambda: replay(other, 0))


def test_subscribers_that_come_and_go_while_nothing_is_published_leave_no_memory_behind(publisher):
    _, config = publisher(replay_endpoint=None)

    def come_and_go(count):
        for _ in range(count):
            with greet(config.endpoint, b"SUB") as subscriber:
                assert subscriber.recv(64), "it was let in"
        time.sleep(1.5)  # the thread looks each second
        return psutil.Process().memory_info().rss

    taken = [come_and_go(300) for _ in range(4)]
    assert min(now - before for before, now in itertools.pairwise(taken)) < 1 << 20, "300 took 3 MiB each time"

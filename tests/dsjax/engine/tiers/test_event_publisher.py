"""Subscribers of vLLM's events learn from dsjax which pages lie where, and can ask for what they have missed.

These are the tests of `schedule/page_events.py` too.
"""

import json
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from event_subscriber import Subscriber, hashes_of
from fake_executor import FakeExecutor

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import EngineParts, LLMEngine, attachments_of
from dsjax.engine.schedule.page_events import BlockRemoved
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.args import EngineArgs
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


def core(publisher, **sizes):
    executor = FakeExecutor(pages_per_rank=17, max_rows_decode=4, **sizes)
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
    return EngineCore(executor, config, attachments=attachments_of(config, sink=publisher))


def run(engine, *prompts, together=False):
    for number, tokens in enumerate(prompts):
        name = f"{time.monotonic()}-{number}"
        engine.add(Request(name, list(tokens), len(tokens), SamplingParams(temperature=0), 2, 0))
        while engine.has_unfinished and not (together and number + 1 < len(prompts)):
            engine.step()


def test_a_page_is_followed_through_the_tiers():
    told = Subscriber(1, 4)
    engine = core(told, host_pages_per_rank=4, disk_pages=100)
    engine.executor.disk_takes = 0
    first = list(range(40))
    run(engine, first)
    where = lambda: [medium for medium, known in told.blocks[0].items() if hashes_of(first, 4)[3] in known]  # noqa: E731
    assert where() == ["GPU"]
    assert told.tokens[hashes_of(first, 4)[3]] == (hashes_of(first, 4)[2], (12, 13, 14, 15))
    assert told.tokens[hashes_of(first, 4)[0]] == (None, (0, 1, 2, 3))
    run(engine, range(100, 156), range(200, 256))
    told.check(engine.scheduler)
    assert where() == ["CPU_TIER2"]
    run(engine, [*first, 7])
    told.check(engine.scheduler)
    assert where() == ["GPU", "CPU_TIER2"]
    engine.flush_prefix_cache()
    assert where() == []
    told.check(engine.scheduler)


def test_every_rank_is_told_of_the_disk_which_all_can_fetch_from():
    told = Subscriber(2, 4)
    engine = core(told, num_ranks=2, disk_pages=100)
    engine.executor.disk_takes = 0
    run(engine, *(range(100 * n, 100 * n + 56) for n in range(6)))
    told.check(engine.scheduler)
    assert told.blocks[0]["CPU_TIER2"] == told.blocks[1]["CPU_TIER2"] != set()
    assert not told.blocks[0]["GPU"] & told.blocks[1]["GPU"]


@pytest.fixture
def published(tmp_path):
    """An engine of two ranks that publishes, and of each rank a subscriber and a socket to ask for a replay."""
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed (pip install 'dsjax[kv-events]')")
    options = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay", "topic": "kv"}
    config = KvEventsConfig(enable_kv_cache_events=True, **options)
    publisher = EventPublisher(config, 2)
    subscribers, replays = [], []
    for rank in range(2):
        subscribers.append(zmq.Context.instance().socket(zmq.SUB))
        subscribers[-1].connect(endpoint_of(config.endpoint, rank))
        subscribers[-1].setsockopt(zmq.SUBSCRIBE, b"kv")
        replays.append(zmq.Context.instance().socket(zmq.REQ if rank else zmq.DEALER))
        replays[-1].connect(endpoint_of(config.replay_endpoint, rank))
    for socket in (*subscribers, *replays):
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.LINGER, 0)
    yield core(publisher, num_ranks=2), publisher, subscribers, replays[0]
    publisher.close()
    for socket in (*subscribers, *replays):
        socket.close()


def replay(socket, first):
    """Batches by their numbers, from `first` on."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = {}
    while True:
        empty, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == b"\xff" * 8:
            assert payload == b""
            return batches
        batches[int.from_bytes(number, "big")] = DECODER.decode(payload)


def test_a_subscriber_that_came_late_learns_the_rest_by_a_replay(published):
    engine, publisher, subscribers, replays = published
    prompts = [list(range(100 * n, 100 * n + 24)) for n in range(4)]
    while not subscribers[0].poll(20):  # it takes a while until a subscription is in force
        publisher.publish(0, [BlockRemoved([], "GPU")])
    run(engine, *prompts, together=True)
    last = publisher._next[0] - 1
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
    assert first.parent_block_hash is None
    assert first.token_ids[:4] == told_prompts[0][:4]
    topic, _, payload = subscribers[1].recv_multipart()
    assert DECODER.decode(payload).data_parallel_rank == 1


def test_what_the_publisher_cannot_keep_up_with_leaves_a_gap_in_the_numbers(tmp_path, caplog):
    pytest.importorskip("zmq")
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events", max_queue_size=1)
    publisher, go_on, encoder = EventPublisher(config, 1), threading.Event(), msgspec.msgpack.Encoder()
    publisher._encoder = SimpleNamespace(encode=lambda batch: go_on.wait(10) and encoder.encode(batch))
    publisher.publish(0, [])
    while publisher._queue.qsize():
        time.sleep(0.001)
    for _ in range(4):
        publisher.publish(0, [])  # keeps nobody waiting
    go_on.set()
    while publisher._queue.qsize():
        time.sleep(0.001)
    publisher.publish(0, [])
    publisher.close()
    assert [number for number, _ in publisher._kept[0]] == [0, 1, 5]
    assert caplog.text.count("some are lost") == 1


def test_an_engine_publishes_what_its_options_say_and_gives_the_endpoint_back(tmp_path):
    zmq = pytest.importorskip("zmq")
    options = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    args = EngineArgs.from_options(kv_events_config=json.dumps(options))
    with zmq.Context.instance().socket(zmq.SUB) as subscriber:
        subscriber.connect(options["endpoint"])
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        for turn in range(2):
            executor = FakeExecutor()
            config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
            engine = LLMEngine(EngineParts(executor, None, config, kv_events=args.kv_events))
            number = 0
            while not subscriber.poll(20):
                number += 1
                prompt = {"prompt_token_ids": [turn, number % 256, 2, 3, 4]}
                engine.add_request(f"{number}", prompt, SamplingParams(temperature=0, max_tokens=1))
                while engine.has_unfinished():
                    engine.step()
            batch = DECODER.decode(subscriber.recv_multipart()[2])
            assert batch.events[0].token_ids[0] == turn
            engine.shutdown()
            while subscriber.poll(20):
                subscriber.recv_multipart()


def test_events_without_a_prefix_cache_are_refused():
    given = {"enable_kv_cache_events": True}
    with pytest.raises(UserError, match="leave one of them out"):
        EngineArgs.from_options(kv_events_config=given, enable_prefix_caching=False)
    assert EngineArgs.from_options().kv_events is None


def test_ports_follow_the_ranks():
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://*:5557", 31) == "tcp://*:5588"
    assert endpoint_of("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert endpoint_of("ipc:///tmp/x", 2) == "ipc:///tmp/x_dp2"


def test_a_port_that_is_taken_is_refused(tmp_path):
    zmq = pytest.importorskip("zmq")
    with zmq.Context.instance().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://*")
        config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}")
        with pytest.raises(UserError, match=f"{port} cannot be used: Address already in use"):
            EventPublisher(config, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "is not JSON"),
        ({"enable": True}, "unknown field enable"),
        ({"publisher": "kafka"}, "expected zmq or null"),
        ({"endpoint": "tcp://*"}, "expected tcp://HOST:PORT"),
        ({"replay_endpoint": "5558"}, "replay_endpoint"),
        ({"buffer_steps": 0}, "an integer of at least 1"),
        ({"enable_kv_cache_events": "yes"}, "true or false"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(given, says):
    with pytest.raises(UserError, match=says):
        KvEventsConfig.parse(given)


def test_without_pyzmq_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'dsjax\[kv-events\]'"):
        KvEventsConfig.parse({"enable_kv_cache_events": True})
    assert not KvEventsConfig.parse({"enable_kv_cache_events": True, "publisher": "null"}).publishes

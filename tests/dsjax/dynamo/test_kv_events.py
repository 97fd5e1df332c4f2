"""The engine's pages as Dynamo's router is told of them, without Dynamo: by rank, with signed hashes and salts, in any tier."""

import itertools
import sys

import pytest
from event_subscriber import Subscriber
from fake_executor import FakeExecutor

from dsjax.dynamo.kv_events import KvEvents, signed
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.core import EngineCore
from dsjax.engine.engine import attachments_of
from dsjax.engine.schedule.page_events import AllBlocksCleared, BlockRemoved, BlockStored
from dsjax.engine.schedule.request import Request, RequestOptions

NAMES = itertools.count()


class Router:
    """Stands where a rank's `KvEventPublisher` does, and knows what its events say."""

    def __init__(self):
        self.blocks: dict[int, tuple] = {}

    def publish_batch(self, events):
        for event in events:
            if event["type"] == "removed":
                for block in event["block_hashes"]:
                    del self.blocks[block]
                continue
            size, parent = event["num_block_tokens"][0], event["parent_hash"]
            assert event["num_block_tokens"] == [size] * len(event["block_hashes"])
            assert parent is None or parent in self.blocks
            for place, block in enumerate(event["block_hashes"]):
                assert -(2**63) <= block < 2**63
                tokens = tuple(event["token_ids"][place * size : (place + 1) * size])
                self.blocks[block] = (parent, tokens, event["cache_salt"])
                parent = block


def engine_of(ranks: int, **sizes):
    """An engine over fake devices, the router's view of each rank, and what vLLM's subscribers would know."""
    executor = FakeExecutor(pages_per_rank=17, max_rows_decode=4, num_ranks=ranks, **sizes)
    executor.disk_takes = 0
    events, told, routers = KvEvents(), Subscriber(ranks, 4), [Router() for _ in range(ranks)]
    for rank, router in enumerate(routers):
        events.connect(rank, router)
    attachments = attachments_of(executor.config, sinks=[told, events])
    return EngineCore(executor, executor.config, attachments=attachments), routers, told


def parents_held(block: int, held: set[int], told: Subscriber) -> bool:
    """Whether a block and all before it are held; the router has no place for others."""
    while block in held:
        parent = told.tokens[block % 2**64][0]
        if parent is None:
            return True
        block = signed(parent)
    return False


def run(engine, tokens, **options) -> None:
    params = SamplingParams(temperature=0)
    engine.add(Request(str(next(NAMES)), list(tokens), len(tokens), params, 2, 0, options=RequestOptions(**options)))
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("below", [{}, {"host_pages_per_rank": 4}, {"host_pages_per_rank": 4, "disk_pages": 20}])
def test_the_router_knows_what_any_tier_of_a_rank_holds(below):
    engine, routers, told = engine_of(2, **below)
    for number in (0, 1, 2, 0, 3, 4, 1, 5, 0):
        run(engine, range(100 * number, 100 * number + 30), dp_rank=number % 2)
        for rank, router in enumerate(routers):
            held = {signed(block) for blocks in told.blocks[rank].values() for block in blocks}
            assert set(router.blocks) <= held
            assert not any(parents_held(block, held, told) for block in held - set(router.blocks))
    assert all(router.blocks for router in routers)
    engine.flush_prefix_cache()
    assert not any(router.blocks for router in routers)


def test_a_block_is_told_with_its_tokens_its_parent_and_its_salt():
    engine, (router,), _ = engine_of(1)
    run(engine, range(12), cache_salt="mine")
    run(engine, range(8))
    run(engine, range(100, 108), cache_salt="mine")
    parents, tokens, salts = zip(*router.blocks.values(), strict=True)
    first, second, other = (0, 1, 2, 3), (4, 5, 6, 7), (100, 101, 102, 103)
    assert {*itertools.product((first, second), ("mine", None))} <= {*zip(tokens, salts, strict=True)}
    assert {block for parent, block in zip(parents, tokens, strict=True) if parent is None} == {first, other}
    assert {*parents} <= {None, *router.blocks}


@pytest.fixture
def heard():
    """Events of a rank that a router listens to, and a function that publishes a block of two tokens."""
    events, router = KvEvents(), Router()
    events.connect(0, router)

    def store(block, parent, medium=None):
        events.publish(0, [BlockStored([block], parent, [1, 2], 2, None, medium, None)])

    return events, router, store


def test_a_block_whose_parent_comes_late_is_told_and_one_whose_parent_never_comes_is_forgotten_with_its_page(heard):
    events, router, store = heard
    for block in range(1, 50):  # a disk that lags writes the last page of a prompt, and not the one before it
        store(1000 + block, block, "disk")
        if block % 2:
            store(block, None, "disk")
            assert {block, 1000 + block} <= router.blocks.keys()
        events.publish(0, [BlockRemoved([1000 + block, block], "disk")])
    assert router.blocks == {}
    [known] = events._ranks.values()
    assert not any((known._waiting, known._parents, known._places, known._published, known._salts))


def test_blocks_that_waited_in_a_long_chain_are_told(heard):
    _, router, store = heard
    last = 5 * sys.getrecursionlimit()
    for block in range(last, 1, -1):
        store(block, block - 1)
    assert router.blocks == {}
    store(1, None)
    assert router.blocks.keys() == set(range(1, last + 1))


def test_a_rank_that_nobody_listens_to_is_told_to_nobody():
    events, router = KvEvents(), Router()
    events.publish(0, [AllBlocksCleared()])
    events.connect(0, router)
    events.publish(1, [AllBlocksCleared()])
    assert router.blocks == {}
    events.close()
    events.publish(0, [AllBlocksCleared()])

"""Chunks that other processes of a prefill side keep: offered by process 0, pulled from where they lie, and dropped there."""

from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

from engine_pair import prefill_request
from fake_executor import FakeExecutor

from dsjax.background import WorkQueue
from dsjax.engine.elastic.transfer_processes import FollowerTransfers
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.transfer import chunk_network
from dsjax.engine.transfer.chunk_network import FollowerSendBuffers
from dsjax.engine.transfer.messages import ChunkReady, ReleaseChunk
from dsjax.engine.transfer.page_chunks import PageChunks
from dsjax.engine.transfer.send_buffers import ChunkOwner, PageSend, SendBuffers


def opened(kept, number):
    chunk = Future()
    kept.open(number, chunk.set_result)
    return chunk


def test_a_chunk_that_another_process_keeps_is_waited_for_when_it_was_offered_early_and_gone_when_process_0_drops_it():
    kept = FollowerSendBuffers()
    early = opened(kept, 3)
    kept.ready(4, None)  # a third process has that one
    assert not early.done()
    kept.ready(3, {"tokens": []})
    assert early.result(0) == {"tokens": []}
    kept.drop([3, 4])
    assert [opened(kept, number).result(0) for number in (3, 4)] == [None, None]
    assert kept._chunks == {}


def test_few_pulls_of_what_nobody_offers_are_kept(monkeypatch):
    monkeypatch.setattr(chunk_network, "_MAX_WAITING", 3)
    kept = FollowerSendBuffers()
    pulls = [opened(kept, number) for number in range(5)]
    assert [pull.done() for pull in pulls] == [True, True, False, False, False]
    assert pulls[0].result(0) is None
    kept.ready(4, {"tokens": 1})
    assert pulls[4].result(0) == {"tokens": 1}


def test_a_chunk_that_another_process_has_offered_and_this_one_could_not_compute_is_waited_for_no_longer():
    kept, made = FollowerSendBuffers(), object.__new__(PageChunks)
    made._offers = WorkQueue("chunk offer", "offers")
    made.send_chunks(kept.ready, kept.drop)
    pull = opened(kept, 3)
    failed = {"tokens": Mock(**{"block_until_ready.side_effect": RuntimeError("the step that made it has failed")})}
    made._offers.put(lambda: made._offer_when_computed(3, failed, is_kept=True))
    assert pull.result(30) is None
    made._offers.put(lambda: made._offer_when_computed(4, {"tokens": 1}, is_kept=True))
    assert opened(kept, 4).result(30) == {"tokens": 1}
    made._offers.close()


def test_chunks_of_a_generation_that_has_ended_are_waited_for_no_longer():
    group, loaded = Mock(**{"endpoint.address": "127.0.0.1:7"}), SimpleNamespace(executor=FakeExecutor(transfers=True))
    transfers = FollowerTransfers(EngineArgs(disaggregation_mode="prefill", transfer_timeout=120), group)
    transfers._server = "started with the first generation"
    transfers.join(loaded)
    pull = opened(transfers._kept, 3)  # offered by process 0, and never computed here
    transfers.join(loaded)
    assert pull.result(0) is None
    loaded.executor._offer(4, {"tokens": 1})
    assert opened(transfers._kept, 4).result(0) == {"tokens": 1}
    told = [call.args[1] for call in group.agreement.contribute.call_args_list]
    assert told == ["127.0.0.1:7"] * 2, "process 0 asks in each generation"


def test_process_0_offers_what_another_process_keeps_and_has_it_dropped_there_when_it_was_pulled():
    executor = FakeExecutor(transfers=True)
    engine = PrefillEngine(executor, executor.config, timeout=60, owners=lambda executor: [ChunkOwner("there:1", True)])
    heard, offers = [], []
    engine.post(prefill_request("a", range(9)), heard.append)
    while not offers:
        engine.turn(wait=False)
        offers = [message for message in heard if isinstance(message, ChunkReady)]
    assert {offer.address for offer in offers} == {"there:1"}
    for offer in offers:
        engine.post(ReleaseChunk(offer.number), heard.append)
    engine.turn(wait=False)
    engine.turn(wait=False)
    assert executor.dropped_chunks == [offer.number for offer in offers]
    assert engine.buffers.num_kept == engine.num_jobs == 0


def test_the_numbers_of_a_side_that_was_started_again_are_not_those_of_before():
    send = PageSend("a", SimpleNamespace(page_hashes=[b""]), None, 0, 0, 1)
    sides = [SendBuffers(60, print) for _ in range(2)]
    for side in sides:
        side.reset([ChunkOwner()])
    first, again = (side.begin(0, send, 0, 1) for side in sides)
    assert first != again  # the same in one run of two billion
    assert all(0 <= number < 2**31 for number in (first, again)), "as commands have them"

"""Chunks that other processes of a prefill side keep: offered by process 0, pulled from where they lie, and dropped there."""

import threading

import pytest
from fake_executor import FakeExecutor

from dsjax.engine.contract.commands import int32s
from dsjax.engine.prefill_engine import PrefillEngine
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.transfer.chunk_network import FollowerSendBuffers
from dsjax.engine.transfer.messages import (
    ChunkGoneError,
    ChunkReady,
    PrefillRequest,
    ReleaseChunk,
)
from dsjax.engine.transfer.send_buffers import Keeper


def test_a_chunk_that_another_process_keeps_is_waited_for_when_it_was_offered_early_and_gone_when_process_0_drops_it():
    kept = FollowerSendBuffers(timeout=5)
    timer = threading.Timer(0.05, kept.ready, (3, {"tokens": []}))
    timer.start()
    assert kept.take(3) == {"tokens": []}
    kept.ready(4, None)  # a third process has that one
    kept.drop([3, 4])
    for number in (3, 4):
        with pytest.raises(ChunkGoneError):
            kept.take(number)
    assert len(kept) == 0


def test_process_0_offers_what_another_process_keeps_and_has_it_dropped_there_when_it_was_pulled():
    executor = FakeExecutor(transfers=True)
    config = SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)
    engine = PrefillEngine(executor, config, timeout=60, keepers=lambda executor: [Keeper("there:1", True)])
    offers = []
    engine.post(PrefillRequest("a", int32s(range(9)), 0, 2), offers.append)
    while not any(isinstance(message, ChunkReady) for message in offers):
        engine.turn(wait=False)
    offers = [message for message in offers if isinstance(message, ChunkReady)]
    assert {offer.address for offer in offers} == {"there:1"}
    for offer in offers:
        engine.post(ReleaseChunk(offer.number), offers.append)
    engine.turn(wait=False)
    engine.turn(wait=False)
    assert executor.dropped_chunks == [offer.number for offer in offers]
    assert engine.buffers.num_kept == engine.num_jobs == 0

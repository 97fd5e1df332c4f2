"""Counts of tokens by expert are added up over launches, under whichever placement each of them had."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_steps import tiny

from dsjax.engine.device import expert_recorder
from dsjax.engine.device.expert_recorder import ExpertRecorder
from dsjax.model.expert_dispatch import ExpertDispatch
from dsjax.model.rows import GroupShape
from sharding.dispatch import DispatchConfig
from sharding.layer_placement import LayerPlacements

LAYERS, RANKS, EXPERTS = 2, 2, 32
HERE = LayerPlacements(np.tile(np.arange(EXPERTS), (LAYERS, 1)), EXPERTS)
REVERSED = LayerPlacements(HERE.physical_to_logical[:, ::-1], EXPERTS)


def rows(tokens: int):
    return [GroupShape(tokens, 1, 4, "A_CC_ME")]


def report(tokens: int):
    """A launch in which the physical expert p of layer l computed tokens × (1,000 l + p) tokens."""
    experts = np.arange(EXPERTS).reshape(1, RANKS, -1) + 1000 * np.arange(LAYERS)[:, None, None]
    rows = np.full((LAYERS, RANKS), tokens)
    return {"tokens_per_expert": tokens * experts, "rows_sent": rows, "rows_received": rows, "rounds": rows * 0 + 1}


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(expert_recorder, "_SECONDS", 1e9)  # nothing is read because of the time
    made = ExpertRecorder(tiny("dp=2"))
    made._last_read_time = expert_recorder.time.monotonic()
    return made


def test_tokens_are_added_by_slot_and_by_logical_expert_wherever_it_was(recorder):
    recorder.add(report(1), rows(8), HERE)
    recorder.add(report(10), rows(8), HERE)
    recorder.add(report(100), rows(8), REVERSED)
    assert recorder.counts() is None, "reports stay on the devices for a while"
    counts = recorder.read()
    slots = np.arange(EXPERTS) + 1000 * np.arange(LAYERS)[:, None]
    np.testing.assert_array_equal(counts.tokens_per_expert, 111 * slots)
    np.testing.assert_array_equal(counts.logical_load, 11 * slots + 100 * slots[:, ::-1])
    np.testing.assert_array_equal(counts.physical_to_logical, REVERSED.physical_to_logical)
    np.testing.assert_array_equal(counts.rows_sent, [LAYERS * 111] * RANKS)
    assert counts.rounds == 3 * LAYERS


def test_reports_are_read_together_when_many_have_come_and_a_launch_without_any_counts_nothing(recorder):
    recorder.add({}, rows(8), HERE)
    assert recorder.read() is None
    for _ in range(expert_recorder._MAX_UNREAD - 1):
        recorder.add(report(1), rows(8), HERE)
    assert recorder.counts() is None
    recorder.add(report(1), rows(16), HERE)  # of another size, which is read by itself
    counts = recorder.counts()
    assert counts.tokens_per_expert[0, 3] == 3 * expert_recorder._MAX_UNREAD
    recorder.add(report(1), rows(8), HERE)
    assert recorder.counts().tokens_per_expert[0, 3] == counts.tokens_per_expert[0, 3], "a copy stays as it is"


def test_bytes_are_those_of_the_exchange_that_was_carried_out(recorder, monkeypatch):
    in_memory = DispatchConfig(by_choice=True, in_memory=SimpleNamespace(experts_read_tokens=True))
    for config, sends in ((in_memory, False), (DispatchConfig("gather"), True)):
        monkeypatch.setattr(ExpertDispatch, "config", config)
        recorder.add(report(1), rows(8), HERE)
        assert (recorder.read().dispatch_bytes > 0) == sends

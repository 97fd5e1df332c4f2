"""What a dry run says of experts that move: bytes of the compiled exchange, the buffer, and the steps that the engine would take."""

import dataclasses

import numpy as np
import pytest

from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.memory import DeviceMemory
from dsjax.dryrun.prices import Assumed, default_cluster
from dsjax.dryrun.rebalance import _moves
from dsjax.dryrun.run import dry_run
from dsjax.engine.experts.eplb import ExpertSlots
from dsjax.engine.experts.expert_balancer import decide
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.skew import Slots, drawn
from sharding.balancing import keep_in_place, rebalance
from sharding.placement import Placement

EXPERT = 3 * 256 * 32 * 2
"""Bytes of one of the demo's experts in bf16."""
EPLB = {"num_redundant_experts": 8, "max_bytes_per_step": 2 * 7 * EXPERT}
BALANCED = EngineArgs(model="demo", mesh="dp=8", enable_eplb=True, eplb_config=EPLB)
V3 = Slots(ranks=32, physical=288, groups=8, hosts=4)
V3_EXPERT = 44_050_944  # FP8 and its scales


@pytest.fixture(scope="module")
def balanced():
    return dry_run(DryRunArgs(engine=BALANCED, batch=4, context=64))


@pytest.mark.slow
def test_the_compiled_exchange_sends_what_arithmetic_says(balanced):
    found = balanced.rebalance
    # Emulated devices gather: a device receives what all seven others send, and that is what is bounded.
    assert (found.layers, found.experts_per_exchange) == (4, 2)
    assert (found.expert_bytes, found.sent_bytes, found.staging_bytes) == (EXPERT, 2 * EXPERT, 9 * EXPERT)


@pytest.mark.slow
def test_the_buffer_and_the_counters_are_all_that_is_kept_on_a_device(balanced, described):
    unmoved = dataclasses.replace(BALANCED, enable_eplb=False, eplb_config=None, redundant_experts=8)
    without = described(DryRunArgs(engine=unmoved, batch=4, context=64))
    moving, still = balanced.memory, DeviceMemory.of(without)
    assert without.exchange is None
    assert moving.staging == 9 * EXPERT
    assert (still.staging, still.moving) == (0, 0)
    counters = 4 * 9 * 4  # int32 of each slot of each layer
    assert moving.persistent - still.persistent == moving.staging + counters
    assert moving.total >= moving.persistent + moving.moving
    assert moving.weights == still.weights
    assert balanced.to_json()["device_bytes"]["staging"] == 9 * EXPERT


def test_steps_and_bytes_are_those_of_the_engines_own_decision():
    load = drawn(1.28, 256, 0.0).seen[:4]
    start = np.tile(Placement.with_redundancy(256, 288, ranks=32).physical_to_logical, (4, 1))
    new = keep_in_place(start, rebalance(load, n_physical=288, ranks=32, groups=8, hosts=4), 32, 4)
    cluster = default_cluster(load_hardware("h200"), 32)
    found = _moves(start, new, V3, 3, cluster.domain, V3_EXPERT, Assumed.of(cluster))
    machine = {"n_logical": 256, "ranks": 32, "hosts": 4, "groups": 8}
    slots = ExpertSlots(start, **machine, expert_share=0.54, expert_bytes=V3_EXPERT, per_exchange=3)
    engine = decide(load, slots, "auto", interval=3000, step_seconds=0.05)
    assert len(engine.changes) == 4
    assert sum(len(change.commands()) for change in engine.changes) == 4 * (found.exchanges + 1)
    assert engine.summary(V3_EXPERT)["bytes"] == 4 * found.experts * V3_EXPERT
    # All nine slots of the rank with the most: 396 MB, of which most come from other hosts, over 400 Gb/s at 0.6 of them.
    assert 8 < found.received <= 9
    assert found.seconds.low < found.seconds.value < found.seconds.high
    assert 0.5 < found.seconds.value / (found.received * V3_EXPERT / 30e9) < 2


def test_more_bytes_of_a_bound_take_fewer_exchanges_and_one_without_room_for_an_expert_is_refused():
    loads = drawn(1.28, 256, 0.25)
    old, new = (rebalance(load[:3], n_physical=288, ranks=32, groups=8, hosts=4) for load in (loads.seen, loads.served))
    few, many = (_moves(old, new, V3, count, 8, V3_EXPERT, None) for count in (1, 9))
    assert few.experts == many.experts
    assert few.received == many.received
    assert few.exchanges >= few.received > many.exchanges
    engine = dataclasses.replace(BALANCED, eplb_config={"num_redundant_experts": 8, "max_bytes_per_step": EXPERT})
    with pytest.raises(UserError, match="to move one expert a device receives"):
        dry_run(DryRunArgs(engine=engine, batch=4, context=64))

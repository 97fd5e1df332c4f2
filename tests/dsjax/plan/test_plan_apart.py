"""Plans with attention and experts apart (`apart.py`, `moves.py`): two pools, and what travels between them."""

import dataclasses

import pytest
from plan_words import plan_json
from step_models import options_for

from dsjax.engine.setup.args import EngineArgs
from dsjax.plan.apart import ApartStep, _layers_seconds
from dsjax.plan.cluster import load_cluster
from dsjax.plan.cold_start import recovery
from dsjax.plan.figure import assumption
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.memory import expert_side_bytes, weight_bytes
from dsjax.plan.moves import AfdExchange, afd_exchange, agreement, connection
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.turns import LayerTimes, simulate_layers
from sharding import MeshSpec

FP8 = PRECISIONS["fp8"]


def test_messages_between_processes_take_what_was_measured_of_them():
    """ZeroMQ without encryption: 64 B there and back in 79 µs, 18 MB in 7.1 ms; the sender of a broadcast waits for 0.13 ms."""
    cluster = load_cluster("h200-32")
    rate, fixed = connection(cluster, cluster)
    assert 2 * 18e6 / rate == pytest.approx(7.1e-3, rel=0.05)
    assert fixed - cluster.latency == pytest.approx(79e-6)
    assert agreement(cluster, 2) - cluster.latency == pytest.approx(79e-6)
    assert assumption("a step's command to the other processes") == pytest.approx(0.13e-3)


def layout(attention, experts, redundant=0):
    return InstanceLayout(MeshSpec.parse(attention), redundant, experts=experts)


def decoding(ask, mesh, experts, cluster="h800-32", redundant=0, **changes):
    options = options_for("dsjax", modes=("aggregated",), **changes)
    question = ask(cluster, options=options, decoding_at=4096.0)
    return question.instance(layout(mesh, experts, redundant), {})


def test_a_device_with_attention_holds_no_expert_and_one_with_experts_nothing_else(v3):
    both, apart = InstanceLayout(MeshSpec.parse("dp=8")), layout("dp=8", 8)
    together, alone = weight_bytes(v3, both, FP8), weight_bytes(v3, apart, FP8)
    assert alone == {name: size for name, size in together.items() if name != "experts"}
    assert expert_side_bytes(v3, apart, FP8) == together["experts"]


def test_within_a_process_all_rooms_travel_and_between_processes_the_rows_that_are_needed(ask):
    cluster = ask("h200-32").cluster
    pairs = (2, 6), (8, 8), (8, 24), (16, 8)
    near, far, farther, wide = (afd_exchange(cluster, cluster, *pair, 100, 50.0, (1e4, 2e4)) for pair in pairs)
    empty = [afd_exchange(cluster, cluster, *pair, 100, 50.0, (0.0, 0.0)) for pair in pairs]
    assert near.back - empty[0].back == pytest.approx(100 * 2e4 * 6 / (0.6 * cluster.hardware.scale_up_bandwidth))
    # Each connection joins eight devices of one host with eight of another, at 5 GB/s.
    for one, fixed in zip((far, farther, wide), empty[1:], strict=True):
        assert one.there - fixed.there == pytest.approx(8 * 8 * 50 * 1e4 / 5e9)
        assert one.back - fixed.back == pytest.approx(8 * 8 * 50 * 2e4 / 5e9)
    assert (near.one_call, far.one_call) == (False, True)
    assert far.begin_back == 0 < wide.begin_back, "two processes with attention wait for each other"


def test_a_lost_host_with_attention_costs_no_reading_of_experts(ask):
    lost = recovery(decoding(ask, "dp=16", 16, "h200-32"))
    assert lost.read == 0
    assert recovery(decoding(ask, "dp=8", 16, "h200-32")) is None, "it is all of attention"


@pytest.mark.parametrize(
    ("attention", "experts", "most"),
    [
        ("dp=2", 6, 4),
        ("dp=2", 1, 8),  # two on each host of eight, whose last two devices are too few for a third
        ("dp=4", 1, 4),
        ("dp=4", 8, 2),  # attention and experts on a host of their own
        ("dp=8", 16, 1),
    ],
)
def test_an_instance_within_a_host_lies_on_no_other_and_larger_ones_have_whole_hosts(ask, attention, experts, most):
    assert ask("h200-32", options=options_for("dsjax")).max_instances(layout(attention, experts)) == most


def test_experts_that_do_not_fit_leave_no_room_for_a_request(ask):
    # 653 GB of FP8 experts over four devices of 80 GB.
    small, enough = (decoding(ask, "dp=8", experts) for experts in (4, 16))
    assert small.max_batch == 0
    assert small.memory.weights == {"experts": expert_side_bytes(small.config, small.layout, FP8)}
    assert enough.max_batch > 100


def test_the_experts_of_a_step_work_for_the_tokens_of_all_attention_devices(ask):
    """As many tokens on as many devices: the products of `dp=16` with half the batch are those of 16 devices behind 8 with attention."""
    instance = decoding(ask, "dp=8", 16)
    step: ApartStep = instance.step_models()[0]
    apart = step.routed(64, True, 1.0, False)["experts"]
    assert apart * step.config.num_moe_layers == pytest.approx(step.expert_side.decode_parts(32, 4096)["experts"])
    side = decoding(ask, "dp=16", 16, redundant=32).step_models()[0].expert_side
    assert side.expert_slots.hosts == 1, "rows come from other devices, to which no expert's is nearer"


def test_micro_batches_in_turn_gain_where_the_batch_is_large_and_lose_where_it_is_small(ask):
    (one, two), models = (decoding(ask, "dp=2", 6, redundant=2, afd_stages=n).step_models() for n in (2, 3))
    assert [model.micro_batches for model in (one, two, *models)] == [1, 2, 1, 3]
    assert one.decode(2, 4096) < two.decode(2, 4096)
    assert two.decode(512, 4096) < one.decode(512, 4096)


def test_turns_that_repeat_are_not_all_played():
    for batches in (1, 2, 3):
        for one_call in (False, True):
            exchange = AfdExchange(1e-4, 1.2e-4, 1e-4, 1e-4, 6e-5, one_call)
            turn = LayerTimes(3e-4, 5e-5, 1e-5, 2.5e-4, exchange)
            every = simulate_layers([turn] * batches, 58).seconds
            assert _layers_seconds(turn, batches, 58) == pytest.approx(every, rel=0.01)


def test_commands_of_all_processes_are_options_that_the_engine_takes():
    meshes = ["--attention-mesh", "dp=8", "--expert-mesh", "ep=16"]
    made = plan_json("--cluster", "h200-32", *meshes, "--mode", "aggregated")
    services = made["winner"]["services"]
    attention, *experts = (one["options"] for one in services)
    assert [one["--afd-role"] for one in (attention, *experts)] == ["attention", "expert", "expert"]
    assert [one["--afd-server-rank"] for one in experts] == ["0", "1"]
    assert [one["devices_each"] for one in services] == [8, 8, 8]
    assert attention["--afd-address"] == "EXPERTS0:7000,EXPERTS1:7000"
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for one in (attention, *experts):
        assert {flag[2:].replace("-", "_") for flag in one} <= known
        assert "--dispatch" not in one
    assert made["ranked"][0]["expert_mesh"] == "ep=16"

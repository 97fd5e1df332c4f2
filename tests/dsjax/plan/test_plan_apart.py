"""Plans with attention and experts apart (`apart.py`, `pools.py`, `moves.py`): two pools, what an engine does, where it wins."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.apart import IN_TURN, ApartStep, _seconds
from dsjax.plan.candidate import aggregated
from dsjax.plan.engine import PUBLISHED, dsjax_engine
from dsjax.plan.figure import exact
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.memory import expert_side_bytes, weight_bytes
from dsjax.plan.moves import in_one_process, moves, published_moves
from dsjax.plan.pools import most_instances, pairs
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.recipe import published_beside
from dsjax.plan.recovery import recovery
from dsjax.plan.search import search
from dsjax.plan.skew import DEFAULT_SKEW, UNIFORM
from dsjax.plan.step import StepModel
from dsjax.plan.turns import Turn, play_turns
from dsjax.plan.workload import Pins, PlanOptions
from sharding import MeshSpec

FP8 = PRECISIONS["fp8"]


def options(engine=PUBLISHED, **changes):
    return PlanOptions(engine=engine, dispatch=engine.dispatch, **{"afd": "on", "modes": ("aggregated",)} | changes)


def layout(attention, experts, redundant=0):
    return InstanceLayout(MeshSpec.parse(attention), redundant, experts=experts)


def decoding(ask, mesh, experts, engine=PUBLISHED, cluster="h800-32", redundant=0, **changes):
    question = ask(cluster, options=options(engine, **changes))
    question = dataclasses.replace(question, workload=dataclasses.replace(question.workload, decoding_at=4096.0))
    return question.instance(layout(mesh, experts, redundant), {})


def test_a_device_with_attention_holds_no_expert_and_one_with_experts_nothing_else(v3):
    both, apart = InstanceLayout(MeshSpec.parse("dp=8")), layout("dp=8", 8)
    together, alone = weight_bytes(v3, both, FP8), weight_bytes(v3, apart, FP8)
    assert alone == {name: size for name, size in together.items() if name != "experts"}
    assert expert_side_bytes(v3, apart, FP8) == together["experts"]


@pytest.mark.parametrize("engine", [dsjax_engine(), PUBLISHED], ids=lambda engine: engine.name)
def test_both_sides_share_a_host_or_have_whole_hosts(ask, engine):
    found = pairs(ask("h200-32", options=options(engine)))
    assert {(2, 6), (8, 8), (8, 24), (16, 16), (24, 8)} <= set(found)
    assert all(a + e <= 8 or (a % 8, e % 8) == (0, 0) for a, e in found)


def test_processes_with_attention_send_their_own_rows_and_wait_for_each_other_at_each_layer(ask):
    """Half the rows on each of two connections to a process with experts; then a word to every other process and back."""
    cluster = ask("h200-32").cluster
    one, two, three = (moves(cluster, cluster, 8 * n, 8, 100, 50.0, (1e4, 2e4)) for n in (1, 2, 3))
    assert two.there.value == pytest.approx(one.there.value), "twice the rows, on two connections"
    assert [way.begin_back.value for way in (one, two, three)] == pytest.approx(
        [0.0, 30e-6 + cluster.latency, 60e-6 + cluster.latency]
    )
    thin = dataclasses.replace(cluster, network_gbps=8.0, nics_per_host=1)
    shared, alone = (moves(cluster, thin, 8 * n, 8, 100, 50.0, (1e4, 2e4)) for n in (2, 1))
    sent = 8 * 8 * 50 * 1e4
    assert shared.there.value - alone.there.value == pytest.approx(sent / 0.5e9 - sent / 1e9), "over one card"


def test_a_step_of_several_processes_with_attention_begins_when_its_command_has_come(ask):
    models = [decoding(ask, mesh, 8, dsjax_engine(), "h200-32").step_models()[0] for mesh in ("dp=8", "dp=16")]
    one, two = (model.beside(64, 64, True) for model in models)
    assert two["command to the other processes"].value == 0.5e-3
    assert set(two) - set(one) == {"command to the other processes"}
    published = decoding(ask, "dp=16", 8, cluster="h200-32").step_models()[0]
    assert "command to the other processes" not in published.beside(64, 64, True)


def test_a_lost_host_with_attention_costs_no_reading_of_experts(ask):
    lost = recovery(decoding(ask, "dp=16", 16, dsjax_engine(), "h200-32"))
    assert (lost.read.value, lost.received.value) == (0, 0)
    assert lost.seconds.value == pytest.approx(0.8)
    assert recovery(decoding(ask, "dp=8", 16, dsjax_engine(), "h200-32")) is None, "it is all of attention"
    meshes = ["--attention-mesh", "dp=16", "--expert-mesh", "ep=16"]
    shown = CliRunner().invoke(app, ["plan", "--cluster", "h200-32", *meshes, "--mode", "aggregated"]).output
    assert "silent for 1 s [1 … 2], and 60 more [10 … 300] for compiling;" in " ".join(shown.split())


def test_two_kinds_of_hosts_have_as_many_instances_as_the_scarcer_one_gives(ask):
    question = ask("h200-32", options=options())
    cluster = question.cluster.with_experts_on(load_hardware("h20"), 2)
    question = dataclasses.replace(question, cluster=cluster)
    assert max(e for _, e in pairs(question)) == 16
    assert most_instances(question, layout("dp=8", 8)) == 2
    assert most_instances(question, layout("dp=32", 8)) == 1
    pins = Pins(attention_mesh=MeshSpec.parse("dp=8"), expert_mesh=MeshSpec.parse("dp=16"))
    question = dataclasses.replace(question, options=options(pins=pins, redundant=0))
    winner = search(question).winner
    assert winner.decode.step_models()[0].expert_side.chip.hardware.key == "h20"
    assert winner.decode.step_models()[0].chip.hardware.key == "h200"


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
def test_an_instance_within_a_host_lies_on_no_second_one_and_a_larger_one_has_whole_hosts(
    ask, attention, experts, most
):
    assert most_instances(ask("h200-32", options=options()), layout(attention, experts)) == most


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
    apart = step.parts(64, 64 * 4096, 4096, True)["experts"]
    alike = dataclasses.replace(step.expert_side).parts(32, 32 * 4096, 4096, True)["experts"]
    assert apart.value == pytest.approx(alike.value)


def test_experts_apart_are_placed_on_any_device_and_those_of_a_whole_mesh_by_host(ask):
    """Rows come from other devices, to which no expert's is nearer; prices of the two kinds of layouts are not mixed up."""
    side = decoding(ask, "dp=16", 16, redundant=32).step_models()[0].expert_side
    whole = StepModel(side.config, side.cluster, side.layout, FP8, side.skew, shared=side.shared)
    assert (side.expert_slots.hosts, whole.expert_slots.hosts) == (1, 2)
    alone, together = (one.parts(64, 64 * 4096, 4096, True)["experts"].value for one in (side, whole))
    assert alone < together


def test_micro_batches_in_turn_gain_where_the_batch_is_large_and_lose_where_it_is_small(ask):
    one, two, three = decoding(ask, "dp=16", 16).step_models()
    assert (one.micro_batches, two.micro_batches, three.micro_batches) == (1, 2, 3)
    assert one.decode(8, 4096).value < two.decode(8, 4096).value < three.decode(8, 4096).value
    assert two.decode(160, 4096).value < one.decode(160, 4096).value
    ours = [decoding(ask, "dp=2", 6, dsjax_engine(), afd_stages=count).step_models() for count in (2, 3)]
    assert [[model.micro_batches for model in models] for models in ours] == [[1, 2], [1, 3]]


def test_turns_that_repeat_are_not_all_played():
    turn = Turn(3e-4, 5e-5, 1e-5, 2.5e-4, 1e-4, 1.2e-4, 6e-5, 1e-4, 1e-4)
    for batches in (1, 2, 3):
        for one_call in (False, True):
            every = play_turns([turn] * batches, 58, one_call=one_call).seconds
            assert _seconds(turn, batches, 58, one_call) == pytest.approx(every, rel=0.01)


def test_our_moves_are_copies_that_the_host_begins_or_a_connection_to_each_host(ask):
    cluster = ask("h200-32").cluster
    near, far, farther = (moves(cluster, cluster, *pair, 100, 50.0, (1e4, 2e4)) for pair in ((2, 6), (8, 8), (8, 24)))
    assert not near.one_call
    assert near.begin_there.value == pytest.approx(12 * 10e-6), "a copy for each pair of devices"
    assert near.there.value == pytest.approx(6 * 100 * 1e4 / (0.6 * 450e9) + 10e-6), "all that there is room for"
    assert far.one_call
    assert far.back.value == pytest.approx(8 * 8 * 50 * 2e4 / 1e9 + 152e-6, rel=1e-3), "the rows that are needed"
    assert farther.back.value == pytest.approx(far.back.value), "three connections to three hosts, at the same time"


def test_experts_on_hosts_beside_those_with_attention_are_reached_over_the_network_whatever_their_device(ask):
    cluster = ask("h200-32").cluster
    beside = cluster.with_experts_on(cluster.hardware, 2)
    assert not in_one_process(beside, beside.experts, 6)
    assert moves(beside, beside.experts, 2, 4, 100, 50.0, (1e4, 2e4)).one_call
    wide = ask("gb200-nvl72-36").cluster
    apart = wide.with_experts_on(wide.hardware, 2)
    near, far = (
        published_moves(one, one.experts or one, 4, 8, 128.0, 8, (7392.0, 14336.0), exact(1.0)) for one in (wide, apart)
    )
    assert far.there.value > near.there.value, "the fast link does not join them"


def test_rows_that_find_no_room_take_further_rounds(ask):
    """The busiest of six devices has more rows than four standard deviations above the mean of even routing, where nothing is balanced."""
    engine = dataclasses.replace(dsjax_engine(), balances=False)
    ways = [
        decoding(ask, "dp=2", 6, engine, "h200-8", 2, skew=skew).step_models()[0]._moves(256, 1.0)
        for skew in (DEFAULT_SKEW, UNIFORM)
    ]
    assert [way.back.name for way in ways] == ["answers, further rounds", "answers on their way"]
    assert ways[0].back.value > ways[1].back.value + ways[1].there.value
    far, even = (
        decoding(ask, "dp=8", 8, engine, "h200-32", skew=skew).step_models()[0]._moves(256, 1.0)
        for skew in (DEFAULT_SKEW, UNIFORM)
    )
    assert far.back.name == "answers, further rounds"
    busiest = far.there.value / even.there.value
    assert far.back.value < 1.1 * busiest * even.back.value, "between processes a row travels once, in whichever round"


def test_a_plan_says_what_ours_would_gain_and_lose_and_how_it_is_started(ask):
    whole = search(ask("h200-8", options=options(dsjax_engine(), afd="off"))).winner
    apart = search(ask("h200-8", options=options(dsjax_engine()))).winner
    assert apart.throughput.value < whole.throughput.value, "the host stands between the two sides"
    step = apart.decode.decode_step(apart.batch)
    assert step.part(IN_TURN).value > 0.5 * step.value
    both = search(ask("h200-8", options=options(dsjax_engine(), afd="auto")))
    assert both.winner.decode.layout == whole.decode.layout
    assert any(c.decode.layout.experts for c in search(ask("h200-8", options=options())).ranked)


def test_what_engines_would_gain_by_names_the_micro_batches_that_take_turns(ask):
    decode = decoding(ask, "dp=16", 16)
    other = aggregated(decode, 1, 160.0, 4096.0)
    assert decode.batches_in_turn(160.0) == 2
    assert "rows that go from device to device, 2 micro-batches in turn" in published_beside(None, other)


def test_the_published_gain_is_met_between_its_bounds_and_not_below_them(ask):
    """+19 % is the most that Baidu publishes, at 100 ms; its paper has a dead zone (docs/layout-plans.md). 32 H800, context 4,096."""

    def best(afd, bound):
        question = ask("h800-32", options=options(afd=afd))
        question = dataclasses.replace(question, workload=dataclasses.replace(question.workload, decoding_at=4096.0))
        rates = [0.0]
        meshes = [layout("dp=16", 16, 32), layout("dp=8", 24, 8)] if afd == "on" else []
        if afd == "off":
            meshes = [InstanceLayout(MeshSpec.parse(mesh), 32) for mesh in ("dp=32", "dp=16,tp=2")]
        for one in meshes:
            middle = question.instance(one, {}).middle
            held = [b for b in range(8, middle.max_batch + 1, 4) if middle.tpot(b).value <= bound]
            rates += [b * middle.replicas / middle.tpot(b).value / one.devices for b in held[-1:]]
        return max(rates)

    assert 1.0 < best("on", 0.1) / best("off", 0.1) < 1.25
    assert best("on", 0.03) < best("off", 0.03)


def test_the_table_says_how_many_micro_batches_take_turns():
    meshes = ["--attention-mesh", "dp=2", "--expert-mesh", "ep=6", "--num-afd-stages", "4"]
    shown = CliRunner().invoke(app, ["plan", "--cluster", "h200-8", "--mode", "aggregated", "--rows", "1", *meshes])
    assert "attention on 2, experts on 6, 4 batches" in shown.output


def test_commands_of_all_processes_are_options_that_the_engine_takes():
    meshes = ["--attention-mesh", "dp=8", "--expert-mesh", "ep=16"]
    arguments = ["plan", "--cluster", "h200-32", *meshes, "--mode", "aggregated", "--json", "-"]
    made = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    attention, *experts = made["winner"]["services"]
    assert [one["options"]["--afd-role"] for one in (attention, *experts)] == ["attention", "expert", "expert"]
    assert [one["options"]["--afd-server-rank"] for one in experts] == ["0", "1"]
    assert [one["devices_each"] for one in (attention, *experts)] == [8, 8, 8]
    assert attention["options"]["--afd-address"] == "EXPERTS0:7000,EXPERTS1:7000"
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for one in (attention, *experts):
        assert {flag[2:].replace("-", "_") for flag in one["options"]} <= known
        assert "--dispatch" not in one["options"]
    assert made["ranked"][0]["expert_mesh"] == "ep=16"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--afd", "on", "--engine", "vllm"], "vllm has no released option"),
        (["--attention-mesh", "dp=8"], "give both"),
        (["--expert-device", "h20"], "give --afd auto or on"),
        (["--num-afd-stages", "3"], "give --engine dsjax and --afd auto or on"),
        (["--afd", "on", "--simulate"], "--simulate knows layouts of one mesh"),
        (["--afd", "on", "--mesh", "dp=8"], "--mesh is of one mesh"),
        (["--attention-mesh", "dp=8", "--expert-mesh", "dp=8"], "such as ep=24"),
    ],
)
def test_what_does_not_go_with_it_is_refused(given, reason):
    shown = CliRunner().invoke(app, ["plan", *given])
    assert isinstance(shown.exception, UserError)
    assert reason in str(shown.exception)

"""What a plan says of stages: memory, the time of a step, and which layouts have any."""

import dataclasses
import functools
import json

import pytest
from step_models import options_for

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import spread
from dsjax.plan.fit import planned_launch, set_aside
from dsjax.plan.layout import InstanceLayout, layouts
from dsjax.plan.memory import expert_bytes, memory, weight_bytes
from dsjax.plan.moves import fullest_stage, hand_over
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.question import Question
from dsjax.plan.recipe import serve_options
from dsjax.plan.search import instances, search
from dsjax.plan.workload import Lengths, Objective, Workload
from sharding import MeshSpec

V3, H20 = load_config("deepseek-v3"), load_cluster("h20-32")
FP8 = PRECISIONS["fp8"]
STAGED, WHOLE = InstanceLayout(MeshSpec.parse("pp=2,tp=8")), InstanceLayout(MeshSpec.parse("tp=8"))


def question(engine="published", **options):
    workload = Workload(Lengths(1000), Lengths(500), concurrency=64.0)
    return Question(V3, H20, workload, Objective(), options_for(engine, **options))


def meshes(engine="published", **options):
    return {str(layout.mesh) for layout in instances(question(engine, **options))[0]}


def test_the_fullest_stage_has_half_of_the_experts_and_its_own_of_everything_else():
    whole, staged = (weight_bytes(V3, layout, FP8) for layout in (WHOLE, STAGED))
    assert staged["experts"] * 58 == whole["experts"] * 30  # the last stage has 30 of 58 layers with experts
    assert staged["attention"] * 61 == whole["attention"] * 30
    assert staged["embedding and head"] < whole["embedding and head"]


def test_experts_that_follow_the_load_take_a_layers_slots_of_each_stages_memory():
    """On one host: stages in several processes refuse to move experts, and are not credited with it."""
    asked = question("dsjax", precision=FP8)
    for mesh, slots, moves in ((MeshSpec.parse("pp=2,tp=4"), (256 + 8) // 4, True), (STAGED.mesh, 0, False)):
        copies = InstanceLayout(mesh, redundant=8)
        instance, room = asked.instance(copies, {}), H20.hardware.visible_bytes
        aside = set_aside(V3, copies, FP8, planned_launch(asked.options, room, copies, 4096))
        still = memory(V3, copies, FP8, room, aside)
        assert instance.memory.reserve - still.reserve == slots * expert_bytes(V3, 1, FP8)
        options = serve_options("deepseek-v3", instance, 8.0, 2048.0)
        assert ("--enable-eplb" in options) == moves
        moved = json.loads(options.get("--eplb-config", "{}")).get("num_redundant_experts")
        assert (moved, options.get("--redundant-experts")) == ((8, None) if moves else (None, "8"))


def test_a_step_of_a_batch_takes_what_it_takes_on_one_stage_and_what_stages_add():
    whole, staged = (question().instance(layout, {}) for layout in (WHOLE, STAGED))
    assert 1 <= fullest_stage(V3, 2) < 1.02
    assert fullest_stage(V3, 61) > 1.5, "a stage of one layer and the head"
    step = whole.decode_step(16)
    added = hand_over(H20, STAGED.mesh, 16, V3.hidden_size)
    expected = step * fullest_stage(V3, 2) + added
    assert staged.decode_step(16) == pytest.approx(expected + 0.006)  # and the host, which nothing hides
    [again] = spread(lambda: [staged.on(staged.cluster, {}).decode_step(16)])
    assert again.low < again == staged.decode_step(16) < again.high
    assert (staged.replicas, staged.requests(16)) == (2, 32)
    assert staged.prefill_step(2048) > whole.prefill_step(2048)


def test_hidden_states_cross_the_network_where_stages_have_hosts_of_their_own():
    inside = dataclasses.replace(STAGED.mesh, tp_size=4, ep_size=4)
    assert inside.num_devices == H20.domain
    here, there = (hand_over(H20, mesh, 512, V3.hidden_size) for mesh in (inside, STAGED.mesh))
    assert there > here
    quarters, halves = (hand_over(H20, MeshSpec.parse(f"pp={n},tp=4"), 512, V3.hidden_size) for n in (4, 2))
    assert quarters == pytest.approx(there + 2 * halves), "two stages lie on each host"
    by_device, own = (hand_over(H20, MeshSpec.parse("pp=2,dp=8"), 4096, V3.hidden_size, one) for one in (0, 1))
    assert own > 4 * by_device, "a process of dsjax sends all ranks' from the host's memory over one connection"


def test_layouts_with_stages_are_looked_at_where_they_are_asked_for():
    assert not any("pp" in mesh for mesh in meshes())
    asked = meshes(stages=(1, 2))
    assert {mesh for mesh in asked if "pp" not in mesh} == meshes()
    assert "pp=2,dp=16" in asked
    assert not any("pp=4" in mesh for mesh in asked)
    assert meshes(mesh=STAGED.mesh) == {"pp=2,tp=8"}
    found = functools.partial(layouts, V3, 32, 8, redundant=None, block=128, copies=False)
    four, three = ({layout.devices for layout in found(stages=(n,))} for n in (4, 3))
    assert max(four) == 32
    assert three == {24}, "stages of one or two devices would leave devices of a host over, and of four half a host"


def test_of_dsjax_no_stage_is_on_two_hosts_whose_processes_would_refuse_it():
    asked = {mesh for mesh in meshes("dsjax", stages=(1, 2, 4)) if "pp" in mesh}
    assert {"pp=2,dp=8", "pp=2,tp=8", "pp=4,dp=8"} <= asked
    assert not any(MeshSpec.parse(mesh).stage_devices > H20.devices_per_host for mesh in asked)
    with pytest.raises(UserError, match="pp=2,dp=16: a stage of 16 devices is on several hosts of 8"):
        meshes("dsjax", mesh=MeshSpec.parse("pp=2,dp=16"))
    assert "pp=2,dp=16" in meshes(stages=(2,))  # of others


def test_a_plan_for_a_mesh_with_stages_names_its_kind_and_all_requests_of_a_rank():
    best = search(question(mesh=STAGED.mesh, modes=("aggregated",))).winner
    assert best.decode.layout.kind == "PP2×TEP8"
    assert best.decode.requests(best.batch) * best.count == pytest.approx(64)
    assert best.to_json()["batch_per_dp_rank"] == best.decode.requests(best.batch)
    assert best.throughput == pytest.approx(64 / best.tpot, rel=0.2)


def test_a_layout_with_stages_and_one_without_keep_prices_of_their_own_on_another_cluster(ask):
    """Both have one unit, and bottlenecks of all rows of a plan share one dict of prices."""
    question, shared = ask("h200-16"), {}
    for layout in (WHOLE, STAGED, WHOLE):
        instance = question.instance(layout, {})
        again = instance.on(question.cluster, shared)
        assert again.decode_step(16) == pytest.approx(instance.decode_step(16))

"""Layouts: all that fit, none that does not."""

import pytest

from dsjax.config import load_config
from dsjax.engine.setup.fitting import check_layout
from dsjax.errors import UserError
from dsjax.plan.engine import PUBLISHED, find_engine
from dsjax.plan.layout import InstanceLayout, fits, instance_sizes, layouts, parse_layout
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.recipe import memory_share, serve_options
from dsjax.plan.search import instances, search
from dsjax.plan.workload import Objective, Pins, PlanOptions
from sharding.errors import MeshError
from sharding.mesh import MeshSpec


def every(config, devices, **kwargs):
    return list(layouts(config, devices, 8, **{"redundant": None, "block": 128, "copies": True, **kwargs}))


def test_every_layout_passes_meshspec_and_no_two_are_the_same(v3):
    found = every(v3, 32)
    assert all(fits(v3, layout, 128) is None for layout in found)
    assert len(set(found)) == len(found) > 100


def test_widths_that_dp_ranks_share_are_planned_where_a_mesh_names_them(ask):
    shared, apart = (
        search(ask(options=PlanOptions(mesh=MeshSpec.parse(mesh), redundant=0))) for mesh in ("dp=8,ep=2,etp=4", "dp=8")
    )
    (layout,) = shared.considered
    assert (str(layout), layout.kind) == ("dp=8,ep=2,etp=4", "DP8, ETP4, EP2")
    (instance,) = shared.fitting
    # Each rank sees the tokens of the four that share an expert's width.
    assert instance.decode_step(64) > apart.fitting[0].decode_step(64)


@pytest.mark.parametrize("ep", [72, 144, 320])
def test_ep_sizes_that_only_redundancy_makes_possible_are_found(v3, ep):
    found = [layout for layout in every(v3, 320, copies=False) if layout.mesh == MeshSpec(dp_size=ep)]
    assert min(layout.redundant for layout in found) == -256 % ep


def test_instances_are_parts_of_a_host_or_whole_hosts():
    assert instance_sizes(32, 8) == [1, 2, 4, 8, 16, 24, 32]
    assert instance_sizes(4, 8) == [1, 2, 4]


def test_fp8_blocks_are_not_cut(v3):
    # An expert's width of 2048 over 16 is one block of 128; over 32 it is half of one.
    assert fits(v3, InstanceLayout(MeshSpec(tp_size=16, ep_size=1)), 128) is None
    assert "quantisation block" in str(fits(v3, InstanceLayout(MeshSpec(tp_size=32, ep_size=1)), 128))


@pytest.mark.parametrize(
    ("model", "weights", "most"),
    [
        # Experts of 1,408: a device of tp=8 has 176, eleven blocks of NVFP4, five and a half of MXFP4 and INT4.
        ("deepseek-v2-lite", "nvfp4-bf16", 8),
        ("deepseek-v2-lite", "mxfp4-bf16", 4),
        ("deepseek-v2-lite", "int4-bf16", 4),
        # Two shared experts of 3,072: over tp=16 that is a block of 128 and a half. Moonlight's are 22 blocks together.
        ("deepseek-v2", "fp8", 8),
        ("kimi-k2", "fp8", 16),
        ("moonlight", "fp8", 2),
    ],
)
def test_no_layout_is_planned_that_the_engine_refuses_at_its_start(model, weights, most):
    config = load_config(model)
    found = every(config, 32, **PRECISIONS[weights].blocks)
    for layout in found:
        check_layout(config, layout.mesh, layout.redundant, weights)
    assert max(one.mesh.tp_size for one in found if weights == "fp8" or one.mesh.splits_expert_width) == most


def test_a_mesh_that_does_not_fit_is_refused_with_the_redundancy_that_would(v3):
    with pytest.raises(MeshError, match="least number of redundant experts that fits is 32"):
        parse_layout("dp=72", 0, v3)
    assert parse_layout("dp=72", None, v3).redundant == 32


def test_each_ratio_of_prefill_to_decode_instances_is_a_row(ask):
    pins = Pins(MeshSpec.parse("dp=16"), MeshSpec.parse("dp=16"))
    options = PlanOptions(modes=("separated",), redundant=0, pins=pins)
    found = search(ask("h100-32", prompt=2000, hosts=8, objective=Objective(ttft=4, tpot=0.06), options=options)).ranked
    assert [(one.prefill_count, one.count) for one in found] == [(2, 2), (1, 3), (3, 1)]


def test_a_recipe_gives_the_engine_the_memory_that_its_batch_was_priced_with(instance):
    made = instance("dp=8", prompt=2000)
    few, all_of_them = (serve_options("demo", made, batch, 2000) for batch in (1, made.max_batch))
    assert "--gpu-memory-utilization" not in few, "the engine's own 0.9 is enough"
    share = float(all_of_them["--gpu-memory-utilization"])
    assert 0.9 < share <= 0.98
    assert share * made.memory.device >= made.memory.weights_total + made.max_batch * 2500 * 70_272
    assert memory_share(made, 0, 1000) < memory_share(made, 100, 1000)


def test_a_shared_expert_is_none_of_dsjax_s_fp4_experts_as_the_engine_says_at_its_start(ask):
    def planned(engine, **options):
        fp4 = engine.precision(PRECISIONS["nvfp4"])
        options = PlanOptions(precision=fp4, engine=engine, fused=True, **options)
        return instances(ask("gb200-nvl72-36", options=options))[1]

    assert planned(PUBLISHED)
    with pytest.raises(UserError, match="packs into four bits, and dsjax serve keeps shared experts in more"):
        planned(find_engine("dsjax"), dispatch="auto")

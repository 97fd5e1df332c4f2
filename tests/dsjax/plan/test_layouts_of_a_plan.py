"""Layouts: all that fit, none that does not."""

import pytest

from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.plan.candidate import prefill_pool, separated
from dsjax.plan.engine import PUBLISHED, dsjax_engine
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


def test_the_named_layouts_are_there(v3):
    kinds = {(str(layout.mesh), layout.kind) for layout in every(v3, 32)}
    assert {
        ("dp=32", "DEP32"),
        ("dp=4,tp=8", "DP4×TEP8"),
        ("tp=8", "TEP8"),
        ("tp=8,ep=1", "TP8"),
        ("dp=32,ep=8", "DEP32, EP8"),
    } <= kinds


def test_widths_that_dp_ranks_share_are_planned_where_a_mesh_names_them(ask):
    mesh = MeshSpec.parse("dp=8,ep=2,etp=4")
    found = search(ask("h200-8", options=PlanOptions(mesh=mesh, redundant=0)))
    assert {str(layout) for layout in found.considered} == {"dp=8,ep=2,etp=4"}
    (layout,) = found.considered
    assert layout.kind == "DP8, ETP4, EP2"
    (instance,) = found.fitting
    apart = search(ask("h200-8", options=PlanOptions(mesh=MeshSpec.parse("dp=8"), redundant=0))).fitting[0]
    # Each rank sees the tokens of the four that share an expert's width.
    assert instance.decode_step(64).value > apart.decode_step(64).value


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


@pytest.mark.parametrize(("named", "most"), [("nvfp4-bf16", 8), ("mxfp4-bf16", 4), ("bf16", 16)])
def test_no_layout_cuts_a_block_of_fp4_experts(named, most):
    """V2-Lite's experts are 1,408 wide, so that a device of tp=8 has 176: eleven blocks of NVFP4, five and a half of MXFP4."""
    from dsjax.engine.setup.assembly import check_layout

    config = load_config("deepseek-v2-lite")
    found = every(config, 16, **PRECISIONS[named].blocks)
    for layout in found:
        check_layout(config, layout.mesh, layout.redundant, named)
    assert max(one.mesh.tp_size for one in found if one.mesh.splits_expert_width) == most


@pytest.mark.parametrize("model", ["deepseek-v2", "deepseek-v3", "kimi-k2", "moonlight"])
def test_no_fp8_layout_is_planned_that_the_engine_refuses_at_its_start(model):
    """V2's two shared experts are 3,072 wide: over tp=16 that is a block of 128 and a half. Moonlight's are 22 blocks together."""
    from dsjax.engine.setup.assembly import check_layout

    config = load_config(model)
    found = every(config, 32)
    for layout in found:
        check_layout(config, layout.mesh, layout.redundant, "fp8")
    most = max(layout.mesh.tp_size for layout in found)
    assert most == {"deepseek-v2": 8, "deepseek-v3": 16, "kimi-k2": 16, "moonlight": 2}[model]


def test_a_mesh_that_does_not_fit_is_refused_with_the_redundancy_that_would(v3):
    with pytest.raises(MeshError, match="least number of redundant experts that fits is 32"):
        parse_layout("dp=72", 0, v3)
    assert parse_layout("dp=72", None, v3).redundant == 32


def test_each_ratio_of_prefill_to_decode_instances_is_a_row(ask):
    pins = Pins(MeshSpec.parse("dp=16"), MeshSpec.parse("dp=16"))
    options = PlanOptions(modes=("separated",), redundant=0, pins=pins)
    found = search(ask("h100-32", prompt=2000, hosts=8, objective=Objective(ttft=4, tpot=0.06), options=options)).ranked
    assert [(one.prefill_count, one.count) for one in found] == [(2, 2), (1, 3), (3, 1)]


def test_a_recipe_gives_the_engine_the_memory_that_its_batch_was_priced_with(ask):
    instance = ask("h200-8", prompt=2000, output=500).instance(parse_layout("dp=8", 0, ask().config), {})
    few, all_of_them = (serve_options("demo", instance, batch, 2000) for batch in (1, instance.max_batch))
    assert "--gpu-memory-utilization" not in few, "the engine's own 0.9 is enough"
    share = float(all_of_them["--gpu-memory-utilization"])
    assert 0.9 < share <= 0.98
    assert share * instance.memory.device >= instance.memory.weights_total + instance.max_batch * 2500 * 70_272
    assert memory_share(instance, 0) < memory_share(instance, 100_000)


def test_a_shared_expert_is_none_of_dsjax_s_fp4_experts_as_the_engine_says_at_its_start(ask):
    for engine, options in ((dsjax_engine(), {"dispatch": "auto"}), (PUBLISHED, {})):
        fp4 = engine.precision(PRECISIONS["nvfp4"])
        question = ask("gb200-nvl72-36", options=PlanOptions(precision=fp4, engine=engine, fused=True, **options))
        if engine is PUBLISHED:
            assert instances(question)[1]
            continue
        with pytest.raises(UserError, match="packs into four bits, and dsjax serve keeps shared experts in more"):
            instances(question)


def test_of_dsjax_one_device_of_a_replica_pulls_its_pages_whole(ask):
    """`engine/transfer/page_chunks.py` pulls on the first device of each DP rank, and hands the pages to the others."""

    def seconds(mesh, engine, **options):
        question = ask("h200-32", options=PlanOptions(engine=engine, redundant=0, **options))
        instance = question.instance(parse_layout(mesh, 0, question.config), {})
        return separated(prefill_pool(instance, 1000), 1, instance, 1, 8).ttft.part("cache transfer").value

    one, own = (seconds(mesh, dsjax_engine(), dispatch="auto") for mesh in ("dp=8", "tp=8"))
    assert own == pytest.approx(one)
    assert seconds("tp=8", PUBLISHED) == pytest.approx(own / 8)

"""The model of a step: arithmetic that can be checked, and no resource of which more is worse."""

import csv
import dataclasses
from pathlib import Path

import pytest

from dsjax.dryrun.prices import Assumed
from dsjax.hardware import load_hardware
from dsjax.model.mla_costs import mla_cost
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import RESOURCES, load_cluster
from dsjax.plan.compiled import read_dry_run
from dsjax.plan.figure import exact
from dsjax.plan.layout import parse_layout
from dsjax.plan.network import all_reduce, own_exchange, xla_collective
from dsjax.plan.precision import PRECISIONS, precision
from dsjax.plan.skew import UNIFORM
from dsjax.plan.step import StepModel
from dsjax.plan.tiers import Tier, Wiring
from sharding.dispatch import default_capacity

OPERATORS = Path(__file__).parents[3] / "configs" / "operators"


@pytest.fixture
def model(v3):
    def make(mesh="dp=32", cluster="h100-32", redundant=None, **kwargs):
        layout = parse_layout(mesh, redundant, v3)
        return StepModel(v3, load_cluster(cluster), layout, PRECISIONS["fp8"], **kwargs)

    return make


def test_decode_attention_is_the_tables_time_for_rows_and_context_that_were_timed(v3, model):
    # TensorRT-LLM's 258.9 and SGLang's 254.2 µs a layer at 128 rows and 4,096 positions on an H200; mean of both.
    figure = model("dp=8", cluster="h200-8").decode(128, 4096).part("attention")
    rows = [r for r in csv.DictReader((OPERATORS / "mla_generation.csv").open()) if r["device"] == "h200"]
    timed = [
        float(r["latency_ms"])
        for r in rows
        if (r["kv_cache_dtype"], r["num_heads"], r["batch_size"], r["context"]) == ("bfloat16", "128", "128", "4096")
    ]
    assert len(timed) == 2
    assert figure.value == pytest.approx(61e-3 * sum(timed) / 2, rel=1e-6)
    flops = mla_cost(v3, "A_CC", rows=128, chunk=1, context=4096).attention_flops * 61
    assert 0.5 < flops / figure.value / 989e12 < 0.7


def test_a_fused_shared_expert_is_one_more_in_the_routed_ones_product(v3):
    def steps(mesh, rows, **changed):
        layout = dataclasses.replace(parse_layout(mesh, None, v3), **changed)
        return StepModel(v3, load_cluster("h200-8"), layout, PRECISIONS["fp8"]).decode(rows, 4096)

    for mesh in ("dp=8", "tp=8", "tp=8,ep=1"):
        apart, fused = steps(mesh, 1), steps(mesh, 1, fused=True)
        assert apart.part("shared experts").value > 0
        assert "shared experts" not in {part.name for part in fused.parts}
        assert fused.part("experts").value > apart.part("experts").value
    # A token reads the whole expert in place of an eighth of it, on the one device that it is on.
    assert steps("tp=8", 1, fused=True).value > steps("tp=8", 1).value


def test_an_fp8_cache_speeds_decode_attention_up_on_blackwell_and_hardly_on_hopper(v3):
    gains = {}
    for device in ("h200", "b200"):
        both = [Chip(load_hardware(device), precision("fp8", cache)) for cache in ("bf16", "fp8")]
        slow, fast = (chip.decode_attention(128, 128, 8192, 576, 512).value for chip in both)
        gains[device] = slow / fast
    assert 1.0 < gains["h200"] < 1.15
    assert 1.5 < gains["b200"] < 2.0


def test_prefill_attentions_share_of_the_peak_grows_with_the_prompt():
    for device, wanted in (("h200", (0.32, 0.46, 0.56)), ("b200", (0.22, 0.35, 0.47))):
        hardware = load_hardware(device)
        chip = Chip(hardware, PRECISIONS["fp8"])
        for length, share in zip((1024, 2048, 4096), wanted, strict=True):
            seconds = chip.prefill_attention(128, length, 1, (length + 1) / 2, 320).value
            flops = 2 * 128 * 320 * length * (length + 1) / 2
            assert flops / seconds / hardware.bf16_flops == pytest.approx(share, abs=0.01)


def test_attention_over_tp_reads_the_whole_latent_with_an_eighth_of_the_heads(model):
    whole = model("dp=8", cluster="h200-8").decode(64, 4096).part("attention").value
    split = model("tp=8", cluster="h200-8").decode(64, 4096).part("attention").value
    assert whole / 8 < split < whole


@pytest.mark.parametrize("resource", RESOURCES)
@pytest.mark.parametrize("mesh", ["dp=32", "dp=4,tp=8", "tp=8,ep=1"])
def test_more_of_a_resource_never_makes_a_step_slower(v3, mesh, resource):
    cluster = load_cluster("h100-32")
    layout = parse_layout(mesh, None, v3)
    steps = []
    for factor in (1, 2, 8):
        step = StepModel(v3, cluster.scaled(resource, factor), layout, PRECISIONS["fp8"])
        steps.append((step.decode(32, 2000).value, step.prefill(8192, prompt=2000).value))
    assert steps[0][0] >= steps[1][0] >= steps[2][0]
    assert steps[0][1] >= steps[1][1] >= steps[2][1]


def test_a_larger_batch_takes_longer_and_yields_more(model):
    step = model()
    times = [step.decode(batch, 2000).value for batch in (1, 8, 64, 256)]
    assert times == sorted(times)
    rates = [batch / time for batch, time in zip((1, 8, 64, 256), times, strict=True)]
    assert rates == sorted(rates)


def test_every_step_lies_in_its_interval_and_says_that_it_is_estimated(model):
    figure = model().decode(32, 2000)
    assert figure.low < figure.value < figure.high
    assert all(part.low <= part.value <= part.high for part, _ in figure.walk())
    assert figure.part("dispatch, share of network").source.startswith("DeepEP")


def test_overlap_pays_for_large_batches_and_costs_for_small_ones(model):
    plain, overlapped = model("dp=32"), model("dp=32", overlap=True)
    assert overlapped.decode(256, 2000).value < plain.decode(256, 2000).value
    assert overlapped.decode(4, 2000).value > plain.decode(4, 2000).value


def test_one_device_and_one_replica_exchange_nothing(model):
    alone = model("tp=8,ep=1", cluster="h200-8").decode(8, 1000)
    assert alone.part("dispatch").value == 0
    assert alone.part("tensor-parallel sums").value > 0


def test_gathered_tokens_cost_a_sum_over_all_ranks_each_way_and_half_of_one_in_decode(v3):
    cluster, layout = load_cluster("h200-8"), parse_layout("dp=8", 0, v3)
    step = StepModel(v3, cluster, layout, PRECISIONS["fp8"], gathers=True)
    for decode, share in ((False, 1.0), (True, 0.5)):
        parts = step.parts(512.0, 0.0, 500.0, decode)
        each = all_reduce(cluster, 8, share * 8 * 512 * v3.hidden_size * 2) * v3.num_moe_layers
        assert parts["dispatch"].value == parts["combine"].value == pytest.approx(each.value)
    alone = StepModel(v3, cluster, parse_layout("tp=8,ep=1", 0, v3), PRECISIONS["fp8"], gathers=True)
    assert alone.parts(512.0, 0.0, 500.0, True)["dispatch"].value == 0


def test_cached_prompts_cost_attention_but_no_projections(model):
    step = model()
    fresh, suffix = step.prefill(8192, prompt=4096), step.prefill(8192, prompt=4096, cached=4096)
    assert suffix.part("attention").value > 2.5 * fresh.part("attention").value
    assert suffix.part("experts").value == fresh.part("experts").value


def test_drafting_costs_a_module_pass_and_twice_the_tokens(model):
    step = model()
    with_draft = step.decode(32, 2000, drafts=1)
    assert with_draft.part("MTP module").value > 0
    assert step.decode(32, 2000).value < with_draft.value < 2 * step.decode(64, 2000).value


@pytest.mark.parametrize(("method", "rows"), [("gather", 32), ("padded", 24), ("ragged", 32 * (1 - (31 / 32) ** 8))])
def test_own_dispatch_sends_the_rows_that_its_page_says(model, method, rows):
    # padded: mean 7.18 + 4 standard deviations 9.4 = 16.7, rounded up to a multiple of 8.
    step = model(dispatch=method, skew=UNIFORM, redundant=0)
    busiest = step.skew.slowest(step.expert_slots, 256, 32 * 8, balanced=False).value if method == "ragged" else 1
    row = 7168 + 224 + 52
    there = step.decode(32, 2000).part("dispatch")
    # To 24 ranks of other hosts and 7 of its own; but what all ranks get comes to each of 3 hosts once, and inside it from the others.
    away, near = (3, 28) if method == "gather" else (24, 7)
    assert there.part("bytes to other hosts").value == pytest.approx(rows * busiest * away * row)
    assert there.part("bytes to neighbours").value == pytest.approx(rows * busiest * near * row)


def test_one_program_makes_all_drafts_where_published_engines_launch_each_pass(v3):
    def host(eager, drafts):
        model = StepModel(v3, load_cluster("h200-8"), parse_layout("dp=8", 0, v3), PRECISIONS["fp8"], eager=eager)
        return model.drafting(8, 1000, drafts=drafts)["host, drafts"].value

    assert host(True, 3) == pytest.approx(3 * host(True, 1))
    assert host(False, 3) == host(False, 1) == host(True, 1)


def half_a_sum(cluster, tp, each):
    """Seconds of a gather over ``tp``, such as that of a replica's tokens behind each exchange, or of scattered sums."""
    return all_reduce(cluster, tp, each * tp / 2).value


def test_dsjax_gathers_scatters_and_gathers_over_tp_in_each_layer_with_experts(v3):
    """The program of `dry_runs/tp8-decode.json` has these three of a layer, beside the sums of attention and of shared experts."""
    program = read_dry_run(Path(__file__).parent / "dry_runs" / "tp8-decode.json")
    times = {(one.kind, one.dispatches): one.times for one in program.collectives if one.kind != "all-reduce"}
    kinds = ("all-gather", True), ("reduce-scatter", True), ("all-gather", False)
    assert times == dict.fromkeys(kinds, v3.num_moe_layers)
    cluster, row = load_cluster("h200-8"), 2.0 * v3.hidden_size
    cut, whole = (
        StepModel(v3, cluster, parse_layout(mesh, 0, v3), PRECISIONS["bf16"], dispatch="gather").parts(
            64, 0, 1024, True
        )
        for mesh in ("tp=8,ep=1", "tp=8")
    )
    assert cut["dispatch"].value == pytest.approx(half_a_sum(cluster, 8, 8 * (row + 52)) * v3.num_moe_layers)
    assert cut["combine"].value == pytest.approx(2 * half_a_sum(cluster, 8, 8 * row) * v3.num_moe_layers)
    apart = own_exchange(cluster, "gather", 8, 8, 8, row, exact(1.0)).value
    assert whole["combine"].value == pytest.approx((apart + half_a_sum(cluster, 8, 8 * row)) * v3.num_moe_layers)


def test_a_collective_of_xlas_begins_in_a_plan_as_in_the_timeline_of_a_dry_run():
    cluster = load_cluster("h100-32")
    timeline = Assumed.of(cluster)
    inside, between = (xla_collective(cluster, ranks, exact(0.0)) for ranks in (8, 32))
    assert inside.value == timeline.fixed_inside.value < timeline.fixed_between.value
    assert between.value == timeline.fixed_between.value + cluster.latency
    assert "NVIDIA/nccl" in timeline.fixed_inside.source
    assert "NVIDIA/nccl" not in Assumed.of(load_cluster("tpu-v6e-32")).fixed_inside.source


def test_layouts_of_as_wide_experts_share_no_exchange_where_tp_differs(v3):
    shared, cluster = {}, load_cluster("h200-8")
    for mesh in ("dp=8,ep=1,etp=8", "tp=8,ep=1"):
        tokens = 64 if mesh.startswith("tp") else 8
        own = [
            StepModel(v3, cluster, parse_layout(mesh, 0, v3), PRECISIONS["fp8"], dispatch="auto", shared=known)
            .parts(tokens, 0, 1024, True)["combine"]
            .value
            for known in (shared, {})
        ]
        assert own[0] == own[1]


def test_where_ranks_share_widths_gather_has_two_collectives_over_all_of_them_and_no_sum_beside(v3):
    """`sharding/dispatch/gather.py`: one gather and one reduce-scatter add parts of widths and parts of experts alike."""
    cluster = load_cluster("h100-32")
    for mesh in ("dp=4,tp=8,ep=4", "dp=8,ep=2,etp=4", "dp=8,ep=1,etp=8"):
        layout = parse_layout(mesh, None, v3)
        step = StepModel(v3, cluster, layout, PRECISIONS["bf16"], dispatch="auto")
        parts = step.parts(8 * layout.mesh.tp_size, 0, 1024, True)
        combine = own_exchange(cluster, "gather", layout.devices, 8, 8, 2.0 * v3.hidden_size, exact(1.0))
        more = half_a_sum(cluster, 8, 8 * 2.0 * v3.hidden_size) if layout.mesh.tp_size > 1 else 0.0
        assert parts["combine"].value == pytest.approx((combine.value + more) * v3.num_moe_layers)


def test_rows_that_ranks_share_the_width_of_travel_between_the_ranks_of_one_place_and_are_pooled(v3):
    """`sharding/dispatch/padded.py`: `exchange` over ep, then `pool_width` over those that share the width."""
    cluster = load_cluster("h100-32")
    layout = parse_layout("dp=4,tp=8,ep=4", None, v3)
    step = StepModel(v3, cluster, layout, PRECISIONS["bf16"], dispatch="padded")
    combine = step.parts(8 * 400, 0, 1024, True)["combine"].value / v3.num_moe_layers
    row, capacity = 2.0 * v3.hidden_size, default_capacity(400, 8, 4)
    there = xla_collective(cluster, 4, exact(capacity * row), near=1, of=32)
    pooled = xla_collective(cluster, 8, exact(4 * capacity * row), kind="reduce_scatter")
    assert combine == pytest.approx(there.value + pooled.value + half_a_sum(cluster, 8, 400 * row))


def test_ranks_with_other_experts_meet_at_the_tier_that_joins_all_that_share_widths(v3):
    """Two hosts of a dp=16,ep=2,etp=8 exchange, not the one that two neighbours would be on."""
    fast = load_cluster("h100-32")
    tiers = (Tier("rack", 1, 1.0, 2e-6, 2e-6, 2e-6), Tier("spine", 4, 8.0, 2e-6, 2e-6, 2e-6))
    slow = dataclasses.replace(fast, wiring=Wiring(tiers))
    for dispatch in ("deepep", "ragged"):
        there = [
            StepModel(v3, one, parse_layout("dp=16,ep=2,etp=8", None, v3), PRECISIONS["fp8"], dispatch=dispatch)
            .parts(4096, 0, 1024, False)["dispatch"]
            .value
            for one in (fast, slow)
        ]
        assert there[1] > 2 * there[0]

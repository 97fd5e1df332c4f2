"""The model of a step: arithmetic that can be checked, and no resource of which more is worse."""

import json
from pathlib import Path

import pytest
from step_models import step_model

from dsjax.plan.cluster import load_cluster
from dsjax.plan.layout import parse_layout
from dsjax.plan.network import all_reduce, deepep_exchange, hosts_of_a_token, own_exchange, xla_collective
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.skew import UNIFORM
from dsjax.plan.step import RankWork
from dsjax.plan.step_basis import routed_experts
from sharding.dispatch import default_capacity


def test_attention_over_tp_reads_the_whole_latent_with_an_eighth_of_the_heads(model):
    whole, split = (model(mesh, "h200-8").decode_parts(64, 4096)["attention"] for mesh in ("dp=8", "tp=8"))
    assert whole / 8 < split < whole


def test_overlap_pays_for_large_batches_and_costs_for_small_ones(model):
    plain, overlapped = model(), model(overlap=True)
    assert overlapped.decode(256, 2000) < plain.decode(256, 2000)
    assert overlapped.decode(4, 2000) > plain.decode(4, 2000)


def test_one_device_and_one_replica_exchange_nothing(model):
    alone = model("tp=8,ep=1", cluster="h200-8").decode_parts(8, 1000)
    assert alone["dispatch"] == 0
    assert alone["tensor-parallel sums"] > 0


def test_cached_prompts_cost_attention_but_no_projections(model):
    fresh, suffix = (model().prefill_parts(8192, prompt=4096, cached=cached) for cached in (0, 4096))
    assert suffix["attention"] > 2.5 * fresh["attention"]
    assert suffix["experts"] == fresh["experts"]


def test_drafting_costs_a_module_pass_and_twice_the_tokens(model):
    step = model()
    assert step.decode_parts(32, 2000, drafts=1)["MTP module"] > 0
    assert step.decode(32, 2000) < step.decode(32, 2000, drafts=1) < 2 * step.decode(64, 2000)


@pytest.mark.parametrize(("method", "rows"), [("gather", 32), ("padded", 24), ("ragged", 32 * (1 - (31 / 32) ** 8))])
def test_own_dispatch_sends_the_rows_that_its_page_says(model, method, rows):
    # padded: mean 7.18 + 4 standard deviations 9.4 = 16.7, rounded up to a multiple of 8.
    step = model(dispatch=method, skew=UNIFORM, redundant=0)
    busiest = step.options.skew.slowest(step.expert_slots, 256, 32 * 8, balanced=False) if method == "ragged" else 1
    sent = rows * busiest * (7168 + 224 + 52) / 0.6  # of a link, which XLA's collectives get
    kind, count = {"gather": ("all_gather", 1), "padded": ("all_to_all", 1), "ragged": ("ragged_all_to_all", 2)}[method]
    fixed = xla_collective(step.cluster, 32, 0.0, count, kind)
    there = step.decode_parts(32, 2000)["dispatch"] / 58 - fixed
    # To 24 ranks of other hosts and 7 of its own; but what all ranks get comes to each of 3 hosts once, and inside it from the others.
    away, near = (3, 28) if method == "gather" else (24, 7)
    links = step.cluster.hardware.scale_up_bandwidth, step.cluster.network_bandwidth
    assert there == pytest.approx(sent * max(near / links[0], away / links[1]))


def half_a_sum(cluster, tp, each):
    """Seconds of a gather over ``tp``, such as that of a replica's tokens behind each exchange, or of scattered sums."""
    return all_reduce(cluster, tp, each * tp / 2)


def test_dsjax_gathers_scatters_and_gathers_over_tp_in_each_layer_with_experts(v3):
    """The program of `dry_runs/tp8-decode.json` has these three of a layer, beside the sums of attention and of shared experts."""
    program = json.loads((Path(__file__).parent / "dry_runs" / "tp8-decode.json").read_text())
    others = [one for one in program["collectives"] if one["kind"] != "all-reduce"]
    times = {(one["kind"], "/dispatch/" in one["op_name"]): one["times"] for one in others}
    kinds = ("all-gather", True), ("reduce-scatter", True), ("all-gather", False)
    assert times == dict.fromkeys(kinds, v3.num_moe_layers)
    cluster, row = load_cluster("h200-8"), 2.0 * v3.hidden_size
    layouts = (parse_layout(mesh, 0, v3) for mesh in ("tp=8,ep=1", "tp=8"))
    steps = (step_model(v3, cluster, layout, PRECISIONS["bf16"], dispatch="gather") for layout in layouts)
    cut, whole = (step.decode_parts(64, 1024) for step in steps)
    assert cut["dispatch"] == pytest.approx(half_a_sum(cluster, 8, 8 * (row + 52)) * v3.num_moe_layers)
    assert cut["combine"] == pytest.approx(2 * half_a_sum(cluster, 8, 8 * row) * v3.num_moe_layers)
    apart = own_exchange(cluster, "gather", 8, 8, 8, row, 1.0)
    assert whole["combine"] == pytest.approx((apart + half_a_sum(cluster, 8, 8 * row)) * v3.num_moe_layers)


def test_where_ranks_share_widths_gather_has_two_collectives_over_all_of_them_and_no_sum_beside(v3):
    """`sharding/dispatch/gather.py`: one gather and one reduce-scatter add parts of widths and parts of experts alike."""
    cluster = load_cluster("h100-32")
    for mesh in ("dp=4,tp=8,ep=4", "dp=8,ep=2,etp=4", "dp=8,ep=1,etp=8"):
        layout = parse_layout(mesh, None, v3)
        step = step_model(v3, cluster, layout, PRECISIONS["bf16"], dispatch="auto")
        parts = step.decode_parts(8 * layout.mesh.tp_size, 1024)
        combine = own_exchange(cluster, "gather", layout.devices, 8, 8, 2.0 * v3.hidden_size, 1.0)
        more = half_a_sum(cluster, 8, 8 * 2.0 * v3.hidden_size) if layout.mesh.tp_size > 1 else 0.0
        assert parts["combine"] == pytest.approx((combine + more) * v3.num_moe_layers)


def test_rows_that_ranks_share_the_width_of_travel_between_the_ranks_of_one_place_and_are_pooled(v3):
    """`sharding/dispatch/padded.py`: `exchange` over ep, then `pool_width` over those that share the width."""
    cluster = load_cluster("h100-32")
    layout = parse_layout("dp=4,tp=8,ep=4", None, v3)
    step = step_model(v3, cluster, layout, PRECISIONS["bf16"], dispatch="padded")
    combine = step.decode_parts(8 * 400, 1024)["combine"] / v3.num_moe_layers
    row, capacity = 2.0 * v3.hidden_size, default_capacity(400, 8, 4)
    there = xla_collective(cluster, 4, capacity * row, near=1, of=32)
    pooled = xla_collective(cluster, 8, 4 * capacity * row, kind="reduce_scatter")
    assert combine == pytest.approx(there + pooled + half_a_sum(cluster, 8, 400 * row))


def test_layouts_of_as_wide_experts_share_no_exchange_where_tp_differs(v3):
    shared, cluster = {}, load_cluster("h200-8")
    for mesh in ("dp=8,ep=1,etp=8", "tp=8,ep=1"):
        given, tokens = (v3, cluster, parse_layout(mesh, 0, v3)), 64 if mesh.startswith("tp") else 8
        steps = (step_model(*given, dispatch="auto", shared=known) for known in (shared, {}))
        again, own = (step.decode_parts(tokens, 1024)["combine"] for step in steps)
        assert again == own


def test_decode_of_published_kernels_takes_the_faster_of_deepeps_two_kinds(model):
    """On H20 a token's rows cross to a host once with the normal kernels, and once for each expert with the low-latency ones."""
    for mesh, rows in (("dp=8", 8), ("dp=16", 64), ("dp=32", 64)):
        decode, prompts = (routed_experts(model(mesh, "h20-32", 0), rows, kind) for kind in (True, False))
        times = [parts["dispatch"] + parts["combine"] for parts in (decode, prompts)]
        assert times[0] <= times[1] * (1 + 1e-9), f"{mesh}, {rows} rows"


def test_rows_to_ranks_of_the_own_host_do_not_cross_the_network(v3):
    """Three of four hosts are others. Links are so fast, and the network so slow, that its bytes are all that counts."""
    known = {("links", 32, False, False): (float("inf"), 1.0, 0.0, 0.0)}
    found = deepep_exchange(load_cluster("h100-32"), v3, 32, 1.0, 1.0, 1.0, known=known)
    assert found == pytest.approx(0.75 * hosts_of_a_token(8, 4, (8, 4)))


def test_beside_a_further_round_of_two_halves_nothing_runs(model, monkeypatch):
    step, times = model("dp=8", "h200-8", 0, dispatch="padded", overlap=True), []
    for rounds in (0, 1):
        monkeypatch.setattr("dsjax.plan.step_basis.further_rounds", lambda *_, rounds=rounds: rounds)
        times.append(step.decode(128, 2000))
    least = 2 * step.config.num_moe_layers * sum(routed_experts(step, 64, True, halved=True).values())
    assert least < times[1] - times[0] < 1.5 * least, "rows travel there and back, and all experts compute"


def test_the_rank_with_most_tokens_is_waited_for_and_experts_see_those_of_all(model):
    step = model("dp=8", "h200-8", 0)
    work, idle = RankWork(32, 32 * 2000), RankWork()
    every, one = (step.step([work] * n + [idle] * (8 - n)) for n in (8, 1))
    assert one["attention"] == every["attention"]
    assert one["experts"] < every["experts"]
    assert step.step([work], busy=1 / 8) == pytest.approx(one)

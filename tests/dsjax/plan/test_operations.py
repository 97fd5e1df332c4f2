"""The models of operations give back the published tables that they were read from."""

import dataclasses
import itertools

import pytest

from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure
from dsjax.plan.layout import parse_layout
from dsjax.plan.network import all_reduce, hosts_of_a_token, low_latency_exchange
from dsjax.plan.operations import (
    ALL_REDUCE_US,
    COMBINE_ROW_BYTES,
    DENSE_TFLOPS,
    DISPATCH_ROW_BYTES,
    FLASHINFER_FP8_RATE,
    LOW_LATENCY_SECONDS,
    dense_error,
)
from dsjax.plan.operator_tables import BUNDLED, FUSED, GEMM, REPACKING, SPREAD, OperatorTables, operator_tables
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.step import StepModel

H800 = Chip(load_hardware("h800"), PRECISIONS["fp8"])


@pytest.mark.parametrize("shape", DENSE_TFLOPS)
def test_every_measured_product_takes_the_time_that_was_measured(shape):
    n, k = shape
    for m, tflops in DENSE_TFLOPS[shape].items():
        measured = 2 * m * n * k / (tflops * 1e12)
        # 1e-3: FP8 scales are counted as bytes here and not in the table.
        assert H800.product(m, n, k).value == pytest.approx(measured, rel=1e-3)


def test_a_shape_that_was_not_measured_is_guessed_within_a_quarter_of_what_was():
    assert 0.05 < dense_error() < 0.25


@pytest.mark.parametrize("ranks", LOW_LATENCY_SECONDS)
def test_low_latency_exchange_gives_back_deepep_within_15_percent(ranks):
    cluster = load_cluster("h800-32").resized(max(1, ranks // 8))
    for combine, row in ((False, DISPATCH_ROW_BYTES), (True, COMBINE_ROW_BYTES)):
        predicted = low_latency_exchange(cluster, ranks, 128, 8, row, Figure(1.0), combine)
        assert predicted.value == pytest.approx(LOW_LATENCY_SECONDS[ranks][combine], rel=0.15)


def test_a_token_reaches_no_more_hosts_than_its_groups_and_experts_allow(v3):
    assert hosts_of_a_token(v3, 1) == 1
    # 4 of 8 groups, 2 groups a host on 4 hosts: 4 (1 - C(6,4) / C(8,4)).
    assert hosts_of_a_token(v3, 4) == pytest.approx(4 * (1 - 15 / 70))
    assert hosts_of_a_token(v3, 8) == 4
    assert 4 < hosts_of_a_token(v3, 18) < 8


def test_a_device_that_is_easy_to_feed_reaches_a_larger_share_of_its_peak():
    h20, h200 = Chip(load_hardware("h20"), PRECISIONS["fp8"]), Chip(load_hardware("h200"), PRECISIONS["fp8"])
    flops = 2 * 4096 * 4096 * 7168
    shares = [flops / chip.product(4096, 4096, 7168).value / chip.hardware.fp8_flops for chip in (h20, h200)]
    assert 0.75 < shares[0] < 0.95
    assert 0.45 < shares[1] < 0.6


@pytest.mark.parametrize("resource", ["fp8_flops", "memory_bandwidth"])
def test_a_little_more_of_a_resource_changes_a_time_a_little_and_never_for_the_worse(resource):
    hardware = load_hardware("h20")
    times = []
    for step in range(60):
        more = dataclasses.replace(hardware, **{resource: getattr(hardware, resource) * 1.05**step})
        times.append(Chip(more, PRECISIONS["fp8"]).product(4096, 4096, 7168).value)
    assert all(0.9 < after / before <= 1 for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sum_within_a_host_takes_the_time_that_was_published(ranks):
    cluster = load_cluster("h200-8")
    for values, microseconds in ALL_REDUCE_US["h200"][ranks].items():
        assert all_reduce(cluster, ranks, 2048.0 * values).value == pytest.approx(microseconds * 1e-6)


def test_a_sum_grows_with_its_bytes_and_shrinks_with_the_link_but_for_what_it_takes_to_start():
    h200, h800 = load_cluster("h200-8"), load_cluster("h800-32")
    sizes = [2.0**n for n in range(10, 32)]
    for cluster in (h200, h800, load_cluster("b200-8"), load_cluster("gb200-nvl72-36")):
        times = [all_reduce(cluster, 8, size).value for size in sizes]
        assert times == sorted(times)
        assert all(
            all_reduce(cluster.scaled("scale-up", 2), 8, s).value <= t for s, t in zip(sizes, times, strict=True)
        )
    assert all_reduce(h200, 8, 1024.0).value == all_reduce(h800, 8, 1024.0).value
    assert all_reduce(h800, 8, 2.0**30).value == pytest.approx(450 / 200 * all_reduce(h200, 8, 2.0**30).value, rel=0.01)


def test_a_block_fp8_product_on_blackwell_is_without_the_packing_of_scales_unless_it_is_your_own(tmp_path):
    header = "device,gemm_dtype,m,n,k,latency_ms"
    lines = [f"b200,fp8_block,{m},3072,1536,0.0172" for m in (1, 16)]
    (tmp_path / f"{GEMM}.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    own = OperatorTables(tmp_path).product("b200", "fp8_block", 3072, 1536)
    assert own(1) == pytest.approx(17.2e-6)
    bundled = BUNDLED.product("b200", "fp8_block", 3072, 1536)
    assert bundled(1) <= own(1) - REPACKING
    for n, k in ((256, 7168), (3072, 1536), (7168, 2048)):
        fp8, fp4 = (BUNDLED.product("b200", dtype, n, k) for dtype in ("fp8_block", "nvfp4"))
        assert all(fp8(rows) >= fp4(rows) for rows in (1, 16, 64, 4096))


def test_whole_experts_of_one_slot_a_rank_are_priced_too(tmp_path, v3):
    lines = ["device,kernel_source,moe_dtype,moe_ep_size,distribution,num_tokens,latency_ms"]
    lines += [f"h200,x,fp8_block,256,balanced,{tokens},{0.05 + tokens * 1e-4}" for tokens in (1, 32, 4096)]
    (tmp_path / f"{SPREAD}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    step = StepModel(
        v3,
        load_cluster("h200-8").resized(32),
        parse_layout("dp=256", 0, v3),
        PRECISIONS["fp8"],
        operators=operator_tables(tmp_path),
    )
    assert step.parts(16.0, 16000.0, 1000.0, True)["experts"].value / 58 == pytest.approx(0.46e-3, rel=0.01)


@pytest.mark.parametrize(("device", "gain"), [("h20", True), ("h200", False)])
def test_an_fp8_cache_is_multiplied_as_fp8_on_an_h20_where_the_engine_has_the_kernel(device, gain):
    """Published for the H20: about 70 % faster than bf16 where its operations are the bound; the H200's times are its tables'."""
    numbers = dataclasses.replace(PRECISIONS["fp8"], cache=1.0)
    chips = [Chip(load_hardware(device), numbers, fp8_mla=has) for has in (False, True)]
    without, having = (chip.decode_attention(128, 64, 4096, 576, 512).value for chip in chips)
    bf16 = Chip(load_hardware(device), PRECISIONS["fp8"], fp8_mla=True).decode_attention(128, 64, 4096, 576, 512).value
    assert (without / having > 1.5) == gain
    assert having == (pytest.approx(bf16 / 1.7) if gain else without)


def test_no_bytes_are_read_faster_than_an_h20_can_for_multiplying_as_fp8():
    """Few heads read more bytes than they compute; the FP8 cache of half the bytes is then the bound, not a factor."""
    chip = Chip(load_hardware("h20"), dataclasses.replace(PRECISIONS["fp8"], cache=1.0), fp8_mla=True)
    rows, context = 64, 16384
    assert (
        chip.decode_attention(16, rows, context, 576, 512).value > rows * context * 576 / chip.hardware.memory_bandwidth
    )


@pytest.mark.parametrize(("precision", "tokens", "microseconds"), [
    ("fp8", 8192, 1204.0), ("fp8", 1024, 396.6), ("nvfp4-bf16", 8192, 564.7), ("nvfp4-bf16", 1024, 228.0)
])  # fmt: skip
def test_cut_experts_on_a_b200_take_what_its_own_kernel_took(precision, tokens, microseconds):
    b200 = Chip(load_hardware("b200"), PRECISIONS[precision])
    assert b200.fused_experts(tokens, lambda _: 256.0, "all", 8, 1).value == pytest.approx(
        microseconds * 1e-6, rel=0.01
    )


def test_experts_that_are_spread_over_ranks_of_a_b200_are_not_priced_by_the_table_of_cut_ones():
    b200 = Chip(load_hardware("b200"), PRECISIONS["fp8"])
    assert b200.fused_experts(8192, lambda _: 256.0, "all", 1, 8) is None
    assert (
        Chip(load_hardware("h100"), PRECISIONS["nvfp4-bf16"]).fused_experts(8192, lambda _: 256.0, "all", 8, 1) is None
    )


def experts_of(cluster, mesh, v3, tokens, decode, tables):
    step = StepModel(v3, load_cluster(cluster), parse_layout(mesh, 0, v3), PRECISIONS["fp8"], operators=tables)
    return step.parts(tokens, tokens * 1000.0 if decode else 0.0, 1000.0, decode)["experts"].value / 58


OLD_TENSORRT_LLM = BUNDLED.of_version("tensorrt-llm-1.2.0rc5")


@pytest.mark.parametrize(("cluster", "tokens", "milliseconds"), [("b200-8", 64, 0.2386), ("h200-8", 512, 0.4185)])
def test_whole_experts_of_an_engine_without_deepep_take_what_it_was_timed_at(v3, cluster, tokens, milliseconds):
    """Enough tokens that all experts have some, and so few in decode that their weights count."""
    assert experts_of(cluster, "tp=8", v3, tokens, True, OLD_TENSORRT_LLM) * 1e3 == pytest.approx(
        milliseconds, rel=0.03
    )
    assert experts_of(cluster, "tp=8", v3, tokens, True, BUNDLED) == experts_of(
        cluster, "tp=8", v3, tokens, True, OLD_TENSORRT_LLM.without(SPREAD, FUSED, GEMM)
    )


def test_the_rank_with_most_experts_is_waited_for_where_a_table_was_routed_evenly(v3):
    few = experts_of("h200-8", "tp=8", v3, 4, True, OLD_TENSORRT_LLM) * 1e3
    assert 0.0872 < few < 0.137, "more than evenly routed, less than by a power law whose busiest rank was timed"
    many = experts_of("h200-8", "tp=8", v3, 8192, False, OLD_TENSORRT_LLM) * 1e3
    assert 1.404 < many < 2.122


def test_beyond_the_tokens_that_were_timed_whole_experts_are_priced_as_for_all_engines(v3):
    table, usual = (experts_of("b200-8", "tp=8", v3, 4096, False, tables) for tables in (OLD_TENSORRT_LLM, BUNDLED))
    assert table == usual
    assert experts_of("b200-8", "tp=8,ep=1", v3, 64, True, OLD_TENSORRT_LLM) == experts_of(
        "b200-8", "tp=8,ep=1", v3, 64, True, BUNDLED
    ), "cut experts are not in it"
    own = [
        StepModel(
            v3,
            load_cluster("b200-8"),
            parse_layout("dp=8", 0, v3),
            PRECISIONS["fp8"],
            operators=tables,
            dispatch="padded",
        )
        for tables in (OLD_TENSORRT_LLM, OLD_TENSORRT_LLM.without(SPREAD))
    ]
    times = [step.parts(64.0, 64000.0, 1000.0, True)["experts"].value for step in own]
    assert times[0] == times[1], "nor those of an engine that sends each rank its tokens"


@pytest.mark.parametrize(
    ("cluster", "mesh", "last"), [("b200-8", "tp=8", 1024), ("h200-8", "tp=8", 16384), ("h200-32", "dp=32", 512)]
)
@pytest.mark.parametrize("decode", [True, False])
def test_one_token_more_than_were_timed_is_not_faster_than_the_most_that_were(v3, cluster, mesh, last, decode):
    counts = (last - 1, last, last + 1, 2 * last)
    times = [experts_of(cluster, mesh, v3, tokens, decode, OLD_TENSORRT_LLM) for tokens in counts]
    assert times == sorted(times)


def test_a_shared_expert_in_the_product_of_a_rank_adds_the_weights_of_one_expert_to_those_that_the_rank_has(v3):
    def experts(fused):
        layout = dataclasses.replace(parse_layout("tp=8", 0, v3), fused=fused)
        step = StepModel(v3, load_cluster("h200-8"), layout, PRECISIONS["fp8"], operators=OLD_TENSORRT_LLM)
        return step.parts(512, 512e3, 1000.0, True)["experts"].value

    assert experts(True) / experts(False) == pytest.approx(1 + 1 / 32, rel=1e-3)


def test_a_shared_expert_is_not_free_where_a_table_of_the_b200_is_slower_than_what_is_carried_over(v3):
    def experts(fused, tables):
        layout = dataclasses.replace(parse_layout("tp=8,ep=1", 0, v3), fused=fused)
        step = StepModel(v3, load_cluster("b200-8"), layout, PRECISIONS["fp8"], operators=tables)
        return step.parts(1024, 1024e3, 1000.0, True)["experts"].value

    apart = experts(False, BUNDLED)
    assert apart > experts(False, BUNDLED.without(FUSED)), "the table counts"
    assert experts(True, BUNDLED) == pytest.approx(apart * (1 + 1 / 256), rel=1e-3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("h200,x,fp8_block,eight,balanced,1,0.1", "line 3: moe_ep_size is 'eight', not a whole number above 0"),
        ("h200,x,fp8_block,8,balanced,1.5,0.1", "line 3: num_tokens is '1.5', not a whole number above 0"),
        ("h200,x,fp8_block,8,balanced,0,0.1", "line 3: num_tokens is '0', not a whole number above 0"),
        ("h200,x,fp8_block,8,balanced,1,inf", "line 3 has no time above 0"),
        ("h200,x,,8,balanced,1,0.1", "line 3 has no moe_dtype"),
        ("h200,x,fp8_block,8,balanced,1", "line 3 has no latency_ms"),
    ],
)
def test_a_table_with_a_row_that_says_no_size_or_no_time_is_refused_by_its_line(tmp_path, row, message):
    columns = "device,kernel_source,moe_dtype,moe_ep_size,distribution,num_tokens,latency_ms"
    good = "h200,x,fp8_block,8,balanced,1,0.1"
    (tmp_path / f"{SPREAD}.csv").write_text("\n".join((columns, good, row)))
    with pytest.raises(UserError, match=message):
        operator_tables(tmp_path)


def test_dense_fp8_of_flashinfer_on_a_b200_reaches_the_published_rate_and_small_products_stay_as_they_are():
    usual = Chip(load_hardware("b200"), PRECISIONS["fp8"])
    flashinfer = dataclasses.replace(usual, known={}, fp8_rate=FLASHINFER_FP8_RATE)
    many, few = (8192, 7168, 2048), (8, 7168, 2048)
    slow = flashinfer.product(*many)
    assert slow.value == pytest.approx(2 * 8192 * 7168 * 2048 / FLASHINFER_FP8_RATE[0])
    assert slow.value > 2 * usual.product(*many).value
    assert slow.low < slow.value < slow.high
    assert flashinfer.product(*few).value == usual.product(*few).value
    assert flashinfer.bf16_product(*many).value == usual.bf16_product(*many).value


def test_the_table_of_a_b200_that_outruns_its_memory_with_few_tokens_prices_no_decode_of_so_few(v3):
    def experts(tokens, decode, tables):
        layout = parse_layout("tp=8,ep=1", 0, v3)
        step = StepModel(v3, load_cluster("b200-8"), layout, PRECISIONS["fp8"], operators=tables)
        return step.parts(tokens, tokens * 1000.0 if decode else 0.0, 1000.0, decode)["experts"].value

    without = BUNDLED.without(FUSED)
    assert experts(64.0, True, BUNDLED) == experts(64.0, True, without)
    assert experts(1536.0, True, BUNDLED) > experts(1536.0, True, without)
    assert experts(1536.0, True, BUNDLED) == experts(1536.0, False, BUNDLED)
    assert experts(8192.0, False, BUNDLED) > 1.5 * experts(8192.0, False, without)

"""The models of operations give back the published tables that they were read from."""

import dataclasses
import itertools

import pytest

from dsjax.hardware import load_hardware
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure
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
from dsjax.plan.operator_tables import BUNDLED, GEMM, REPACKING, OperatorTables
from dsjax.plan.precision import PRECISIONS

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

"""The models of operations give back the published tables that they were read from."""

import dataclasses
import itertools

import pytest

from dsjax.hardware import load_hardware
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import load_cluster
from dsjax.plan.figure import Figure
from dsjax.plan.network import hosts_of_a_token, low_latency_exchange
from dsjax.plan.operations import (
    COMBINE_ROW_BYTES,
    DENSE_TFLOPS,
    DISPATCH_ROW_BYTES,
    LOW_LATENCY_SECONDS,
    dense_error,
)
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

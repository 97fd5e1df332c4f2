"""The models of operations give back the published tables that they were read from."""

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
    dense_efficiency,
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


def test_an_unknown_shape_has_the_error_of_leaving_one_out_as_its_range():
    assert 0.05 < dense_error() < 0.25
    unknown = dense_efficiency(128, 3072, 7168)
    assert unknown.high / unknown.value - 1 == pytest.approx(dense_error())
    assert dense_efficiency(128, 4096, 7168).high / dense_efficiency(128, 4096, 7168).value == pytest.approx(1.05)


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


def test_an_easily_fed_device_is_assumed_more_efficient_in_compute_and_says_so():
    h20 = Chip(load_hardware("h20"), PRECISIONS["fp8"])
    figure = h20.product(4096, 4096, 7168)
    share = figure.parts[0]
    assert share.low == pytest.approx(dense_efficiency(4096, 4096, 7168).value)
    assert share.value > share.low
    assert "few operations a byte" in share.source

"""Arrivals have the rate and the burstiness that were asked for."""

import itertools
import math

import numpy as np
import pytest

from dsjax.bench.serve.load import arrival_times

COUNT = 20_000


def gaps(rate: float, burstiness: float, seed: int = 3) -> np.ndarray:
    return np.diff(arrival_times(COUNT, rate, burstiness, seed))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_rate_is_exact_and_the_gaps_spread_is_that_of_the_gamma_distribution(burstiness):
    found = gaps(8.0, burstiness)
    assert found.sum() == pytest.approx((COUNT - 1) / 8.0)
    assert found.min() >= 0
    # Coefficient of variation 1 / √shape; its standard error at 20,000 gaps is below 1.5 % for these shapes, so 6 % is 4 of them.
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_burstiness_of_one_is_a_poisson_process():
    found = np.sort(gaps(5.0, 1.0))
    exponential = 1 - np.exp(-5.0 * found)
    distance = np.abs(exponential - np.arange(1, len(found) + 1) / len(found)).max()
    assert distance < 1.95 / math.sqrt(len(found)), "Kolmogorov-Smirnov, 0.1 % level"


def test_the_seed_decides_and_edges_are_exact():
    assert arrival_times(100, 2.0, 1.0, 7) == arrival_times(100, 2.0, 1.0, 7)
    assert arrival_times(100, 2.0, 1.0, 7) != arrival_times(100, 2.0, 1.0, 8)
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, math.inf, 0) == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert arrival_times(1, 2.0, 1.0, 0) == [0.0]
    assert arrival_times(0, 2.0, 1.0, 0) == []
    tiny_shape = arrival_times(5, 2.0, 1e-9, 0)
    assert tiny_shape[-1] == pytest.approx(2.0)
    assert all(a <= b for a, b in itertools.pairwise(tiny_shape))

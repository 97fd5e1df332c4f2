"""Between measured points: growing in every size, and smaller everywhere where every point is smaller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.plan.curves import Curve, Grid

SIZES = [1.0, 2.0, 4.0, 8.0]
times = st.lists(st.floats(1e-6, 1.0), min_size=16, max_size=16)
size = st.floats(0.1, 100.0)


def grid(values):
    return Grid(SIZES, SIZES, lambda first, second: values[4 * SIZES.index(first) + SIZES.index(second)])


@given(times, size, size, st.floats(1.0, 5.0))
def test_a_grid_grows_in_both_sizes_whatever_was_measured(values, first, second, factor):
    found = grid(values)
    assert found(first, second) <= min(found(first * factor, second), found(first, second * factor)) * (1 + 1e-12)


@given(times, st.lists(st.floats(0.1, 1.0), min_size=16, max_size=16), size, size)
def test_faster_points_make_a_grid_faster_everywhere(values, shares, first, second):
    faster = grid([value * share for value, share in zip(values, shares, strict=True)])
    assert faster(first, second) <= grid(values)(first, second) * (1 + 1e-12)


def test_a_grid_gives_back_points_that_grow_and_the_middle_of_a_cell():
    found = Grid([1.0, 3.0], [10.0, 20.0], lambda first, second: first * second)
    assert [found(1, 10), found(3, 10), found(1, 20), found(3, 20)] == [10, 30, 20, 60]
    assert found(2, 15) == pytest.approx((10 + 30 + 20 + 60) / 4)
    assert found(6, 40) == pytest.approx(4 * 60)  # twice beyond each of its ends
    assert found(0.5, 5) == 10


def test_a_kernel_that_is_slower_for_fewer_rows_is_given_more():
    assert Curve([(1, 5.0), (2, 3.0), (4, 4.0)])(1) == 3.0

"""Figures carry their interval, their kinds and their derivation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.plan.figure import Kind, assumed, exact, largest, measured, smallest, total

positive = st.floats(0.01, 1e6)
share = st.floats(0.0, 1.0)


def interval(low, width):
    return assumed(low + width / 2, low, low + width, "x", "for the test")


@given(positive, positive, positive, positive)
def test_with_one_uncertain_part_the_ends_are_that_parts_and_with_two_they_are_nearer_than_bounds(a, wa, b, wb):
    x, y, sure = interval(a, wa), interval(b, wb), exact(b)
    slack = 1 + 1e-9
    for operation in (lambda p, q: p + q, lambda p, q: p * q, lambda p, q: p / q):
        alone, both = operation(x, sure), operation(x, y)
        assert alone.low == pytest.approx(operation(x.low, b))
        assert alone.high == pytest.approx(operation(x.high, b))
        bounds = [operation(p, q) for p in (x.low, x.high) for q in (y.low, y.high)]
        assert min(bounds) / slack <= both.low <= both.value <= both.high <= max(bounds) * slack


def test_independent_distances_add_up_as_squares_do():
    x, y = assumed(10, 7, 14, "x", "test"), assumed(20, 16, 23, "y", "test")
    assert ((x + y).low, (x + y).high) == (25, 35)
    assert (total([x, y]).low, total([x, y]).high) == (25, 35)


@given(positive, positive, positive, positive, share, share)
def test_maxima_and_minima_are_bounds(a, wa, b, wb, s, t):
    x, y = interval(a, wa), interval(b, wb)
    inside_x, inside_y = a + s * wa, b + t * wb
    slack = 1 + 1e-9
    for result, value in ((largest(x, y), max(inside_x, inside_y)), (smallest(x, y), min(inside_x, inside_y))):
        assert result.low / slack <= value <= result.high * slack


def test_kinds_accumulate_and_exact_is_said_only_of_arithmetic_alone():
    made = exact(2.0) * measured(3.0, 2.5, 3.5, "m", "a table")
    assert Kind(made.kinds).words() == "measured"
    assert Kind((made + assumed(1, 0, 2, "a", "why")).kinds).words() == "measured + assumption"
    assert Kind((exact(2) + exact(3)).kinds).words() == "exact"


def test_derivation_is_a_tree_of_named_figures():
    product = (exact(6.0, "operations") / measured(2.0, 1.0, 3.0, "rate", "a table")).named("product", "s")
    found = (product + exact(1.0, "wait")).named("step", "s")
    assert [(f.name, depth) for f, depth in found.walk()] == [
        ("step", 0),
        ("product", 1),
        ("operations", 2),
        ("rate", 2),
        ("wait", 1),
    ]
    assert found.part("rate").source == "a table"
    with pytest.raises(KeyError):
        found.part("nothing")

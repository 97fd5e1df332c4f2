"""Figures carry their interval, their kinds and their derivation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.plan.figure import Figure, Kind, assumed, exact, largest, measured, smallest

positive = st.floats(0.01, 1e6)
share = st.floats(0.0, 1.0)


def interval(low, width):
    return assumed(low + width / 2, low, low + width, "x", "for the test")


@given(positive, positive, positive, positive, share, share)
def test_any_values_inside_two_intervals_give_a_result_inside_the_result(a, wa, b, wb, s, t):
    x, y = interval(a, wa), interval(b, wb)
    inside_x, inside_y = a + s * wa, b + t * wb
    slack = 1 + 1e-9
    for result, value in (
        (x + y, inside_x + inside_y),
        (x * y, inside_x * inside_y),
        (x / y, inside_x / inside_y),
        (largest(x, y), max(inside_x, inside_y)),
        (smallest(x, y), min(inside_x, inside_y)),
        (3.0 / x, 3.0 / inside_x),
    ):
        assert result.low / slack <= value <= result.high * slack
    assert (1e7 - x).low <= 1e7 - inside_x <= (1e7 - x).high


def test_kinds_accumulate_and_exact_is_said_only_of_arithmetic_alone():
    made = exact(2.0) * measured(3.0, 2.5, 3.5, "m", "a table")
    assert Kind(made.kinds).words() == "measured"
    assert Kind((made + assumed(1, 0, 2, "a", "why")).kinds).words() == "measured + assumption"
    assert Kind((exact(2) + exact(3)).kinds).words() == "exact"


def test_derivation_is_a_tree_of_named_figures():
    product = (exact(6.0, "operations") / measured(2.0, 1.0, 3.0, "rate", "a table")).named("product", "s")
    total = (product + exact(1.0, "wait")).named("step", "s")
    assert [(f.name, depth) for f, depth in total.walk()] == [
        ("step", 0),
        ("product", 1),
        ("operations", 2),
        ("rate", 2),
        ("wait", 1),
    ]
    assert total.part("rate").source == "a table"
    with pytest.raises(KeyError):
        total.part("nothing")


def test_json_names_value_interval_kind_and_unit():
    assert Figure(1.0, 0.5, 2.0, Kind.MEASURED, unit="s").to_json() == {
        "value": 1.0,
        "low": 0.5,
        "high": 2.0,
        "kind": "measured",
        "unit": "s",
    }

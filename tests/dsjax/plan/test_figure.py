"""Figures carry their interval and kinds; a draw moves each assumption everywhere at once."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.plan.figure import (
    DRAWS,
    Draw,
    Figure,
    Kind,
    as_json,
    assumed,
    drawing,
    is_drawing,
    measured,
    samples,
    spread,
)

positive = st.floats(0.01, 1e6)


def a():
    return assumed(1.0, 0.5, 2.0, "a", "for the test")


def b():
    return measured(3.0, 2.5, 3.5, "b", "a table")


def test_an_assumption_that_is_used_twice_is_one_assumption():
    twice, ratio = spread(lambda: [a() + a(), a() / a()])
    assert (twice, twice.low, twice.high) == pytest.approx((2, 1, 4))
    assert (ratio, ratio.low, ratio.high) == (1, 1, 1)


def test_what_two_results_share_cancels_in_their_difference():
    one, other, difference = spread(lambda: [a() + b(), a() + 1, a() + b() - (a() + 1)])
    [alone] = spread(lambda: [b() - 1])
    assert (difference.low, difference.high) == pytest.approx((alone.low, alone.high))
    assert difference.high - difference.low < one.high - other.low


@given(positive, positive, positive, positive)
def test_the_ends_contain_the_value_and_lie_within_the_bounds(low, below, above, scale):
    def x():
        return assumed(low + below, low, low + below + above, "x", "test")

    def y():
        return assumed(2 * scale, scale, 4 * scale, "y", "test")

    slack = 1 + 1e-9
    for operation in (lambda p, q: p + q, lambda p, q: p * q, lambda p, q: p / q, max, min):
        [found] = spread(lambda operation=operation: [operation(x(), y())])
        bounds = [operation(p, q) for p in (x().low, x().high) for q in (y().low, y().high)]
        assert found == operation(float(x()), float(y()))
        assert min(bounds) / slack <= found.low <= found <= found.high <= max(bounds) * slack


@given(st.text(min_size=1), st.integers(0, DRAWS - 1))
def test_a_draw_gives_one_name_the_same_value_in_every_computation(name, number):
    for low in (0.5, 0.9):
        with drawing(Draw.number(number, DRAWS)):
            first = assumed(1.0, low, 2.0, name, "test")
        with drawing(Draw.number(number, DRAWS)):
            a()
            assert assumed(1.0, low, 2.0, name, "test") == first
        assert low <= first <= 2.0


def test_draws_of_two_names_are_spread_over_their_ranges_and_not_alike():
    found = samples(lambda: [a(), assumed(1.0, 0.5, 2.0, "other", "test")], DRAWS)
    assert found.min(axis=0) == pytest.approx([0.5, 0.5])
    assert found.max(axis=0) == pytest.approx([2.0, 2.0])
    assert len({tuple(row) for row in found.argsort(axis=0).T}) == 2


def test_an_assumption_can_be_put_at_either_end_alone():
    with drawing(Draw({"a": -1.0})):
        assert (a(), b()) == (0.5, 3.0)
    with drawing(Draw({"a": 1.0})):
        assert (a(), b()) == (2.0, 3.0)


def test_the_draw_before_is_at_hand_again_after_an_error():
    with drawing(Draw({"a": 1.0})):
        with pytest.raises(ZeroDivisionError), drawing(Draw({"a": -1.0})):
            assert a() / 0
        assert a() == 2.0
    assert not is_drawing()
    assert a() == 1.0


def test_a_result_has_the_kinds_of_everything_that_was_asked_for():
    def kind(*parts):
        return Kind(spread(lambda: [sum(part() for part in parts)])[0].kinds).words()

    assert kind(b) == "measured"
    assert kind(b, a) == "measured + assumption"
    assert kind() == "exact"
    certain = spread(lambda: [measured(3.0, 3.0, 3.0, "sure", "a table")])[0]
    assert certain.to_json() == {"value": 3, "low": 3, "high": 3, "kind": "measured"}


def test_arithmetic_gives_plain_numbers_and_a_figure_is_copied_whole():
    figure = Figure(2.0, 1.0, 4.0, Kind.MEASURED | Kind.ASSUMPTION, name="x", unit="s", source="a table")
    assert type(figure + 1) is float
    inverse = figure.through(lambda x: 1 / x)
    assert (inverse, inverse.low, inverse.high) == (0.5, 0.25, 1)
    for other in (copy.copy(figure), pickle.loads(pickle.dumps(figure))):
        assert (other.to_json(), other.name, other.source) == (figure.to_json(), "x", "a table")
    assert figure.to_json() == {"value": 2, "low": 1, "high": 4, "kind": "measured + assumption", "unit": "s"}
    assert as_json(2.0) == {"value": 2, "low": 2, "high": 2, "kind": "exact"}

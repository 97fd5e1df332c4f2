"""Figures carry their interval and kinds; a draw moves each assumption of the table, which says why, everywhere at once."""

import copy
import functools
import operator
import pickle
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.plan import figure
from dsjax.plan.figure import DRAWS, Draw, Figure, Kind, assumed, assumption, drawing, ends, measured, spread

ROOT = Path(__file__).parents[3]
ROWS = tomllib.loads((ROOT / "configs" / "assumptions.toml").read_text(encoding="utf-8"))
SOURCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "dsjax" / "plan").rglob("*.py"))
positive = st.floats(0.01, 1e6)
a = functools.partial(assumed, 1.0, 0.5, 2.0, "a", "for the test")
b = functools.partial(measured, 3.0, 2.5, 3.5, "b", "a table")


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
    def applied():
        x = assumed(low + below, low, low + below + above, "x", "test")
        return operation(x, assumed(2 * scale, scale, 4 * scale, "y", "test"))

    slack = 1 + 1e-9
    for operation in (operator.add, operator.mul, operator.truediv, max, min):
        [found] = spread(lambda: [applied()])
        bounds = [operation(p, q) for p in (low, low + below + above) for q in (scale, 4 * scale)]
        assert found == applied()
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
    found = figure.samples(lambda: [a(), assumed(1.0, 0.5, 2.0, "other", "test")], DRAWS)
    assert found.min(axis=0) == pytest.approx([0.5, 0.5])
    assert found.max(axis=0) == pytest.approx([2.0, 2.0])
    assert len({tuple(row) for row in found.argsort(axis=0).T}) == 2


def test_an_assumption_can_be_put_at_either_end_alone_and_the_draw_before_is_at_hand_again_after_an_error():
    with drawing(Draw({"a": 1.0})):
        with drawing(Draw({"a": -1.0})):
            assert (a(), b()) == (0.5, 3.0)
        with pytest.raises(ZeroDivisionError), drawing(Draw({"a": -1.0})):
            assert a() / 0
        assert (a(), b()) == (2.0, 3.0)
    assert not figure.is_drawing()
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
    one = Figure(2.0, 1.0, 4.0, Kind.MEASURED | Kind.ASSUMPTION, name="x", unit="s", source="a table")
    assert type(one + 1) is float
    inverse = figure.through(one, lambda x: 1 / x)
    assert (inverse, inverse.low, inverse.high) == (0.5, 0.25, 1)
    for other in (copy.copy(one), pickle.loads(pickle.dumps(one))):
        assert (other.to_json(), other.name, other.source) == (one.to_json(), "x", "a table")
    assert one.to_json() == {"value": 2, "low": 1, "high": 4, "kind": "measured + assumption", "unit": "s"}
    assert figure.as_json(2.0) == {"value": 2, "low": 2, "high": 2, "kind": "exact"}


@pytest.mark.parametrize("key", ROWS)
def test_a_figure_lies_in_its_range_says_why_and_is_asked_for(key):
    value, low, high = ends(key)
    assert low <= value <= high
    assert ROWS[key]["why"]
    # Some keys are put together of their words.
    assert f'"{key}"' in SOURCE or all(word.removeprefix("launches of ") in SOURCE for word in key.split(", "))
    assert assumption(key) == value
    assert assumption(key).kinds == (Kind.MEASURED if ROWS[key].get("measured") else Kind.ASSUMPTION)


def test_figures_of_one_name_move_together():
    with drawing(Draw({"host": 1.0})) as draw:
        moved = [assumption(f"host, {step}") for step in ("decode", "prefill")]
    assert moved == [0.004, 0.015]
    assert list(draw.seen) == ["host"]

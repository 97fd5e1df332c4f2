"""What a sample is, and what is made of it: without a clock."""

import jax.numpy as jnp
import pytest

from dsjax.bench.modules.timing import Budget, PreparedCase, TimedCalls, Times, device_loop


def test_the_call_and_what_it_costs_once_are_taken_off():
    # An empty call of 2, applications of 3 each, and 7 once: short 2 + 7 + 5 × 3, long 2 + 7 + 700 × 3.
    times = Times((TimedCalls(2.0, 24.0, 2109.0),) * 3, few=5, many=700)
    assert times.median == pytest.approx(3.0, rel=0.01)  # the 7 are not taken off the long call: 7 / 700 of a percent
    assert times.once == pytest.approx(7.0, rel=0.01)


def test_what_stands_several_times_in_a_program_shares_what_it_costs_once():
    times = Times((TimedCalls(0.0, 4 * 3.0 + 8.0, 4000 * 3.0 + 8.0),), few=4, many=4000, unit=4)
    assert times.once == pytest.approx(2.0, rel=0.01)


def test_noise_never_makes_a_negative_cost():
    assert Times((TimedCalls(1.0, 1.5, 101.0),), few=1, many=100).once == 0


def test_the_spread_is_the_middle_eighty_percent():
    times = Times(tuple(TimedCalls(0.0, 0.0, float(i)) for i in range(1, 21)), few=0, many=1)
    assert (times.low, times.high) == (3.0, 19.0)
    assert times.to_json()["min_s"] == 1.0


def test_every_application_is_done_with_its_own_layer():
    """Layers are added up with the number of their turn: a loop that skipped, repeated or hoisted one would differ."""
    weights = jnp.asarray([1.0, 10.0, 100.0])
    prepared = device_loop(
        lambda inputs, layer, total: total * 2 + inputs[layer], weights, jnp.float32(0), depth=3, in_call=2
    )
    prepared.run(4)
    expected = 0.0
    for layer in (0, 1, 2, 0):
        expected = expected * 2 + float(weights[layer])
    assert float(prepared.state()) == expected
    prepared.run(1)  # goes on with the layer after the last call's
    assert float(prepared.state()) == expected * 2 + 10.0


def test_slow_work_is_one_sample_a_call():
    calls = []
    prepared = PreparedCase(calls.append, unit=2, in_call=6)
    prepared.warm_up(Budget(seconds=0.0))
    prepared.take(Budget(seconds=0.0, samples=5))
    assert (prepared.few, prepared.many) == (0, 2)
    assert len(prepared.samples) == 3, "the least number of samples, whatever the budget"


def test_the_short_call_has_what_a_step_has():
    prepared = PreparedCase(lambda n: None, unit=1, in_call=61)
    prepared.warm_up()
    assert prepared.few == 61
    assert prepared.many > 10 * prepared.few


def test_of_processes_that_apply_it_together_the_slowest_decides():
    """All apply it as often as the slowest says, or they would wait for each other for ever; its samples are everybody's."""
    calls = []
    told = {"seconds": lambda own: [own, 0.005], "sample": lambda own: [own, [0.0, 0.0, 9.0]]}
    prepared = PreparedCase(calls.append, in_call=2, agree=lambda what, own: told[what](own))
    prepared.warm_up()
    assert (prepared.few, prepared.many) == (2, 2 + 16), (
        "0.02 s are four calls of 5 ms, which are four applications each"
    )
    times = prepared.take(Budget(seconds=0.001, samples=5))
    assert [sample.long for sample in times.samples] == [9.0] * 3, (
        "5 ms have gone by after each: no more than the least"
    )

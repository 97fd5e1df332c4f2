"""What a sample is, and what is made of it: without a clock."""

import itertools

import jax.numpy as jnp
import pytest

from dsjax.bench.modules import timing
from dsjax.bench.modules.timing import Budget, PreparedCase, TimedCalls, Times


def test_the_call_and_what_it_costs_once_are_taken_off_and_noise_makes_no_negative_cost():
    # An empty call of 2, applications of 3 each, and 7 once: short 2 + 7 + 5 × 3, long 2 + 7 + 700 × 3.
    times = Times((TimedCalls(2.0, 24.0, 2109.0),) * 3, few=5, many=700)
    assert times.median == pytest.approx(3.0, rel=0.01)  # the 7 are not taken off the long call: 7 / 700 of a percent
    assert times.setup == pytest.approx(7.0, rel=0.01)
    assert Times((TimedCalls(1.0, 1.5, 101.0),), few=1, many=100).setup == 0
    times = Times((TimedCalls(2.0, 0.0, 2.0 - 5e-5),) * 3, few=0, many=100)
    assert times.is_above_noise
    assert times.median == timing.CALL_RESOLUTION


def test_a_loop_that_cannot_be_told_from_an_empty_one_is_made_longer(monkeypatch):
    """Every second empty call takes 90 ms, since something else has the core, and an application 0.1 ms."""
    empty = itertools.cycle((0.01, 0.09))
    seconds = lambda run, count: 0.01 + count * 1e-4 if count else next(empty)  # noqa: E731
    monkeypatch.setattr("dsjax.bench.modules.timing.seconds_of", seconds)
    prepared = PreparedCase(lambda count: None)
    prepared.warm_up()
    few, many = prepared.few, prepared.many
    times = prepared.take(Budget(seconds=0.0))
    assert times.many - few == 256 * (many - few)
    assert len(times.samples) == timing.MIN_SAMPLES, "none of the shorter loops"


def test_noise_is_no_figure(monkeypatch):
    """A long call takes less than an empty one: in a loop on the device, and called one by one as what a step has once."""
    monkeypatch.setattr("dsjax.bench.modules.timing.seconds_of", lambda run, count: run(count))
    looped = PreparedCase(lambda count: 0.05 if count else 0.06)
    alone = PreparedCase(lambda count: 0.05, in_device_loop=False, empty=lambda count: 0.05 + 2e-6 * count)
    for case in (looped, alone):
        case.warm_up()
        assert case.take(Budget(seconds=0.0)) is None


def test_the_spread_is_the_middle_eighty_percent():
    times = Times(tuple(TimedCalls(0.0, 0.0, float(i)) for i in range(1, 21)), few=0, many=1)
    found = times.to_json()
    # Two of twenty are left out at each end.
    assert (found["min_s"], found["low_s"], found["high_s"]) == (1.0, 3.0, 18.0)
    assert timing.spread([1.0, 2.0, 3.0]) == (1.0, 3.0)


def test_every_application_is_done_with_its_own_layer():
    """Layers are added up with the number of their turn: a loop that skipped, repeated or hoisted one would differ."""
    weights = jnp.asarray([1.0, 10.0, 100.0])
    apply = lambda inputs, layer, total: total * 2 + inputs[layer]  # noqa: E731
    prepared = timing.device_loop(apply, weights, jnp.float32(0), depth=3, in_step=2)
    prepared.run(4)
    expected = 0.0
    for layer in (0, 1, 2, 0):
        expected = expected * 2 + float(weights[layer])
    assert float(prepared.state()) == expected
    prepared.run(1)  # goes on with the layer after the last call's
    assert float(prepared.state()) == expected * 2 + 10.0


def test_slow_work_is_one_sample_a_call_and_a_short_call_has_what_a_step_has():
    calls = []
    prepared = PreparedCase(calls.append, in_step=6)
    prepared.warm_up(Budget(seconds=0.0))
    prepared.take(Budget(seconds=0.0, samples=5))
    assert (prepared.few, prepared.many) == (0, 1)
    assert len(prepared.samples) == 3, "the least number of samples, whatever the budget"
    prepared = PreparedCase(lambda n: None, in_step=61)
    prepared.warm_up()
    assert prepared.few == 61
    assert prepared.many > 10 * prepared.few


def test_of_processes_that_apply_it_together_the_slowest_decides():
    """All apply it as often as the slowest says, or they would wait for each other for ever; its samples are everybody's."""
    calls = []
    told = {"seconds": lambda own: [own, 0.005], "sample": lambda own: [own, [0.0, 0.0, 9.0]]}
    prepared = PreparedCase(calls.append, in_step=2, agree=lambda what, own: told[what](own))
    prepared.warm_up()
    # 0.02 s are four calls of 5 ms, which are four applications each.
    assert (prepared.few, prepared.many) == (2, 2 + 16)
    times = prepared.take(Budget(seconds=0.001, samples=5))
    # 5 ms have gone by after each: no more than the least.
    assert [sample.long for sample in times.samples] == [9.0] * 3

"""Intervals that hold 90 % of measurements nobody had looked at: the method on made-up data, and what is shipped on real data."""

import math
import random

import pytest

from dsjax.plan.calibration import (
    DRAFTS,
    FAR,
    HOST,
    LEAST,
    RATE,
    TPOT,
    Blind,
    blind_predictions,
    calibrate,
    calibrate_ratio,
    calibrated,
    distance_of,
    ratio_calibration,
)
from dsjax.plan.engine import find_engine
from dsjax.plan.figure import LEVEL
from dsjax.plan.search import search
from dsjax.plan.workload import PlanOptions


def made_up(count, bias=0.0, spread=0.3, kind=RATE, distance=HOST, seed=0, run="R"):
    """Predictions of 100, whose measurements are log-normal around another middle."""
    draw = random.Random(seed)
    return [
        Blind("r", f"{run}{n}", kind, distance, 100.0, 100 * math.exp(draw.gauss(bias, spread))) for n in range(count)
    ]


@pytest.mark.parametrize("bias", [-0.2, 0.0, 0.3])
def test_the_correction_is_the_bias_and_90_percent_of_new_measurements_lie_inside(bias):
    known, new = made_up(400, bias), made_up(4000, bias, seed=1)
    figure = calibrate(known, RATE, HOST).interval(100.0)
    assert math.log(figure / 100) == pytest.approx(bias, abs=0.05)
    held = sum(figure.low <= b.measured <= figure.high for b in new) / len(new)
    assert held == pytest.approx(LEVEL, abs=0.03)


def test_a_group_that_is_too_small_borrows_from_its_kind_but_not_from_those_that_stand_alone():
    few, kind, drafts = made_up(LEAST - 1), made_up(40, bias=1.0, distance=FAR), made_up(99, bias=5.0, distance=DRAFTS)
    found = calibrate([*few, *kind, *drafts], RATE, HOST)
    assert (found.of, found.count) == (f"{RATE}, any distance", LEAST - 1 + 40)
    assert calibrate([*few, *made_up(1, seed=2)], RATE, HOST).of == f"{RATE}, {HOST}"


def test_what_two_runs_of_an_engine_share_cancels_in_their_ratio():
    """Two engines, one of which is predicted twice as fast as it is: ratios within either are right."""
    both = [*made_up(40, bias=0.7, spread=0.05), *made_up(40, bias=-0.7, spread=0.05, seed=1, run="S")]
    single, ratio = calibrate(both, RATE, HOST), calibrate_ratio(both, RATE, HOST)
    assert single.high / single.low > 3
    assert ratio.high < 1.2
    assert ratio.low == pytest.approx(1 / ratio.high)
    assert ratio.count == 80


def test_the_shipped_ratios_of_rates_rest_on_blind_runs():
    for kind in (RATE, TPOT):
        found = ratio_calibration(kind, HOST)
        assert found.count > 300
        assert 0.6 < found.low < 1 < found.high < 1.6


@pytest.mark.parametrize("kind", [RATE, TPOT])
def test_intervals_made_without_a_run_hold_90_percent_of_such_runs(kind):
    every, made = blind_predictions(), {}
    group = [b for b in every if (b.kind, b.distance) == (kind, HOST)]
    for run in {b.run for b in group}:
        made[run] = calibrate([b for b in every if b.run != run], kind, HOST)
    inside = [figure.low <= b.measured <= figure.high for b in group for figure in (made[b.run].interval(b.predicted),)]
    assert 0.85 <= sum(inside) / len(inside) <= 0.95


def test_a_plan_shows_its_calibrated_ends_and_what_they_rest_on(ask):
    near, far = (
        search(ask("h200-8", concurrency=16, options=PlanOptions(engine=engine, dispatch=engine.dispatch))).winner
        for engine in (find_engine("sglang"), find_engine("dsjax"))
    )
    assert (distance_of(near), distance_of(far)) == (HOST, FAR)
    shown = calibrated(near)
    assert shown["level"] == LEVEL
    rate = shown["output_tokens_per_s"]
    assert rate["low"] < rate["corrected"] < rate["high"]
    assert rate["corrected"] == pytest.approx(near.throughput * rate["correction"])
    assert rate["predictions"] >= LEAST
    assert "any distance" in calibrated(far)["output_tokens_per_s"]["by"]
    assert "ttft_s" not in shown, "no blind prediction was of a TTFT in steady state"

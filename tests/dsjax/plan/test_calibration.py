"""Intervals that hold 9 of 10 measurements nobody had looked at: the method on made-up data, and what is shipped on real data."""

import math
import random

import pytest

from dsjax.plan.calibration import (
    FAR,
    HOST,
    LEAST,
    LEVEL,
    NEWEST,
    RATE,
    TPOT,
    Blind,
    blind_predictions,
    calibrate,
    calibrated,
    distance_of,
)
from dsjax.plan.engine import find_engine
from dsjax.plan.figure import Figure
from dsjax.plan.search import search
from dsjax.plan.workload import PlanOptions


def made_up(count, bias=0.0, spread=0.3, kind=RATE, distance=HOST, seed=0):
    """Predictions of 100 with ends 80 and 120, whose measurements are log-normal around another middle."""
    draw = random.Random(seed)
    return [
        Blind("r", str(n), kind, distance, Figure(100, 80, 120), 100 * math.exp(draw.gauss(bias, spread)))
        for n in range(count)
    ]


@pytest.mark.parametrize("bias", [-0.2, 0.0, 0.3])
def test_nine_of_ten_new_measurements_lie_inside_whatever_the_own_interval_and_the_bias(bias):
    known, new = made_up(400, bias), made_up(4000, bias, seed=1)
    low, high = calibrate(known, RATE, HOST).interval(Figure(100, 80, 120))
    held = sum(low <= b.measured <= high for b in new) / len(new)
    assert held == pytest.approx(LEVEL, abs=0.03)
    assert sum(b.inside for b in new) / len(new) < 0.65, "the own interval does not hold so many"


@pytest.mark.parametrize("kind", [RATE, TPOT])
def test_intervals_made_without_a_run_of_the_newest_rounds_hold_nine_of_ten_such_runs(kind):
    every, made = blind_predictions(), {}
    group = [b for b in every if (b.kind, b.distance) == (kind, HOST) and b.round in NEWEST]
    for run in {b.run for b in group}:
        made[run] = calibrate([b for b in every if b.run != run], kind, HOST)
    inside = [low <= b.measured <= high for b in group for low, high in (made[b.run].interval(b.figure),)]
    assert 0.85 <= sum(inside) / len(inside) <= 0.97


def test_a_plan_shows_its_calibrated_ends_and_what_they_rest_on(ask):
    near, far = (
        search(ask("h200-8", concurrency=16, options=PlanOptions(engine=engine, dispatch=engine.dispatch))).winner
        for engine in (find_engine("sglang"), find_engine("dsjax"))
    )
    assert (distance_of(near), distance_of(far)) == (HOST, FAR)
    shown = calibrated(near)
    assert shown["level"] == LEVEL
    rate = shown["output_tokens_per_s"]
    assert rate["low"] < near.throughput.value < rate["high"]
    assert rate["predictions"] >= LEAST
    assert "any distance" in calibrated(far)["output_tokens_per_s"]["by"]
    assert "ttft_s" not in shown, "no blind prediction was of a TTFT in steady state"

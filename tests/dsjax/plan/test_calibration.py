"""Intervals that hold 9 of 10 measurements nobody had looked at: the method on made-up data, and what is shipped on real data."""

import hashlib
import math
import random

import pytest

from dsjax.plan.calibration import (
    FAR,
    HOST,
    LEAST,
    LEVEL,
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
from tools.blind_rounds import (
    DATA,
    LeftOut,
    blind,
    csv_text,
)
from tools.plan_data import all_left
from tools.plan_data.drafts import rows as draft_rows
from tools.plan_data.drafts_again import rows as again_rows
from tools.plan_data.history import rows as history_rows
from tools.plan_data.last_runs import rows as last_rows
from tools.plan_data.other_dates import rows as other_rows


@pytest.fixture(scope="module")
def every():
    return blind()


@pytest.fixture(scope="module")
def left_out(every):
    return LeftOut(every)


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


def test_the_shipped_predictions_are_those_that_were_committed(every):
    assert DATA.read_text(encoding="utf-8") == csv_text(), "python tools/blind_rounds.py"
    assert len(blind_predictions()) == len(every)


def test_calibrated_intervals_of_runs_left_out_hold_nine_of_ten_where_there_are_enough(every, left_out):
    for kind in (RATE, TPOT):
        group = [b for b in every if (b.kind, b.distance) == (kind, HOST)]
        inside = [low <= b.measured <= high for b, (low, high) in zip(group, left_out(group), strict=True)]
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


@pytest.mark.parametrize(
    ("rows", "digest"),
    [
        (draft_rows, "2cc2a2bffdc7bb2a"),
        (history_rows, "68053c71050b54b8"),
        (other_rows, "6e4b5c00243ccba4"),
        (last_rows, "0234d515202af719"),
        (again_rows, "a5b7bdff8b484f10"),
        (all_left.rows, "157ce00482ab5900"),
    ],
    ids=lambda value: getattr(value, "__module__", ""),
)
def test_predictions_of_a_round_have_not_changed_since_they_were_committed(rows, digest):
    said = [[value for name, value in row.items() if name != "measured"] for row in rows()]
    assert hashlib.sha256(repr(said).encode()).hexdigest()[:16] == digest
    assert all(float(row["measured"]) > 0 for row in rows())

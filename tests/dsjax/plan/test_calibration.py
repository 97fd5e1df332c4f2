"""Intervals that hold 90 % of measurements nobody had looked at: the method on made-up data, and what is shipped on real data."""

import math
import random

import pytest
from step_models import options_for

from dsjax.config import load_config
from dsjax.plan import calibration
from dsjax.plan.calibration import DRAFTS, FAR, HOST, LEAST, RATE, TPOT, UNSEEN, WIDE, Blind, calibrate, calibrated
from dsjax.plan.figure import LEVEL
from dsjax.plan.search import search
from sharding.mesh import MeshSpec


def made_up(count, bias=0.0, spread=0.3, kind=RATE, distance=HOST, seed=0, run="R"):
    """Predictions of 100, whose measurements are log-normal around another middle."""
    draw = random.Random(seed).gauss
    return [Blind("r", f"{run}{n}", kind, distance, 100.0, 100 * math.exp(draw(bias, spread))) for n in range(count)]


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
    single, ratio = calibrate(both, RATE, HOST), calibration.calibrate_ratio(both, RATE, HOST)
    assert single.high / single.low > 3
    assert ratio.high < 1.2
    assert ratio.low == pytest.approx(1 / ratio.high)
    assert ratio.count == 80


def test_the_shipped_ratios_of_rates_rest_on_blind_runs():
    for kind in (RATE, TPOT):
        found = calibration.ratio_calibration(kind, HOST)
        assert found.count > 300
        assert 0.6 < found.low < 1 < found.high < 1.6


@pytest.mark.parametrize("kind", [RATE, TPOT])
def test_intervals_made_without_a_run_hold_90_percent_of_such_runs(kind):
    every = calibration.blind_predictions()
    group = [b for b in every if (b.kind, b.distance) == (kind, HOST)]
    made = {run: calibrate([b for b in every if b.run != run], kind, HOST) for run in {b.run for b in group}}
    inside = [figure.low <= b.measured <= figure.high for b in group for figure in (made[b.run].interval(b.predicted),)]
    assert 0.85 <= sum(inside) / len(inside) <= 0.95


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"config": load_config("kimi-k2")}, "a model of other sizes"),
        ({"prompt": 32_000}, "prompts of 32,000 tokens"),
        ({"output": 20}, "outputs of 20 tokens"),
        ({"prefix_hit": 0.5}, "found in the cache"),
        ({"engine": "dsjax"}, "dsjax"),
        ({"cluster": "rtx4090-32", "config": load_config("deepseek-v2-lite")}, "RTX 4090"),
        ({"mesh": MeshSpec.parse("pp=2,tp=4"), "cluster": "h200-8"}, "several stages"),
    ],
)
def test_what_no_blind_prediction_had_is_named_and_has_the_widest_ends(ask, asked, words):
    """Predictions of R1 on one host, with 1,024 to 8,192 tokens, say little of Kimi-K2, of 32,000 tokens, or of stages."""
    asked = {"cluster": "h200-16", "engine": "published", "mesh": None, **asked}
    options = options_for(asked.pop("engine"), mesh=asked.pop("mesh"), modes=("aggregated",), overlap="off")
    winner = search(ask(concurrency=16, options=options, **asked)).winner
    assert calibration.distance_of(winner) == UNSEEN
    shown = calibrated(winner)
    assert any(words in one for one in shown["unseen"])
    assert shown["unseen"] == calibration.unseen(winner)
    for name, kind in (("output_tokens_per_s", RATE), ("tpot_s", TPOT)):
        assert UNSEEN in shown[name]["by"]
        found = calibration.calibration(kind, UNSEEN)
        for distance in (HOST, WIDE, DRAFTS):
            other = calibration.calibration(kind, distance)
            assert found.low <= other.low < other.high <= found.high


def test_a_plan_shows_its_calibrated_ends_and_what_they_rest_on(ask):
    near, far = (search(ask(concurrency=16, options=options_for(name))).winner for name in ("sglang", "dsjax"))
    assert [*map(calibration.distance_of, (near, far))] == [HOST, UNSEEN]
    shown = calibrated(near)
    assert shown["level"] == LEVEL
    rate = shown["output_tokens_per_s"]
    assert rate["low"] < rate["corrected"] < rate["high"]
    assert rate["corrected"] == pytest.approx(near.throughput * rate["correction"])
    assert rate["predictions"] >= LEAST
    assert shown["unseen"] == []
    assert calibrated(far)["unseen"] == ["dsjax on a GPU or TPU"]
    assert "ttft_s" not in shown, "no blind prediction was of a TTFT in steady state"

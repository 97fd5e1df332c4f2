"""The committed pages are what their commands write, and the errors that they state are those of the model."""

import importlib.util
import statistics
from pathlib import Path

import pytest

from tools.plan_data.point_sets import csv_text, median_of_wide_ep, point_sets
from tools.plan_data.unseen import FURTHER, further
from tools.plan_data.validation import points
from tools.plan_data.validation_score import rates, score

pytestmark = pytest.mark.slow  # all together

ROOT = Path(__file__).parents[3]


def _tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study():
    return _tool("h20_study")


def test_the_committed_validation_is_what_the_model_says_now():
    assert (ROOT / "docs" / "plan-validation.md").read_text(encoding="utf-8") == _tool("plan_validation").page()


def test_the_committed_points_are_those_that_the_model_predicts_now():
    assert (ROOT / "docs" / "measurements" / "plan-validation.csv").read_text(encoding="utf-8") == csv_text()


def test_the_model_has_not_moved_away_from_what_was_predicted_of_one_machine():
    (four_users,) = (one for one in further() if one.key == "S")
    assert four_users.predict().value == pytest.approx(FURTHER["S"][0], rel=0.1)


def test_counted_points_are_predicted_within_10_percent_and_nine_of_ten_lie_in_intervals_that_are_not_wide():
    found = score(rates(points()))
    assert found.count >= 15
    assert found.error < 0.10
    assert found.covered >= 0.875
    assert found.width < 1.65


def test_no_run_is_counted_twice():
    counted = [point.key for point in rates(points())]
    assert sorted(key for key in counted if key.startswith("8")) == ["8 (16)", "8 (32)", "8 (64)", "8 (8)"]


def test_time_to_first_token_is_counted_as_its_source_reports_it():
    counted = {point.key: point.measured for point in points() if point.kind == "ttft" and point.comparable}
    # Means of InferenceX issue 870 in ms, the wave of all users at the start included.
    assert counted == {"8 (8, TTFT)": 330.6, "8 (16, TTFT)": 356.0, "8 (32, TTFT)": 426.5, "8 (64, TTFT)": 423.1}


def test_the_median_error_of_wide_groups_is_that_of_their_own_runs():
    (wide,) = (one for one in point_sets() if one.name == "wide EP")
    assert median_of_wide_ep() == statistics.median(abs(point.error) for point in wide.points)


def test_points_that_are_not_counted_say_why():
    assert all(point.caveat for point in points() if not point.comparable)


def test_the_study_states_its_exact_figures(study):
    page = (ROOT / "docs" / "h20-32.md").read_text(encoding="utf-8")
    assert study.weights() in page
    linear, attention = study.operations()
    # 73.25 G linear and head, 16.99 M for each position of the context.
    assert linear == pytest.approx(73.25e9, rel=1e-4)
    assert attention == pytest.approx(16.99e6 * 32768, rel=1e-3)
    assert f"{32 * 148e12 / attention:,.0f} (exact bound)" in page
    assert "75.1 GB in bf16, 39.5 GB in FP8 (exact)" in page


def test_the_studys_tables_are_what_the_model_says_now(study):
    page = (ROOT / "docs" / "h20-32.md").read_text(encoding="utf-8")
    assert study.decode_table()[0] in page
    assert study.prefill_table() in page
    assert study.written_first_token() in page
    assert study.written_decode() in page
    assert study.memory_rows() in page
    assert study.other_claims() in page
    assert study.claims_table() in page


def test_the_page_of_32_boards_at_home_is_what_the_model_says_now():
    assert (ROOT / "docs" / "rtx4090-32.md").read_text(encoding="utf-8") == _tool("home_study").page()


def test_pictures_of_the_study_are_there():
    for name in ("front", "figures", "latency", "bandwidth", "loss-of-hosts", "hosts", "concurrency"):
        assert (ROOT / "docs" / "h20-32" / f"{name}.png").stat().st_size > 10_000

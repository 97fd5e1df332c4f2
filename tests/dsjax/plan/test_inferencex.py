"""Runs of InferenceX that were predicted before their measured values were read."""

from pathlib import Path

import pytest

from tools.plan_data.inferencex import beside_inferencex, inferencex_points, points_of_today, row_of_today
from tools.plan_data.inferencex_apart import APART, COMMITTED, apart_points, beside_apart
from tools.plan_data.validation_score import score

PAGE = Path(__file__).parents[3] / "docs" / "plan-validation.md"


def test_the_page_shows_the_predictions_as_they_were_committed():
    assert beside_inferencex() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 13, 31])
def test_the_page_shows_what_the_model_of_today_predicts(number):
    assert row_of_today(inferencex_points()[number], points_of_today()[number]) in PAGE.read_text(encoding="utf-8")


def test_runs_of_the_tables_age_are_predicted_within_a_fifth():
    found = score(inferencex_points())
    assert found.count == 36
    assert found.error < 0.2


def test_runs_with_wide_ep_are_shown_as_they_were_predicted_and_the_model_has_not_moved_away():
    assert beside_apart() in PAGE.read_text(encoding="utf-8")
    assert APART[4].predict().value == pytest.approx(COMMITTED[4][0], rel=0.1)


def test_runs_with_wide_ep_are_predicted_within_a_fifth_and_three_of_four_lie_inside():
    found = score(apart_points())
    assert found.count == 33
    assert found.error < 0.2
    assert found.covered > 0.75

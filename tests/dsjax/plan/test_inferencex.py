"""Runs of InferenceX that were predicted before their measured values were read."""

from pathlib import Path

import pytest

from dsjax.plan.inferencex import beside_inferencex, inferencex_points, points_of_today, row_of_today
from dsjax.plan.validation import score

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

"""Runs of InferenceX that were predicted before their measured values were read."""

import pytest

from tools.plan_data.inferencex import inferencex_points
from tools.plan_data.inferencex_apart import APART, COMMITTED, apart_points
from tools.plan_data.validation_score import score


def test_runs_of_the_tables_age_are_predicted_within_a_fifth():
    found = score(inferencex_points())
    assert found.count == 36
    assert found.error < 0.2


def test_the_model_has_not_moved_away_from_what_was_predicted_of_runs_with_wide_ep():
    assert APART[4].predict().value == pytest.approx(COMMITTED[4][0], rel=0.1)


def test_runs_with_wide_ep_are_predicted_within_a_fifth_and_three_of_four_lie_inside():
    found = score(apart_points())
    assert found.count == 33
    assert found.error < 0.2
    assert found.covered > 0.75

"""The committed pages are what their commands write, and the errors that they state are those of the model."""

from pathlib import Path

import pytest

from tools import h20_study, home_study, plan_validation
from tools.plan_data.point_sets import csv_text
from tools.plan_data.validation import points
from tools.plan_data.validation_score import rates, score

pytestmark = pytest.mark.slow  # all together

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("file", "made"),
    [
        ("plan-validation.md", plan_validation.page),
        ("measurements/plan-validation.csv", csv_text),
        ("rtx4090-32.md", home_study.page),
    ],
)
def test_a_committed_page_is_what_the_model_says_now(file, made):
    assert (ROOT / "docs" / file).read_text(encoding="utf-8") == made()


def test_counted_points_are_predicted_within_10_percent_and_nine_of_ten_lie_in_intervals_that_are_not_wide():
    found = score(rates(points()))
    assert found.count >= 15
    assert found.error < 0.10
    assert found.covered >= 0.875
    assert found.width < 1.65


def test_the_studys_exact_figures_and_tables_are_what_the_model_says_now():
    study, page = h20_study, (ROOT / "docs" / "h20-32.md").read_text(encoding="utf-8")
    linear, attention = study.operations()
    # 73.25 G linear and head, 16.99 M for each position of the context.
    assert linear == pytest.approx(73.25e9, rel=1e-4)
    assert attention == pytest.approx(16.99e6 * 32768, rel=1e-3)
    assert f"{32 * 148e12 / attention:,.0f} (exact bound)" in page
    assert "75.1 GB in bf16, 39.5 GB in FP8 (exact)" in page
    tables = "weights prefill_table written_first_token written_decode memory_rows other_claims claims_table"
    for name in tables.split():
        assert getattr(study, name)() in page, name
    assert study.decode_table()[0] in page

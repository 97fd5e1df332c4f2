"""docs/layout-plans.md says what the planner says today, where that takes little time to see."""

from tools.layout_plans import PAGE, best, halving, more_experts


def test_the_page_has_todays_batches_below_which_halving_loses_and_todays_dead_zone():
    page = PAGE.read_text(encoding="utf-8")
    rows = [*halving("h200-32", "dp=32"), *halving("h200-8", "dp=8"), *more_experts("h800-32", 8, "dp=16")]
    assert len(rows) == 10
    assert [row for row in rows if row not in page] == [], "python tools/layout_plans.py"


def test_a_row_s_command_is_what_it_says():
    won = best("--cluster h200-8 --engine dsjax --afd on --mode aggregated --input 2000 --output 500")
    assert won.name().startswith("1 × dp=")
    assert "experts ep=" in won.name()

"""The table of assumptions: every row has a range, a reason and somebody who asks for it."""

import tomllib
from pathlib import Path

import pytest

from dsjax.plan.figure import Draw, Kind, assumption, drawing, ends

ROOT = Path(__file__).parents[3]
ROWS = tomllib.loads((ROOT / "configs" / "assumptions.toml").read_text(encoding="utf-8"))
SOURCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "dsjax" / "plan").rglob("*.py"))


@pytest.mark.parametrize("key", ROWS)
def test_a_figure_lies_in_its_range_says_why_and_is_asked_for(key):
    value, low, high = ends(key)
    assert low <= value <= high
    assert ROWS[key]["why"]
    # Some keys are put together of their words.
    assert f'"{key}"' in SOURCE or all(word.removeprefix("launches of ") in SOURCE for word in key.split(", "))
    assert assumption(key) == value
    assert assumption(key).kinds == (Kind.MEASURED if ROWS[key].get("measured") else Kind.ASSUMPTION)


def test_figures_of_one_name_move_together():
    with drawing(Draw({"host": 1.0})) as draw:
        moved = [assumption(f"host, {step}") for step in ("decode", "prefill")]
    assert moved == [0.004, 0.015]
    assert list(draw.seen) == ["host"]

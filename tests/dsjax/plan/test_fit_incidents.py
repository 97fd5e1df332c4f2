"""What `dsjax plan --fit` says of public launches: verdicts as they were committed, and what became of them."""

import hashlib

import pytest

from tools.plan_data.fit_dryruns import command
from tools.plan_data.fit_incidents import SECOND, dry_run_score, held, rows, score


@pytest.mark.parametrize(
    ("given", "digest", "committed", "fitting"),
    [((), "647eeaa62ca73b3f", (19, 25), (16, 16)), ((SECOND,), "3476b5d259a643b1", (10, 11), (8, 8))],
)
def test_verdicts_are_those_that_were_committed_and_most_of_them_are_right_today_too(given, digest, committed, fitting):
    """A verdict that is changed after its outcome is known is no prediction."""
    asked = [[value for name, value in row.items() if name not in ("fitted", "happened")] for row in rows(*given)]
    assert hashlib.sha256(repr(asked).encode()).hexdigest()[:16] == digest
    found = score(*given)
    assert (found["committed, all"], found["committed, yes"], found["today, yes"]) == (committed, fitting, fitting)
    assert found["today, all"][0] >= committed[0]
    assert all(row["fitted"] in ("yes", "no", "") and row["happened"] for row in rows(*given))


def test_launches_that_dsjax_has_options_for_were_run_through_its_dry_run():
    asked = {row["key"] for row in (*rows(), *rows(SECOND)) if command(row, "FILE")}
    assert asked - set(held()) == {"M9"}, "tp=32 cuts a block of FP8 scales, which dsjax refuses"
    assert set(held()) <= asked
    assert dry_run_score()["yes"][0] == dry_run_score()["yes"][1], "what a device holds at least is more than its room"
    # V3 in FP8 on eight devices, and 131,072 cached tokens of 70,272 B.
    assert held()["M18"] == pytest.approx(85.14e9 + 131072 * 70272, rel=1e-3)

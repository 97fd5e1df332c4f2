"""What `dsjax plan fit` says of public launches: verdicts as they were committed, and what became of them."""

import hashlib

from tools.plan_data.fit_incidents import rows, score


def test_verdicts_are_those_that_were_committed():
    """A verdict that is changed after its outcome is known is no prediction."""
    asked = [[value for name, value in row.items() if name not in ("fitted", "happened")] for row in rows()]
    assert hashlib.sha256(repr(asked).encode()).hexdigest()[:16] == "41f31d1129a0fe7c"
    assert all(row["fitted"] in ("yes", "no", "") and row["happened"] for row in rows())


def test_most_verdicts_are_right_today_too_and_none_refuses_what_fitted():
    assert score()["committed"] == (29, 36)
    assert score()["today"][0] >= 29
    assert score("yes") == {"committed": (24, 24), "today": (24, 24)}

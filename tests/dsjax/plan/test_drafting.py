"""Tokens that a step with drafts yields: each further draft is accepted less often than the one before."""

from itertools import pairwise

import pytest

from dsjax.errors import UserError
from dsjax.plan.workload import FIRST, PlanOptions, read_acceptance, tokens_a_step


def test_one_draft_yields_its_acceptance_and_further_ones_less_and_less():
    made = [tokens_a_step(FIRST, drafts) for drafts in range(5)]
    gains = [after - before for before, after in pairwise(made)]
    assert made[0] == 1
    assert gains[0] == pytest.approx(FIRST)
    assert all(0 < later < FIRST * earlier for earlier, later in pairwise(gains))


def test_shares_of_positions_are_taken_as_an_engine_logs_them():
    assert tokens_a_step(read_acceptance("0.74,0.48,0.26"), 3) == pytest.approx(2.48)
    assert read_acceptance("0.85") == 0.85


def test_what_is_no_acceptance_is_said_and_each_draft_needs_its_share():
    for text in ("much", "1.2", "0.4,0.5", ""):
        with pytest.raises(UserError, match="--mtp-acceptance is"):
            read_acceptance(text)
    with pytest.raises(UserError, match="has 2 positions and --mtp 3 drafts"):
        PlanOptions(drafts=3, acceptance=(0.8, 0.5))

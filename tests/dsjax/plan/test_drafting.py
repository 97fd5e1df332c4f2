"""Tokens that a step with drafts yields: each further draft is accepted less often than the one before."""

from itertools import pairwise

import pytest

from dsjax.errors import UserError
from dsjax.plan.drafting import FADING, FIRST, read_acceptance, tokens_a_step
from dsjax.plan.workload import PlanOptions


def test_one_draft_yields_its_acceptance_and_further_ones_less_and_less():
    made = [tokens_a_step(FIRST, drafts).value for drafts in range(5)]
    gains = [after - before for before, after in pairwise(made)]
    assert made[0] == 1
    assert gains[0] == pytest.approx(FIRST)
    assert all(0 < later < FIRST * earlier for earlier, later in pairwise(gains))


@pytest.mark.parametrize(("first", "measured"), [(0.85, 3.20), (0.90, 3.09)])
def test_seven_drafts_of_v3_s_own_module_yield_what_is_published_within_the_range(first, measured):
    """nebius/MTP-DeepSeek-V3-0324: the original module at temperature 0 and 1."""
    made = tokens_a_step(first, 7)
    assert made.low < measured < made.high
    assert made.value == pytest.approx(measured, rel=0.07)


def test_the_measured_curve_of_a_model_with_one_module_has_this_form():
    """DeepSeek-V4-Pro, thinking: SemiAnalysisAI/InferenceX, golden_al_distribution/dsv4_mtp.yaml."""
    first, least = 0.79, FADING[1]
    for drafts, measured in ((1, 1.79), (2, 2.27), (3, 2.49), (8, 2.58)):
        made, reached, chance = 1.0, 1.0, first
        for _ in range(drafts):
            reached *= chance
            made, chance = made + reached, chance * least
        assert made == pytest.approx(measured, abs=0.03)


def test_shares_of_positions_are_taken_as_an_engine_logs_them():
    assert tokens_a_step(read_acceptance("0.74,0.48,0.26"), 3).value == pytest.approx(2.48)
    assert read_acceptance("0.85") == 0.85


@pytest.mark.parametrize("text", ["much", "1.2", "0.4,0.5", ""])
def test_what_is_no_acceptance_is_said(text):
    with pytest.raises(UserError, match="--mtp-acceptance is"):
        read_acceptance(text)


def test_each_draft_needs_its_share():
    with pytest.raises(UserError, match="has 2 positions and --mtp 3 drafts"):
        PlanOptions(drafts=3, acceptance=(0.8, 0.5))

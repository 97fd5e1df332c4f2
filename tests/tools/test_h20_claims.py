"""The study of the 32 × H20 plan: each figure has a verdict that its own numbers bear out. `test_plan_pages.py` holds the page itself."""

import pytest

from tools.plan_data.h20_claims import OPEN, REFUTED, REPRODUCED, change, claims


@pytest.fixture(scope="module")
def every():
    return claims()


def test_every_figure_has_a_verdict_and_a_line_of_reason(every):
    assert len(every) > 100
    assert {claim.verdict for claim in every} == {REPRODUCED, REFUTED, OPEN}
    assert all(claim.said and claim.why and "\n" not in claim.why for claim in every)


def test_what_is_refuted_by_a_number_differs_from_it(every):
    for claim in every:
        if claim.compared:
            said, found = claim.compared
            assert claim.verdict == REFUTED
            assert abs(said / found - 1) > 0.04, claim


def test_a_worse_network_is_never_better():
    assert change("network", 0.5)[0] < 0 < change("network", 2)[0]
    assert change("network", 0.5)[1] > 0

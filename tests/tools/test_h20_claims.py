"""The study of the 32 × H20 plan: each figure has a verdict that its own numbers bear out."""

import pytest

from tools.plan_data.h20_claims import OPEN, REFUTED, REPRODUCED, change, claims


@pytest.fixture(scope="module")
def every():
    return claims()


def of(every, section, start):
    (found,) = (claim for claim in every if claim.section == section and claim.what.startswith(start))
    return found


def test_every_figure_has_a_verdict_and_a_line_of_reason(every):
    assert len(every) > 100
    assert {claim.verdict for claim in every} == {REPRODUCED, REFUTED, OPEN}
    assert all(claim.said and claim.why and "\n" not in claim.why for claim in every)


def test_the_sections_are_in_the_plans_order(every):
    chapters = [claim.section for claim in every if claim.section[0].isdigit()]
    assert chapters == sorted(chapters, key=lambda section: [int(part) for part in section.split(".")])


def test_what_is_refuted_by_a_number_differs_from_it(every):
    for claim in every:
        if claim.compared:
            said, found = claim.compared
            assert claim.verdict == REFUTED
            assert abs(said / found - 1) > 0.04, claim


def test_the_throughput_chain_is_a_thousandfold_slip(every):
    for share, tokens in (("30%", 15.3), ("50%", 27.2), ("70%", 40.5), ("85%", 52.1)):
        said, found = of(every, "3.4.2", share).compared
        assert found == pytest.approx(tokens, rel=0.01)
        assert said / found == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(
    ("section", "start", "text"),
    [
        ("4.6.2", "a batch", "16.8 MB"),
        ("3.5.4", "NVLink", "µs became ms"),
        ("A.3", "shared parts", "15.8 B"),
        ("A.3", "what sparsity", "58.8%"),
        ("4.1.4", "all-to-all", "16.7 GB/s"),
        ("8.1", "routing of 200", "2.80 GB"),
        ("4.6.5", "return", "7.5"),
        ("6.1", "the commands", "5 of them"),
        ("3.3.5", "memory left", "-1.2"),
        ("3.4.2", "32 GPUs", "34.1"),
        ("4.5.2", "all-to-all", "80%, 60%, 40%, 20%"),
        ("4.6.1", "latency", "+400 %"),
        ("4.6.2", "a routing exchange", "1.38 ms"),
        ("4.6.4", "all-to-all", "2.01 ms"),
        ("8.2", "operations", "7.48"),
        ("end", "64 and 128", "896"),
    ],
)
def test_figures_that_were_asked_about_have_their_arithmetic(every, section, start, text):
    assert text in of(every, section, start).why


def test_every_section_with_figures_is_there(every):
    chapters = {claim.section for claim in every}
    assert {
        "3.1.3",
        "3.3.5",
        "3.4.4",
        "4.1.4",
        "4.4.1",
        "4.5.2",
        "4.5.4",
        "4.6.3",
        "4.6.4",
        "5.1",
        "6.2.1",
        "A.6",
    } <= chapters


def test_a_prompts_exchanges_wait_twice_and_a_decode_steps_once(every):
    for more in (5, 100):
        why = of(every, "4.5.1", f"+ {more} ms").why
        assert f"{116 * more / 1e3:.2f} s" in why
        assert f"{232 * more / 1e3 * 1.03:.2f} s" in why


def test_a_worse_network_is_never_better():
    assert change("network", 0.5)[0] < 0 < change("network", 2)[0]
    assert change("network", 0.5)[1] > 0

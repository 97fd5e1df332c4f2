"""What the soak test judges by: the bound on a step's launches, and every claim's failure."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.engine.contract.commands import TOKEN_MADE, PrefillRow, RankStep, Step, int32s
from dsjax.engine.device.buckets import Buckets
from dsjax.top.reading import Exposition
from tools.soak import judge
from tools.soaks.bound import ChunkBudget
from tools.soaks.sessions import Outcome


@st.composite
def chunks_within_a_budget(draw):
    """Prompt chunks of a rank: at most `chunk` tokens each, `rows` of them, `budget` together."""
    chunk, rows = draw(st.sampled_from([32, 48, 100, 256])), draw(st.integers(1, 40))
    budget = draw(st.integers(rows, 2048))
    lengths, left = [], budget
    for wanted in draw(st.lists(st.one_of(st.integers(1, chunk), st.integers(1, 33)), max_size=rows)):
        if left:
            lengths.append(min(wanted, chunk, left))
            left -= lengths[-1]
    return budget, chunk, rows, lengths


@given(chunks_within_a_budget())
def test_no_step_has_more_prompt_launches_than_the_bound_counts(case):
    budget, chunk, rows, lengths = case
    prompts = [PrefillRow(slot, 0, int32s([1] * length), TOKEN_MADE, 4096) for slot, length in enumerate(lengths)]
    launches = Buckets.covering(rows, chunk, mixed=False).launches(Step([RankStep([], [], b"", prompts, [])]))
    assert len(launches) <= ChunkBudget(budget, chunk, rows, 0.0, 0.0).most_prompt_launches


def test_the_bound_is_the_longest_step():
    # 2 × 2048 / 256 = 16 half-full launches, one more of each wider width (256, 128, 64), and the narrowest's one of 8 rows
    budget = ChunkBudget(2048, 256, 8, prompt_launch=0.1, decode_launch=0.05)
    assert budget.most_prompt_launches == 20
    assert budget.seconds == pytest.approx(2.05)


ARGUMENTS = argparse.Namespace(slack=1.0, memory_growth=0.05, api_key="secret")
BUDGET = ChunkBudget(256, 256, 8, prompt_launch=0.1, decode_launch=0.0)
GOOD = {
    "outcome": Outcome(completed=3, itls=[0.01] * 200),
    "memory": [100] * 50,
    "loads": [{"used_pages": 0, "running": 0, "waiting": 0}],
    "after": "dsjax_compilations_after_warm_up_total 0\n",
}


def verdict(**changed) -> list[str]:
    """The claims that do not hold."""
    case = {**GOOD, **changed}
    after = Exposition(case.pop("after"))
    found = judge(ARGUMENTS, *case.values(), Exposition(""), after, BUDGET)
    assert "secret" not in str(found)
    return [name for name, claim in found["claims"].items() if not claim["holds"]]


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({"outcome": Outcome(completed=3, errors={"HTTP 500": 1})}, "no error but those asked for"),
        ({"outcome": Outcome()}, "requests were completed"),
        ({"loads": [{"used_pages": 2, "running": 0, "waiting": 0}]}, "pages in use at the end"),
        ({"memory": [100] * 40 + [110] * 10}, "resident memory is flat"),
        ({"memory": list(range(100, 150))}, "resident memory is flat"),
        ({"after": "dsjax_compilations_after_warm_up_total 1\n"}, "compilations after warm-up"),
        (
            {"outcome": Outcome(completed=1, itls=[0.01] * 90 + [9.0] * 10)},
            "P99 of ITL within the chunk budget's bound, ms",
        ),
    ],
)
def test_each_claim_can_fail(changed, claim):
    assert verdict() == []
    assert verdict(**changed) == [claim]

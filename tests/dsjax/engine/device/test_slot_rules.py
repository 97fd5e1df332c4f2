"""The rules of a slot's request run on the device only while they change something."""

import pytest

from dsjax.engine.contract.commands import ALWAYS, Admission, RankStep, Sampling, Step, int32s
from dsjax.engine.contract.executor import RankResults, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.device.launch_rows import SlotRules, SlotTable
from dsjax.engine.text.logit_rules import LogitRules

V = 70  # no multiple of 32


def test_rules_are_active_only_while_they_change_something():
    """A greedy row of which only its end is held back leaves the sampler when it has made its least number of tokens."""
    rules = LogitRules(SamplingParams(min_tokens=2, max_tokens=9), V, frozenset({3}))
    biases = rules.biases().astype("<i4").tobytes()
    waiting = Admission(0, 0, 1, Sampling(1, 0), biases=biases)
    assert SlotRules.of(waiting).until == 2
    table = SlotTable(1, 2, V)
    step = Step([RankStep([waiting], [], int32s((0, 9)), [], [])])
    table.admit(step)
    wants = lambda: bool(table._wants[0, 0])  # noqa: E731
    for tokens, still in (((5,), True), ((6,), False)):
        assert wants()
        table.commit(step, [RankResults([RowResult(tokens)], [])])
        assert wants() == still


@pytest.mark.parametrize(
    ("sampling", "more", "until"),
    [
        ({}, {}, 0),
        ({"temperature": 0.5}, {}, ALWAYS),
        ({"logprobs": 0}, {}, ALWAYS),
        ({"presence_penalty": 0.5}, {}, ALWAYS),
        ({}, {"allowed": int32s([7, 0, 0])}, ALWAYS),
        ({}, {"guided": True}, ALWAYS),
        ({}, {"biases": int32s([3, 0, ALWAYS])}, ALWAYS),
    ],
)
def test_nothing_runs_for_a_request_that_the_step_s_greedy_token_serves(sampling, more, until):
    assert SlotRules.of(Admission(0, 0, 1, Sampling(1, 0, **sampling), **more)).until == until

"""What `dsjax bench soak` asks for, and every claim's failure."""

import numpy as np
import pytest

from dsjax.bench.accept.watch import MemorySample, ServerWatch
from dsjax.bench.soak import Outcome, SoakOptions, judge
from dsjax.top.reading import Exposition

GOOD = {
    "outcome": Outcome(completed=3, itls=[0.01] * 200),
    "memory": [100] * 50,
    "loads": [{"used_pages": 0, "running": 0, "waiting": 0}],
    "after": "dsjax_compilations_after_warm_up_total 0\n",
}


def verdict(**changed) -> list[str]:
    case = GOOD | changed
    memory = [MemorySample(0, 0, used) for used in case["memory"]]
    watch = ServerWatch(None, "", (), 2.0, counters=[Exposition(case["after"])], memory=memory)
    options = SoakOptions(api_key="secret", admin_api_key="secret", itl_p99=500.0)
    found = judge(options, case["outcome"], watch, case["loads"])
    assert "secret" not in str(found)
    return [one["claim"] for one in found["claims"] if not one["holds"]]


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({"outcome": Outcome(completed=3, errors={"HTTP 500": 1})}, "no error but those asked for"),
        ({"outcome": Outcome()}, "requests were completed"),
        ({"loads": [{"used_pages": 2, "running": 0, "waiting": 0}]}, "pages in use at the end"),
        ({"loads": [{"used_pages": 0, "running": 0, "waiting": 1}]}, "pages in use at the end"),
        ({"memory": [100] * 40 + [110] * 10}, "memory is flat"),
        ({"memory": list(range(100, 150))}, "memory is flat"),
        ({"after": "dsjax_compilations_after_warm_up_total 1\n"}, "compilations after warm-up"),
        ({"outcome": Outcome(completed=1, itls=[0.01] * 90 + [9.0] * 10)}, "P99 of the ITL, ms"),
    ],
)
def test_each_claim_can_fail(changed, claim):
    assert verdict() == []
    assert verdict(**changed) == [claim]


def test_a_prompt_and_its_answer_fit_into_the_models_length():
    options, rng = SoakOptions(), np.random.default_rng(0)
    drawn = [options.draw(rng, 300) for _ in range(500)]
    assert all(len(one.prompt) == one.prompt_tokens for one in drawn)
    assert {one.prompt_tokens + one.output_tokens <= 300 for one in drawn} == {True}
    assert min(one.output_tokens for one in drawn) == 1
    assert max(one.output_tokens for one in drawn) > 200

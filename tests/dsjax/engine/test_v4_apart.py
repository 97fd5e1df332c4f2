"""DeepSeek-V4 with two-batch overlap, balanced pipeline stages, AFD and disaggregated prefill: one device's tokens."""

import pytest
from layouts import decide_at_once
from v4_engine import DRAFTS, answers, engine, handed_over

pytestmark = pytest.mark.slow

OVERLAPPED = {"enable_dbo": True, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 1}
EPLB = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}
BALANCED = {"enable_eplb": True, "eplb_config": EPLB}
RUNS = {
    "in two batches": {"mesh": "dp=2,tp=2"} | OVERLAPPED,
    # Stages begin between layers that take turns.
    "balanced in two stages": {"mesh": "pp=2,dp=2", "pp_layer_partition": "1,3"} | BALANCED,
    "balanced on devices apart, in two batches": {"attention_mesh": "dp=2", "expert_mesh": "ep=2"}
    | OVERLAPPED
    | BALANCED,
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_with_drafts_the_tokens_are_those_of_one_device(v4_checkpoint, v4_tokens, options):
    with engine(v4_checkpoint, **options, **DRAFTS) as llm:
        decide_at_once(llm)
        for _ in range(2):  # found in the cache the second time
            assert answers(llm) == v4_tokens[0]
        if "enable_eplb" in options:
            assert llm.engine.core.statistics()["balance"].rebalances > 0


def test_pages_of_both_kinds_go_from_prefill_to_decode(v4_checkpoint, v4_tokens):
    found, asked, completed = handed_over(v4_checkpoint, prefill_mesh="dp=1", decode_mesh="dp=1", **DRAFTS)
    assert found == v4_tokens[0]
    assert completed == asked >= 4

"""A DeepSeek-V4 in two batches, in stages whose experts follow the load, with experts apart, and with prefill apart from decode makes one
device's tokens."""

import pytest
from v4_engine import DRAFTS, answers, engine, handed_over, one_devices, prompts, write

pytestmark = pytest.mark.slow

OVERLAPPED = {
    "mesh": "dp=2,tp=2",
    "enable_dbo": True,
    "dbo_decode_token_threshold": 1,
    "dbo_prefill_token_threshold": 1,
}
BALANCED = {
    "mesh": "pp=2,dp=2",
    "pp_layer_partition": "1,3",  # between layers that take turns
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
}

APART = {
    "attention_mesh": "dp=2",
    "expert_mesh": "ep=2",
    "enable_dbo": True,
    "dbo_decode_token_threshold": 1,
    "dbo_prefill_token_threshold": 1,
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    return one_devices(checkpoint)


@pytest.mark.parametrize(
    "options",
    [OVERLAPPED, BALANCED, APART],
    ids=["in two batches", "balanced in two stages", "balanced on devices apart, in two batches"],
)
def test_with_drafts_the_tokens_are_those_of_one_device(checkpoint, expected, options):
    llm = engine(checkpoint, **options, **DRAFTS)
    for _ in range(2):  # found in the cache the second time
        assert answers(llm, prompts()) == expected[0]
    if "enable_eplb" in options:
        assert llm.engine.core.statistics()["balance"].rebalances > 0
    llm.shutdown()


def test_pages_of_both_kinds_go_from_prefill_to_decode(checkpoint, expected):
    found, counts = handed_over(checkpoint, prefill_mesh="dp=1", decode_mesh="dp=1", **DRAFTS)
    assert found == expected[0]
    assert (counts.completed, counts.given_up) == (counts.asked, 0)
    assert counts.asked >= 4

"""What a decode step's parts have to read and multiply, in `tools/profile_step.py`."""

import pytest

from dsjax.config import load_config
from dsjax.model.parameter_counts import parameter_counts
from tools.profile_step import step_work


@pytest.mark.parametrize("model", ["demo", "deepseek-v3"])
def test_one_token_without_context_reads_and_multiplies_with_every_matrix_that_acts_on_it_once(model):
    config = load_config(model)
    counts = parameter_counts(config)
    norms = config.num_hidden_layers * (counts["layer_norms"] + config.q_lora_rank + config.kv_lora_rank)
    others = counts["embedding"] + norms + counts["final_norm"] + config.num_moe_layers * counts["router_bias"]
    work = step_work(config, rows=1, context=0)
    assert sum(multiplied for multiplied, _ in work.values()) == counts["active"] - others
    assert sum(read for _, read in work.values()) == pytest.approx(4 * (counts["active"] - others), rel=1e-9)


def test_a_context_adds_scores_and_values_of_every_head_and_reads_each_entry_once():
    config = load_config("demo")
    with_context, without = (step_work(config, rows=3, context=context)["attend"] for context in (100, 0))
    heads, rank, rope, layers = 8, 64, 16, 5
    assert with_context[0] - without[0] == layers * 3 * 100 * heads * (2 * rank + rope)
    assert with_context[1] - without[1] == layers * 3 * 100 * (rank + rope) * 4

"""Experts that follow the load on devices of their own: each slot holds what its table says. In other processes: `test_expert_process.py`.

These are the tests of `afd/expert_slots.py` too, and of experts' load as it is counted there.
"""

import numpy as np
import pytest
from balanced_model import assert_same, by_expert, generate, load, loads_of, move_all, slots_of
from layouts import prompts

from dsjax import LLM, SamplingParams

pytestmark = pytest.mark.slow  # all together

SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=4"}
PATHS = ("moe_layers.moe.experts.gate_up.weight", "moe_layers.moe.experts.down.weight")


@pytest.fixture(scope="module")
def one_mesh(checkpoint):
    """What two devices with everything make, the scores of a prompt, the loads that they count, and the experts by number."""
    llm = load(checkpoint, "dp=2")
    llm.executor.set_recording(True)
    made = generate(llm)
    loads, counts = loads_of(llm), llm.executor.expert_counts()
    yield made, scores(llm), loads, counts, experts(llm.executor.params, llm)
    llm.shutdown()


def scores(llm):
    """Log-probabilities of a prompt in chunks."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=2)
    (output,) = llm.generate(prompts()[-1:], params)
    return output.prompt_logprobs


def experts(params: dict, llm: LLM) -> dict[str, np.ndarray]:
    """Parameters by logical expert."""
    return {path: by_expert(params[path], slots_of(llm).physical_to_logical) for path in PATHS}


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = load(checkpoint, "dp=2", enable_prefix_caching=False, **SIDES)
    yield made
    made.shutdown()


def test_loads_are_those_of_one_mesh_and_experts_move_without_changing_a_token(llm, one_mesh):
    made, scored, loads, recorded, held = one_mesh
    loads_of(llm)
    llm.executor.set_recording(True)
    assert generate(llm) == made
    counted, counts = loads_of(llm), llm.executor.expert_counts()
    llm.executor.set_recording(False)
    np.testing.assert_array_equal(counted.logical, loads.logical)
    assert counted.by_rank.shape == (2, 4)
    np.testing.assert_array_equal(counts.logical_load, recorded.logical_load)
    assert counts.rounds > 0
    assert 0 < counts.padding_share < 1
    side = llm.executor.programs.experts
    assert_same(experts(side.params, llm), held)
    for seed in (1, 2):
        before = slots_of(llm).physical_to_logical
        move_all(llm, seed)
        assert (slots_of(llm).physical_to_logical != before).any()
        assert_same(experts(side.params, llm), held)
        assert generate(llm) == made
    np.testing.assert_array_equal(loads_of(llm).logical, 2 * loads.logical)
    assert scores(llm) == scored

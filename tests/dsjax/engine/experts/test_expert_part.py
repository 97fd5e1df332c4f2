"""Experts that follow the load on devices of their own: in this process and in others, each slot holds what its table says.

These are the tests of `afd/expert_slots.py` too, and of experts' load as it is counted there.
"""

import numpy as np
import pytest
from balanced_model import assert_same, by_expert, generate, load, loads_of, move, move_all, slots_of
from layouts import prompts
from processes import free_port

from dsjax import LLM, SamplingParams
from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs

pytestmark = pytest.mark.slow  # all together

SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=4"}
CONFIG = {"num_redundant_experts": 8, "window_size": 10**6, "step_interval": 10**6}
PATHS = ("moe_layers.moe.experts.gate_up.weight", "moe_layers.moe.experts.down.weight")


@pytest.fixture(scope="module")
def one_mesh(checkpoint):
    """What two devices with everything make, the scores of a prompt, the loads that they count, and the experts by number."""
    llm = load(checkpoint, "dp=2")
    llm.executor.set_recording(True)
    made = generate(llm)
    loads, counts = loads_of(llm), llm.executor.expert_counts()
    yield made, scores(llm), loads, counts, experts([llm.executor.params], llm)
    llm.shutdown()


def scores(llm):
    """Log-probabilities of a prompt in chunks."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=2)
    (output,) = llm.generate(prompts()[-1:], params)
    return output.prompt_logprobs


def experts(params: list[dict], llm: LLM) -> dict[str, np.ndarray]:
    """Parameters by logical expert, from the slots of one process after the other."""
    rows = slots_of(llm).physical_to_logical
    whole = {path: np.concatenate([np.asarray(one[path]) for one in params], axis=1) for path in PATHS}
    return {path: by_expert(array, rows) for path, array in whole.items()}


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
    assert_same(experts([side.params], llm), held)
    for seed in (1, 2):
        before = slots_of(llm).physical_to_logical
        move_all(llm, seed)
        assert (slots_of(llm).physical_to_logical != before).any()
        assert_same(experts([side.params], llm), held)
        assert generate(llm) == made
    np.testing.assert_array_equal(loads_of(llm).logical, 2 * loads.logical)
    assert scores(llm) == scored


def test_experts_move_between_processes_and_one_that_comes_back_has_them_where_they_are_now(checkpoint, one_mesh):
    made, *_, expected = one_mesh
    several = SIDES | {"afd_address": f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"}
    args = {"model": str(checkpoint), "dtype": "float32", "enable_eplb": True, "eplb_config": CONFIG, **several}
    start = lambda rank: load_experts(EngineArgs(**args, afd_role="expert", afd_server_rank=rank))  # noqa: E731
    processes = [start(0), start(1)]
    llm = load(checkpoint, "dp=2", afd_role="attention", **several)
    held = lambda: [process.side.params for process in processes]  # noqa: E731
    try:
        assert generate(llm) == made
        move_all(llm, 1)
        assert_same(experts(held(), llm), expected)
        assert generate(llm) == made
        processes[1].close()
        processes[1] = start(1)
        assert generate(llm) == made
        assert_same(experts(held(), llm), expected)
        row = np.roll(slots_of(llm).physical_to_logical[0], 7)
        assert not any(move(llm, 0, row))
        assert_same(experts(held(), llm), expected)
        assert generate(llm) == made
    finally:
        llm.shutdown()
        for process in processes:
            process.close()

"""Experts that are moved between steps, on one mesh or on devices of their own (in other processes: `test_expert_process.py`): every slot
holds what its table says, bit for bit, and what a request is told stays the same.

These are the tests of `experts/expert_part.py`, `device/expert_programs.py` and `afd/expert_slots.py` too, and of counted load.
"""

import balanced_model as model
import numpy as np
import pytest
from balanced_model import assert_same, generate, load, loads_of, move, move_all, slots_of
from layouts import TINY, prompts

from dsjax import LLM, SamplingParams
from dsjax.engine.device.expert_programs import pack_moves
from sharding.layer_placement import exchange_rounds

pytestmark = pytest.mark.slow  # all together

EXPERTS = TINY["n_routed_experts"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with load(checkpoint, "dp=4", dispatch="padded") as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm, kernels):
    return generate(llm)


def experts(llm: LLM) -> dict[str, np.ndarray]:
    rows = slots_of(llm).physical_to_logical
    return {
        path: model.by_expert(array, rows[-1:] if path.startswith("mtp.") else rows[: len(array)])
        for path, array in llm.executor.params.items()
        if ".experts." in path
    }


def test_a_ragged_exchange_of_the_plan_brings_each_expert_to_its_slot():
    """What a GPU does with it, by the documentation of `jax.lax.ragged_all_to_all`; the CPU gathers instead."""
    rng, ranks, per_rank, most = np.random.default_rng(3), 4, 6, 2
    old, new = (rng.permutation(np.concatenate([np.arange(16), rng.integers(0, 16, 8)])) for _ in range(2))
    staging = np.full((ranks, per_rank), -1)
    for moves in exchange_rounds(old, new, ranks=ranks, experts=most):
        plan = pack_moves(moves, ranks=ranks, per_rank=per_rank, experts=most)
        sends, (which, sent, lands) = plan[:, :most], np.split(plan[:, most:], 3, axis=1)
        operand = np.take_along_axis(old.reshape(ranks, per_rank), sends, axis=1)
        for source in range(ranks):
            for target in range(ranks):
                size, start, at = sent[source, target], which[source, target], lands[source, target]
                staging[target, at : at + size] = operand[source, start : start + size]
    changed = old != new
    np.testing.assert_array_equal(np.where(changed, staging.reshape(-1), old), new)
    assert (staging.reshape(-1)[~changed] == -1).all()


def test_every_slot_holds_the_expert_that_its_table_names(llm):
    before = experts(llm)
    for seed in range(3):
        move_all(llm, seed)
        assert_same(experts(llm), before)
        tables = llm.executor.state.copies
        for layer, row in enumerate(slots_of(llm).physical_to_logical):
            for expert in range(EXPERTS):
                copies = int(tables.copies_E[layer, expert])
                held = np.flatnonzero(row == expert)
                assert np.asarray(tables.physical_EC)[layer, expert, :copies].tolist() == held.tolist()


def test_loads_are_counted_under_the_placement_that_was_in_force(llm):
    windows = []
    for moved in (False, True):
        llm.engine.flush_prefix_cache()
        loads_of(llm)
        generate(llm)
        if moved:
            move_all(llm, 20)
        llm.engine.flush_prefix_cache()
        generate(llm)
        windows.append(loads_of(llm))
    tokens = sum(len(one["prompt_token_ids"]) + 11 for one in prompts())
    for window in windows:
        assert (window.logical.sum(axis=1) == 2 * TINY["num_experts_per_tok"] * tokens).all()
        assert (window.by_rank.sum(axis=1) == window.logical.sum(axis=1)).all()
        np.testing.assert_array_equal(window.logical, windows[0].logical)
    assert not loads_of(llm).logical.any()


@pytest.mark.parametrize(("program", "lost"), [("stage experts", 0), ("place experts", 0), ("place experts", 1)])
def test_a_layer_that_cannot_be_moved_is_as_it_was(llm, expected, monkeypatch, caplog, program, lost):
    before, slots = experts(llm), slots_of(llm).physical_to_logical
    row = model.random_row(np.random.default_rng(40), slots.shape[1])
    with monkeypatch.context() as patch:
        patch.setattr(llm.executor.programs, "get", model.failing_to(program, llm.executor.programs, lost))
        errors = move(llm, 1, row) if program == "place experts" else [next(model.stage(llm, 1, row))]
    assert errors[-1] == "RuntimeError: the device said no"
    assert ("read again from the checkpoint" in caplog.text) == bool(lost)
    np.testing.assert_array_equal(slots_of(llm).physical_to_logical, slots)
    assert_same(experts(llm), before)
    assert generate(llm) == expected
    assert not any(move(llm, 1, row))
    assert generate(llm) == expected


SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=4"}
PATHS = ("moe_layers.moe.experts.gate_up.weight", "moe_layers.moe.experts.down.weight")


def scores(llm):
    """Log-probabilities of a prompt in chunks."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=2)
    (output,) = llm.generate(prompts()[-1:], params)
    return output.prompt_logprobs


def by_number(params: dict, llm: LLM) -> dict[str, np.ndarray]:
    """Parameters by logical expert."""
    return {path: model.by_expert(params[path], slots_of(llm).physical_to_logical) for path in PATHS}


@pytest.fixture
def apart(checkpoint):
    with load(checkpoint, "dp=2", enable_prefix_caching=False, **SIDES) as made:
        yield made


def recorded(llm):
    """What an engine makes, and the loads that it counts meanwhile."""
    loads_of(llm)
    llm.executor.set_recording(True)
    made = generate(llm), loads_of(llm), llm.executor.expert_counts()
    llm.executor.set_recording(False)
    return made


def test_loads_are_those_of_one_mesh_and_experts_move_without_changing_a_token(checkpoint, apart):
    with load(checkpoint, "dp=2") as one_mesh:
        made, loads, expected = recorded(one_mesh)
        scored, held = scores(one_mesh), by_number(one_mesh.executor.params, one_mesh)
    found, counted, counts = recorded(apart)
    assert found == made
    np.testing.assert_array_equal(counted.logical, loads.logical)
    assert counted.by_rank.shape == (2, 4)
    np.testing.assert_array_equal(counts.logical_load, expected.logical_load)
    assert counts.rounds > 0
    assert 0 < counts.padding_share < 1
    side = apart.executor.programs.experts
    assert_same(by_number(side.params, apart), held)
    for seed in (1, 2):
        before = slots_of(apart).physical_to_logical
        move_all(apart, seed)
        assert (slots_of(apart).physical_to_logical != before).any()
        assert_same(by_number(side.params, apart), held)
        assert generate(apart) == made
    np.testing.assert_array_equal(loads_of(apart).logical, 2 * loads.logical)
    assert scores(apart) == scored

"""Experts that are moved between steps: every slot holds what its table says, bit for bit, and what a request is told stays the same.

These are the tests of `device/expert_programs.py` too.
"""

import logging

import numpy as np
import pytest
from balanced_model import assert_same, by_expert, failing_to, generate, load, move, move_all, random_row, slots_of
from layouts import TINY, prompts

from dsjax import LLM
from dsjax.engine.contract.commands import ReadLoads, StageExperts, int32s
from dsjax.engine.device.expert_programs import pack_moves
from sharding.layer_placement import exchange_rounds

pytestmark = pytest.mark.slow  # all together

EXPERTS = TINY["n_routed_experts"]


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = load(checkpoint, "dp=4", dispatch="padded")
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def expected(llm, kernels):
    return generate(llm)


def experts(llm: LLM) -> dict[str, np.ndarray]:
    rows = slots_of(llm).physical_to_logical
    params = {path: array for path, array in llm.executor.params.items() if ".experts." in path}
    return {
        path: by_expert(array, rows[-1:] if path.startswith("mtp.") else rows[: len(array)])
        for path, array in params.items()
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


def read_loads(llm: LLM):
    return llm.executor.collect(llm.executor.launch(ReadLoads()))


def test_loads_are_counted_under_the_placement_that_was_in_force(llm):
    windows = []
    for moved in (False, True):
        llm.engine.flush_prefix_cache()
        read_loads(llm)
        generate(llm)
        if moved:
            move_all(llm, 20)
        llm.engine.flush_prefix_cache()
        generate(llm)
        windows.append(read_loads(llm))
    tokens = sum(len(one["prompt_token_ids"]) + 11 for one in prompts())
    for window in windows:
        assert (window.logical.sum(axis=1) == 2 * TINY["num_experts_per_tok"] * tokens).all()
        assert (window.by_rank.sum(axis=1) == window.logical.sum(axis=1)).all()
        np.testing.assert_array_equal(window.logical, windows[0].logical)
    assert not read_loads(llm).logical.any()


@pytest.mark.parametrize(("program", "lost"), [("stage experts", 0), ("place experts", 0), ("place experts", 1)])
def test_a_layer_that_cannot_be_moved_is_as_it_was(llm, expected, monkeypatch, caplog, program, lost):
    before, slots = experts(llm), slots_of(llm).physical_to_logical
    row = random_row(np.random.default_rng(40), slots.shape[1])
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(llm.executor.programs, "get", failing_to(program, llm.executor.programs, lost))
        errors = move(llm, 1, row) if program == "place experts" else [stage_one(llm, row)]
    assert errors[-1] == "RuntimeError: the device said no"
    assert ("read again from the checkpoint" in caplog.text) == bool(lost)
    np.testing.assert_array_equal(slots_of(llm).physical_to_logical, slots)
    assert_same(experts(llm), before)
    assert generate(llm) == expected
    assert not any(move(llm, 1, row))
    assert generate(llm) == expected


def stage_one(llm: LLM, row: np.ndarray) -> str | None:
    slots = slots_of(llm)
    moves = next(exchange_rounds(slots.physical_to_logical[1], row, ranks=slots.ranks, experts=slots.per_exchange))
    command = StageExperts(1, int32s(int(slot) for pair in moves for slot in pair))
    return llm.executor.collect(llm.executor.launch(command)).error

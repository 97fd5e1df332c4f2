"""Experts that are moved between steps: every slot holds what its table says, bit for bit, and what a request is told stays the same.

These are the tests of `device/expert_programs.py` too.
"""

import logging

import jax
import numpy as np
import pytest
from balanced_model import generate, load, move, move_all, random_row
from drafting_checkpoint import write_drafting_checkpoint
from layouts import TINY, prompts, write_checkpoint

from dsjax import LLM
from dsjax.engine.contract.commands import ReadLoads, StageExperts, int32s
from dsjax.engine.device.expert_programs import pack_moves
from dsjax.engine.experts import expert_exchange
from dsjax.engine.experts.eplb import ExpertMover
from sharding.layer_placement import exchange_rounds

pytestmark = pytest.mark.slow  # all together

EXPERTS = TINY["n_routed_experts"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = load(checkpoint, "dp=8", dispatch="padded")
    yield made
    made.shutdown()


def experts(llm: LLM, path: str) -> np.ndarray:
    """A parameter's values by logical expert, from whichever slots have it; every copy must be the same."""
    array = np.asarray(llm.executor.params[path])
    rows = llm.executor.extension(ExpertMover).slots.physical_to_logical
    rows = rows[-1:] if path.startswith("mtp.") else rows[: len(array)]
    by_expert = np.zeros((len(array), EXPERTS, *array.shape[2:]), array.dtype)
    for layer, row in enumerate(rows):
        by_expert[layer, row] = array[layer]
        np.testing.assert_array_equal(by_expert[layer, row], array[layer])
    return by_expert


def test_the_balancer_is_told_the_hosts_of_a_copy_of_the_experts(llm, monkeypatch):
    mover = llm.executor.extension(ExpertMover)
    assert mover.slots.hosts == 1
    monkeypatch.setattr(expert_exchange, "hosts_of_experts", lambda devices, ranks: devices.size // ranks + 1)
    assert mover.slots.hosts == 2


def expert_paths(llm: LLM) -> list[str]:
    return [path for path in llm.executor.params if ".experts." in path]


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
    before = {path: experts(llm, path) for path in expert_paths(llm)}
    for seed in range(3):
        move_all(llm, seed)
        for path, values in before.items():
            np.testing.assert_array_equal(experts(llm, path), values)
        tables = llm.executor.state.copies
        for layer, row in enumerate(llm.executor.extension(ExpertMover).slots.physical_to_logical):
            for expert in range(EXPERTS):
                copies = int(tables.copies_E[layer, expert])
                held = np.flatnonzero(row == expert)
                assert np.asarray(tables.physical_EC)[layer, expert, :copies].tolist() == held.tolist()


def test_tokens_and_logits_stay_the_same_wherever_experts_are(llm, kernels):
    expected, (reference,) = generate(llm), llm.logits([prompts()[-1]["prompt_token_ids"]])
    for seed in (10, 11):
        move_all(llm, seed)
        llm.engine.flush_prefix_cache()
        assert generate(llm) == expected
        (logits,) = llm.logits([prompts()[-1]["prompt_token_ids"]])
        np.testing.assert_array_equal(logits, reference)


# And dp=4,tp=2, where they move while the engine serves: test_expert_balancer.py.
@pytest.mark.parametrize(("mesh", "dispatch"), [("dp=4,tp=2,ep=2", "gather"), ("dp=8,ep=4", "padded")])
def test_other_layouts_move_experts_too(llm, checkpoint, mesh, dispatch):
    other = load(checkpoint, mesh, dispatch=dispatch)
    try:
        expected = generate(llm)
        for seed in (1, 2):
            move_all(other, seed)
            assert generate(other) == expected
    finally:
        other.shutdown()


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


def test_moving_compiles_nothing_and_keeps_no_memory(llm):
    move_all(llm, 30)
    read_loads(llm)
    compiled, held = llm.executor.programs.compiled, live_bytes()
    for seed in (31, 32):
        move_all(llm, seed)
        read_loads(llm)
    assert llm.executor.programs.compiled == compiled
    assert live_bytes() == held


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def failing(llm: LLM, program: str, monkeypatch, lost: int) -> None:
    """The named program fails from now on, and takes its first `lost` arguments with it."""

    def fail(*arguments):
        for array in jax.tree.leaves(arguments[:lost]):
            array.delete()
        raise RuntimeError("the device said no")

    monkeypatch.setattr(llm.executor.programs, program, lambda layers: fail)


@pytest.mark.parametrize(("program", "lost"), [("stage_experts", 0), ("place_experts", 0), ("place_experts", 1)])
def test_a_layer_that_cannot_be_moved_is_as_it_was(llm, monkeypatch, caplog, program, lost):
    before = {path: experts(llm, path) for path in expert_paths(llm)}
    expected, slots = generate(llm), llm.executor.extension(ExpertMover).slots.physical_to_logical
    row = random_row(np.random.default_rng(40), slots.shape[1])
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        failing(llm, program, patch, lost)
        errors = move(llm, 1, row) if program == "place_experts" else [stage_one(llm, row)]
    assert errors[-1] == "RuntimeError: the device said no"
    assert ("read again from the checkpoint" in caplog.text) == bool(lost)
    np.testing.assert_array_equal(llm.executor.extension(ExpertMover).slots.physical_to_logical, slots)
    for path, values in before.items():
        np.testing.assert_array_equal(experts(llm, path), values)
    assert generate(llm) == expected
    assert not any(move(llm, 1, row))
    assert generate(llm) == expected


def stage_one(llm: LLM, row: np.ndarray) -> str | None:
    slots = llm.executor.extension(ExpertMover).slots
    moves = next(exchange_rounds(slots.physical_to_logical[1], row, ranks=slots.ranks, experts=slots.per_exchange))
    command = StageExperts(1, int32s(int(slot) for pair in moves for slot in pair))
    return llm.executor.collect(llm.executor.launch(command)).error


@pytest.mark.slow
def test_the_modules_experts_and_fp8_with_their_scales_move_alike(tmp_path):
    directory = write_drafting_checkpoint(tmp_path)
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    llm = load(directory, "dp=4", dispatch="padded", weights="fp8", speculative_config=speculation)
    try:
        before = {path: experts(llm, path) for path in expert_paths(llm)}
        assert any(path.startswith("mtp.") for path in before)
        assert any(path.endswith(".scale") for path in before)
        expected = generate(llm)
        read_loads(llm)
        move_all(llm, 50)
        for path, values in before.items():
            np.testing.assert_array_equal(experts(llm, path), values)
        llm.engine.flush_prefix_cache()
        assert generate(llm) == expected
        assert (read_loads(llm).logical.sum(axis=1) > 0).all()
    finally:
        llm.shutdown()

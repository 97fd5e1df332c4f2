"""Experts that follow the load on devices of their own: in this process and in others, each slot holds what its table says.

These are the tests of `afd/expert_slots.py` and `afd/expert_peers.py`, and of experts' load as it is counted there.
"""

import socket

import numpy as np
import pytest
from balanced_model import generate, load, move, move_all
from layouts import TINY, write_checkpoint

from dsjax import LLM
from dsjax.engine.contract.commands import ReadLoads
from dsjax.engine.expert_process import load_experts
from dsjax.engine.experts.eplb import ExpertMover
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.setup.args import EngineArgs

pytestmark = pytest.mark.slow  # all together

SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=4"}
CONFIG = {"num_redundant_experts": 8, "window_size": 10**6, "step_interval": 10**6}
PATHS = ("moe_layers.moe.experts.gate_up.weight", "moe_layers.moe.experts.down.weight")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def one_mesh(checkpoint):
    """What two devices with everything make, the loads that they count, and the experts by number."""
    llm = load(checkpoint, "dp=2")
    llm.executor.set_recording(True)
    made = generate(llm)
    loads, counts = read_loads(llm), llm.executor.expert_counts()
    yield made, loads, counts, by_expert([llm.executor.params], llm)
    llm.shutdown()


def read_loads(llm):
    return llm.executor.collect(llm.executor.launch(ReadLoads()))


def by_expert(params: list[dict], llm: LLM) -> dict[str, np.ndarray]:
    """Parameters by logical expert, from the slots of one process after the other; all copies must be the same."""
    rows, found = llm.executor.extension(ExpertMover).slots.physical_to_logical, {}
    for path in PATHS:
        slots = np.concatenate([np.asarray(one[path]) for one in params], axis=1)
        found[path] = np.zeros((len(slots), TINY["n_routed_experts"], *slots.shape[2:]), slots.dtype)
        for layer, row in enumerate(rows):
            found[path][layer, row] = slots[layer]
            np.testing.assert_array_equal(found[path][layer, row], slots[layer])
    return found


def assert_same(found, expected):
    for path in PATHS:
        np.testing.assert_array_equal(found[path], expected[path])


def test_loads_are_those_of_one_mesh_and_experts_move_without_changing_a_token(checkpoint, one_mesh):
    made, loads, recorded, experts = one_mesh
    llm = load(checkpoint, "dp=2", enable_prefix_caching=False, **SIDES)
    try:
        llm.executor.set_recording(True)
        assert generate(llm) == made
        counted, counts = read_loads(llm), llm.executor.expert_counts()
        np.testing.assert_array_equal(counted.logical, loads.logical)
        assert counted.by_rank.shape == (2, 4)
        np.testing.assert_array_equal(counts.logical_load, recorded.logical_load)
        assert counts.rounds > 0
        assert 0 < counts.padding_share < 1
        side = llm.executor.device.model.apart
        assert_same(by_expert([side.params], llm), experts)
        for seed in (1, 2):
            before = llm.executor.extension(ExpertMover).slots.physical_to_logical
            move_all(llm, seed)
            assert (llm.executor.extension(ExpertMover).slots.physical_to_logical != before).any()
            assert_same(by_expert([side.params], llm), experts)
            assert generate(llm) == made
        np.testing.assert_array_equal(read_loads(llm).logical, 2 * loads.logical)
    finally:
        llm.shutdown()


def test_a_rebalance_makes_the_predicted_loads_true(checkpoint, one_mesh):
    llm = load(checkpoint, "dp=2", enable_prefix_caching=False, **SIDES)
    try:
        made = generate(llm)
        balancer = llm.engine.core.part(ExpertBalancer)
        before = balancer.rebalance_now()["balancedness"]
        assert before["after"] > before["before"]
        assert generate(llm) == made == one_mesh[0]
        assert not balancer.busy
        read_loads(llm)  # in part before experts had moved
        assert generate(llm) == made
        window = read_loads(llm)
        found = window.by_rank.mean(axis=1).sum() / window.by_rank.max(axis=1).sum()
        assert found > before["before"]
        assert found == pytest.approx(before["after"], abs=0.03)  # copies take turns, and have no equal loads
        assert balancer.stats.rebalances == 1
    finally:
        llm.shutdown()


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_experts_move_between_processes_and_one_that_comes_back_has_them_where_they_are_now(
    checkpoint, one_mesh, monkeypatch
):
    made, _, _, experts = one_mesh
    several = SIDES | {"afd_address": f"{free_address()},{free_address()}"}
    args = {"model": str(checkpoint), "dtype": "float32", "enable_eplb": True, "eplb_config": CONFIG, **several}
    start = lambda rank: load_experts(EngineArgs(**args, afd_role="expert", afd_server_rank=rank))  # noqa: E731
    processes = [start(0), start(1)]
    llm = load(checkpoint, "dp=2", afd_role="attention", **several)
    held = lambda: [process.side.params for process in processes]  # noqa: E731
    try:
        assert generate(llm) == made
        asked = []
        for process in processes:
            original = process._peers.fetch
            monkeypatch.setattr(
                process._peers, "fetch", lambda *a, original=original: asked.append(found := original(*a)) or found
            )
        reads = [read_nothing(process, monkeypatch) for process in processes]
        move_all(llm, 1)
        assert reads == [[], []]  # from the checkpoint; each took what it lacked from the other
        assert all(asked)
        assert_same(by_expert(held(), llm), experts)
        assert generate(llm) == made
        processes[1].close()
        processes[1] = start(1)
        assert generate(llm) == made
        assert_same(by_expert(held(), llm), experts)
        row = np.roll(llm.executor.extension(ExpertMover).slots.physical_to_logical[0], 7)
        monkeypatch.setattr(processes[0]._peers, "fetch", lambda *_: {})  # as where the other gives none
        assert not any(move(llm, 0, row))
        assert_same(by_expert(held(), llm), experts)
        assert generate(llm) == made
    finally:
        llm.shutdown()
        for process in processes:
            process.close()


def read_nothing(process, monkeypatch) -> list:
    """Writes down what a process reads from the checkpoint."""
    read, original = [], process._writer._read
    monkeypatch.setattr(process._writer, "_read", lambda *cell: read.append(cell) or original(*cell))
    return read

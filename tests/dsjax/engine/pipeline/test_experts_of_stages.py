"""Experts that follow the load at each stage: tokens are those of one device, and all that a server says of it is of all stages together.

The model has one dense layer, four with experts, and the MTP module; the first of three stages has the dense layer alone. What goes from
one stage to the next while experts move is that of `pipeline/pending_stages.py`.
"""

import jax
import numpy as np
import pytest
from balanced_model import generate, load, move, random_row
from layouts import TINY, answer, difference, prompts, write_checkpoint

from dsjax.engine.contract.commands import ReadLoads
from dsjax.engine.experts.eplb import ExpertMover
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.experts.expert_exchange import expert_share

pytestmark = pytest.mark.slow  # all together

DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
STAGES = {"mesh": "pp=3,dp=2", "pp_layer_partition": "1,2,2"}
OFTEN = {"window_size": 4, "step_interval": 4, "payback": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("stages"), mtp=True, num_hidden_layers=5)


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = load(checkpoint, **STAGES, eplb=OFTEN, dispatch="padded", **DRAFTS)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def one_device(checkpoint, kernels):
    return answer(checkpoint, "dp=1", "auto", "CC", "CC", new_tokens=24)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=3,dp=2", DRAFTS | {"pp_layer_partition": "1,2,2"}),
        ("pp=2,dp=2,tp=2", {"mixed": True, "async_scheduling": False}),
    ],
)
def test_experts_that_move_at_every_stage_change_no_bit_of_what_one_device_gives(checkpoint, one_device, mesh, options):
    eplb = OFTEN | {"num_redundant_experts": 4}
    found = answer(checkpoint, mesh, "padded", "CC", "CC", enable_eplb=True, eplb_config=eplb, new_tokens=24, **options)
    assert found.exact
    assert difference(found, one_device) is None
    assert found.rebalances >= 2


def slots_of(llm):
    return llm.executor.extension(ExpertMover).slots


def by_expert(llm):
    """Give the parameters of each stage's experts by logical expert, from whichever slots have them; every copy must be the same."""
    found, first = [], 0
    rows = slots_of(llm).physical_to_logical
    for stage in llm.executor.stages:
        for path in sorted(path for path in stage.params if ".experts." in path):
            array = np.asarray(stage.params[path])
            own = rows[-1:] if path.startswith("mtp.") else rows[first : first + len(array)]
            values = np.zeros((len(array), TINY["n_routed_experts"], *array.shape[2:]), array.dtype)
            for layer, row in enumerate(own):
                values[layer, row] = array[layer]
                np.testing.assert_array_equal(values[layer, row], array[layer])
            found.append((path, values))
        first += stage.model.config.num_moe_layers
    return found


def same(found, expected):
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (_, values), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(values, others)


def test_a_layers_experts_move_at_the_stage_that_has_it_and_nowhere_else(llm):
    before, rng = by_expert(llm), np.random.default_rng(3)
    assert {path.partition(".")[0] for path, _ in before} == {"moe_layers", "mtp"}
    assert slots_of(llm).physical_to_logical.shape == (5, TINY["n_routed_experts"] + 8)
    for layer in range(5):
        placed = slots_of(llm).physical_to_logical
        row = random_row(rng, placed.shape[1])
        assert not any(move(llm, layer, row))
        np.testing.assert_array_equal(slots_of(llm).physical_to_logical, [*placed[:layer], row, *placed[layer + 1 :]])
        same(by_expert(llm), before)


def test_loads_are_of_all_stages_layers(llm):
    llm.executor.collect(llm.executor.launch(ReadLoads()))
    llm.engine.flush_prefix_cache()
    generate(llm, 1)  # of which nothing is drafted
    window = llm.executor.collect(llm.executor.launch(ReadLoads()))
    tokens = sum(len(one["prompt_token_ids"]) for one in prompts())
    assert window.logical.shape == (5, TINY["n_routed_experts"])
    assert (window.logical[:4].sum(axis=1) == TINY["num_experts_per_tok"] * tokens).all()
    np.testing.assert_array_equal(window.by_rank.sum(axis=1), window.logical.sum(axis=1))


def test_a_layer_whose_stage_fails_is_as_it_was_and_its_experts_are_read_again(llm, monkeypatch):
    before, placed = by_expert(llm), slots_of(llm).physical_to_logical
    first, second = llm.executor.stages[1:]

    def fail(*arguments):
        for array in jax.tree.leaves(arguments[:1]):
            array.delete()
        raise RuntimeError("the device said no")

    row = random_row(np.random.default_rng(4), placed.shape[1])
    with monkeypatch.context() as patch:
        patch.setattr(first.programs, "place_experts", lambda layers: fail)
        assert not any(move(llm, 2, row))
        assert move(llm, 1, row)[-1] == "RuntimeError: the device said no"
        patch.undo()
        patch.setattr(second.programs, "place_experts", lambda layers: fail)
        assert move(llm, 4, row)[-1] == "RuntimeError: the device said no"  # the MTP module's
    np.testing.assert_array_equal(slots_of(llm).physical_to_logical, [*placed[:2], row, *placed[3:]])
    same(by_expert(llm), before)


def test_an_idle_engine_carries_a_rebalance_through_all_stages(llm):
    llm.engine.flush_prefix_cache()
    generate(llm, 6)
    balancer, before = llm.engine.core.part(ExpertBalancer), slots_of(llm).physical_to_logical
    done = balancer.stats
    asked = balancer.rebalance_now()
    while llm.engine.has_unfinished():
        llm.engine.step()
    changed = (slots_of(llm).physical_to_logical != before).any(axis=1)
    assert changed[:2].any()
    assert changed[2:].any()
    assert changed.sum() == asked["layers"]
    assert balancer.stats.layers_changed - done.layers_changed == asked["layers"]
    assert balancer.stats.rebalances == done.rebalances + 1
    assert balancer.stats.failures == done.failures


def test_an_exchange_is_taken_to_cost_what_it_costs_at_the_slowest_stage(llm):
    assert slots_of(llm).seconds is None
    llm.warm_up()
    each = [stage.extension(ExpertMover) for stage in llm.executor.stages]
    assert each[0] is None
    seconds = np.array([mover.slots.seconds for mover in each[1:]])
    assert slots_of(llm).seconds == tuple(seconds.max(axis=0))
    assert slots_of(llm).expert_share == expert_share(llm.config)
    generate(llm)
    assert llm.executor.counts().compilations_after_warm_up == 0

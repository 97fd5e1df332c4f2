"""`ExpertsOfStages` in `pipeline/pipeline_executor.py`: experts follow the load at each stage, and tokens stay one device's."""

import dataclasses

import balanced_model
import numpy as np
import pytest
from balanced_model import assert_same, experts_stay, failing_to, generate, loads_of, move, random_row, slots_of
from layouts import TINY, answer, prompts
from test_pipeline_executor import assert_same_answer

from dsjax import SamplingParams
from dsjax.engine.experts.eplb import ExpertMover
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.experts.expert_part import expert_share

pytestmark = pytest.mark.slow  # all together

LAYERS = 3
"""Two with experts, and the MTP module's."""


@pytest.fixture(scope="module")
def llm(checkpoint):
    """Three stages: the dense layer, a layer with experts, and another one with the MTP module behind it.

    Drafts, and a cache that is too small for all requests of `generate` at a time.
    """
    options = {"mla_prefill": "CC", "mla_decode": "CC", "dispatch": "padded", "cache_tokens": 76}
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    made = balanced_model.load(checkpoint, "pp=3,dp=2", eplb=balanced_model.OFTEN, **drafts, **options)
    yield made
    made.shutdown()


def test_experts_that_move_at_every_stage_change_no_bit_of_what_one_device_gives(checkpoint, llm, kernels):
    expected = answer(checkpoint, "dp=1", "auto", "CC", "CC", new_tokens=12, every_token=False)
    balancer = llm.engine.core.part(ExpertBalancer)
    assert_same_answer(generate(llm), expected)
    assert balancer.statistics().rebalances >= 2
    assert any(rank.num_preemptions for rank in llm.engine.core.scheduler.ranks)
    assert balancer.load()[-1].any(), "the MTP module's experts have loads too"


def experts(llm):
    found, first, rows = {}, 0, slots_of(llm).physical_to_logical
    for number, stage in enumerate(llm.executor.stages):
        layers = stage.model.config.num_moe_layers
        for path in (path for path in stage.params if ".experts." in path):
            own = rows[-1:] if path.startswith("mtp.") else rows[first : first + layers]
            found[f"{number} {path}"] = balanced_model.by_expert(stage.params[path], own)
        first += layers
    return found


def test_a_layers_experts_move_at_the_stage_that_has_it_and_nowhere_else(llm):
    before, rng = experts(llm), np.random.default_rng(3)
    assert {path.partition(".")[0] for path in before} == {"1 moe_layers", "2 moe_layers", "2 mtp"}
    assert slots_of(llm).physical_to_logical.shape == (LAYERS, TINY["n_routed_experts"] + 8)
    for layer in range(LAYERS):
        placed = slots_of(llm).physical_to_logical
        row = random_row(rng, placed.shape[1])
        assert not any(move(llm, layer, row))
        np.testing.assert_array_equal(slots_of(llm).physical_to_logical, [*placed[:layer], row, *placed[layer + 1 :]])
        assert_same(experts(llm), before)


def test_loads_are_of_all_stages_layers(llm):
    llm.engine.flush_prefix_cache()
    with experts_stay(llm):
        loads_of(llm)
        generate(llm, 1)  # of which nothing is drafted
        window = loads_of(llm)
    tokens = sum(len(one["prompt_token_ids"]) for one in prompts())
    assert window.logical.shape == (LAYERS, TINY["n_routed_experts"])
    assert (window.logical[:-1].sum(axis=1) == TINY["num_experts_per_tok"] * tokens).all()
    np.testing.assert_array_equal(window.by_rank.sum(axis=1), window.logical.sum(axis=1))


def test_a_layer_whose_stage_fails_is_as_it_was_and_its_experts_are_read_again(llm, monkeypatch):
    before, placed = experts(llm), slots_of(llm).physical_to_logical
    first, second = llm.executor.stages[1:]
    row = random_row(np.random.default_rng(4), placed.shape[1])
    with monkeypatch.context() as patch:
        patch.setattr(first.programs, "get", failing_to("place experts", first.programs, lost=1))
        assert not any(move(llm, 1, row))
        assert move(llm, 0, row)[-1] == "RuntimeError: the device said no"
        patch.undo()
        patch.setattr(second.programs, "get", failing_to("place experts", second.programs, lost=1))
        assert move(llm, 2, row)[-1] == "RuntimeError: the device said no"  # the MTP module's
    np.testing.assert_array_equal(slots_of(llm).physical_to_logical, [placed[0], row, placed[2]])
    assert_same(experts(llm), before)


def test_an_idle_engine_carries_a_rebalance_through_all_stages(llm):
    balancer = llm.engine.core.part(ExpertBalancer)
    with experts_stay(llm):
        generate(llm, 6)
        window = loads_of(llm)
        for layer, load in enumerate(window.logical):
            busiest_first = np.argsort(-load)
            assert not any(move(llm, layer, np.concatenate([busiest_first, busiest_first[24:]])))
    balancer._windows.append(window)
    before, done = slots_of(llm).physical_to_logical, balancer.statistics()
    asked = balancer.rebalance_now()
    while llm.engine.has_unfinished():
        llm.engine.step()
    changed = (slots_of(llm).physical_to_logical != before).any(axis=1)
    assert changed.all()
    assert balancer.statistics().layers_changed - done.layers_changed == asked["layers"] == LAYERS
    assert balancer.statistics().rebalances == done.rebalances + 1
    assert balancer.statistics().failures == done.failures


def test_warm_up_compiles_all_that_requests_can_ask_for_and_times_an_exchange_at_the_slowest_stage(llm):
    seen = []
    llm.warm_up(lambda done, total, label: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    each = [stage.extension(ExpertMover) for stage in llm.executor.stages]
    assert each[0] is None
    seconds = np.array([mover.slots.seconds for mover in each[1:]])
    assert slots_of(llm).seconds == tuple(seconds.max(axis=0))
    assert slots_of(llm).expert_share == expert_share(llm.config)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    sampled = dataclasses.replace(greedy, temperature=1.0, logprobs=1, prompt_logprobs=1)
    llm.generate(prompts()[:2], [greedy, sampled])
    assert llm.executor.counts().compilations_after_warm_up == 0

"""Prompts beside decodes, where replicas that get theirs one by one wait for each other; and which MLA form computes them."""

import dataclasses

import numpy as np
import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.plan.engine import PUBLISHED
from dsjax.plan.figure import spread
from dsjax.plan.prompts import _added, _fullest, prompts_beside_decodes
from dsjax.plan.recipe import serve_options
from dsjax.plan.simulation.service import StepPrices
from dsjax.plan.step import RankWork
from dsjax.plan.workload import PlanOptions

CACHED = 60_000


@pytest.fixture
def priced(instance):
    def make(mesh, prompt=1024, eager=True, drafts=0):
        options = PlanOptions(overlap="off", engine=dataclasses.replace(PUBLISHED, eager=eager), drafts=drafts)
        return instance(mesh, prompt=prompt, output=2048, options=options)

    return make


@pytest.mark.parametrize(("mean", "ranks"), [(0.05, 1), (3.0, 8), (60.0, 8), (200.0, 32)])
def test_the_fullest_replica_is_that_of_a_poisson_number_spread_evenly(mean, ranks):
    drawn = np.random.default_rng(0).poisson(mean, 400_000)
    # Three standard errors of 400,000 draws are below 1 % of these means; rounding up is approximate above a mean of 30.
    assert _fullest(mean, ranks) == pytest.approx(np.ceil(drawn / ranks).mean(), rel=0.02)
    assert _fullest(mean, ranks, 1) == pytest.approx(np.ceil((1 + drawn) / ranks).mean(), rel=0.02)


def test_more_requests_or_longer_prompts_never_make_a_token_wait_less(priced):
    wide, batches = priced("dp=8"), (1, 8, 64, 256, 1024)
    for tokens in (1024, 8192):
        times = [wide.decode_step(batch) + prompts_beside_decodes(wide, batch, tokens)[0] for batch in batches]
        assert times == sorted(times)
    longer = [prompts_beside_decodes(priced("dp=8", prompt), 64, 4096)[0] for prompt in (256, 1024, 4096, 16384)]
    assert longer == sorted(longer)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_with_prompts_and_drafts_costs_what_the_simulation_says(priced, drafts):
    one, batch = priced("dp=8", 1000, eager=False, drafts=drafts), 64
    model, context = one.step_models()[0], round(one.workload.context)
    prices, decodes = StepPrices([model], drafts), RankWork(decodes=batch, context=batch * context)
    work = decodes._replace(prompts=1000, pairs=1000 * 500.5)
    # The planner's own 3 % for uneven prompts is left out of the simulation.
    added = _added(one, batch, 1000.0, 1.0)
    assert one.decode_step(batch) + added == pytest.approx(prices.seconds([work] * 8), rel=0.05)


def test_prompts_never_make_a_step_shorter(priced):
    one = priced("tp=8,ep=1", 64, eager=False, drafts=16)
    waited, added = spread(lambda: prompts_beside_decodes(one.on(one.cluster, {}), 512, 64))
    assert min(waited, added, waited.low, added.low) >= 0


def test_a_few_new_tokens_behind_a_long_prefix_are_absorbed_and_many_are_not(instance):
    (model, *_) = instance("tp=8,ep=1").step_models()
    asked = [*((new, CACHED) for new in (1, 16, 128, 1024)), (16, 0)]
    absorbed = [model.absorbs(new, cached, cached + (new + 1) / 2) for new, cached in asked]
    assert absorbed == [True, True, False, False, False]


@pytest.mark.parametrize(("hit", "absorbed"), [(0.9998, True), (0.5, False), (0.0, False)])
def test_the_recipe_says_which(instance, hit, absorbed):
    options = serve_options("deepseek-v3", instance("tp=8,ep=1", prompt=CACHED, prefix_hit=hit), 4, 4096)
    assert options.get("--mla-prefill") == (EngineArgs.mla_decode if absorbed else None)

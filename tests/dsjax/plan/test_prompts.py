"""Prompts beside decodes: replicas that get theirs one by one wait for each other."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest

from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import PUBLISHED
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.prompts import _added, _depth_of_one, _steps_with_prompts, prompts_beside_decodes
from dsjax.plan.simulation.prices import RankWork, StepPrices
from dsjax.plan.workload import Lengths, PlanOptions, Workload


@pytest.fixture
def instance(v3):
    def make(mesh, prompt=1024, output=2048, eager=True, drafts=0):
        layout, engine = parse_layout(mesh, 0, v3), dataclasses.replace(PUBLISHED, eager=eager)
        options = PlanOptions(overlap="off", engine=engine, drafts=drafts)
        return Instance(v3, load_cluster("h200-8"), layout, options, Workload(Lengths(prompt), Lengths(output)))

    return make


@pytest.mark.parametrize(
    ("mean", "ranks"), [(0.05, 1), (0.5, 8), (3.0, 8), (25.0, 8), (60.0, 8), (200.0, 32), (40.0, 1)]
)
def test_the_fullest_replica_is_that_of_a_poisson_number_spread_evenly(mean, ranks):
    drawn = np.random.default_rng(0).poisson(mean, 400_000)
    depth = np.ceil(drawn[drawn > 0] / ranks)
    share, deepest = _steps_with_prompts(mean, ranks)
    # Three standard errors of 400,000 draws are below 1 % of these means; rounding up is approximate above a mean of 30.
    assert share == pytest.approx(np.mean(drawn > 0), rel=0.02)
    assert deepest == pytest.approx(depth.mean(), rel=0.02)


def test_one_replica_pays_for_each_prompt_as_it_comes(instance):
    alone = instance(
        "tp=8,ep=1", eager=False
    )  # with eager launches the decodes of a step fit into what the prompt's launches leave
    added, step = prompts_beside_decodes(alone, 64, 1024)
    # 64 requests of 2,048 tokens: one prompt in 32 steps.
    assert added.value == pytest.approx(step.value / 32, rel=0.02)
    # The step reads the weights once for both: longer than the prompt alone, shorter than one after the other.
    both = step.value + alone.decode_step(64).value
    assert alone.prefill_step(1024.0).value < both < alone.prefill_step(1024.0).value + alone.decode_step(64).value


def test_what_prompts_do_for_decodes_is_all_but_attending_and_a_token_more_each(instance):
    one = instance("tp=8,ep=1", 8192, eager=False)
    step = one.prefill_step(8192.0).value
    added = prompts_beside_decodes(one, 8, 8192)[1].value
    saved = one.decode_step(8).value - one.decode_attention(8).value
    assert step - saved < added < step - saved + step * 8 / 8192


@pytest.mark.parametrize(("prompt", "batch"), [(64, 64), (256, 256), (1024, 8), (4096, 64)])
def test_decodes_beside_a_short_prompt_read_its_weights_and_no_others(instance, prompt, batch):
    one = instance("tp=8,ep=1", prompt, eager=False)
    context = round(one.workload.context)
    work = RankWork(decodes=batch, context=batch * context, prompts=prompt, pairs=prompt * (prompt + 1) / 2)
    played = StepPrices(one.step_models()[0], 8192).seconds([work])
    added = _added(one.middle, batch, float(prompt), (1.0, 1.0, 0.0)).value
    assert one.decode_step(batch).value + added == pytest.approx(played, rel=0.06)


def test_decodes_fill_what_a_short_prompt_waits_for_launches(instance):
    eager, compiled = (instance("tp=8,ep=1", 256, eager=e) for e in (True, False))
    steps = [prompts_beside_decodes(one, 64, 256)[1].value + one.decode_step(64).value for one in (eager, compiled)]
    # The kernels of both take as long to be started as those of the prompt alone.
    assert steps[0] == pytest.approx(eager.prefill_step(256.0).value, rel=0.01)
    assert steps[1] < steps[0]


def test_a_prompt_of_a_closed_loop_comes_with_those_of_the_same_step():
    drawn = np.random.default_rng(0).poisson(3.0, 400_000)
    assert _depth_of_one(3.0, 8) == pytest.approx(np.ceil((1 + drawn) / 8).mean(), rel=0.01)
    assert _depth_of_one(0.0, 8) == 1
    assert _depth_of_one(60.0, 8) == pytest.approx(
        np.ceil((61 + np.random.default_rng(0).normal(0, 8, 10_000)) / 8).mean(), rel=0.02
    )


def test_eight_replicas_wait_for_a_prompt_of_one(instance):
    wide = instance("dp=8")
    added, step = prompts_beside_decodes(wide, 128, 8192)
    # 1,024 requests of 2,048 tokens: half a prompt a step, so that 39 % of the steps have one, mostly on one replica.
    assert added.value == pytest.approx(-math.expm1(-0.5) * step.value, rel=0.01)
    together = wide.prompt_seconds(8192).value * 128 / 2048
    assert added.value > 2 * together
    assert added.low <= together
    # An eighth of the ranks computes: less for its experts than with all ranks busy.
    assert wide.prefill_step(1024.0, 1 / 8).value < wide.prefill_step(1024.0).value


def test_more_requests_or_longer_prompts_never_make_a_token_wait_less(instance):
    wide = instance("dp=8")
    for tokens in (1024, 8192):
        times = [
            wide.decode_step(batch).value + prompts_beside_decodes(wide, batch, tokens)[0].value
            for batch in (1, 8, 64, 256, 1024)
        ]
        assert all(a <= b for a, b in pairwise(times))
    longer = [
        prompts_beside_decodes(instance("dp=8", prompt), 64, 4096)[0].value for prompt in (256, 1024, 4096, 16384)
    ]
    assert longer == sorted(longer)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_with_prompts_and_drafts_costs_what_the_simulation_says(instance, drafts):
    one, batch = instance("dp=8", 1000, eager=False, drafts=drafts), 64
    model, context = one.step_models()[0], round(one.workload.context)
    prices, decodes = (
        StepPrices(model, 2048, drafts, module=drafts > 0),
        RankWork(decodes=batch, context=batch * context),
    )
    assert prices.seconds([decodes] * 8) == pytest.approx(model.decode(batch, context, drafts=drafts).value, rel=0.01)
    work = dataclasses.replace(decodes, prompts=1000, pairs=1000 * 500.5)
    # The planner's own 3 % for uneven prompts is left out of the simulation.
    added = _added(one.middle, batch, 1000.0, (1.0, 1.0, 0.0)).value
    assert one.decode_step(batch).value + added == pytest.approx(prices.seconds([work] * 8), rel=0.05)


def test_prompts_never_make_a_step_shorter(instance):
    one = instance("tp=8,ep=1", 64, eager=False, drafts=16)
    assert prompts_beside_decodes(one, 512, 64)[1].low >= 0
    assert prompts_beside_decodes(one, 512, 64)[0].value >= 0

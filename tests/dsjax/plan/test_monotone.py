"""More of a resource, a looser objective, a shorter prompt: never worse, over steps on every bundled cluster and over the search."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_models import step_model

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated, prefill_pool, recompute, separated, with_intervals
from dsjax.plan.cluster import RESOURCES, bundled_clusters, load_cluster
from dsjax.plan.figure import spread
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import named_precision
from dsjax.plan.question import Question
from dsjax.plan.search import search
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload

CONFIG, H200 = load_config("deepseek-v3"), load_cluster("h200-8")
# Rounding of sums of some hundred floats: the only slack of this page.
ROUNDING = 1 + 1e-9
PRECISIONS = {
    "fp8": named_precision("fp8"),
    "fp8 with its cache": named_precision("fp8", "fp8"),
    "bf16": named_precision("bf16"),
}
MESHES = ["dp=8", "tp=8", "tp=8,ep=1", "dp=2,tp=4"]
CLUSTER, MESH, NUMBERS = (st.sampled_from(every) for every in (bundled_clusters(), MESHES, sorted(PRECISIONS)))
BATCH, CONTEXT = st.integers(1, 512), st.integers(64, 60_000)


def model(cluster, mesh, numbers, overlap=False):
    return step_model(CONFIG, cluster, parse_layout(mesh, None, CONFIG), PRECISIONS[numbers], overlap=overlap)


@settings(max_examples=50)
@given(CLUSTER, MESH, NUMBERS, BATCH, CONTEXT, st.sampled_from(RESOURCES), st.floats(1.0, 8.0), st.booleans())
def test_more_of_a_resource_makes_no_step_slower(cluster, mesh, numbers, batch, context, resource, factor, overlap):
    before = load_cluster(cluster)
    now, more = (model(c, mesh, numbers, overlap) for c in (before, before.scaled(resource, factor)))
    assert more.decode(batch, context) <= now.decode(batch, context) * ROUNDING
    tokens = max(batch * 16, 64)
    assert more.prefill(tokens, prompt=context) <= now.prefill(tokens, prompt=context) * ROUNDING


@settings(max_examples=50)
@given(CLUSTER, MESH, NUMBERS, BATCH, CONTEXT, st.floats(1.0, 3.0), st.floats(0.0, 1.0))
def test_fewer_requests_and_shorter_contexts_make_no_step_slower(cluster, mesh, numbers, batch, context, factor, cv):
    step = model(load_cluster(cluster), mesh, numbers)
    now = step.decode(batch, context, uneven=cv)
    assert now <= step.decode(batch * factor, context, uneven=cv) * ROUNDING
    assert now <= step.decode(batch, context * factor, uneven=cv) * ROUNDING
    prompts = step.prefill(8192, prompt=context)
    assert prompts <= step.prefill(8192 * factor, prompt=context) * ROUNDING
    # Shorter prompts are more of them in a step, and each has a row of logits.
    assert prompts <= (step.prefill(8192, prompt=context * factor) + step.head(8192 / context)) * ROUNDING


def asked(cluster=H200, prompt=2000, ttft=2.0, tpot=0.05, modes=("aggregated",)):
    options = PlanOptions(modes=modes, redundant=0, overlap="off")
    return Question(CONFIG, cluster, Workload(Lengths(prompt), Lengths(500)), Objective(ttft, tpot), options)


@pytest.mark.slow
@pytest.mark.parametrize("modes", [("aggregated",), ("separated",)])
def test_no_easement_of_a_plan_makes_it_worse(modes):
    cluster = H200 if modes == ("aggregated",) else load_cluster("h200-16")
    now = search(asked(cluster, modes=modes)).winner.throughput
    for easier in (
        *(asked(cluster.scaled(resource, 1.2), modes=modes) for resource in RESOURCES),
        asked(with_memory(cluster, 1.2), modes=modes),
        asked(cluster, prompt=1900, modes=modes),
        asked(cluster, ttft=2.3, modes=modes),
        asked(cluster, tpot=0.057, modes=modes),
    ):
        assert search(easier).winner.throughput >= now / ROUNDING


def drawn(source):
    """A cluster, a workload and objectives such as people ask for."""
    cluster = load_cluster(source.choice(bundled_clusters()))
    if source.random() < 0.5:
        cluster = cluster.resized(max(1, cluster.hosts // 2))
    lengths = (source.choice(choices) for choices in ((512, 1024, 2000, 4096, 8192), (128, 500, 1000, 2048)))
    objective = Objective(source.choice((None, 0.5, 1.0, 2.0, 5.0)), source.choice((None, 0.02, 0.03, 0.05, 0.1)))
    return Question(CONFIG, cluster, Workload(*map(Lengths, lengths)), objective, PlanOptions())


def with_memory(cluster, factor):
    chip = cluster.hardware
    return replace(cluster, hardware=replace(chip, driver_bytes=round(chip.visible_bytes * factor)))


def eased(question, source):
    """The same made easier in one way."""
    way = source.choice((*RESOURCES, "memory", "ttft", "tpot", "prompt", "cache"))
    factor = source.choice((1.05, 1.5, 2))
    if way in RESOURCES:
        return replace(question, cluster=question.cluster.scaled(way, factor))
    if way == "memory":
        return replace(question, cluster=with_memory(question.cluster, factor))
    if way in ("ttft", "tpot"):
        bound = getattr(question.objective, way)
        return replace(question, objective=replace(question.objective, **{way: bound and bound * factor}))
    if way == "prompt":
        shorter = Lengths(round(question.workload.input.mean / factor))
        return replace(question, workload=replace(question.workload, input=shorter))
    return replace(question, options=replace(question.options, precision=named_precision("fp8", "fp8")))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))  # any number draws a question
def test_no_easement_of_a_drawn_question_makes_its_answer_worse(number):
    source = random.Random(number)
    question = drawn(source)
    before = search(question).winner
    for easier in (eased(question, source) for _ in range(3)):
        after = search(easier).winner
        assert before is None or after.throughput >= before.throughput * (1 - 1e-6)


def test_the_search_stands_on_the_batch_that_just_meets_the_objective():
    winner = search(asked()).winner
    assert winner.tpot <= 0.05
    more = aggregated(winner.decode, winner.count, winner.batch + 1, winner.prefill_tokens)
    assert more.tpot > 0.05 or more.ttft > 2.0 or winner.batch == winner.decode.max_batch


@pytest.mark.parametrize("batch", [1.0, 7.0, 64.0])
def test_intervals_are_around_the_figures_of_the_search(batch):
    instance = asked().instance(parse_layout("dp=4", 0, CONFIG), {"shared": {}})
    pool = prefill_pool(instance, 8192)
    both = aggregated(instance, 2, batch, 4096), 1e-9
    # Where prefill holds decode up, the search reads the step of those that still decode off a curve.
    apart = separated(pool, 1, instance, 1, batch), 1e-2
    for found, rounding in (both, apart):
        again = with_intervals(found)
        for name in ("ttft", "tpot", "throughput"):
            full = getattr(again, name)
            assert full.low < full < full.high
            assert full == pytest.approx(getattr(found, name), rel=rounding)


def test_a_closed_loop_that_prefill_holds_up_has_the_figures_of_the_search_beside_its_intervals():
    """Draws scale the decode curve of the search by a step of theirs ÷ the usual one, which must be none of theirs."""
    work = Workload(Lengths(4000), Lengths(500), concurrency=200.0)
    question = Question(CONFIG, load_cluster("h20-32"), work, Objective(), PlanOptions(redundant=0, overlap="off"))
    prefill, decode = (question.instance(parse_layout(mesh, 0, CONFIG), {}) for mesh in ("dp=2,tp=4,ep=2", "dp=4,tp=4"))
    found = separated(prefill_pool(prefill, 16384), 2, decode, 1, 50.0)
    again = with_intervals(found)
    for name in ("ttft", "tpot", "throughput"):
        assert getattr(again, name) == pytest.approx(getattr(found, name), rel=0.02)


def test_what_two_layouts_share_cancels_in_the_ratio_of_their_figures():
    layouts = (parse_layout(mesh, 0, CONFIG) for mesh in ("dp=8", "tp=8,ep=1"))
    both = [aggregated(asked().instance(layout, {"shared": {}}), 1, 16.0, 4096) for layout in layouts]

    def compute():
        one, other = (recompute(candidate).tpot for candidate in both)
        return one, other, one / other

    *alone, ratio = (math.log(figure.high / figure.low) for figure in spread(compute))
    assert 0 < ratio < math.hypot(*alone), "wider than if they had nothing in common"


def test_prompts_beside_decodes_do_not_wait_longer_behind_a_faster_network():
    # The wait grew as decodes got shorter, because it counted only what prompts add to them.
    work = Workload(Lengths(2000), Lengths(500))
    question = Question(CONFIG, load_cluster("h800-32"), work, Objective(), PlanOptions())
    faster = replace(question, cluster=question.cluster.scaled("network", 1.5))
    instances = (one.instance(parse_layout("dp=32", 32, CONFIG), {}) for one in (question, faster))
    now, then = (aggregated(instance, 1, 112.0, 1024.0).ttft for instance in instances)
    assert then <= now

"""Objectives as percentiles, and workloads of several classes of requests."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.errors import UserError
from dsjax.plan.cluster import load_cluster
from dsjax.plan.limits import forbidden
from dsjax.plan.percentiles import Slo, guide, within
from dsjax.plan.question import Question
from dsjax.plan.search import search
from dsjax.plan.simulation.service import OfferedLoad, requests
from dsjax.plan.workload import Lengths, Objective, PlanOptions, RequestClass, Workload
from sharding.mesh import MeshSpec

pytestmark = pytest.mark.slow  # all together

# One rank: a simulation takes as long as it has ranks.
ONE_LAYOUT = PlanOptions(mesh=MeshSpec.parse("tp=8,ep=1"), redundant=0, modes=("aggregated",))
TWO = Workload.of_classes([RequestClass.parse("short=0.8,512:0.2,64"), RequestClass.parse("long=0.2,4096,128")])


def test_a_mixture_has_the_moments_of_what_is_drawn_from_it():
    source = requests(OfferedLoad(10.0, None), TWO, 10**6, seed=0)
    drawn = [next(source) for _ in range(20_000)]
    prompts = np.array([one.prompt for one in drawn])
    # 20,000 draws: standard errors below 1 %.
    assert prompts.mean() == pytest.approx(TWO.input.mean, rel=0.03)
    assert prompts.std() / prompts.mean() == pytest.approx(TWO.input.variation, rel=0.03)
    assert np.mean([one.kind == "long" for one in drawn]) == pytest.approx(0.2, abs=0.01)
    assert {one.prompt for one in drawn if one.kind == "long"} == {4096}


def test_a_percentile_or_a_class_that_cannot_be_read_is_refused():
    for text in ("ttft=3", "ttft-p42=3", "ttft-p95", "ttft-p95=-1", "ttft-p95=inf", "other:ttft-p95=3", "rate-p95=1"):
        with pytest.raises(UserError, match="--slo"):
            Slo.parse(text, TWO)
    for text in ("short", "a=0.5,10", "a=2,10,10", "=1,2,3", "a:b=1,2,3"):
        with pytest.raises(UserError, match="--class"):
            RequestClass.parse(text)
    with pytest.raises(UserError, match="expected 1 in all"):
        Workload.of_classes([RequestClass.parse("short=0.5,512,64")])


@pytest.mark.parametrize(
    ("work", "texts", "ttft", "tpot"),
    [
        (TWO, ["long:ttft-p95=900", "ttft-p50=100"], 0.9, None),
        (TWO, ["e2e-p99=7680"], 2.0, pytest.approx(7.68 / (TWO.output.mean - 1))),
        # The mean prompt of TWO has 1,229 tokens: a mean TTFT above 50 ms breaks no bound on prompts of 512.
        (TWO, ["short:ttft-p95=50"], 2.0, None),
        (Workload(Lengths(2000), Lengths(1)), ["e2e-p95=300"], 0.3, None),
        (Workload(Lengths(2000), Lengths(2)), ["e2e-p95=300"], 2.0, 0.3),
    ],
)
def test_the_search_is_guided_by_bounds_on_means_and_never_by_a_median(work, texts, ttft, tpot):
    found = guide(Objective(ttft=2.0), [Slo.parse(text, work) for text in texts], work)
    assert (found.ttft, found.tpot) == (ttft, tpot)


@pytest.fixture(scope="module")
def plan(v3):
    return search(Question(v3, load_cluster("h200-8"), TWO, Objective(tpot=0.06), ONE_LAYOUT))


def test_the_load_is_the_largest_that_keeps_the_percentile_of_the_class(plan):
    loads, bound = [], 2000.0
    for _ in range(2):
        slos = [Slo.parse(f"long:ttft-p95={bound:.0f}", TWO)]
        answer, kept = within(plan, slos, num_requests=100, seed=0, played=1)
        assert answer.winner is kept[0].candidate
        assert kept[0].outcome.classes["long"].ttft.p95 <= bound / 1e3
        assert kept[0].outcome.classes["short"].ttft.p50 < kept[0].outcome.classes["long"].ttft.p50
        loads.append(kept[0].outcome.load.rate)
        bound = 700 * kept[0].outcome.classes["long"].ttft.p95
    assert loads[1] < loads[0]


def test_a_class_that_no_played_request_is_of_is_refused_with_what_to_do(v3):
    rare = Workload.of_classes([RequestClass.parse("short=0.999,512,64"), RequestClass.parse("rare=0.001,4096,128")])
    found = search(Question(v3, load_cluster("h200-8"), rare, Objective(tpot=0.06), ONE_LAYOUT))
    with pytest.raises(UserError, match="none of 20 played requests is of class 'rare'; give more with --num-prompts"):
        within(found, [Slo.parse("rare:ttft-p95=900", rare)], num_requests=20, seed=0, played=1)


def test_what_no_load_keeps_leaves_no_winner_and_says_what_breaks(plan):
    slos = [Slo.parse("ttft-p50=5", TWO)]
    answer, kept = within(plan, slos, num_requests=30, seed=0, played=1)
    assert answer.winner is None
    assert kept[0].broken == tuple(slos)
    assert answer.missed[0] is kept[0].candidate


def test_what_breaks_the_bounds_on_means_is_not_played_and_is_named(plan):
    slos = [Slo.parse("ttft-p95=1", TWO)]
    question = dataclasses.replace(plan.question, objective=guide(Objective(), slos, TWO))
    answer, kept = within(search(question), slos, num_requests=30, seed=0, played=1)
    assert kept == []
    assert [reason.bound for reason in forbidden(answer)] == ["ttft"]


def test_the_command_plays_what_it_plans():
    words = ["plan", "--cluster", "h200-8", "--engine", "published", "--mesh", "tp=8,ep=1"]
    words += ["--class", "short=0.8,512,64", "--class", "long=0.2,4096,128"]
    words += ["--slo", "long:ttft-p95=1500", "--request-rate", "2", "--num-prompts", "60", "--json", "-"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert answer["percentiles"][0]["objectives"][0]["class"] == "long"
    assert answer["percentiles"][0]["kept"]
    assert [one["name"] for one in answer["winner"]["workload"]["classes"]] == ["short", "long"]

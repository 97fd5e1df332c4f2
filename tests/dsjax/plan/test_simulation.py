"""Arrivals on virtual time: prices are the step model's, requests are conserved, and queues behave as queues do."""

import dataclasses
import functools
import itertools
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from plan_words import plan, plan_json, refusal_of

from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.errors import UserError
from dsjax.plan.candidate import aggregated, prefill_pool, separated, transfer_seconds
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import PUBLISHED, find_engine
from dsjax.plan.figure import assumption
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.recipe import serve_options
from dsjax.plan.simulation import deployment
from dsjax.plan.simulation.outcome import Spread, simulate
from dsjax.plan.simulation.service import Decoder, OfferedLoad, Served, SimulatedEngine, StepPrices, requests
from dsjax.plan.step import RankWork
from dsjax.plan.workload import Lengths, Objective, PlanOptions, RequestClass, Workload

pytestmark = pytest.mark.slow  # all together
TWO = Workload.of_classes([RequestClass.parse("short=0.8,512:0.2,64"), RequestClass.parse("long=0.2,4096,128")])
CLOSED = {
    "one replica": {"batch": 16},
    "long prompts": {"mesh": "dp=8", "batch": 16, "prompt": 8000, "output": 500, "variation": 0.2},
    "separated": {"mesh": "dp=8", "batch": 32, "output": 500, "variation": 0.2, "prefill": "dp=8"},
    "separated, few": {"mesh": "dp=8", "batch": 8, "output": 200, "variation": 0.2, "prefill": "dp=8"},
    # One DP rank that decodes pulls one cache of 0.56 GB after the other.
    "transfers in turn": {"batch": 16, "prompt": 8000, "prefill": "dp=8", "engine": find_engine("dsjax")},
}
SIMULATE = ("simulate", "--cluster", "h200-8", "--mesh", "tp=8,ep=1", "--mode", "aggregated")


@pytest.fixture
def step_model(model):
    return functools.partial(model, cluster="h200-8", redundant=0)


@pytest.fixture
def candidate(v3):
    def make(
        mesh="tp=8,ep=1", batch=16, prompt=1000, output=100, variation=0.0, prefill=None, engine=PUBLISHED, **more
    ):
        drafting = {name: more.pop(name) for name in ("drafts", "acceptance") if name in more}
        work = Workload(Lengths(prompt, variation), Lengths(output, variation), **more)
        options = PlanOptions(overlap="off", prefill_tokens=8192, engine=engine, dispatch=engine.dispatch, **drafting)

        def instance(name):
            return Instance(v3, load_cluster("h200-16"), parse_layout(name, 0, v3), options, work)

        if prefill is None:
            return aggregated(instance(mesh), 1, batch, 8192)
        return separated(prefill_pool(instance(prefill), 8192), 1, instance(mesh), 1, batch)

    return make


def play(candidate, rate=None, users=None, burstiness=1.0, ttft=None, tpot=None, **how):
    return simulate(candidate, OfferedLoad(rate, users, burstiness), Objective(ttft, tpot), **how)


def test_a_step_through_stages_is_played_with_what_stages_add(candidate):
    instance = candidate("pp=2,tp=8").decode
    prices, ranks = deployment._prices(instance), instance.replicas
    work = [RankWork(decodes=16, context=16 * 1050)] * ranks
    assert prices.seconds(work) == pytest.approx(instance.decode_step(16), rel=0.005)
    whole = dataclasses.replace(instance, layout=parse_layout("tp=8", 0, instance.config), steps={})
    assert prices.seconds(work) > whole.decode_step(16) + 0.006  # the host, which no other batch hides
    assert prices.seconds([RankWork()] * ranks) == 0


def test_a_step_with_all_decodes_but_one_still_takes_a_whole_prompt(candidate):
    """64 requests of a rank and prompts of 100 tokens, as many as a step may take: what starts it gives the decodes room beside them."""
    found = candidate(prompt=100, output=64).decode
    engine = deployment._engine(found, 64, 100, 4096)
    for number in range(63):
        engine.add(Served(number, 0.0, 100, 0, 200))  # none ends meanwhile
        engine.begin(0.0)
        engine.end(0.0)
    engine.add(Served(63, 0.0, 100, 0, 200))
    engine.begin(0.0)
    (rank,) = engine._plan.ranks
    assert sum(row.length for row in rank.prefills) == 100
    options = serve_options("deepseek-v3", found, 64, 100)
    config = engine.scheduler.ranks[0].config
    assert config.max_num_batched_tokens == int(options["--max-num-batched-tokens"]) == 164
    assert config.prefill_chunk == int(options["--prefill-chunk"]) == 100


@pytest.mark.parametrize("mesh", ["dp=8", "tp=8,ep=1", "dp=4"])
@pytest.mark.parametrize(
    ("how", "drafts"),
    [({}, 0), ({"overlap": True}, 0), ({"overlap": True, "dispatch": "padded"}, 0), ({}, 2)],
    ids=["plain", "overlap", "padded", "drafts"],
)
def test_a_simulated_step_of_even_ranks_is_the_plans(step_model, mesh, how, drafts):
    """There is one composition of a step: only the context of a rank's decodes is rounded, and a plan allows 3 % for uneven prompts."""
    model = step_model(mesh, eager=False, **how)
    prices, ranks = StepPrices([model], drafts), model.layout.mesh.dp_size
    for batch in (1, 13, 200):
        work = [RankWork(decodes=batch, context=batch * 2000)] * ranks
        assert prices.seconds(work) == pytest.approx(model.decode(batch, 2000, drafts=drafts), rel=0.003)
    for tokens, cached in ((1000, 0), (4000, 0), (4000, 3000)):
        rows = tokens // 1000
        one = RankWork(prompts=tokens, pairs=tokens * (cached + 500.5), cached=rows * cached, ended=rows)
        planned = model.prefill(tokens, prompt=1000, cached=cached, drafts=drafts)
        assert prices.seconds([one] * ranks) == pytest.approx(planned / 1.03, rel=0.003)
    assert prices.seconds([RankWork()] * ranks) == 0


def test_beyond_a_power_of_two_a_simulated_batch_costs_no_more_than_a_planned_one(model):
    """Its attention was extrapolated in proportion to the batch from 32 on, where kernels gain: 1.2 % of the step at 38."""
    wide = model("dp=16", redundant=32)
    found = StepPrices([wide]).seconds([RankWork(38, 38 * 2250)] * 16)
    assert found == pytest.approx(wide.decode(38, 2250), rel=0.002)


def test_steps_are_played_at_the_pace_of_programs(step_model):
    models, work = [step_model("dp=8")], [RankWork(decodes=8, context=9000)] * 8
    usual, slow = (StepPrices(models, paces=[(1.0, pace)]).seconds(work) for pace in (1.0, 5.0))
    assert slow == pytest.approx(5 * usual)


def test_all_ranks_wait_for_the_one_with_a_prompt(step_model):
    prices = StepPrices([step_model("dp=8")])
    idle, prompt = RankWork(decodes=32, context=64_000), RankWork(32, 64_000, prompts=2000, pairs=2000 * 1000.5)
    none, one, every = (prices.seconds([prompt] * n + [idle] * (8 - n)) for n in (0, 1, 8))
    assert none < one < every
    assert one - none > 0.5 * (every - none)


def works_of(requests, make):
    """The work of all steps that an engine does for so many requests of 1,000 tokens in and out; every step takes a second."""
    asked: list[RankWork] = []
    engine = make(SimpleNamespace(seconds=lambda ranks: asked.extend(ranks) or 1.0))
    for number in range(requests):
        engine.add(Served(number, 0.0, 1000, 0, 1000))
    while not engine.idle:
        engine.begin(0.0)
        engine.end(0.0)
    return asked


def engine_with(prices, pages=513, most=4096):
    config = SchedulerConfig(8, 4096, 4096, 4096, 16, pages, most, prefix_caching=False)
    return SimulatedEngine(prices, Scheduler(config, 1), made=2.5)


@pytest.mark.parametrize("make", [engine_with, lambda prices: Decoder(prices, 1, seqs=8, made=2.5)])
def test_a_request_grows_by_what_a_step_makes(make):
    """1,000 tokens after a prompt of 1,000, with drafts 2.5 a step: the last of 400 steps attends to nearly 2,000."""
    contexts = [work.context for work in works_of(1, make) if work.decodes]
    assert len(contexts) == 400
    assert contexts == pytest.approx([1001 + 2.5 * step for step in range(400)], abs=1)


def test_the_cache_fills_with_what_steps_make():
    asked = works_of(2, lambda prices: engine_with(prices, 201, 3200))
    # The second gives way when both have made 600, and computes its prompt anew.
    assert sum(work.prompts for work in asked) == pytest.approx(2000 + 1600, abs=50)


def test_lengths_and_gaps_have_the_moments_that_were_asked_for():
    work = Workload(Lengths(2000, 0.5), Lengths(300, 1.0))
    source = requests(OfferedLoad(10.0, None, 0.5), work, 10**6, seed=1)
    drawn = [next(source) for _ in range(20_000)]
    prompts, outputs = np.array([r.prompt for r in drawn]), np.array([r.output for r in drawn])
    gaps = np.diff([r.arrival for r in drawn])
    # 20,000 draws: standard errors of means below 1 %, of deviations below 5 %.
    assert prompts.mean() == pytest.approx(2000, rel=0.02)
    assert prompts.std() / prompts.mean() == pytest.approx(0.5, rel=0.1)
    assert outputs.mean() == pytest.approx(300, rel=0.03)
    assert gaps.mean() == pytest.approx(0.1, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(2**0.5, rel=0.05)


@pytest.mark.parametrize("output", [Lengths(300), Lengths(300, 0.8), Lengths(300).around(0.9)])
def test_contexts_of_a_decode_batch_vary_as_those_of_all_tokens_that_are_drawn(output):
    work = Workload(Lengths(200, 0.3), output)
    drawn = itertools.islice(requests(OfferedLoad(10.0, None), work, 10**6, seed=1), 20_000)
    contexts = np.concatenate([one.prompt + np.arange(one.output) for one in drawn])
    assert contexts.mean() == pytest.approx(work.context, rel=0.03)
    assert contexts.std() / contexts.mean() == pytest.approx(work.uneven, rel=0.04)


def test_a_mixture_has_the_moments_of_what_is_drawn_from_it():
    source = requests(OfferedLoad(10.0, None), TWO, 10**6, seed=0)
    drawn = [next(source) for _ in range(20_000)]
    prompts = np.array([one.prompt for one in drawn])
    # 20,000 draws: standard errors below 1 %.
    assert prompts.mean() == pytest.approx(TWO.input.mean, rel=0.03)
    assert prompts.std() / prompts.mean() == pytest.approx(TWO.input.variation, rel=0.03)
    assert np.mean([one.kind == "long" for one in drawn]) == pytest.approx(0.2, abs=0.01)
    assert {one.prompt for one in drawn if one.kind == "long"} == {4096}


def test_classes_are_played_together_and_shown_apart(candidate):
    found = candidate()
    mixed = dataclasses.replace(found, decode=dataclasses.replace(found.decode, workload=TWO, steps={}))
    seen = play(mixed, 1.0, num_requests=60)
    assert seen.classes["short"].ttft.p50 < seen.classes["long"].ttft.p50
    assert seen.classes["short"].requests + seen.classes["long"].requests == 60


def test_a_class_that_cannot_be_read_is_refused():
    for text in ("short", "a=0.5,10", "a=2,10,10", "=1,2,3", "a:b=1,2,3"):
        with pytest.raises(UserError, match="--class"):
            RequestClass.parse(text)
    with pytest.raises(UserError, match="expected 1 in all"):
        Workload.of_classes([RequestClass.parse("short=0.5,512,64")])


def test_prompts_that_fill_a_step_each_wait_as_the_queue_of_one_server_says(candidate):
    found, busy = candidate(batch=1, prompt=8192, output=1), 0.8
    service = StepPrices(found.decode.step_models()[:1]).seconds([RankWork(prompts=8192, pairs=8192 * 4096.5)])
    one = play(found, busy / service, num_requests=6000)
    # M/D/1. Waits of neighbours go together: the mean of 6,000 has a standard error of about 5 %.
    assert one.ttft.mean == pytest.approx(service * (1 + busy / (2 * (1 - busy))), rel=0.1)


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_loop_agrees_with_its_mean_value_answer(candidate, name):
    users = CLOSED[name]["batch"] * (8 if "mesh" in CLOSED[name] else 1)
    found = candidate(**CLOSED[name], concurrency=float(users))
    one = play(found, users=users, num_requests=200)
    # Steps that are planned ahead let prompts of two steps come together, which the mean-value answer leaves out.
    assert one.tpot.mean == pytest.approx(found.tpot, rel=0.07)
    # A step of prompts is priced at its mean size, the simulation plays each.
    assert one.ttft.mean == pytest.approx(found.ttft, rel=0.2)
    assert one.tokens_per_s == pytest.approx(found.throughput, rel=0.07)
    # Little's law, of the answer itself.
    output = found.decode.workload.output.mean
    stay = found.ttft + found.tpot * (output - 1)
    assert found.throughput / output * stay == pytest.approx(users, rel=1e-3)


def test_prefill_that_cannot_keep_up_lets_the_rest_of_a_closed_loop_wait(candidate):
    found = candidate("dp=8", batch=64, prompt=2000, output=200, prefill="tp=8,ep=1", concurrency=512.0)
    output, pool = 200, prefill_pool(found.prefill, 8192)
    assert found.throughput == pytest.approx(pool.rate * output, rel=0.02)
    assert found.ttft > 10 * pool.seconds
    stay = found.ttft + found.tpot * (output - 1)
    assert found.throughput / output * stay == pytest.approx(512, rel=1e-3)


def test_a_lone_request_has_its_own_prompt_and_steps(candidate, step_model):
    found = candidate(batch=1, prefill="dp=8")
    one = play(found, 0.01, num_requests=5)
    transfer = transfer_seconds(found.decode, found.prefill)
    alone = found.prefill.prefill_step(1000.0, 1 / 8)
    assert one.ttft.p50 == pytest.approx(assumption("front door") + alone + transfer, rel=0.05)
    step = step_model("tp=8,ep=1").decode(1, 1050)
    assert one.tpot.p50 == pytest.approx(step, rel=0.03)


def test_a_percentile_weighs_each_value():
    weighed = Spread.of([1.0, 2.0], [99, 1])
    assert (weighed.p50, weighed.p99, weighed.mean) == (1.0, 1.0, pytest.approx(1.01))


def test_the_same_seed_gives_the_same_outcome_and_bursts_make_tails(candidate):
    played = functools.partial(play, candidate(variation=0.5), 3.0)
    first, again = (played(num_requests=200, seed=3) for _ in range(2))
    assert first.to_json() == again.to_json()
    few, others = (played(num_requests=10, seed=seed) for seed in (3, 4))
    assert few.to_json() != others.to_json()
    assert played(burstiness=0.1, num_requests=200, seed=3).ttft.p99 > 1.5 * first.ttft.p99


def test_overload_queues_and_goodput_counts_those_within_both_objectives(candidate):
    found = candidate()
    capacity = found.throughput / 100
    calm, flooded = (play(found, n * capacity, ttft=1.0, tpot=0.05, num_requests=300) for n in (0.5, 3))
    assert calm.kept > 0.95
    assert flooded.ttft.p50 > 5 * calm.ttft.p50
    assert flooded.kept < 0.5
    assert flooded.goodput < calm.goodput
    assert flooded.ttft.mean > 5 * flooded.mean_ttft.high, "no steady state is as late"


@pytest.fixture
def loop_of(candidate):
    """A loop of 16 users on an engine with one ability or without it, and its mean-value answer."""

    def make(*given, **ability):
        engine = dataclasses.replace(PUBLISHED, **ability)
        found = candidate(*given, variation=0.06, concurrency=16.0, engine=engine)
        return play(found, users=16, num_requests=160, warmup=0, at_once=True), found

    return make


def test_an_engine_that_mixes_none_lets_decodes_wait_for_prompts(loop_of):
    (mixing, answer), (apart, longer) = (loop_of(mixes=able) for able in (True, False))
    assert apart.tpot.mean > mixing.tpot.mean
    assert apart.ttft.p50 < mixing.ttft.p50, "prompts are computed without the decodes"
    assert apart.itl.p99 > mixing.itl.p99
    assert longer.tpot > answer.tpot


def test_an_engine_that_holds_prompts_back_answers_later_and_its_steps_have_prompts_less_often(loop_of):
    holding, taking = (loop_of("dp=8", 2, holds_prompts=able)[0] for able in (True, False))
    assert holding.ttft.p50 > 2 * taking.ttft.p50
    assert holding.tpot.mean < taking.tpot.mean


def test_a_prefix_that_all_share_is_computed_once(candidate):
    one, whole = (play(candidate(prompt=4000, prefix_hit=hit), 1.0, num_requests=60) for hit in (0.75, 0.0))
    assert one.ttft.p50 < 0.6 * whole.ttft.p50


@pytest.mark.parametrize("prefill", [None, "dp=8"])
def test_outputs_of_one_token_have_no_time_between_tokens(candidate, prefill):
    one = play(candidate("dp=8", output=1, prefill=prefill), 5.0, tpot=0.01, num_requests=50)
    assert (one.tpot, one.kept) == (None, 1)
    assert one.to_json()["tpot_s"] is None
    assert one.requests_per_s == pytest.approx(5, rel=0.4)  # 50 Poisson gaps: a standard error of 14 %


def test_drafts_make_a_request_take_fewer_steps_that_each_take_longer(candidate):
    plain, fast = (candidate(batch=8, drafts=drafts, acceptance=0.8) for drafts in (0, 1))
    first, second = (play(found, users=8, num_requests=40) for found in (plain, fast))
    assert second.itl.p50 > first.itl.p50
    assert second.tpot.mean < first.tpot.mean
    assert second.tpot.mean == pytest.approx(fast.tpot, rel=0.25)


def test_the_command_shows_and_writes_it():
    words = [*SIMULATE, "--input", "500", "--output", "50", "--request-rate", "4"]
    words += ["--tpot-ms", "50", "--num-prompts", "100"]
    assert "simulated, 100 requests each" in plan(*words)
    (one,) = plan_json(*words)["simulation"]
    assert one["requests_per_s_offered"] == 4
    assert one["requests_per_s"] == pytest.approx(4, rel=0.3)  # 100 Poisson gaps: a standard error of 10 %
    assert 0 < one["ttft_s"]["p50"] <= one["ttft_s"]["p90"] <= one["ttft_s"]["p99"]
    assert all(math.isfinite(value) for value in one["itl_s"].values())


def test_lengths_of_a_range_are_even_between_its_ends_and_have_its_moments():
    drawn = Lengths(1024).around(0.2)
    assert drawn.mean == 1024
    load, work = OfferedLoad(None, 1), Workload(drawn, drawn)
    asked = [one.prompt for one in itertools.islice(requests(load, work, 10_000, 0), 4000)]
    assert 819 <= min(asked) < 830 < 1218 < max(asked) <= 1229
    assert statistics.mean(asked) == pytest.approx(drawn.mean, rel=0.01)
    assert statistics.stdev(asked) / statistics.mean(asked) == pytest.approx(drawn.variation, rel=0.03)
    assert sum(one < drawn.mean for one in asked) / len(asked) == pytest.approx(0.5, abs=0.03)


def test_a_benchmark_s_ttft_has_the_start_and_neither_the_steady_state_nor_a_run_after_a_warmup_has_it(candidate):
    found = candidate(batch=32, output=400, variation=0.2)
    played = play(found, users=32, num_requests=320, warmup=0, at_once=True)
    warm = play(found, users=32, num_requests=192, warmup=64, at_once=True)
    assert (played.requests, played.steady.requests, warm.requests) == (320, 320 - 64, 192)
    assert played.ttft.mean > 1.1 * played.steady.ttft.mean
    assert played.ttft.p99 > 1.5 * max(played.steady.ttft.p99, warm.ttft.p99)
    assert played.steady.ttft.mean == pytest.approx(warm.ttft.mean, rel=0.25)


def test_the_command_plays_a_published_loop():
    base = [*SIMULATE, "--engine", "published", "--input", "256", "--output", "64", "--max-concurrency", "8"]
    loop = ["--request-rate", "inf", "--random-range-ratio", "0.1", "--num-prompts", "80"]
    said = " ".join(plan(*base, *loop).split())
    assert "TTFT of 80 requests, as such a benchmark reports it: mean" in said
    assert "TTFT of 64 requests, in steady state" in said
    refused = refusal_of(*base, "--random-range-ratio", "1")
    assert "--random-range-ratio is 1, expected at least 0 and less than 1" in refused


@pytest.mark.parametrize("prefill", [None, "tp=8,ep=1"])
def test_tokens_a_second_are_those_of_the_requests_where_a_step_makes_several(candidate, prefill):
    drafting = candidate(batch=8, prefill=prefill, concurrency=8.0, drafts=2)
    assert drafting.decode.options.tokens_a_step > 2
    seen = play(drafting, users=8, num_requests=80, warmup=0, at_once=True)
    # Of 100 tokens the last step makes fewer than it could.
    assert seen.tokens_per_s == pytest.approx(100 * seen.requests_per_s, rel=0.03)

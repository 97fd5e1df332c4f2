"""When an engine takes prompts in (`dsjax/plan/simulation/admission.py`): looking for them seldom, and holding them back for balance."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from step_models import step_model

from dsjax.engine.schedule.scheduler import Scheduler
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.errors import UserError
from dsjax.plan.arguments import SimulateArgs
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import PUBLISHED, find_engine
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.simulation.admission import Lobby
from dsjax.plan.simulation.outcome import simulate
from dsjax.plan.simulation.service import OfferedLoad, Served, SimulatedEngine, StepPrices
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload


class FakeEngine:
    """What a lobby asks an engine whose ranks have so many `running` requests.

    free: tokens of each rank's KV cache that nobody holds; to_come: that the running requests of a rank will make.
    """

    def __init__(self, running, had_prompts=False, free=math.inf, to_come=0):
        self.had_prompts, self.cache_tokens, self.idle = had_prompts, free, not any(running)
        self.scheduler = SimpleNamespace(ranks=[])
        for count in running:
            request = SimpleNamespace(max_tokens=to_come / max(1, count), num_output_tokens=0, token_ids=())
            self.scheduler.ranks.append(SimpleNamespace(running=[request] * count, waiting=[]))


def lobby(ranks=1, step_tokens=math.inf, decode_tokens=1, **rule):
    """The lobby of an engine with these rules of admission and no others."""
    rule = {"holds_prompts": "hold_steps" in rule} | rule
    return Lobby(dataclasses.replace(PUBLISHED, **rule), ranks, step_tokens, decode_tokens)


def prompts(names, tokens=1000, output=100):
    """What enters a lobby: a request of each name, at the beginning."""
    return [Served(number, 0.0, tokens, 0, output, name) for number, name in enumerate(names)]


def names(given):
    return "".join(served.kind for served in given)


def steps_until_taken(arrived, engine, most=200, **rule):
    """Steps after which the lobby has given all prompts that arrived at once, to an engine that does not change."""
    tested, given = lobby(len(engine.scheduler.ranks), **rule), 0
    entering = prompts(arrived)
    for step in range(1, most):
        given += len(tested.admit(engine, entering))
        entering = []
        if given == len(arrived):
            return step
    return math.inf


@pytest.mark.parametrize("steps", [1, 30])
def test_an_engine_that_decodes_looks_for_prompts_after_so_many_steps_and_any_other_at_once(steps):
    assert steps_until_taken("ab", FakeEngine([4]), poll_steps=steps) == steps
    assert steps_until_taken("a", FakeEngine([0]), poll_steps=steps) == 1
    assert steps_until_taken("a", FakeEngine([4], had_prompts=True), poll_steps=steps) == 1


def test_prompts_wait_until_every_rank_can_have_one_and_no_longer_than_the_limit():
    assert steps_until_taken("abc", FakeEngine([7, 7, 8, 7]), hold_steps=50) == 50, "the third rank gets none"
    assert steps_until_taken("abcd", FakeEngine([7, 7, 7, 7]), hold_steps=50) == 1
    assert steps_until_taken("a", FakeEngine([7, 7, 8, 0]), hold_steps=50) == 1, (
        "a rank without a request would stand still"
    )
    assert steps_until_taken("abc", FakeEngine([7, 7, 8, 7])) == 1


def test_a_prompt_whose_rank_has_no_room_in_a_step_keeps_back_none_of_other_ranks():
    held, engine = lobby(3, 1600, hold_steps=40), FakeEngine([5, 7, 7])
    assert names(held.admit(engine, prompts("abcde"))) == "ade", "b and c wait for the first rank"
    assert names(held.admit(FakeEngine([0, 0, 0]), [])) == "bc"


def test_a_step_that_has_room_for_one_prompt_lets_no_second_one_through():
    rule = {"hold_steps": 40, "step_tokens": 1600}
    assert steps_until_taken("abcd", FakeEngine([7, 7]), **rule) == 2
    assert steps_until_taken("abcd", FakeEngine([7, 30]), **rule) == 4 * 40, (
        "all go to the first rank, one at each end of the wait"
    )
    rule = {"hold_steps": 40, "step_tokens": 2010, "decode_tokens": 2}
    assert steps_until_taken("abcd", FakeEngine([2, 2]), **rule) == 1
    assert steps_until_taken("abcd", FakeEngine([7, 7]), **rule) == 2, "decodes take their tokens of the step first"


def test_prompts_wait_until_they_fill_a_step_and_no_longer_than_the_limit():
    rule = {"fill": (40, 0.8), "step_tokens": 8192}
    assert steps_until_taken("ab", FakeEngine([60]), **rule) == 41
    assert steps_until_taken("abcdefg", FakeEngine([60]), **rule) == 1
    assert steps_until_taken("a", FakeEngine([0]), **rule) == 1, "nothing runs that they would hold up"


def test_a_prompt_waits_until_the_cache_has_room_beside_what_running_requests_are_kept():
    tight = FakeEngine([8], free=2000, to_come=1000)  # a prompt with its output needs 1,100
    assert steps_until_taken("a", tight) == 1
    assert steps_until_taken("a", tight, keeps=(1.0, 1.0, 1)) == math.inf
    falling = FakeEngine([8], free=1600, to_come=1000)
    assert steps_until_taken("a", falling, keeps=(0.7, 0.1, 60)) == 20, "0.5 of the outputs are kept by then"
    assert steps_until_taken("a", FakeEngine([0], free=10), keeps=(1.0, 1.0, 1)) == 1, "alone it may have what there is"


def test_known_ends_let_requests_share_the_room_that_they_need_one_after_the_other(v3):
    """Two of 1,000 and 500 tokens end one after the other; with 2,501 more the first would have to give way before its end."""
    model = step_model(v3, load_cluster("h200-8"), parse_layout("tp=8,ep=1", 0, v3), PRECISIONS["fp8"])
    prices = StepPrices([model])

    def taken(cache, *outputs):
        engine = SimulatedEngine(prices, Scheduler(SchedulerConfig(8, 8192, 8192, 8192, 16, 1024, 8192), 1), cache)
        asked = [Served(at, 0.0, 1000, 0, output) for at, output in enumerate(outputs)]
        return len(lobby(knows_ends=True, keeps=(1.0, 1.0, 1)).admit(engine, asked))

    # 2,000 tokens of prompts; both make 500 more, then the second 500 more in the room of the first.
    assert taken(2000 + 2 * 501 + 1, 500, 1000) == 2
    assert taken(2000 + 2 * 501, 500, 1000) == 1
    assert taken(10, 500) == 1, "alone it may have what there is"


def test_one_rank_waits_for_full_steps_and_several_for_a_prompt_each():
    rule, running = {"hold_steps": 50, "fill": (40, 0.8), "step_tokens": 8192}, [60, 60]
    assert [steps_until_taken("a", FakeEngine(running[:ranks]), **rule) for ranks in (1, 2)] == [41, 50]


def test_a_lobby_is_open_where_no_rule_keeps_a_prompt():
    several = {"ranks": 2, "fill": (40, 0.8)}  # which is of one rank alone
    assert all(lobby(**rule).is_open for rule in ({}, several, {"hold_steps": 50}))
    rules = ({"poll_steps": 2}, {"ranks": 2, "hold_steps": 50}, {"fill": (40, 0.8)}, {"keeps": (0.1, 0.0, 1)})
    assert not any(lobby(**rule).is_open for rule in (*rules, {"knows_ends": True}))


@pytest.fixture
def played(v3):
    """TTFT and rate of a loop of 16 users that begin at once, on `mesh`, with an engine changed by `changes`."""

    def play(mesh="tp=8,ep=1", **changes):
        engine = dataclasses.replace(find_engine("published"), **changes)
        work = Workload(Lengths(1000, 0.06), Lengths(100, 0.06), concurrency=16.0)
        options = PlanOptions(overlap="off", prefill_tokens=8192, engine=engine)
        instance = Instance(v3, load_cluster("h200-8"), parse_layout(mesh, 0, v3), options, work)
        found = aggregated(instance, 1, 16 / instance.replicas, 8192)
        seen = simulate(found, OfferedLoad(None, 16), Objective(), num_requests=160, warmup=0, at_once=True)
        return seen, found

    return play


def test_an_engine_that_mixes_none_lets_decodes_wait_for_prompts(played):
    (mixing, answer), (apart, longer) = (played(mixes=mixes) for mixes in (True, False))
    assert apart.tpot.mean > mixing.tpot.mean
    assert apart.ttft.p50 < mixing.ttft.p50, "prompts are computed without the decodes"
    assert apart.itl.p99 > mixing.itl.p99
    assert longer.tpot > answer.tpot


def test_an_engine_that_holds_prompts_back_answers_later_with_several_ranks(played):
    assert played("dp=8", holds_prompts=True)[0].ttft.p50 > 2 * played("dp=8")[0].ttft.p50


@pytest.mark.parametrize("given", [{}, {"engine": "vllm"}])
def test_the_interval_is_an_option_of_no_other_engine(given):
    with pytest.raises(UserError, match="--scheduler-recv-interval needs --engine sglang or published"):
        SimulateArgs(scheduler_recv_interval=30, **given)
    question = SimulateArgs(scheduler_recv_interval=30, engine="sglang").question()
    assert question.options.engine.poll_steps == 30

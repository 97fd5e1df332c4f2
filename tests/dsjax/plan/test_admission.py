"""When an engine takes prompts in (`dsjax/plan/simulation/admission.py`): looking for them seldom, and holding them back for balance."""

import dataclasses
import math

import pytest

from dsjax.errors import UserError
from dsjax.plan.arguments import SimulateArgs
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import find_engine
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.simulation.admission import Admission, Lobby
from dsjax.plan.simulation.deployment import admission
from dsjax.plan.simulation.load import Asked, OfferedLoad
from dsjax.plan.simulation.prices import StepPrices
from dsjax.plan.simulation.run import simulate
from dsjax.plan.simulation.service import Served, SimulatedEngine
from dsjax.plan.step import StepModel
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload


@dataclasses.dataclass
class FakeEngine:
    """What a lobby asks an engine."""

    running: list[int]
    had_prompts: bool = False
    free: float = math.inf
    kept: float = 0.0
    """Tokens of the cache of a rank that nobody holds, and those that all of the running requests' outputs to come will take."""

    def takes(self, asked: list[Served]) -> int:
        return min(len(asked), 1)

    def free_tokens(self, kept: float) -> list[float]:
        return [self.free - kept * self.kept for _ in self.running]

    @property
    def idle(self) -> bool:
        return not any(self.running)


def prompts(names, tokens=1000, output=100):
    """What enters a lobby: a request of each name, at the beginning."""
    return [(Served(number, Asked(0.0, tokens, 0, output, name), 0.0), 0.0) for number, name in enumerate(names)]


def steps_until_taken(rule, engine, arrived, most=200):
    """Steps after which the lobby gives all that arrived at once, of an engine that does not change."""
    lobby = Lobby(rule)
    lobby.enter(prompts(arrived))
    given = []
    for step in range(1, most):
        given += lobby.leave(engine)
        if len(given) == len(arrived):
            assert len(lobby) == 0
            return step
    return math.inf


@pytest.mark.parametrize("steps", [1, 30])
def test_an_engine_that_decodes_looks_for_prompts_after_so_many_steps_and_any_other_at_once(steps):
    seldom = Admission(poll_steps=steps)
    assert steps_until_taken(seldom, FakeEngine([4]), ["a", "b"]) == steps
    assert steps_until_taken(seldom, FakeEngine([0]), ["a"]) == 1
    assert steps_until_taken(seldom, FakeEngine([4], had_prompts=True), ["a"]) == 1


def test_prompts_wait_until_every_rank_can_have_one_and_no_longer_than_the_limit():
    holds = Admission(hold_steps=50)
    assert steps_until_taken(holds, FakeEngine([7, 7, 8, 7]), ["a", "b", "c"]) == 50, "the third rank gets none"
    assert steps_until_taken(holds, FakeEngine([7, 7, 7, 7]), ["a", "b", "c", "d"]) == 1
    assert steps_until_taken(holds, FakeEngine([7, 7, 8, 0]), ["a"]) == 1, "a rank without a request would stand still"
    assert steps_until_taken(Admission(), FakeEngine([7, 7, 8, 7]), ["a"]) == 1


def test_a_prompt_whose_rank_has_no_room_in_a_step_keeps_back_none_of_other_ranks():
    lobby = Lobby(Admission(hold_steps=40, step_tokens=1600))
    lobby.enter(prompts("abcde"))
    engine = FakeEngine([5, 7, 7])
    assert [served.asked.kind for served, _ in lobby.leave(engine)] == ["a", "d", "e"], (
        "b and c wait for the first rank"
    )
    assert len(lobby) == 2


def test_a_step_that_has_room_for_one_prompt_lets_no_second_one_through():
    holds = Admission(hold_steps=40, step_tokens=1600)
    two_for_each = ["a", "b", "c", "d"]
    assert steps_until_taken(holds, FakeEngine([7, 7]), two_for_each) == 2
    assert steps_until_taken(holds, FakeEngine([7, 30]), two_for_each) == 4 * 40, (
        "all go to the first rank, one at each end of the wait"
    )
    drafting = dataclasses.replace(holds, step_tokens=2010, decode_tokens=2)
    assert steps_until_taken(drafting, FakeEngine([2, 2]), two_for_each) == 1
    assert steps_until_taken(drafting, FakeEngine([7, 7]), two_for_each) == 2, (
        "decodes take their tokens of the step first"
    )


def test_prompts_wait_until_they_fill_a_step_and_no_longer_than_the_limit():
    fills = Admission(fill=(40, 0.8), step_tokens=8192)
    assert steps_until_taken(fills, FakeEngine([60]), ["a", "b"]) == 41
    assert steps_until_taken(fills, FakeEngine([60]), ["a", "b", "c", "d", "e", "f", "g"]) == 1
    assert steps_until_taken(fills, FakeEngine([0]), ["a"]) == 1, "nothing runs that they would hold up"


def test_a_prompt_waits_until_the_cache_has_room_beside_what_running_requests_are_kept():
    whole, falling, none = (Admission(keeps=keeps) for keeps in ((1.0, 1.0, 1), (0.7, 0.1, 60), (0.0, 0.0, 1)))
    tight = FakeEngine([8], free=2000, kept=1000)  # a prompt with its output needs 1,100
    assert steps_until_taken(none, tight, ["a"]) == 1
    assert steps_until_taken(whole, tight, ["a"]) == math.inf
    assert steps_until_taken(falling, dataclasses.replace(tight, free=1600), ["a"]) == 20, (
        "0.5 of the outputs are kept by then"
    )
    assert steps_until_taken(whole, FakeEngine([0], free=10), ["a"]) == 1, "alone it may have what there is"


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


def test_an_engine_that_knows_ends_is_asked_how_many_prompts_it_takes():
    lobby = Lobby(Admission(keeps=(1.0, 1.0, 1), knows_ends=True))
    lobby.enter(prompts("ab"))
    assert [served.asked.kind for served, _ in lobby.leave(FakeEngine([8], free=0.0))] == ["a"]
    assert not Admission(knows_ends=True).is_open


def test_known_ends_let_requests_share_the_room_that_they_need_one_after_the_other(v3):
    """Two of 1,000 and 500 tokens end one after the other; with 2,501 more the first would have to give way before its end."""
    model = StepModel(v3, load_cluster("h200-8"), parse_layout("tp=8,ep=1", 0, v3), PRECISIONS["fp8"])
    prices = StepPrices(model, 4096)

    def taken(cache, *lengths):
        engine = SimulatedEngine(
            prices, 1, seqs=8, step_tokens=8192, cache_tokens=cache, longest=8192, sharing=False, made=1.0
        )
        return engine.takes([Served(at, Asked(0.0, *one, ""), 0.0) for at, one in enumerate(lengths)])

    first, second = (1000, 0, 500), (1000, 0, 1000)
    # 2,000 tokens of prompts; both make 500 more, then the second 500 more in the room of the first.
    assert taken(2000 + 2 * 501 + 1, first, second) == 2
    assert taken(2000 + 2 * 501, first, second) == 1
    assert taken(10, first) == 1, "alone it may have what there is"


@pytest.mark.parametrize("mesh", ["tp=8,ep=1", "dp=8"])
def test_one_rank_waits_for_full_steps_and_several_for_a_prompt_each(ask, mesh):
    """Everything else of an engine's rule is the same for both."""
    engine = dataclasses.replace(
        find_engine("published"),
        poll_steps=20,
        holds_prompts=True,
        fill=(40, 0.8),
        keeps=(0.7, 0.1, 60),
        knows_ends=True,
    )
    question = ask(options=PlanOptions(engine=engine, drafts=1))
    rule = admission(question.instance(parse_layout(mesh, 0, question.config), {}), 4096)
    hold, fill = (engine.hold_steps, (0, 0.0)) if mesh == "dp=8" else (0, (40, 0.8))
    assert rule == Admission(20, hold, fill, 4096, 2, (0.7, 0.1, 60), True)


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
    with pytest.raises(UserError, match="--scheduler-recv-interval is 30"):
        SimulateArgs(scheduler_recv_interval=30, **given)
    question = SimulateArgs(scheduler_recv_interval=30, engine="sglang").question()
    assert question.options.engine.poll_steps == 30

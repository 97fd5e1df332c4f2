"""When an engine takes prompts in (`dsjax/plan/simulation/admission.py`): looking for them seldom, and holding them back for balance."""

import dataclasses
import math

import pytest

from dsjax.errors import UserError
from dsjax.plan.arguments import PlanArgs
from dsjax.plan.candidate import aggregated
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import find_engine
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.simulation.admission import Admission, Lobby
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


@pytest.mark.parametrize("steps", [1, 10, 30])
def test_an_engine_that_decodes_looks_for_prompts_after_so_many_steps(steps):
    assert steps_until_taken(Admission(poll_steps=steps), FakeEngine([4]), ["a", "b"]) == steps


def test_an_engine_looks_at_once_when_it_is_idle_or_had_prompts_in_its_last_step():
    seldom = Admission(poll_steps=30)
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


def test_every_engine_keeps_what_its_source_says():
    assert find_engine("tensorrt-llm").keeps == (1.0, 1.0, 1)
    assert Admission(keeps=find_engine("sglang").keeps).kept(600) == pytest.approx(0.098)
    assert Admission(keeps=find_engine("vllm").keeps).is_open


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


def test_in_a_loop_a_first_token_waits_half_the_steps_between_two_looks(played):
    often, found = played()
    seldom, _ = played(poll_steps=20)
    steps = (seldom.ttft.p50 - often.ttft.p50) / found.decode.decode_step(16).value
    # 0 to 20 steps, less where another prompt's step ends the wait; half of the users are expected within a quarter of the interval.
    assert 5 < steps < 15
    assert seldom.tpot.mean < often.tpot.mean, "prompts come together, so that fewer steps have any"


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


def test_an_engine_that_mixes_none_lets_decodes_wait_for_prompts(played):
    mixing, apart = (played(mixes=mixes)[0] for mixes in (True, False))
    assert apart.tpot.mean > mixing.tpot.mean
    assert apart.ttft.p50 < mixing.ttft.p50, "prompts are computed without the decodes"
    assert apart.itl.p99 > mixing.itl.p99
    answers = [played(mixes=mixes)[1].tpot.value for mixes in (True, False)]
    assert answers[1] > answers[0]


def test_an_engine_that_keeps_room_for_whole_outputs_begins_fewer_requests_in_a_small_cache(v3):
    def running(keeps):
        engine = dataclasses.replace(find_engine("published"), keeps=keeps)
        work = Workload(Lengths(1000, 0.06), Lengths(1000, 0.06), concurrency=16.0)
        options = PlanOptions(overlap="off", prefill_tokens=8192, engine=engine)
        cluster = load_cluster("h200-8")
        instance = Instance(v3, cluster, parse_layout("tp=8,ep=1", 0, v3), options, work)
        least = (instance.memory.weights_total + 12_000 * instance.memory.cache_per_token) / 0.92  # 8 % are set aside
        small = dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, memory_bytes=round(least)))
        found = aggregated(dataclasses.replace(instance, cluster=small), 1, 16, 8192)
        seen = simulate(found, OfferedLoad(None, 16), Objective(), num_requests=64, warmup=0, at_once=True)
        return seen.ttft.p50

    assert running((1.0, 1.0, 1)) > 1.5 * running((0.0, 0.0, 1))


def test_an_engine_that_holds_prompts_back_answers_later_only_with_several_ranks(played):
    assert played("dp=8", holds_prompts=True)[0].ttft.p50 > 2 * played("dp=8")[0].ttft.p50
    assert played(holds_prompts=True)[0].ttft == played()[0].ttft


@pytest.mark.parametrize("given", [{}, {"engine": "sglang"}, {"engine": "vllm", "simulate": True}])
def test_the_interval_is_an_option_of_a_simulation_and_of_no_other_engine(given):
    with pytest.raises(UserError, match="--scheduler-recv-interval is 30"):
        PlanArgs(scheduler_recv_interval=30, **given)
    question, _ = PlanArgs(scheduler_recv_interval=30, engine="sglang", simulate=True).question()
    assert question.options.engine.poll_steps == 30

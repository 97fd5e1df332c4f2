"""An engine whose experts follow the load tells every request what an engine tells whose experts stay, whatever happens meanwhile. These
are the tests of `experts/eplb.py` and `setup/expert_location.py` too."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from balanced_model import OFTEN, experts_stay, failing, generate, load, random_row, slots_of
from layouts import prompts, write_checkpoint

from dsjax import SamplingParams
from dsjax.config import load_config
from dsjax.engine.contract.commands import PlaceExperts, ReadLoads, StageExperts, Step
from dsjax.engine.experts.eplb import EplbConfig, Exchanged, ExpertSlots, LoadWindow, RebalanceUnderWayError
from dsjax.engine.experts.expert_balancer import ExpertBalancer, LayerChange, decide
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.errors import UserError
from sharding import MeshSpec
from sharding.balancing import rebalance
from sharding.layer_placement import exchange_rounds

pytestmark = pytest.mark.slow  # all together

TOKENS = 30


@pytest.fixture(scope="module")
def llm(checkpoint):
    with load(checkpoint, "dp=4", eplb=OFTEN, dispatch="padded") as made:
        yield made


@pytest.fixture(scope="module")
def one(checkpoint):
    """One device, which holds all experts, so that they can only move between its own slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsjax.engine.setup.sizes.experts_per_exchange", lambda args, step: 2)
        made = load(checkpoint, "dp=1")
    with made:
        yield made


@pytest.fixture(scope="module")
def expected(one):
    with experts_stay(one):
        made = generate(one, TOKENS)
    one.engine.flush_prefix_cache()
    return made


def balancer_in(llm) -> ExpertBalancer:
    return llm.engine.core.part(ExpertBalancer)


def stats(llm):
    return balancer_in(llm).statistics()


def test_tokens_are_the_same_while_experts_move_beneath_them(llm, expected):
    before = stats(llm)
    assert generate(llm, TOKENS) == expected
    after = stats(llm)
    assert after.rebalances - before.rebalances >= 3
    assert after.experts_moved > before.experts_moved
    assert after.bytes_moved > before.bytes_moved
    assert (after.failures, after.layers_left) == (0, 0)


def test_nothing_is_compiled_and_memory_returns(llm):
    taken, rebalances = [], []
    for _ in range(2):
        llm.engine.flush_prefix_cache()
        generate(llm, TOKENS)
        balancer_in(llm).rebalance_now()
        finish(llm)
        taken.append((llm.executor.programs.compiled, sum(array.nbytes for array in jax.live_arrays())))
        rebalances.append(stats(llm).rebalances)
    assert taken[0] == taken[1]
    assert rebalances[1] > rebalances[0] + 1, "the second one is not the one that was asked for"


def test_an_exchange_between_two_steps_in_flight_changes_no_token(one, expected, monkeypatch):
    """One device has two steps in flight, as accelerators have.

    Each exchange is enqueued behind a step that is not done, and a step behind it, without waiting for either.
    """
    executor, balancer, rng = one.executor, balancer_in(one), np.random.default_rng(2)
    launch, behind = executor.launch, []

    def launched(command):
        if isinstance(command, StageExperts | PlaceExperts):
            behind.append(any(isinstance(one.command, Step) for one in executor._queue))
        return launch(command)

    assert executor.max_in_flight == 2
    monkeypatch.setattr(executor, "launch", launched)
    start(one)

    def move_some():
        if not balancer.busy and one.engine.core.scheduler.num_unfinished:
            layer = int(rng.integers(2))
            old = slots_of(one).physical_to_logical[layer]
            row, swapped = old.copy(), rng.permutation(len(old))[:4]
            row[swapped] = np.roll(row[swapped], 1)
            rounds = list(exchange_rounds(old, row, ranks=1, experts=2))
            balancer._pending_commands.extend(LayerChange(layer, row, rounds, 4, 0.0, 0.0).commands())

    assert finish(one, move_some) == [one.tokens for one in expected]
    assert stats(one).layers_changed >= 3
    assert not stats(one).failures
    assert sum(behind) > 10


def start(llm) -> None:
    given = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    llm.engine.flush_prefix_cache()
    for number, prompt in enumerate(prompts()):
        llm.engine.add_request(str(number), prompt, given)


def finish(llm, meanwhile=lambda: None) -> list[list[int]]:
    """Run all requests to their end; return their tokens in the order of their numbers. meanwhile: called before each step."""
    outputs = {}
    while llm.engine.has_unfinished():
        meanwhile()
        outputs |= {int(output.request_id): list(output.outputs[0].token_ids) for output in llm.engine.step()}
    return [outputs[number] for number in sorted(outputs)]


def test_a_second_rebalance_is_refused_in_the_middle_of_one(llm, expected):
    start(llm)
    while not balancer_in(llm).busy:
        llm.engine.step()
        assert llm.engine.has_unfinished()
    with pytest.raises(RebalanceUnderWayError, match=r"under way, with [12] layers left|ask again"):
        balancer_in(llm).rebalance_now()
    assert finish(llm) == [one.tokens for one in expected]
    asked = balancer_in(llm).rebalance_now()
    assert asked["balancedness"]["after"] >= asked["balancedness"]["before"]
    finish(llm)
    assert not stats(llm).layers_left


def test_a_failure_in_the_middle_gives_the_rebalance_up_and_serving_goes_on(llm, expected, monkeypatch, caplog):
    failed, before = [], stats(llm)
    original = llm.executor.programs.get

    def get(kind, *arguments):
        if kind != "place experts" or failed:
            return original(kind, *arguments)
        failed.append(kind)
        return failing(lost=1)

    with monkeypatch.context() as patch:
        patch.setattr(llm.executor.programs, "get", get)
        llm.engine.flush_prefix_cache()
        assert generate(llm, TOKENS) == expected
    assert failed
    assert stats(llm).failures == before.failures + 1
    if stats(llm).rebalances == before.rebalances:
        assert stats(llm).rebalance_seconds == before.rebalance_seconds, "it is the time of those that were carried out"
    assert "Rebalancing experts is given up" in caplog.text


def slots(placement=((0, 1, 2, 3),), ranks=2, seconds=(1.0, 1.0)) -> ExpertSlots:
    rows = np.array(placement, np.int32)
    one = {"hosts": 1, "groups": 1, "expert_share": 0.5, "expert_bytes": 8, "per_exchange": 1}
    return ExpertSlots(rows, n_logical=rows.max() + 1, ranks=ranks, seconds=seconds, **one)


SIX = np.tile(np.arange(8) % 6, (2, 1))
"""Six experts in eight slots of two layers."""


def balancer_of(mover, results, steps: int) -> ExpertBalancer:
    """A balancer behind so many steps. results: of its commands, each of which is asked for its result at once."""
    executor = SimpleNamespace(extension=lambda kind: mover, launch=lambda command: command, collect=results)
    balancer = ExpertBalancer(EplbConfig(window_size=1, step_interval=1000))
    balancer.start(executor, None)
    for _ in range(steps):
        balancer.before_launch(0)
        balancer.after_step(0.1)
    return balancer


def test_a_layer_is_changed_only_where_that_gains_more_than_it_costs():
    load = np.array([[90, 1, 1, 1, 1, 90], [30, 30, 30, 30, 30, 30]])
    few, many = (decide(load, slots(SIX, 4, (0.01, 0.02)), "global", interval=n, step_seconds=0.01) for n in (1, 1000))
    assert not few.changes
    assert few.left
    assert 0 in [change.layer for change in many.changes]
    gain = next(change.gain for change in many.changes if change.layer == 0)
    assert gain == pytest.approx((91 - 46) / (91 + 60) * 10 * 0.5)  # of 10 s, half of which are in experts
    for change in many.changes:
        assert change.gain > change.cost == pytest.approx(0.01 * len(change.rounds) + 0.02)
    forced = decide(load, slots(SIX, 4, (0.01, 0.02)), "global", interval=1, step_seconds=0.01, payback=0)
    assert {change.layer for change in forced.changes} == {change.layer for change in (*few.changes, *few.left)}


def test_who_asks_just_behind_a_window_has_experts_moved_by_that_window():
    loads = [LoadWindow(share * np.array([[9, 9, 1, 1]]), share * np.array([[18, 2]])) for share in (1, 0)]
    balancer = balancer_of(SimpleNamespace(slots=slots()), lambda command: loads.pop(0), steps=2)
    assert len(loads) == 1, "the window has been read"
    assert balancer.rebalance_now()["balancedness"] == {"before": 10 / 18, "after": 1.0}


def test_who_asks_just_behind_a_change_to_another_number_of_expert_devices_has_experts_moved_by_all_that_was_read():
    """Experts in other processes may be on a side with another number of devices by then, without a generation."""
    nothing = np.zeros((1, 4), int)
    loads = iter([LoadWindow(np.array([[9, 9, 1, 1]]), np.array([[18, 2]])), LoadWindow(nothing, nothing)])
    mover = SimpleNamespace(slots=slots())
    balancer = balancer_of(mover, lambda command: next(loads), steps=2)
    mover.slots = slots(ranks=4)
    assert balancer.rebalance_now()["balancedness"] == {"before": 5 / 9, "after": 5 / 9}
    assert balancer.load().tolist() == [[9, 9, 1, 1]]
    assert balancer.latest.by_rank.shape == (1, 4)


@pytest.mark.parametrize(("warmed", "counted"), [((1.0, 1.0), [8.0, 2.0, 4.0]), (None, [2.0, 4.0])])
def test_an_exchange_costs_what_the_last_ones_took_that_moved_experts(warmed, counted):
    """The first one compiles where there was no warm-up."""
    window, taken = LoadWindow(np.array([[9, 9, 1, 1]]), np.array([[18, 2]])), iter((8.0, 80.0, 2.0, 20.0, 4.0, 40.0))
    results = lambda command: window if isinstance(command, ReadLoads) else Exchanged(next(taken))  # noqa: E731
    balancer = balancer_of(SimpleNamespace(slots=slots(seconds=warmed)), results, steps=0)
    assert balancer._slots.seconds == warmed
    for _ in range(3):  # experts lie where they were, as far as this executor says
        balancer.rebalance_now()
        while balancer.busy:
            balancer.idle()
    median = float(np.median(counted))
    assert balancer._slots.seconds == (median, 10 * median)
    (change,) = balancer._bind_decision(payback=0)().changes
    assert change.cost == pytest.approx(len(change.rounds) * median + 10 * median)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"window_size": 0}', "window_size 0; expected an integer of at least 1"),
        ('{"log_balancedness": 1}', "log_balancedness 1; expected true or false"),
        ('{"policy": "best"}', 'policy "best"; expected one of auto, global, hierarchical'),
        ('{"payback": -1}', "payback -1; expected a number of at least 0"),
    ],
)
def test_a_wrong_configuration_names_what_was_found_and_what_would_fit(given, message):
    with pytest.raises(UserError, match=message):
        EplbConfig.parse(given)


NO_EXPERTS = {"n_routed_experts": 0, "n_shared_experts": 0, "first_k_dense_replace": 3}


@pytest.mark.parametrize(
    ("changed", "mesh", "options", "message"),
    [
        ({}, "dp=1", {}, "every device holds all experts"),
        ({}, "dp=8", {"eplb": {"max_bytes_per_step": 1}}, "to move one expert a device receives [0-9,]+ bytes"),
        (NO_EXPERTS, "dp=8", {"eplb": {"num_redundant_experts": 0}}, "--enable-eplb is given, but this model has no"),
        ({"n_shared_experts": 2}, "dp=8", {"enable_shared_experts_fusion": True}, "one shared expert .* model has 2"),
    ],
)
def test_balancing_that_cannot_be_is_refused_at_start(tmp_path, changed, mesh, options, message):
    with pytest.raises(UserError, match=message):
        load(write_checkpoint(tmp_path, **changed), mesh, **options)


def test_a_server_begins_as_a_file_of_places_or_of_loads_says(checkpoint, tmp_path):
    rng = np.random.default_rng(6)
    loads, places = rng.integers(1, 99, (2, 32)), np.stack([random_row(rng, 40) for _ in range(2)])
    path = tmp_path / "location.json"
    path.write_text(json.dumps(ExpertLocation("tiny", loads, places).to_json()))
    # With other slots than those of the file, places are made for its loads.
    made = rebalance(loads, n_physical=36, ranks=4, groups=4)
    for mesh, redundant, expected in (("dp=8", 8, places), ("dp=4", 4, made)):
        options = {"redundant_experts": redundant, "init_expert_location": str(path), "dtype": "float32"}
        args, spec = EngineArgs(model=str(checkpoint), mesh=mesh, **options), MeshSpec.parse(mesh)
        step = make_step(args, load_config(str(checkpoint)), spec, spec.build())
        np.testing.assert_array_equal(step.placement.physical_to_logical[:2], expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("[", "is not JSON"),
        ('{"logical_load": [[1]]}', "has version None, expected 1"),
        ('{"version": 1}', "has neither"),
        ('{"version": 1, "logical_load": [[1, 2], [3]]}', "logical_load that is no table of numbers"),
        ('{"version": 1, "logical_load": [[1, 2], [3, 4]]}', r"expected physical_to_logical \[2, 40\] or logical_load"),
        (json.dumps({"version": 1, "physical_to_logical": [[0] * 40] * 2}), "MoE layer 0: .* missing"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_what_would_fit(checkpoint, tmp_path, content, message):
    path = tmp_path / "location.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        load(checkpoint, "dp=8", init_expert_location=str(path))

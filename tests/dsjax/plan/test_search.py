"""The search keeps what it promises, in the time that it promises."""

import dataclasses
import subprocess
import sys

import pytest
from step_models import options_for

from dsjax.errors import UserError
from dsjax.plan.candidate import prefill_pool, recompute, separated
from dsjax.plan.limits import bottlenecks, forbidden
from dsjax.plan.report import sentence
from dsjax.plan.search import search
from dsjax.plan.sweep import sweep
from dsjax.plan.workload import Lengths, Objective, Pins, PlanOptions, Workload
from sharding.mesh import MeshSpec

PREFILL_BY_TP = Pins(MeshSpec.parse("tp=8,ep=1"), MeshSpec.parse("dp=8"))
TWO_MESHES = Pins(attention_mesh=MeshSpec.parse("dp=8"), expert_mesh=MeshSpec.parse("dp=8"))


def few(mesh=None, **changes):
    """Fewer layouts, where a test is not about them."""
    given = {"modes": ("aggregated",), "redundant": 0, "overlap": "off", "mesh": mesh and MeshSpec.parse(mesh)}
    return PlanOptions(**given | changes)


ONE_LAYOUT = few("tp=8,ep=1")


def test_ranked_candidates_meet_the_objectives_on_the_devices_at_hand_and_in_memory(ask):
    plan = search(ask("h200-16", objective=Objective(ttft=2.0, tpot=0.05)))
    assert plan.ranked
    for c in plan.ranked:
        assert max(c.ttft / 2.0, c.tpot / 0.05, c.devices / 16, c.batch / c.decode.max_batch) <= 1
    throughputs = [c.throughput for c in plan.ranked]
    assert throughputs == sorted(throughputs, reverse=True)


def test_the_front_keeps_the_ttft_and_what_breaks_it_is_kept_apart(ask):
    free = search(ask())
    users, devices = [c.per_user for c in free.frontier], [c.per_device for c in free.frontier]
    assert (users, devices) == (sorted(users), sorted(devices, reverse=True)), "it is a front"
    bound = sorted(c.ttft for c in free.frontier)[len(free.frontier) // 2]
    plan = search(ask(objective=Objective(ttft=bound)))
    assert all(c.ttft <= bound for c in plan.frontier)
    assert plan.late
    assert all(c.ttft > bound for c in plan.late)
    # Nothing that keeps it is missing: each late point has more of one of the two than any of the front.
    for candidate in plan.late:
        better = [c for c in plan.frontier if c.per_user >= candidate.per_user]
        assert all(c.per_device <= candidate.per_device for c in better)
    assert not free.late


def test_a_prefill_that_is_too_busy_for_the_ttft_gets_the_most_requests_that_leave_it_time_enough(ask):
    def ranked(**bound):
        options = few(modes=("separated",), widest=16)
        return search(ask("h100-32", 2000, objective=Objective(tpot=0.04, **bound), options=options, hosts=6)).ranked

    free = ranked()[0]
    bound = 0.9 * free.ttft
    relieved = [c for c in ranked(ttft=bound) if c.key == free.key]
    assert relieved
    assert all(c.ttft <= bound for c in relieved)
    assert 0.8 * free.throughput < relieved[0].throughput < free.throughput


def test_a_concurrency_is_served_and_obeys_littles_law(ask):
    question = ask(concurrency=64.0, options=PlanOptions(modes=("aggregated",)))
    for candidate in search(question).ranked[:5]:
        assert candidate.concurrency == pytest.approx(64)
        stay = candidate.ttft + candidate.tpot * 499
        assert candidate.throughput == pytest.approx(64 * 500 / stay)


def test_a_step_waits_for_the_fullest_rank_and_only_real_users_get_tokens(ask):
    """200 users on 32 DP ranks: 8 ranks have 7 requests, the others 6."""
    found = search(ask("h200-32", concurrency=200.0, options=few("dp=32"))).winner
    tpot = found.decode.tpot
    assert tpot(found.batch) == tpot(7.0) > tpot(6.0)
    assert found.decode.decode_curve(found.decode.rows(found.batch)) == pytest.approx(tpot(7.0), rel=0.01)
    stay = found.ttft + found.tpot * 499
    assert found.throughput == pytest.approx(200 * 500 / stay)


def test_a_fullest_rank_has_room_in_the_cache(ask):
    """A cache holds whole requests, so that one user more than all ranks hold has no place."""
    most = search(ask(prompt=20_000, options=few("dp=8"))).fitting[0].max_batch
    for users, fits in ((8 * most, True), (8 * most + 1, False)):
        assert bool(search(ask(prompt=20_000, concurrency=float(users), options=few("dp=8"))).ranked) is fits


@pytest.mark.slow
def test_a_rate_is_kept_up_with_by_as_few_devices_as_do(ask):
    plan = search(ask("h200-16", objective=Objective(tpot=0.05), rate=5.0))
    assert plan.winner.throughput >= 5 * 500
    assert plan.winner.devices == min(c.devices for c in plan.ranked) < 16


@pytest.mark.parametrize(
    ("rate", "ttft", "options", "devices"),
    [
        (10.2, 4.0, {"mesh": "tp=8,ep=1"}, 24),
        (1.0, 4.0, {"modes": ("separated",)}, 16),
        (20.0, 4.0, {"modes": ("separated",), "widest": 8}, 16),
        # Two instances with prompts keep the rate, and only a third one the TTFT.
        (18.0, 0.2, {"modes": ("separated",), "pins": PREFILL_BY_TP}, 32),
    ],
)
def test_a_rate_takes_the_fewest_devices_that_hold_the_objectives(ask, rate, ttft, options, devices):
    def found(**more):
        objective = Objective(ttft=ttft, tpot=0.05)
        return search(ask("h200-32", 2000, objective=objective, options=few(**options, **more), hosts=8, rate=rate))

    winner = found().winner
    assert winner.throughput >= rate * 500
    assert winner.devices == devices
    assert not found(max_devices=devices - 1).ranked


def test_separated_rates_match_both_sides(ask):
    question = ask("h200-16", objective=Objective(tpot=0.05), options=PlanOptions(modes=("separated",)))
    winner = search(question).winner
    assert winner.mode == "separated"
    of_each = winner.prefill.replicas * 0.85 / winner.prefill.prompt_seconds(winner.prefill_tokens)
    decode = winner.concurrency / (winner.tpot * 499)
    assert winner.throughput == pytest.approx(500 * min(winner.prefill_count * of_each, decode))


@pytest.mark.parametrize("load", [{}, {"concurrency": 64.0}])
def test_no_more_requests_are_served_than_dsjax_moves_caches_of(instance, load):
    """One replica takes in one cache of 8,000 tokens after the other, as docs/disaggregation.md measured: 18.3 MB in 23.2 ms."""
    asked = {"prompt": 8000, "output": 20, "options": options_for("dsjax", modes=("separated",))}
    prefill, decode = (instance("tp=8", "h200-16", **asked, **load) for _ in range(2))
    pool, most = prefill_pool(prefill, 8192), 1.0 if load else 0.85
    moved = most / (8000 * decode.memory.cache_per_token / 18.3e6 * 23.2e-3)
    assert pool.rate * most > moved
    for found in (separated(pool, 1, decode, 1, 64.0), separated(pool, 1, decode, 1, 64.0, interpolate=False)):
        assert found.throughput / 20 <= moved * 1.01


def test_an_impossible_tpot_is_named_with_hardware_that_does_it(ask):
    plan = search(ask(objective=Objective(tpot=0.008), options=ONE_LAYOUT))
    (reason,) = forbidden(plan)
    assert reason.bound == "tpot"
    assert reason.best > 0.008
    assert "TPOT forbids it: 8 ms wanted" in sentence(reason)
    assert "It would hold with" in sentence(reason)
    factor = {r.resource: r.factor for r in reason.remedies}["all resources"]
    cluster = plan.question.cluster
    for resource in ("compute", "memory bandwidth", "scale-up", "network", "latency"):
        cluster = cluster.scaled(resource, factor)
    assert any(recompute(candidate, cluster).tpot <= 0.008 for candidate in plan.missed)


def test_where_no_hardware_helps_what_remains_is_said(ask):
    (reason,) = forbidden(search(ask(objective=Objective(tpot=0.001), options=ONE_LAYOUT)))
    assert not reason.remedies
    assert 0.001 < reason.with_64_times_everything < reason.best
    assert "fixed costs remain" in sentence(reason)


@pytest.mark.parametrize(
    ("load", "bound", "wanted"),
    [({"rate": 100.0}, "throughput", 100 * 500), ({"concurrency": 1e6}, "concurrency", 1e6)],
)
def test_a_load_beyond_all_layouts_is_a_matter_of_throughput_or_of_caches(ask, monkeypatch, load, bound, wanted):
    # To look for remedies takes a hundred times as long as all else.
    monkeypatch.setattr("dsjax.plan.limits._remedies", lambda plan, objective: [])
    (reason,) = forbidden(search(ask(options=few(), **load)))
    assert (reason.bound, reason.wanted) == (bound, wanted)
    assert 100 < reason.best < wanted
    assert "wanted" in sentence(reason)


@pytest.mark.parametrize(("load", "pins"), [({}, Pins()), ({"concurrency": 8.0}, Pins(None, None, 1, 1))])
def test_prefill_and_decode_that_do_not_fit_beside_each_other_are_a_matter_of_devices(ask, load, pins):
    (reason,) = forbidden(search(ask(options=PlanOptions(modes=("separated",), redundant=0, pins=pins), **load)))
    assert (reason.bound, reason.wanted, reason.best) == ("devices", 16, 8)
    assert "1 × dp=8 | 1 × dp=8 takes 16 devices" in sentence(reason)
    assert "2 × devices" in sentence(reason)


def test_weights_that_fit_nowhere_are_a_matter_of_memory(ask):
    plan = search(ask("tpu-v5e-32"))
    assert not [*plan.ranked, *plan.missed]
    assert len(plan.too_large) == len(plan.considered)
    (reason,) = forbidden(plan)
    assert reason.bound == "memory"
    assert {"memory of a device", "hosts"} == {remedy.resource for remedy in reason.remedies}
    assert "memory forbids it" in sentence(reason)


def test_more_devices_are_those_that_are_left_out_first(ask):
    (reason,) = forbidden(search(ask("h200-16", options=few(max_devices=4, overlap="auto"))))
    assert {remedy.resource: remedy.factor for remedy in reason.remedies}["devices"] == 2


def test_the_first_bottleneck_is_what_doubling_moves_most(ask):
    candidate = search(ask("h20-32", prompt=4096, options=few("dp=32"))).winner
    found = bottlenecks(candidate)
    assert found[0].gain == max(one.gain for one in found)
    doubled = recompute(candidate, candidate.decode.cluster.scaled("compute", 2)).throughput
    (compute,) = [one.gain for one in found if one.resource == "compute"]
    assert compute == pytest.approx(doubled / candidate.throughput)


def test_prefix_hits_give_more_and_so_do_accepted_drafts_of_a_small_batch(ask):
    def throughput(drafts=0, **load):
        options = few("tp=8,ep=1", drafts=drafts)
        return search(ask(prompt=8000, concurrency=8.0, options=options, **load)).winner.throughput

    assert throughput() < min(throughput(prefix_hit=0.8), throughput(drafts=1))


@pytest.mark.slow
def test_a_sweep_to_a_slower_network_or_fewer_hosts_never_gains(ask):
    question = ask("h200-16", options=few("dp=16"))
    winner = search(question).winner
    for quantity, faster_first in (("latency", True), ("bandwidth", False)):
        rates = [p.same.throughput for p in sweep(question, winner, quantity).points]
        assert rates == sorted(rates, reverse=faster_first)
    question = ask("h200-16", objective=Objective(tpot=0.05), options=few(widest=8))
    found = sweep(question, search(question).winner, "loss-of-hosts").points
    assert [p.value for p in found] == [0, 1]
    assert found[0].best.throughput >= found[1].best.throughput


@pytest.mark.parametrize("pins", [Pins(), Pins(MeshSpec.parse("dp=8"), MeshSpec.parse("dp=8"))])
def test_a_mesh_that_was_given_runs_on_no_fewer_hosts_than_it_has(ask, pins):
    """The points of a sweep say so, where the plan itself was answered."""
    mesh, modes = (None, ("separated",)) if pins else ("dp=16", ("aggregated",))
    question = ask("h200-16", options=few(mesh, modes=modes, pins=pins))
    whole, lost = sweep(question, search(question).winner, "loss-of-hosts").points
    assert whole.same.throughput == whole.best.throughput
    assert (lost.same, lost.best, lost.met) == (None, None, False)


@pytest.mark.slow
def test_a_plan_of_32_devices_takes_less_than_10_seconds_without_jax_or_pyzmq():
    code = (
        "import sys, time; start = time.perf_counter();"
        "import dsjax.plan.report; from dsjax.plan.search import search; from dsjax.plan.question import Question;"
        "from dsjax.plan.cluster import load_cluster;"
        "from dsjax.config import load_config; from dsjax.plan.workload import *;"
        "q = Question(load_config('deepseek-v3'), load_cluster('h100-32'), Workload(Lengths(2000), Lengths(500)),"
        "Objective(), PlanOptions(dispatch='auto')); plan = search(q); import resource;"
        "used = resource.getrusage(resource.RUSAGE_SELF); assert plan.winner and len(plan.considered) > 100;"
        "assert not {'jax', 'zmq'} & {*sys.modules}, 'jax or zmq was imported'; print(used.ru_utime)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ask: Workload(Lengths(1), Lengths(1), concurrency=1, rate=1), "both given"),
        (lambda ask: Workload(Lengths(1), Lengths(1), prefix_hit=1.0), "below 1"),
        (lambda ask: Lengths.parse("many", "--input"), "--input is 'many'"),
        (lambda ask: PlanOptions(overlap="yes"), "one of auto, on, off"),
        (lambda ask: PlanOptions(acceptance=2.0), "--mtp-acceptance"),
        (lambda ask: search(ask(prompt=163_000, output=1000)), "positions for 163840"),
    ],
)
def test_wrong_wishes_say_what_was_expected(ask, make, message):
    with pytest.raises(UserError, match=message):
        make(ask)


@pytest.mark.parametrize(
    "options",
    [PlanOptions(mesh=MeshSpec.parse("pp=2,tp=8")), options_for("dsjax", pins=TWO_MESHES, redundant=0)],
    ids=["stages", "AFD"],
)
def test_what_hands_no_pages_over_is_no_separated_service_and_may_be_an_aggregated_one(ask, options):
    with pytest.raises(UserError, match="take no pages of prompts from one another; give --mode aggregated"):
        search(ask("h200-16", options=dataclasses.replace(options, modes=("separated",))))
    assert search(ask("h200-16", options=options)).winner.mode == "aggregated"


def test_meshes_and_numbers_of_a_separated_service_can_be_given(ask):
    pins, copies = dataclasses.replace(PREFILL_BY_TP, prefill_count=1, decode_count=3), ("", " +32")
    plan = search(ask("h200-32", options=PlanOptions(pins=pins)))
    assert {c.name() for c in plan.ranked} <= {f"1 × tp=8,ep=1{e} | 3 × dp=8{d}" for e in copies for d in copies}
    assert (plan.winner.mode, plan.winner.devices) == ("separated", 32)
    with pytest.raises(UserError, match=r"--decode-mesh dp=5 is no layout that fits here; nearest are"):
        search(ask("h200-16", options=PlanOptions(pins=Pins(decode_mesh=MeshSpec.parse("dp=5")))))


def test_decode_instances_that_do_not_divide_a_host_leave_whole_ones_to_prefill(ask):
    over_two_hosts = Pins(prefill_mesh=MeshSpec.parse("dp=8"), decode_mesh=MeshSpec.parse("dp=12,ep=6,etp=2"))
    found = search(ask("h200-32", options=PlanOptions(modes=("separated",), pins=over_two_hosts)))
    assert found.ranked
    hosts = [c.prefill_count * c.prefill.layout.devices / 8 + c.count * 2 for c in found.ranked]
    assert max(hosts) <= 4

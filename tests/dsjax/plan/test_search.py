"""The search keeps what it promises, in the time that it promises."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan import relief
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import dsjax_engine
from dsjax.plan.explain import widening
from dsjax.plan.limits import Forbidden, Remedy, _grown, bottlenecks, forbidden, on
from dsjax.plan.prompts import MEAN_OF_STEPS
from dsjax.plan.report import sentence, to_json
from dsjax.plan.search import search
from dsjax.plan.sweep import sweep
from dsjax.plan.workload import Lengths, Objective, Pins, PlanOptions, Workload
from sharding.mesh import MeshSpec

# Fewer layouts, where a test is not about them.
FEW = PlanOptions(modes=("aggregated",), redundant=0, overlap="off")


def test_ranked_candidates_meet_the_objectives_on_the_devices_at_hand_and_in_memory(ask):
    question = ask("h100-32", objective=Objective(ttft=2.0, tpot=0.05))
    plan = search(question)
    assert plan.ranked
    for candidate in plan.ranked:
        assert candidate.ttft.value <= 2.0
        assert candidate.tpot.value <= 0.05
        assert candidate.devices <= 32
        assert candidate.batch <= candidate.decode.max_batch
    throughputs = [c.throughput.value for c in plan.ranked]
    assert throughputs == sorted(throughputs, reverse=True)


def test_the_front_is_a_front(ask):
    front = search(ask()).frontier
    users = [c.per_user.value for c in front]
    devices = [c.per_device.value for c in front]
    assert users == sorted(users)
    assert devices == sorted(devices, reverse=True)
    assert len(front) > 5


def test_the_front_keeps_the_ttft_and_what_breaks_it_is_kept_apart(ask):
    free = search(ask())
    bound = sorted(c.ttft.value for c in free.frontier)[len(free.frontier) // 2]
    plan = search(ask(objective=Objective(ttft=bound)))
    assert all(c.ttft.value <= bound for c in plan.frontier)
    assert plan.late
    assert all(c.ttft.value > bound for c in plan.late)
    # Nothing that keeps it is missing: each late point has more of one of the two than any of the front.
    for candidate in plan.late:
        better = [c for c in plan.frontier if c.per_user.value >= candidate.per_user.value]
        assert all(c.per_device.value <= candidate.per_device.value for c in better)
    assert not free.late


def test_what_relief_leaves_out_would_not_have_been_shown(ask, monkeypatch):
    options = PlanOptions(modes=("separated",), redundant=0, overlap="off", widest=16)
    question = ask("h100-32", 2000, objective=Objective(ttft=1.0, tpot=0.05), options=options, hosts=6)
    worked_out = []

    def counted(one, real=relief._worked_out):
        worked_out.append(one)
        return real(one)

    monkeypatch.setattr(relief, "_worked_out", counted)
    monkeypatch.setattr(relief, "SHOWN", 3)
    bounded, with_bounds = search(question), len(worked_out)
    monkeypatch.setattr(relief._Shown, "may_have", lambda self, hope: True)
    everything = search(question)
    assert with_bounds < len(worked_out) - with_bounds

    def shown(candidates):
        return [(c.name(), c.batch, c.ttft.value, c.tpot.value, c.throughput.value) for c in candidates]

    assert shown(bounded.ranked[:3]) == shown(everything.ranked[:3])
    assert shown(bounded.frontier) == shown(everything.frontier)
    assert shown(bounded.late) == shown(everything.late)


def test_a_hope_that_is_brought_nearer_is_no_worse_than_what_is_worked_out(ask, monkeypatch):
    options = PlanOptions(modes=("separated",), redundant=0, overlap="off", widest=16)
    question = ask("h100-32", 2000, objective=Objective(ttft=1.0, tpot=0.05), options=options, hosts=6)
    found = []

    def kept(one, real=relief._worked_out):
        found.append((one, real(one)))
        return found[-1][1]

    monkeypatch.setattr(relief, "_worked_out", kept)
    monkeypatch.setattr(relief._Shown, "may_have", lambda self, hope: True)
    search(question)
    nearer = 0
    for one, relieved in found:
        hope = first = relief._hope(one)
        for _ in range(relief._NEARER):
            hope = hope.closer()
            assert hope.batch <= relieved.batch
            assert hope.candidate.tpot.value <= relieved.tpot.value
            assert hope.candidate.throughput.value >= relieved.throughput.value
        nearer += hope.candidate.tpot.value > first.candidate.tpot.value
    assert nearer > len(found) / 2


def test_a_concurrency_is_served_and_obeys_littles_law(ask):
    question = ask(concurrency=64.0, options=PlanOptions(modes=("aggregated",)))
    for candidate in search(question).ranked[:5]:
        assert candidate.concurrency == pytest.approx(64)
        stay = candidate.ttft.value + candidate.tpot.value * 499
        assert candidate.throughput.value == pytest.approx(64 * 500 / stay)


def test_a_first_token_waits_for_its_own_prompt_and_for_others(ask):
    for candidate in search(ask(options=FEW)).ranked[:5]:
        own, instance = candidate.ttft.part("own prompt, beside decodes").value, candidate.decode
        # Other replicas have only decodes, or prompts too.
        least, most = instance.prefill_step(1000.0, 1 / 32).value, instance.prefill_step(2000.0).value
        assert least <= own <= most + instance.decode_step(candidate.batch).value
        assert candidate.ttft.value > own + candidate.ttft.part("steps in progress").value


def test_a_rate_is_kept_up_with_by_as_few_devices_as_do(ask):
    plan = search(ask("h200-16", objective=Objective(tpot=0.05), rate=5.0))
    assert plan.winner.throughput.value >= 5 * 500
    assert plan.winner.devices == min(c.devices for c in plan.ranked) < 16


def test_separated_rates_match_both_sides(ask):
    question = ask("h200-16", objective=Objective(tpot=0.05), options=PlanOptions(modes=("separated",)))
    winner = search(question).winner
    assert winner.mode == "separated"
    prefill = winner.prefill_count * 0.85 / winner.prefill.prompt_seconds(winner.prefill_tokens).value
    prefill *= winner.prefill.replicas
    decode = winner.concurrency / (winner.tpot.value * 499)
    assert winner.throughput.value == pytest.approx(500 * min(prefill, decode))


@pytest.fixture(scope="module")
def too_fast(ask):
    """A plan without a winner, and why it has none."""
    plan = search(ask(objective=Objective(tpot=0.008), options=FEW))
    return plan, forbidden(plan)


@pytest.fixture
def no_remedies(monkeypatch):
    """For what is not about them: to look for remedies takes a hundred times as long as all else."""
    monkeypatch.setattr("dsjax.plan.limits._remedies", lambda plan, objective: [])


def test_an_impossible_tpot_is_named_with_the_hardware_that_would_do(too_fast):
    _, reasons = too_fast
    assert [reason.bound for reason in reasons] == ["tpot"]
    assert reasons[0].best > 0.008
    assert reasons[0].remedies
    assert "TPOT forbids it: 8 ms wanted" in sentence(reasons[0])
    assert "It would hold with" in sentence(reasons[0])


def test_where_no_hardware_helps_what_remains_is_said(ask):
    (reason,) = forbidden(search(ask(objective=Objective(tpot=0.001), options=FEW)))
    assert not reason.remedies
    assert 0.001 < reason.floor < reason.best
    assert "fixed costs remain" in sentence(reason)


def test_a_remedy_that_is_named_does_it(too_fast):
    plan, reasons = too_fast
    named = {r.resource: r.factor for r in reasons[0].remedies}
    assert "all of these together" in named
    cluster = plan.question.cluster
    for resource in ("compute", "memory bandwidth", "scale-up", "network", "latency"):
        cluster = cluster.scaled(resource, named["all of these together"])
    assert any(on(candidate, cluster).tpot.value <= 0.008 for candidate in plan.missed)


def test_a_rate_that_cannot_be_kept_up_with_is_a_matter_of_throughput(ask, no_remedies):
    reasons = forbidden(search(ask(rate=100.0, options=FEW)))
    assert [reason.bound for reason in reasons] == ["throughput"]
    assert reasons[0].wanted == 100 * 500
    assert reasons[0].best < 50_000


def test_more_requests_than_caches_hold_is_a_matter_of_memory(ask):
    (reason,) = forbidden(search(ask(concurrency=1e6, options=FEW)))
    assert reason.bound == "concurrency"
    assert 100 < reason.best < 1e6
    assert "requests at once wanted" in sentence(reason)


@pytest.mark.parametrize(
    ("load", "pins"), [({}, Pins()), ({"concurrency": 8.0}, Pins()), ({}, Pins(prefill_count=1, decode_count=1))]
)
def test_prefill_and_decode_that_do_not_fit_beside_each_other_are_a_matter_of_devices(ask, load, pins):
    (reason,) = forbidden(search(ask(options=PlanOptions(modes=("separated",), redundant=0, pins=pins), **load)))
    assert (reason.bound, reason.wanted, reason.best) == ("devices", 16, 8)
    assert "1 × dp=8 | 1 × dp=8 takes 16 devices" in sentence(reason)
    assert "2 × devices" in sentence(reason)


def test_separated_caches_that_are_too_small_are_a_matter_of_memory(ask):
    found = search(ask("h200-16", concurrency=4000.0, options=PlanOptions(modes=("separated",), redundant=0)))
    (reason,) = forbidden(found)
    assert reason.bound == "concurrency"
    assert reason.remedies[0].factor == 4000 / reason.best > 1


def test_a_multiple_that_is_named_is_rounded_up():
    reason = Forbidden("memory", 141.2e9, 141.0e9, "tp=8", [Remedy("memory of a device", 141.2 / 141.0)])
    assert "hold with 1.01 × memory" in sentence(reason)


def test_the_best_of_a_bound_is_the_best_of_all_candidates(ask, no_remedies):
    tight = Objective(tpot=0.001, throughput=1e6)
    reasons = {r.bound: r for r in forbidden(search(ask(objective=tight, options=FEW)))}
    (alone,) = forbidden(search(ask(objective=Objective(tpot=0.001), options=FEW)))
    assert reasons["tpot"].best == alone.best
    assert set(reasons) == {"tpot", "throughput"}


def test_weights_that_fit_nowhere_are_a_matter_of_memory(ask):
    plan = search(ask("tpu-v5e-32"))
    assert not plan.ranked
    assert not plan.missed
    assert len(plan.too_large) == len(plan.considered)
    (reason,) = forbidden(plan)
    assert reason.bound == "memory"
    assert {"memory of a device", "hosts"} == {remedy.resource for remedy in reason.remedies}
    assert "memory forbids it" in sentence(reason)


def test_more_devices_are_those_that_are_left_out_first(ask):
    few = PlanOptions(max_devices=4, redundant=0, modes=("aggregated",))
    (reason,) = forbidden(search(ask("h200-16", options=few)))
    assert {remedy.resource: remedy.factor for remedy in reason.remedies}["devices"] == 2


def test_what_is_given_of_a_separated_service_holds_with_more_hosts_too(ask):
    pins = Pins(prefill_count=1, decode_count=1)
    (reason,) = forbidden(search(ask("tpu-v5e-32", options=PlanOptions(redundant=0, pins=pins))))
    assert {"memory of a device", "hosts"} == {remedy.resource for remedy in reason.remedies}


def test_more_hosts_are_of_every_kind():
    grown = _grown(load_cluster("h800-16-h20-16"), 2)
    assert (grown.num_devices, grown.prefill.num_devices) == (32, 32)


def test_the_first_bottleneck_is_what_doubling_moves_most(ask):
    candidate = search(ask("h20-32", prompt=4096)).winner
    first, *rest = bottlenecks(candidate)
    assert all(first.gain >= other.gain for other in rest)
    doubled = on(candidate, candidate.decode.cluster.scaled("compute", 2)).throughput.value
    gains = {b.resource: b.gain for b in (first, *rest)}
    assert gains["compute"] == pytest.approx(doubled / candidate.throughput.value)


def test_more_prefix_hits_give_more(ask):
    without = search(ask(prompt=8000)).winner.throughput.value
    assert search(ask(prompt=8000, prefix_hit=0.8)).winner.throughput.value > without


def test_who_waits_for_whose_prompts_is_an_assumption_among_the_others(ask):
    options = PlanOptions(modes=("aggregated",), redundant=0, mesh=MeshSpec.parse("dp=8"), drafts=1)
    winner = search(ask("h200-8", options=options, concurrency=64.0)).winner
    shares = dict(widening(winner, "tpot"))
    assert shares[MEAN_OF_STEPS] > 0.1
    assert shares["tokens a step"] > 1e-4
    assert sum(shares.values()) < 1
    before = winner.tpot.to_json()
    assert on(winner, winner.decode.cluster).tpot.to_json() == before


def test_an_accepted_draft_gives_more_at_small_batches(ask):
    base = ask(concurrency=8.0, options=PlanOptions(modes=("aggregated",)))
    drafting = dataclasses.replace(base, options=PlanOptions(modes=("aggregated",), drafts=1))
    assert search(drafting).winner.tpot.value < search(base).winner.tpot.value


def test_losing_hosts_never_gains(ask):
    question = ask("h200-16", objective=Objective(tpot=0.05), options=FEW)
    found = sweep(question, search(question).winner, "loss-of-hosts")
    best = [p.best.throughput.value for p in found.points]
    assert [p.value for p in found.points] == [0, 1]
    assert best[0] >= best[1]


@pytest.mark.parametrize("pins", [Pins(), Pins(MeshSpec.parse("dp=8"), MeshSpec.parse("dp=8"))])
def test_a_mesh_that_was_given_runs_on_no_fewer_hosts_than_it_has(ask, pins):
    """The points of a sweep say so, where the plan itself was answered."""
    mesh, modes = (None, ("separated",)) if pins else (MeshSpec.parse("dp=16"), ("aggregated",))
    question = ask("h200-16", options=dataclasses.replace(FEW, modes=modes, mesh=mesh, pins=pins))
    whole, lost = sweep(question, search(question).winner, "loss-of-hosts").points
    assert whole.same.throughput.value == whole.best.throughput.value
    assert (lost.same, lost.best, lost.met) == (None, None, False)


def test_of_attention_and_experts_apart_as_many_remain_as_hosts_have_room_for(ask):
    pins = Pins(attention_mesh=MeshSpec.parse("dp=4"), expert_mesh=MeshSpec.parse("dp=8"))
    options = PlanOptions(modes=("aggregated",), redundant=0, pins=pins, afd="on")
    question = ask("h200-32", options=options)
    whole, lost = sweep(question, search(question).winner, "loss-of-hosts", (1,)).points
    assert (whole.same.count, lost.same.count, lost.best.count) == (2, 1, 1)
    beside = question.cluster.with_experts_on(load_hardware("h20"), 2)
    pins = Pins(attention_mesh=MeshSpec.parse("dp=32"), expert_mesh=MeshSpec.parse("dp=16"))
    question = dataclasses.replace(question, cluster=beside, options=dataclasses.replace(options, pins=pins))
    (here,) = sweep(question, search(question).winner, "latency", (2,)).points
    assert here.same.throughput.value == here.best.throughput.value


def test_a_sweep_over_users_shows_the_winner_as_it_is_where_prefill_leaves_room_in_it(ask):
    wide = MeshSpec.parse("dp=8")
    question = ask("h200-16", 4000, options=PlanOptions(redundant=0, overlap="off", pins=Pins(wide, wide, 1, 1)))
    winner = dataclasses.replace((found := search(question).winner), batch=float(found.decode.max_batch))
    winner = on(winner, question.cluster)
    swept = sweep(question, winner, "concurrency", ())
    (there,) = (point for point in swept.points if point.value == swept.now)
    assert there.value < 0.9 * winner.concurrency
    assert there.same.tpot.value == pytest.approx(winner.tpot.value, rel=0.05)
    assert there.same.throughput.value == pytest.approx(winner.throughput.value, rel=0.05)


def test_half_of_an_odd_number_of_hosts_is_a_number_of_hosts(ask):
    question = ask("h200-8", hosts=3, options=dataclasses.replace(FEW, mesh=MeshSpec.parse("tp=8,ep=1")))
    swept = sweep(question, search(question).winner, "hosts")
    assert [point.value for point in swept.points] == [1, 3, 6, 12]
    assert [point.best.devices for point in swept.points] == [8, 24, 48, 96]


def test_a_slower_network_never_gains(ask):
    question = ask("h200-16", options=FEW)
    winner = search(question).winner
    for quantity, faster_first in (("latency", True), ("bandwidth", False)):
        rates = [p.same.throughput.value for p in sweep(question, winner, quantity).points]
        assert rates == sorted(rates, reverse=faster_first)


def test_a_plan_of_32_devices_takes_less_than_10_seconds_without_jax():
    code = (
        "import sys, time; start = time.perf_counter();"
        "from dsjax.plan.search import search; from dsjax.plan.question import Question; from dsjax.plan.cluster import load_cluster;"
        "from dsjax.config import load_config; from dsjax.plan.workload import *;"
        "q = Question(load_config('deepseek-v3'), load_cluster('h100-32'), Workload(Lengths(2000), Lengths(500)),"
        "Objective(), PlanOptions(dispatch='auto')); plan = search(q); import resource;"
        "used = resource.getrusage(resource.RUSAGE_SELF); assert plan.winner and len(plan.considered) > 100;"
        "assert 'jax' not in sys.modules, 'jax was imported'; print(used.ru_utime)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 10


def test_json_is_complete_and_has_intervals(ask):
    plan = search(ask(objective=Objective(tpot=0.05)))
    found = json.loads(json.dumps(to_json(plan, "deepseek-v3", 3, [])))
    first = found["ranked"][0]
    assert first["tpot_s"]["low"] < first["tpot_s"]["value"] < first["tpot_s"]["high"]
    assert first["tpot_s"]["kind"] == "measured + assumption"
    assert first["bottleneck"]["resource"]
    assert found["winner"]["expected"]["mesh"] == first["mesh"]
    assert found["forbidden"] == []
    assert all(math.isfinite(c["output_tokens_per_s"]["value"]) for c in found["frontier"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(Lengths(1), Lengths(1), concurrency=1, rate=1), "both given"),
        (lambda: Workload(Lengths(1), Lengths(1), prefix_hit=1.0), "below 1"),
        (lambda: Lengths.parse("many", "--input"), "--input is 'many'"),
        (lambda: Lengths.parse("0", "--input"), "at least 1 token"),
        (lambda: Objective(tpot=0.0), "--tpot-ms"),
        (lambda: PlanOptions(overlap="yes"), "auto, on or off"),
        (lambda: PlanOptions(dispatch="magic"), "--dispatch is 'magic'"),
        (lambda: PlanOptions(acceptance=2.0), "--mtp-acceptance"),
    ],
)
def test_wrong_wishes_say_what_was_expected(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_request_longer_than_the_models_positions_is_refused(ask):
    with pytest.raises(UserError, match="positions for 163840"):
        search(ask(prompt=163_000, output=1000))


def test_a_side_of_a_separated_service_of_dsjax_may_be_on_several_hosts(ask):
    pins = Pins(prefill_mesh=MeshSpec.parse("dp=8"), decode_mesh=MeshSpec.parse("dp=16"))
    options = PlanOptions(modes=("separated",), engine=dsjax_engine(), dispatch="auto", pins=pins)
    winner = search(ask("h200-32", prompt=4000, options=options)).winner
    assert (winner.prefill.layout.devices, winner.decode.layout.devices) == (8, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": MeshSpec.parse("pp=2,tp=8")},
        {"afd": "on", "engine": dsjax_engine(), "dispatch": "auto", "redundant": 0},
    ],
)
def test_what_hands_no_pages_over_is_no_separated_service_and_may_be_an_aggregated_one(ask, changes):
    question = ask("h200-16", options=PlanOptions(modes=("separated",), **changes))
    with pytest.raises(UserError, match="take no pages of prompts from one another; give --mode aggregated"):
        search(question)
    both = dataclasses.replace(question.options, modes=("aggregated", "separated"))
    assert search(dataclasses.replace(question, options=both)).winner.mode == "aggregated"


def test_meshes_and_numbers_of_a_separated_service_can_be_given(ask):
    pins = Pins(MeshSpec.parse("tp=8,ep=1"), MeshSpec.parse("dp=8"), 1, 3)
    plan = search(ask("h200-32", options=PlanOptions(pins=pins)))
    assert {c.name() for c in plan.ranked} <= {
        f"1 × tp=8,ep=1{e} | 3 × dp=8{d}" for e in ("", " +32") for d in ("", " +32")
    }
    assert plan.winner.mode == "separated"
    assert plan.winner.devices == 32
    with pytest.raises(UserError, match=r"--decode-mesh dp=5 is no layout that fits here; nearest are"):
        search(ask("h200-16", options=PlanOptions(pins=Pins(decode_mesh=MeshSpec.parse("dp=5")))))


OVER_TWO_HOSTS = Pins(prefill_mesh=MeshSpec.parse("dp=8"), decode_mesh=MeshSpec.parse("dp=12,ep=6,etp=2"))
OVER_THREE_HOSTS = Pins(attention_mesh=MeshSpec.parse("dp=4"), expert_mesh=MeshSpec.parse("dp=12"))


@pytest.mark.parametrize(("pins", "afd", "hosts_of_decode"), [(OVER_TWO_HOSTS, "off", 2), (OVER_THREE_HOSTS, "on", 3)])
def test_decode_instances_that_do_not_divide_a_host_leave_whole_ones_to_prefill(ask, pins, afd, hosts_of_decode):
    found = search(ask("h200-32", options=PlanOptions(modes=("separated",), pins=pins, afd=afd)))
    assert found.ranked
    hosts = [c.prefill_count * c.prefill.layout.devices / 8 + c.count * hosts_of_decode for c in found.ranked]
    assert max(hosts) <= 4


def test_a_mesh_that_needs_more_hosts_than_there_may_be_is_no_layout(ask):
    wanted = MeshSpec.parse("dp=12,ep=6,etp=2")
    with pytest.raises(UserError, match="12 devices wanted, 12 at hand in hosts of 8"):
        search(ask("h200-32", options=PlanOptions(modes=("aggregated",), mesh=wanted, max_devices=12)))


def test_instances_that_would_need_more_hosts_are_too_many_devices(ask):
    found = search(ask("h200-16", options=PlanOptions(modes=("separated",), pins=OVER_TWO_HOSTS)))
    (reason,) = forbidden(found)
    assert (reason.bound, reason.wanted, reason.best) == ("devices", 24, 16)


@pytest.mark.parametrize(
    ("cluster", "pins", "own", "other", "most"),
    [
        ("h200-16", Pins(), 8, 8, 1),
        ("h200-32", Pins(), 8, 8, 3),
        ("h200-32", Pins(prefill_count=1), 8, 8, 3),
        ("h200-32", Pins(prefill_count=2), 8, 8, 2),
        ("h200-32", Pins(decode_count=2), 8, 8, 2),
        ("h200-32", Pins(decode_count=4), 8, 8, 0),
        ("h200-32", Pins(), 8, 24, 1),
    ],
)
def test_as_many_instances_decode_as_a_split_of_the_devices_has(ask, cluster, pins, own, other, most):
    from dsjax.plan.search import instances
    from dsjax.plan.separated import most_decode_instances

    question = ask(cluster, concurrency=64.0, options=PlanOptions(modes=("separated",), redundant=0, pins=pins))
    fitting = instances(question)[1]
    of_size = {size: [i for i in fitting if i.layout.devices == size] for size in (own, other)}
    assert most_decode_instances(question, of_size[own], of_size[other][0]) == most

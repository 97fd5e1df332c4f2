"""After the loss of a host: what is read and sent, as `tools/check_host_loss.py` measured it, and how long it takes."""

import dataclasses

import pytest

from dsjax.plan.layout import parse_layout
from dsjax.plan.recipe import recipe
from dsjax.plan.recovery import moved_shares, recovery
from dsjax.plan.search import search
from dsjax.plan.workload import PlanOptions
from sharding.mesh import MeshSpec

CHECKPOINT_GB = 3.0
"""What the measured runs had, nearly all of it experts: 4 processes of 8 devices, one killed (docs/many-hosts.md, Measured)."""


def test_what_is_read_and_sent_after_a_loss_is_what_was_measured():
    gone, moved = moved_shares(4)
    assert 0.95 * 0.75 <= CHECKPOINT_GB * gone.value <= 0.84
    assert 1.41 <= CHECKPOINT_GB * moved.value <= 1.69
    assert moved.low <= 1.41 / CHECKPOINT_GB <= 1.69 / CHECKPOINT_GB <= moved.high


def test_a_host_that_leaves_gives_what_a_lost_one_has_read():
    gone, moved = moved_shares(4)
    assert 2.25 <= CHECKPOINT_GB * (gone.value + moved.value) <= 2.44


@pytest.mark.parametrize(("hosts", "kept"), [(2, 1 / 2), (4, 2 / 3)])
def test_survivors_that_keep_their_order_keep_most(hosts, kept):
    """With two hosts the other one keeps its half; with four, the loss of an inner one leaves 1/4 + 1/6 + 1/4 in place."""
    _, moved = moved_shares(hosts)
    assert moved.low == pytest.approx((hosts - 1) / hosts - kept)


def _instance(ask, mesh, **options):
    question = ask("h100-32", options=PlanOptions(redundant=0, **options))
    return question.instance(parse_layout(mesh, 0, question.config), {})


def test_a_mesh_of_one_host_has_nothing_that_goes_on(ask):
    assert recovery(_instance(ask, "dp=8")) is None
    assert recovery(_instance(ask, "dp=16")) is not None


def test_of_stages_nothing_goes_on_after_a_loss(ask):
    """All processes end and are started again (docs/pipeline.md): a recipe has no silence to tell."""
    assert recovery(_instance(ask, "pp=4,dp=8")) is None


def test_small_models_are_silent_as_long_as_it_takes_to_notice_and_meet(ask):
    """0.7 to 1.1 s with programs compiled ahead (docs/measurements/2026-11-22-host-losses.csv)."""
    instance = _instance(ask, "dp=32")
    small = dataclasses.replace(instance.memory, weights={"experts": 1_000_000})
    instance.__dict__["memory"] = small
    seconds = recovery(instance).seconds
    assert 0.7 <= seconds.value <= 1.1
    assert seconds.low <= 0.7 <= 1.1 <= seconds.high


def test_faster_storage_and_other_copies_of_the_experts_shorten_it(ask):
    two = recovery(_instance(ask, "dp=16"))
    assert two.received.value == 0
    assert two.seconds.value < two.seconds.high < 1000
    whole, copies = (recovery(_instance(ask, mesh)) for mesh in ("dp=32", "dp=32,ep=16"))
    assert copies.read.value == 0 < whole.read.value
    instance = _instance(ask, "dp=32")
    quick = dataclasses.replace(instance, cluster=dataclasses.replace(instance.cluster, storage=50e9))
    assert recovery(quick).seconds.value < recovery(instance).seconds.value


def test_the_recipe_says_it_for_a_mesh_of_several_hosts(ask):
    options = PlanOptions(modes=("aggregated",), mesh=MeshSpec.parse("dp=32"), redundant=32)
    question = ask("h100-32", options=options)
    service = recipe("deepseek-v3", question, search(question).winner)["services"][0]
    assert set(service["recovery"]) == {"bytes_read", "bytes_received", "seconds", "compiling_s"}
    assert service["recovery"]["seconds"]["low"] > 0

"""After the loss of a host: what is read and sent, as `tools/check_host_loss.py` measured it, and how long it takes."""

import dataclasses

from dsjax.plan.layout import parse_layout
from dsjax.plan.recovery import moved_shares, recovery
from dsjax.plan.workload import PlanOptions

CHECKPOINT_GB = 3.0
"""What the measured runs had, nearly all of it experts: 4 processes of 8 devices, one killed (docs/many-hosts.md, Measured)."""


def test_what_is_read_and_sent_after_a_loss_is_what_was_measured():
    gone, moved = moved_shares(4)
    assert 0.95 * 0.75 <= CHECKPOINT_GB * gone.value <= 0.84
    assert 1.41 <= CHECKPOINT_GB * moved.value <= 1.69
    assert moved.low <= 1.41 / CHECKPOINT_GB <= 1.69 / CHECKPOINT_GB <= moved.high
    assert 2.25 <= CHECKPOINT_GB * (gone.value + moved.value) <= 2.44, "what a host that leaves gives"


def _instance(ask, mesh, **options):
    question = ask("h100-32", options=PlanOptions(redundant=0, **options))
    return question.instance(parse_layout(mesh, 0, question.config), {})


def test_a_mesh_of_one_host_has_nothing_that_goes_on(ask):
    assert recovery(_instance(ask, "dp=8")) is None
    assert recovery(_instance(ask, "dp=16")) is not None
    assert recovery(_instance(ask, "pp=4,dp=8")) is None, "all processes of stages end and are started again"


def test_faster_storage_and_other_copies_of_the_experts_shorten_it(ask):
    two = recovery(_instance(ask, "dp=16"))
    assert two.received.value == 0
    assert two.seconds.value < two.seconds.high < 1000
    whole, copies = (recovery(_instance(ask, mesh)) for mesh in ("dp=32", "dp=32,ep=16"))
    assert copies.read.value == 0 < whole.read.value
    instance = _instance(ask, "dp=32")
    quick = dataclasses.replace(instance, cluster=dataclasses.replace(instance.cluster, storage=50e9))
    assert recovery(quick).seconds.value < recovery(instance).seconds.value

"""After the loss of a host: what is read, and how long it takes."""

import dataclasses

import pytest

from dsjax.plan.figure import spread
from dsjax.plan.layout import parse_layout
from dsjax.plan.recovery import read_share, recovery
from dsjax.plan.workload import PlanOptions


def test_survivors_read_what_they_did_not_hold():
    alone, share = spread(lambda: [read_share(2), read_share(4)])
    assert alone == alone.low == alone.high == 0.5, "one survivor keeps its half"
    assert share == 0.75
    assert share.low == pytest.approx(1 / 3), "a host in the middle is lost, and the others keep their order"
    assert share.high == 1


def _instance(ask, mesh, **options):
    question = ask("h100-32", options=PlanOptions(redundant=0, **options))
    return question.instance(parse_layout(mesh, 0, question.config), {})


def test_a_mesh_of_one_host_has_nothing_that_goes_on(ask):
    assert recovery(_instance(ask, "dp=8")) is None
    assert recovery(_instance(ask, "dp=16")) is not None
    assert recovery(_instance(ask, "pp=4,dp=8")) is None, "all processes of stages end and are started again"


def test_faster_storage_shortens_it(ask):
    two = recovery(_instance(ask, "dp=16"))
    assert two.seconds < two.seconds.high < 1000
    instance = _instance(ask, "dp=32")
    quick = dataclasses.replace(instance, cluster=dataclasses.replace(instance.cluster, storage=50e9))
    assert recovery(quick).seconds < recovery(instance).seconds

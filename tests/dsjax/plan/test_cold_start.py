"""What a start waits for: each host's share of the weights ÷ what its storage gives."""

import dataclasses

import pytest

from dsjax.plan.cold_start import cold_start, host_bytes, storage_rate
from dsjax.plan.figure import Kind
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.workload import PlanOptions


def instance(ask, mesh, cluster="h200-32", **change):
    question = ask(cluster)
    found = dataclasses.replace(question.cluster, **change)
    return Instance(question.config, found, parse_layout(mesh, 0, question.config), PlanOptions(), question.workload)


def test_a_host_reads_the_experts_of_its_devices_and_the_rest_once(ask):
    wide = instance(ask, "dp=32")
    weights = wide.memory.weights
    assert host_bytes(wide) == 8 * weights["experts"] + wide.memory.weights_total - weights["experts"]
    sharded = instance(ask, "dp=4,tp=8")
    # Eight shards of all that tp divides are the whole of it, as one of dp=32 is; the latents' projections, 3.5 %, are counted eight times.
    assert 1 <= host_bytes(sharded) / host_bytes(wide) < 1.04


def test_storage_is_the_file_s_or_an_assumption_that_the_cards_bound(ask):
    known = instance(ask, "dp=32", storage=2e9)
    assert cold_start(known).value == pytest.approx(host_bytes(known) / 2e9)
    assert cold_start(known).kinds == Kind.EXACT
    assert storage_rate(instance(ask, "dp=32").cluster).value == 3e9
    slow = storage_rate(instance(ask, "dp=32", network_gbps=1.0, nics_per_host=1).cluster)
    assert slow.value == pytest.approx(0.125e9)
    assert slow.kinds & Kind.ASSUMPTION

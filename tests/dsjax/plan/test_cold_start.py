"""What a start waits for: each host's share of the weights ÷ what its storage gives; and what the loss of a host costs."""

import dataclasses

import pytest

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cold_start import cold_start, host_bytes, recovery, storage_rate
from dsjax.plan.engine import find_engine
from dsjax.plan.figure import Kind
from dsjax.plan.instance import Instance
from dsjax.plan.layout import parse_layout
from dsjax.plan.manifests import checkpoint_bytes
from dsjax.plan.memory import weight_bytes
from dsjax.plan.precision import PRECISIONS
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


def test_what_several_devices_or_stages_of_a_host_hold_is_read_once_each(ask):
    """The loader reads each distinct shard once (`sharding`'s regions in `dsjax/checkpoint/place.py`)."""
    copies = instance(ask, "dp=8,ep=4")
    weights = copies.memory.weights
    assert host_bytes(copies) == 4 * weights["experts"] + copies.memory.weights_total - weights["experts"]
    whole = sum(weight_bytes(copies.config, parse_layout("dp=1", 0, copies.config), PRECISIONS["fp8"]).values())
    assert whole <= host_bytes(instance(ask, "pp=2,tp=4")) < 1.06 * whole  # of which the fullest has 31 of 61 layers


@pytest.mark.parametrize(
    ("model", "named", "kept"),
    [("deepseek-v2", "fp8", "bf16"), ("deepseek-v3", "mxfp4", "fp8"), ("kimi-k2.5", "fp8", "int4-bf16")],
)
def test_the_files_of_a_checkpoint_are_read_and_have_room_whatever_they_become(ask, model, named, kept):
    """V2's are bf16, V3's FP8, and Kimi-K2.5's experts INT4; they are quantised while they are loaded."""
    config = load_config(model)
    options = PlanOptions(
        precision=find_engine("dsjax").precision(PRECISIONS[named]), engine=find_engine("dsjax"), dispatch="auto"
    )
    question = ask("h200-32")
    made = Instance(config, question.cluster, parse_layout("dp=32", 0, config), options, question.workload)
    files = weight_bytes(config, made.layout, PRECISIONS[kept])
    assert host_bytes(made) == sum(files.values()) + 7 * files["experts"]
    whole = weight_bytes(config, parse_layout("dp=1", 0, config), PRECISIONS[kept], mtp=True)
    assert checkpoint_bytes(aggregated(made, 1, 1, 1000)) == sum(whole.values())


def test_storage_is_the_file_s_or_an_assumption_that_the_cards_bound(ask):
    known = instance(ask, "dp=32", storage=2e9)
    assert cold_start(known) == pytest.approx(host_bytes(known) / 2e9)
    assert cold_start(known).kinds == Kind.EXACT
    assert storage_rate(instance(ask, "dp=32").cluster) == 3e9
    slow = instance(ask, "dp=32", network_gbps=1.0, nics_per_host=1)
    assert storage_rate(slow.cluster) == pytest.approx(0.125e9)
    assert cold_start(slow).kinds & Kind.ASSUMPTION


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

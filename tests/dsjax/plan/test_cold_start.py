"""What a start waits for: each host's share of the weights ÷ what its storage gives; and what the loss of a host costs."""

import dataclasses

import pytest
from step_models import options_for

from dsjax.config import load_config
from dsjax.plan.candidate import aggregated
from dsjax.plan.cold_start import cold_start, host_bytes, recovery, storage_rate
from dsjax.plan.engine import find_engine
from dsjax.plan.figure import Kind
from dsjax.plan.layout import parse_layout
from dsjax.plan.manifests import checkpoint_bytes
from dsjax.plan.memory import weight_bytes
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.workload import PlanOptions


@pytest.fixture
def on(instance):
    """An instance on H200s or H100s whose cluster differs in something."""

    def make(mesh, cluster="h200-32", **change):
        made = instance(mesh, cluster, options=PlanOptions(redundant=0))
        return dataclasses.replace(made, cluster=dataclasses.replace(made.cluster, **change))

    return make


@pytest.mark.parametrize(("mesh", "parts"), [("dp=32", 8), ("dp=8,ep=4", 4)])
def test_a_host_reads_the_experts_of_its_devices_and_the_rest_once(on, mesh, parts):
    """The loader reads each distinct shard once (`sharding`'s regions in `dsjax/checkpoint/place.py`)."""
    memory = on(mesh).memory
    assert host_bytes(on(mesh)) == parts * memory.weights["experts"] + memory.weights_total - memory.weights["experts"]


def test_what_several_devices_or_stages_of_a_host_hold_is_read_once(on, v3):
    # Eight shards of all that tp divides are the whole of it, as one of dp=32 is; the latents' projections, 3.5 %, are counted eight times.
    assert 1 <= host_bytes(on("dp=4,tp=8")) / host_bytes(on("dp=32")) < 1.04
    whole = sum(weight_bytes(v3, parse_layout("dp=1", 0, v3), PRECISIONS["fp8"]).values())
    assert whole <= host_bytes(on("pp=2,tp=4")) < 1.06 * whole  # of which the fullest has 31 of 61 layers


@pytest.mark.parametrize(
    ("model", "named", "kept"),
    [("deepseek-v2", "fp8", "bf16"), ("deepseek-v3", "mxfp4", "fp8"), ("kimi-k2.5", "fp8", "int4-bf16")],
)
def test_the_files_of_a_checkpoint_are_read_and_have_room_whatever_they_become(instance, model, named, kept):
    """V2's are bf16, V3's FP8, and Kimi-K2.5's experts INT4; they are quantised while they are loaded."""
    config = load_config(model)
    options = options_for("dsjax", precision=find_engine("dsjax").precision(PRECISIONS[named]))
    made = instance("dp=32", "h200-32", config=config, options=options)
    files = weight_bytes(config, made.layout, PRECISIONS[kept])
    assert host_bytes(made) == sum(files.values()) + 7 * files["experts"]
    whole = weight_bytes(config, parse_layout("dp=1", 0, config), PRECISIONS[kept], mtp=True)
    assert checkpoint_bytes(aggregated(made, 1, 1, 1000)) == sum(whole.values())


def test_storage_is_the_file_s_or_an_assumption_that_the_cards_bound(on):
    known = on("dp=32", storage=2e9)
    assert cold_start(known) == pytest.approx(host_bytes(known) / 2e9)
    assert cold_start(known).kinds == Kind.EXACT
    assert storage_rate(on("dp=32").cluster) == 3e9
    slow = on("dp=32", network_gbps=1.0, nics_per_host=1)
    assert storage_rate(slow.cluster) == pytest.approx(0.125e9)
    assert cold_start(slow).kinds & Kind.ASSUMPTION


def test_a_mesh_of_one_host_has_nothing_that_goes_on_and_faster_storage_shortens_a_recovery(on):
    assert recovery(on("dp=8", "h100-32")) is None
    assert recovery(on("pp=4,dp=8", "h100-32")) is None, "all processes of stages end and are started again"
    two = recovery(on("dp=16", "h100-32"))
    assert two.seconds < two.seconds.high < 1000
    assert recovery(on("dp=32", "h100-32", storage=50e9)).seconds < recovery(on("dp=32", "h100-32")).seconds

"""Dry runs in a plan. The files under `dry_runs` are what `dsjax dryrun --model deepseek-v3 --target h200 --weights fp8
--dispatch-wire fp8` wrote for `dp=8` (96 rows; 8,192 prompt tokens), `tp=8,ep=1` (64 rows) and `dp=32` (128 rows), JAX 0.10.2, without
costs."""

import json
import re
from pathlib import Path

import pytest
from plan_words import plan
from step_models import options_for, step_model

from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.run import dry_run
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.plan.cluster import load_cluster
from dsjax.plan.compiled import read_dry_run
from dsjax.plan.engine import find_engine
from dsjax.plan.figure import Kind
from dsjax.plan.fit import planned_launch, set_aside
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import weight_bytes
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.program import refusal
from dsjax.plan.search import search
from dsjax.plan.skew import UNIFORM
from dsjax.plan.workload import PlanOptions
from sharding.dispatch import DispatchConfig, resolved_method
from sharding.mesh import MeshSpec

FILES = {path.stem: path for path in (Path(__file__).parent / "dry_runs").glob("*.json")}


@pytest.fixture(scope="module")
def runs():
    return {name: read_dry_run(path) for name, path in FILES.items()}


@pytest.fixture
def edited(tmp_path):
    """Another file of a dry run, with some fields of it changed."""

    def make(name="dp8-decode", **change):
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(json.loads(FILES[name].read_text()) | change))
        return path

    return make


@pytest.fixture
def planned(ask, runs):
    def make(*names, mesh="dp=8", dispatch="auto", **kwargs):
        compiled, kwargs["mesh"] = tuple(runs[name] for name in names), MeshSpec.parse(mesh)
        options = PlanOptions(compiled=compiled, redundant=0, dispatch=dispatch, modes=("aggregated",), **kwargs)
        return search(ask("h200-16", options=options, hosts=4 if mesh == "dp=32" else None))

    return make


def test_weights_that_were_compiled_are_the_planners_to_the_byte(v3, runs):
    for name, run in runs.items():
        layout = parse_layout(run.mesh, 0, v3)
        assert sum(weight_bytes(v3, layout, PRECISIONS["fp8"]).values()) == run.device_bytes.weights_total
        body = json.loads(FILES[name].read_text())
        assert body["device_bytes"]["cache"] == 70_272 * (body["cache_tokens"] + body["page_size"])


@pytest.mark.parametrize("cluster", ["h200-32", "gb200-nvl72-36"])
@pytest.mark.parametrize("mesh", ["dp=32", "dp=16,tp=2", "dp=4,tp=8,ep=4", "dp=8", "dp=24,ep=12", "dp=12,tp=2"])
def test_auto_comes_to_the_same_in_a_plan_as_in_the_engine(v3, mesh, cluster):
    layout, cluster = parse_layout(mesh, 8 if "12" in mesh else 0, v3), load_cluster(cluster)
    step = step_model(v3, cluster, layout, PRECISIONS["fp8"], UNIFORM, dispatch="auto")
    found = set()
    for tokens, halved in ((4, False), (32, False), (128, False), (2048, False), (1024, True)):
        groups = None if layout.redundant else (8, 4)
        config = DispatchConfig(devices_per_host=cluster.domain, overlapped=halved, routed_groups=groups)
        shape = {"tokens": tokens * layout.mesh.tp_size, "top_k": 8, "experts": 264, "platform": "gpu"}
        assert step.own_method(tokens, halved) == resolved_method(layout.mesh, config, **shape)
        found.add(step.own_method(tokens, halved))
    # Elsewhere an EP group is on one host, has one rank on each, or hosts cut it unevenly; NVLink joins all of a GB200's rack.
    assert ("hierarchical" in found) == (cluster.domain == 8 and mesh in ("dp=32", "dp=16,tp=2", "dp=12,tp=2"))


def test_memory_is_set_aside_as_compiled_once_both_steps_are_given(planned, runs):
    plain, both = planned(dispatch="deepep"), planned("dp8-decode", "dp8-prefill")
    memory = both.winner.decode.memory
    assert memory.reserve == pytest.approx(runs["dp8-prefill"].temporaries + 0.02 * memory.device)
    assumed = plain.winner.decode.memory
    # The cache has what is not set aside.
    assert memory.cache - assumed.cache == pytest.approx(assumed.reserve - memory.reserve)
    assert both.winner.prefill_tokens <= 8192
    decode = planned("dp8-decode").winner.decode
    launch = planned_launch(decode.options, memory.device, decode.layout, 4096)
    aside = set_aside(decode.config, decode.layout, decode.options.precision, launch)
    assert decode.memory.reserve == aside > runs["dp8-decode"].temporaries + 0.02 * memory.device
    assert Kind(decode.cache_tokens.kinds).words() == "compiled + assumption"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": "h100"}, "compiled for h100, the cluster has h200"),
        ({"weights": "bfloat16"}, "its weights are bfloat16"),
        ({"parameters": {"total": 12_000_000}}, "a model of 12,000,000 parameters, the plan's has 671,026,419,200"),
        ({"kv_cache_dtype": "float32"}, "its cache is float32"),
    ],
)
def test_a_dry_run_of_something_else_is_not_used_and_says_why(ask, edited, change, reason):
    assert reason in refusal(read_dry_run(edited(**change)), ask())


def test_files_that_match_no_layout_or_engine_are_said(planned):
    for name, used, said in (
        ("dp32-decode", False, "no layout of this plan is dp=32"),
        ("dp8-decode", True, "not its time: it is a program of dsjax, and the plan is for published"),
    ):
        (usage,) = planned(name).usages
        assert (usage.used, said in usage.text) == (used, True)


def test_a_predicted_timeline_is_shown_beside_the_planners_step():
    predicted = json.loads(FILES["tp8-decode"].read_text())["timeline"]["step"]["value"]
    words = ["--cluster", "h200-8", "--mesh", "tp=8,ep=1", "--mode", "aggregated", "--dispatch", "auto"]
    shown = plan(*words, "--compiled", FILES["tp8-decode"], "--explain", "tpot")
    assert f"its timeline {predicted * 1e3:.3g} ms [" in shown
    assert re.search(r"\d\.\d\d … \d\.\d\d  timeline: ", shown)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_program_in_two_halves_is_read_as_one_and_never_as_a_whole_step(instance, runs, edited, overlap):
    """As if the step of `dp=32` had been compiled with --enable-dbo, and took 70 ms."""
    timeline = {"step": {"value": 0.070, "low": 0.06, "high": 0.09}}
    in_halves, whole = read_dry_run(edited("dp32-decode", halves=True, timeline=timeline)), runs["dp32-decode"]

    def made(*compiled):
        options = options_for("dsjax", dispatch="padded", overlap=overlap, compiled=compiled, skew=UNIFORM)
        return instance("dp=32", "h200-16", hosts=4, prompt=3846, options=options)

    plain, read = made(), made(in_halves)
    assert in_halves.shape.endswith("in two halves")
    assert read.memory.weights == plain.memory.weights
    if overlap == "off":  # its collectives and operations are of half batches, and its time is another step's
        assert read.decode_step(128) == plain.decode_step(128)
        return
    assert read.overlapped(128)
    assert read.compiled_step(in_halves) * read.pace(True, True) == pytest.approx(0.070)
    both = made(in_halves, whole)
    assert both.compiled_step(whole) * both.pace(True, False) == pytest.approx(float(whole.timeline))
    assert not read.overlapped(8)


def test_a_mesh_with_copies_of_the_experts_is_as_many_of_the_one_that_was_compiled(planned, runs):
    copies = planned("dp8-decode", mesh="dp=16,ep=8", engine=find_engine("dsjax")).winner
    assert copies.decode.dry_runs == (runs["dp8-decode"],)
    assert copies.tpot.kinds & Kind.COMPILED


def test_a_file_that_is_no_dry_run_is_refused(tmp_path):
    path = tmp_path / "no.json"
    for text in ("[]", "{}", "no", '{"device_bytes": 1}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"expected a file that `dsjax dryrun"):
            read_dry_run(path)
    with pytest.raises(UserError, match="No such file"):
        read_dry_run(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch": "96"}, "Expected `int`, got `str` - at `$.batch`"),
        ({"step": "verify"}, "Invalid enum value 'verify' - at `$.step`"),
        ({"device_bytes": {"temporaries": 1.5}}, "Expected `int`, got `float` - at `$.device_bytes.temporaries`"),
        ({"timeline": {"step": {"value": 8.0, "low": 9.0, "high": 10.0}}}, "is not within its range, 9 to"),
    ],
)
def test_a_dry_run_that_was_edited_by_hand_is_refused_with_the_field(edited, change, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        read_dry_run(edited(**change))


@pytest.mark.slow
def test_what_the_dry_run_writes_now_is_read(ask, tmp_path):
    report = dry_run(DryRunArgs(engine=EngineArgs(model="demo", mesh="dp=4"), batch=2, context=64))
    path = tmp_path / "demo.json"
    path.write_text(json.dumps(report.to_json()))
    run = read_dry_run(path)
    assert (run.batch, run.step_tokens, run.context) == (2, 2, 64)
    assert run.device_bytes.weights_total == report.memory.weight_bytes
    assert "parameters" in refusal(run, ask())

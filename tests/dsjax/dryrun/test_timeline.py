"""The timeline: prices that can be told by hand, a trace that Perfetto's format allows, and what is refused."""

import gzip
import json
import math

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.config import load_config
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.assumptions import EvenExperts, expected_tiles, trip_counts
from dsjax.dryrun.compilation import compile_step
from dsjax.dryrun.prices import BETWEEN, INSIDE, default_cluster, even_ragged_share
from dsjax.dryrun.program import COMPUTE, Program, program_collectives
from dsjax.dryrun.run import dry_run, even_experts
from dsjax.dryrun.tables import _timeline
from dsjax.dryrun.timeline import Timeline, model_part, parts_by_operation
from dsjax.dryrun.timeline_picture import draw
from dsjax.dryrun.timeline_trace import trace, write_trace
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.cluster import load_cluster
from dsjax.plan.engine import find_engine
from sharding import MeshSpec

H200 = load_hardware("h200")
HOSTS = default_cluster(H200, 32)

PROGRAM = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[64,4096], w: bf16[4096,8192]) -> bf16[2048,4096] {
  %x = bf16[64,4096]{1,0} parameter(0)
  %w = bf16[4096,8192]{1,0} parameter(1)
  %g = (bf16[64,4096]{1,0}, bf16[2048,4096]{1,0}) all-gather-start(%x), channel_id=1, \
replica_groups={}, dimensions={0}, metadata={op_name="jit(run)/attend/shard_map/all_gather"}
  %dot = bf16[64,8192]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(run)/while/body/closed_call/mlp/...d,df->...f/dot_general"}
  %copy = bf16[64,8192]{0,1} copy(%dot)
  %one = s32[] negate(%x), metadata={op_name="jit(run)/neg"}
  ROOT %gd = bf16[2048,4096]{1,0} all-gather-done(%g)
}
"""


def of(text, cluster=HOSTS, mesh=None, trips=lambda loop: None):
    program = Program.parse(text)
    mesh = mesh or {"dp": 1, "ep": 32, "tp": 1}
    collectives = program_collectives(program, mesh, host_devices=cluster.domain, trip_count=trips)
    return Timeline.of(program, collectives, cluster, trips)


HOST_COMPUTE = """HloModule m, is_scheduled=true

%rows (t: bf16[129280,7168], i: s32[32]) -> bf16[32,7168] {
  %t = bf16[129280,7168]{1,0} parameter(0)
  %i = s32[32]{0} parameter(1)
  ROOT %g = bf16[32,7168]{1,0} gather(%t, %i), offset_dims={1}, collapsed_slice_dims={0}, slice_sizes={1,7168}
}, execution_thread="host"

ENTRY %main (table: bf16[129280,7168], i: s32[32]) -> bf16[32,7168] {
  %table = bf16[129280,7168]{1,0:S(5)} parameter(0)
  %i.1 = s32[32]{0:S(5)} parameter(1)
  %start = ((bf16[129280,7168]{1,0:S(5)}, s32[32]{0:S(5)}), bf16[32,7168]{1,0}, u32[]) custom-call-start(%table, %i.1), \
async_execution_thread="host", custom_call_target="HostExecute", called_computations={%rows}
  ROOT %done = bf16[32,7168]{1,0} custom-call-done(%start)
}
"""


def test_of_what_the_host_looks_up_the_rows_are_sent_and_not_the_table_and_who_waits_for_it_waits_for_no_network():
    played = of(HOST_COMPUTE)
    assumed = played.assumed
    rows = 32 * 7168 * 2
    assert played.step.value == pytest.approx(assumed.host_turn.value + rows / assumed.host_link.value, rel=0.05)
    assert (played.compute, played.exposed_network) == (0, 0)
    assert played.exposed_copies == pytest.approx(played.step.value)
    assert "0 ms of them waiting for the network, 0.0" in _timeline(played, "a step").title
    assert of(PROGRAM).exposed_copies == 0


@pytest.fixture(scope="module")
def step(tiny):
    """A real step of a small model on a mesh with every axis; its program is the CPU's, priced as if an H200 ran it."""
    spec, config = MeshSpec.parse("dp=8,tp=4,ep=16"), load_config(tiny)
    engine = EngineArgs(model=tiny, mesh=str(spec), dispatch="padded", page_size=4)
    compiled = compile_step(DryRunArgs(engine=engine, batch=8, context=64), config, spec.build())
    trips = trip_counts({"attend_A_CC_ME": 1}, even_experts(compiled.step, 8))
    text = compiled.main.compiled.as_text()
    return of(text, mesh=dict(compiled.step.mesh.shape), trips=trips)


def test_an_operation_takes_its_roofline_and_a_launch():
    spans = {span.operation.name: span for span in of(PROGRAM).schedule.spans if span.thread == COMPUTE}
    moved = 2 * (64 * 4096 + 4096 * 8192 + 64 * 8192)
    dot = spans["dot"]
    assert (dot.work.flops, dot.work.bytes, dot.work.bound) == (2 * 64 * 4096 * 8192, moved, "memory")
    assert dot.seconds == pytest.approx(moved / (4.8e12 * 0.75) + 2e-6, rel=1e-12)
    assert spans["one"].work.bound == "launch"
    wide = of(PROGRAM.replace("64,", "4096,"))
    (dot,) = (span for span in wide.schedule.spans if span.operation.name == "dot")
    assert dot.work.bound == "operations"
    assert dot.seconds == pytest.approx(2 * 4096 * 4096 * 8192 / (989e12 * 0.65) + 2e-6, rel=1e-12)


def test_an_exchange_over_hosts_brings_each_row_through_one_card_unless_a_domain_holds_them_all():
    spans = {span.thread: span for span in of(PROGRAM).schedule.spans if span.operation.name == "g"}
    rows = 64 * 4096 * 2
    assert spans[INSIDE].work.bytes == 31 * rows
    assert spans[BETWEEN].work.bytes == 24 * rows / 8
    assert spans[INSIDE].seconds == pytest.approx(10e-6 + 31 * rows / (450e9 * 0.6), rel=1e-12)
    # Three hosts lie behind one another on the way round.
    assert spans[BETWEEN].seconds == pytest.approx(30e-6 + 3 * 2e-6 + 3 * rows / (50e9 * 0.6), rel=1e-12)
    nvl = default_cluster(load_hardware("gb200"), 32)
    assert {s.thread for s in of(PROGRAM, nvl).schedule.spans if s.operation.name == "g"} == {INSIDE}
    assert of(PROGRAM, load_cluster("h20-32")).exposed_network > 5 * of(PROGRAM).exposed_network


@pytest.mark.slow
def test_time_is_the_critical_path_and_lies_between_its_ends(step):
    for timeline in (of(PROGRAM), step):
        whole, scopes = pytest.approx(timeline.step.value, rel=1e-9), timeline.by_scope().values()
        assert math.fsum(span.seconds for span in timeline.critical_path) == whole
        assert timeline.compute + timeline.exposed_network == pytest.approx(timeline.step.value, rel=1e-12)
        assert math.fsum(timeline.critical_by_bound().values()) == whole
        assert math.fsum(share.critical for share in scopes) == whole
        assert math.fsum(share.compute for share in scopes) == pytest.approx(timeline.compute, rel=1e-9)
        assert timeline.step.low < timeline.step.value < timeline.step.high


def test_of_an_exchange_that_is_hidden_which_the_device_computes_beside():
    timeline = of(PROGRAM)
    (gather,) = timeline.exchanges()
    assert (gather.name, gather.part, gather.runs) == ("g", "attend", 1)
    ends = {span.operation.name: span.end for span in timeline.schedule.spans if span.thread == COMPUTE}
    assert gather.beside_compute == pytest.approx(min(gather.seconds, ends["one"]))
    assert gather.seconds - gather.beside_compute == pytest.approx(timeline.exposed_network)
    assert 0 < gather.hidden < 1
    done = "%gd = bf16[2048,4096]{1,0} all-gather-done(%g)"
    alone = of(PROGRAM.replace("all-gather-start", "all-gather").replace(done, "%n = s32[] negate(%one)"))
    assert [one.hidden for one in alone.exchanges()] == [0]


@pytest.mark.slow
def test_a_step_of_ours_shows_its_parts_and_overlaps_what_it_is_credited_with_and_no_more(step):
    exchanges = step.exchanges()
    assert sum(one.runs for one in exchanges) > len(exchanges), "a layer's are one row"
    assert sum(one.seconds - one.beside_compute for one in exchanges) == pytest.approx(step.exposed_network)
    dispatched = [one.beside_compute for one in exchanges if "dispatch" in one.part]
    assert dispatched
    assert not any(dispatched), "without --enable-dbo"
    # One thread computes: the shared expert's operations and the routed ones' stand one after the other.
    assert find_engine("dsjax").shared_beside is False
    layer = step.middle_layer()
    assert (layer.times, layer.index) == (2, 1)  # two MoE layers
    parts = {"router", "mla_project", "mla_output", "experts/dispatch", "experts/dispatch/experts"}
    assert parts <= step.by_scope().keys()
    assert step.by_scope()["experts/dispatch"].network > 0


def test_operations_that_xla_made_up_belong_to_what_they_read():
    program = Program.parse(PROGRAM)
    parts = {operation.name: part for operation, part in parts_by_operation(program).items()}
    assert (parts["g"], parts["dot"], parts["copy"], parts["gd"]) == ("attend", "mlp", "mlp", "attend")
    assert model_part("jit(run)/while/body/jit(dynamic_index_in_dim)/dynamic_slice") == "(dynamic_slice)"
    # As JAX 0.11.1 names what it was given as a jaxpr.
    assert model_part("jit(run)/eval_jaxpr/while/body/eval_jaxpr/router/dot_general") == "router"


def test_the_trace_is_what_the_trace_event_format_asks_for(step, tmp_path):
    """As Perfetto and chrome://tracing read it: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    write_trace(step, tmp_path / "t.json.gz", "title")
    data = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert data == json.loads(json.dumps(trace(step, "title")))
    assert data["displayTimeUnit"] in ("ms", "ns")
    names, slices, flows = {}, {}, {}
    for event in data["traceEvents"]:
        assert [type(event[field]) for field in ("name", "pid", "tid")] == [str, int, int]
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            slices.setdefault(event["tid"], []).append(event)
        else:
            assert (event["ph"] in "sf", event.get("bp", "e")) == (True, "e")
            flows.setdefault(event["id"], []).append(event)
    assert set(names.values()) >= {COMPUTE, INSIDE, BETWEEN, "critical path"}
    assert slices.keys() == names.keys()
    for thread in slices.values():
        nested_or_apart(thread)
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert begin["ts"] <= end["ts"]
        for half in (begin, end):
            assert any(s["ts"] <= half["ts"] <= s["ts"] + s["dur"] for s in slices[half["tid"]])
    (path,) = (slices[tid] for tid, name in names.items() if name == "critical path")
    assert sum(s["dur"] for s in path) == pytest.approx(1e6 * step.step.value, rel=1e-4)  # whole nanoseconds
    operations = [s for s in slices[1] if "flops" in s["args"]]
    assert all({"flops", "bytes", "bound by", "operation", "critical"} <= s["args"].keys() for s in operations)


def nested_or_apart(slices):
    """Slices of one thread lie in one another or beside one another, as both viewers need."""
    open_ends = []
    for one in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
        begin, end = round(one["ts"] * 1000), round((one["ts"] + one["dur"]) * 1000)
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], one
        open_ends.append(end)


def test_the_picture_is_drawn_or_says_what_is_missing(step, tmp_path):
    pytest.importorskip("matplotlib")
    draw(step, tmp_path / "t.png", "title")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot write the picture"):
        draw(step, tmp_path / "t.unknown", "title")


def test_what_a_timeline_cannot_be_made_of_is_refused(tmp_path):
    with pytest.raises(UserError, match="--timeline needs an accelerator's schedule"):
        dry_run(DryRunArgs(engine=EngineArgs(model="demo", mesh="dp=2")), timeline=True)
    with pytest.raises(UserError, match="has 8 devices, the mesh 32"):
        dry_run(DryRunArgs(engine=EngineArgs(model="demo", mesh="dp=32"), target="h200"), cluster="h200-8")
    done = CliRunner().invoke(app, ["dryrun", "--timeline-picture", str(tmp_path / "a.png")])
    assert done.exit_code
    assert "needs --timeline" in str(done.exception) + done.output


def test_even_routing_fills_the_tiles_that_chance_leaves():
    assert expected_tiles(1e-6, 4) == pytest.approx(1e-6, rel=1e-5)  # hardly ever a pair, never two
    # The last tile is half full on the mean.
    assert expected_tiles(2000, 64) == pytest.approx(2000 / 64 + 0.5, rel=2e-3)
    assert EvenExperts("cpu", 4.0, 8).turns() == pytest.approx(8 * expected_tiles(4.0, 8))
    assert EvenExperts("gpu", 4.0, 8).turns() == 0  # one round holds the mean and four standard deviations
    assert EvenExperts("gpu", 512.0, 256).turns() == 4  # 603 rows in rounds of 128
    assert even_ragged_share(2, 1) == 1
    assert even_ragged_share(2, 2) == pytest.approx(1.5 / 2)

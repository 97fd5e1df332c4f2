"""The dry run of attention and experts apart: both sides' programs are those that serve, and what travels is what serving sends."""

import json

import pytest
from layouts import TINY
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.config import load_config
from dsjax.dryrun.apart import dry_run_apart
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.memory import DeviceMemory, parameters_by_component
from dsjax.engine.afd.expert_side import ExpertSide, build_both
from dsjax.engine.afd.options import expert_spec
from dsjax.engine.device import device_state
from dsjax.engine.device.programs import Programs
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.errors import UserError
from dsjax.plan.compiled import read_dry_run
from sharding import MeshSpec
from sharding.dispatch import default_capacity

pytestmark = pytest.mark.slow

DEVICES, EXPERTS, ROWS = 2, 4, 8
"""With attention; with experts; decodes of a DP rank."""


def asked(tiny, **options):
    meshes = {"attention_mesh": f"dp={DEVICES}", "expert_mesh": f"ep={EXPERTS}"}
    engine = EngineArgs(model=tiny, page_size=4, kernels="plain", **meshes, **options)
    return DryRunArgs(engine=engine, batch=ROWS, context=64)


@pytest.fixture(scope="module")
def whole(tiny):
    return dry_run_apart(asked(tiny))


def test_each_device_holds_its_sides_parameters_and_no_others(tiny, whole, described):
    one = described(DryRunArgs(engine=EngineArgs(model=tiny, mesh="dp=1", page_size=4), batch=ROWS, context=64))
    held = DeviceMemory.of(one)
    experts = held.weights["routed experts"]
    assert whole.experts.weights == {"routed experts": experts // EXPERTS}
    assert whole.attention.weights == {n: b for n, b in held.weights.items() if n != "routed experts"}
    assert whole.attention.cache == held.cache
    assert (whole.experts.cache, whole.experts.state) == (0, 0)
    assert whole.parameters == parameters_by_component(one.step)
    for side in ("attention", "experts"):  # further rounds among them
        programs = [one.program.compiled.memory_analysis() for one in whole.programs if one.side == side]
        assert getattr(whole, side).temporaries == max(memory.temp_size_in_bytes for memory in programs)


def test_the_time_of_each_program_is_counted_once(whole):
    seconds = [one.program.lower_seconds + one.program.compile_seconds for one in whole.programs]
    assert whole.seconds["lower and compile"] == pytest.approx(sum(seconds), rel=1e-9)


def test_rows_and_answers_are_as_many_bytes_as_the_formula_says_and_a_layer_has_four_programs(whole):
    width, top_k, layers, room = TINY["hidden_size"], TINY["num_experts_per_tok"], 2, whole.links.capacity
    assert room == default_capacity(ROWS, top_k, EXPERTS, True)
    answers = room * layers * 2 * width
    for wire, row in (("bfloat16", 2 * width + 6 * top_k + 4), ("fp8", width + 4 + 6 * top_k + 4)):
        assert whole.links.wires[wire] == {
            "attention_device_sends": EXPERTS * room * layers * row,
            "expert_device_receives": DEVICES * room * layers * row,
            "expert_device_sends": DEVICES * answers,
            "attention_device_receives": EXPERTS * answers,
        }
    assert whole.links.needed == pytest.approx(1 - (3 / 4) ** top_k)
    assert whole.links.connections == 0
    times = {one.name: (one.side, one.times) for one in whole.programs}
    attention = {f"moe_layers: {name}": ("attention", 2) for name in ("attend", "share", "receive")}
    attention |= {f"step: {place}": ("attention", 1) for place in ("before the layers", "behind them")}
    times = {name: one for name, one in times.items() if "further rounds" not in name}
    assert times == attention | {"moe_layers: compute": ("experts", 2)}
    assert not any(one.report.collectives for one in whole.programs)


def test_the_programs_are_those_that_serving_compiles(tiny, whole):
    args, config = asked(tiny), load_config(tiny)
    spec = MeshSpec.parse(args.engine.mesh)
    attention, experts = build_both(spec, expert_spec(args.engine))
    step, limits = make_step(args.for_model(config), config, spec, attention), args.limits(config, spec)
    side, state = ExpertSide(step.apart, experts), device_state.describe(step, limits, 0)
    programs = Programs(step, step.abstract_parameters(), state, limits, experts=side)
    programs.lower_step(programs.shape(args.decode, args.prefill)).compile()
    [serving] = side._passes.values()
    dry = {one.name.removeprefix("moe_layers: "): one.program.compiled for one in whole.programs}
    for name in ("attend", "share", "receive"):
        ours, theirs = dry[name], getattr(serving.programs[0], name)
        assert ours.cost_analysis()["flops"] == theirs.cost_analysis()["flops"]
        assert ours.in_avals == theirs.in_avals
        assert ours.output_shardings == theirs.output_shardings
    ours, theirs = dry["compute"], serving.programs[0].way.program
    assert ours.in_avals == theirs.in_avals
    assert ours.memory_analysis().argument_size_in_bytes == theirs.memory_analysis().argument_size_in_bytes


def test_halves_and_drafts_have_programs_of_their_own_and_send_no_row_twice(tiny, whole):
    options = {
        "enable_dbo": True, "dbo_decode_token_threshold": 2, "dispatch_wire": "fp8",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }  # fmt: skip
    report = dry_run_apart(asked(tiny, **options))
    times = {one.name: one.times for one in report.programs}
    assert times["moe_layers: attend, micro-batch 1"] == times["moe_layers: compute, micro-batch 2"] == 2
    assert times["mtp.layers: compute"] == 1  # the module sees the whole step
    assert (report.request["micro_batches"], report.links.chosen) == (2, "fp8")
    # Two tokens a row: halves with as many as the whole had, and the module's layer with both.
    rooms = [default_capacity(tokens, TINY["num_experts_per_tok"], EXPERTS, True) for tokens in (ROWS, 2 * ROWS)]
    for wire, sizes in report.links.wires.items():
        each = {name: size // (2 * rooms[0]) for name, size in whole.links.wires[wire].items()}
        assert sizes == {name: (4 * rooms[0] + rooms[1]) * size for name, size in each.items()}


def test_the_json_says_all_of_it_and_a_plan_refuses_it(whole, tmp_path):
    found = json.loads(json.dumps(whole.to_json()))
    assert found["device_bytes"]["experts"]["total"] == whole.experts.total
    file = tmp_path / "apart.json"
    file.write_text(json.dumps(found))
    with pytest.raises(UserError, match="attention and experts apart, and a plan takes dry runs of one mesh"):
        read_dry_run(file)


def test_what_does_not_go_with_two_sides_is_refused(tiny):
    base = f"dryrun --model {tiny} --attention-mesh dp=2 --expert-mesh"
    for options, reason in (
        ("ep=4 --fit", "--fit is of one mesh"),
        ("ep=4 --expert-target h200", "the CPU stands in for devices of both sides or of neither"),
        ("ep=4 --timeline t.json", "--timeline needs an accelerator"),
        ("ep=4 --cluster h200-16", "h200-16 is of h200, --target is cpu; give --target h200"),
        ("ep=5", "redundant"),
    ):
        shown = CliRunner().invoke(app, f"{base} {options}")
        assert shown.exit_code
        assert reason in " ".join((str(shown.exception or "") + shown.output).split())

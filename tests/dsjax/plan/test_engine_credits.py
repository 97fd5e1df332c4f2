"""What an engine is credited with: each credit names an option that the engine has, or a file; ours are held to a compiled program."""

import dataclasses
import json
import re
from importlib import resources
from pathlib import Path

import pytest
from layouts import TINY

from dsjax.config import load_config
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.assumptions import trip_counts
from dsjax.dryrun.compilation import compile_step
from dsjax.dryrun.prices import default_cluster
from dsjax.dryrun.run import even_experts
from dsjax.dryrun.timeline import Timeline
from dsjax.engine.setup.args import EngineArgs
from dsjax.hardware import load_hardware
from dsjax.plan.arguments import PlanArgs
from dsjax.plan.engine import CAPABILITIES, credit_table, dsjax_engine, find_engine
from dsjax.plan.halves import further_rounds
from dsjax.plan.launch import LAUNCHED
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.prompts import prompts_beside_decodes
from dsjax.plan.recipe import serve_options
from dsjax.plan.sides import PARTS, QUESTION, RUNNING, sides_table
from dsjax.plan.skew import DEFAULT_SKEW, UNIFORM
from dsjax.plan.workload import PlanOptions
from sharding import MeshSpec
from sharding.program import Program, program_collectives

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("engine", LAUNCHED)
def test_each_credit_of_another_engine_names_an_option_that_it_has_today_or_a_file(engine):
    path = resources.files("configs") / "engines" / "options" / f"{engine}.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    names = {*known["options"], *known["environment"], *known["objects"]}
    names |= {f"{above}.{key}" if above else key for above, keys in known["objects"].items() for key in keys}
    able = find_engine(engine)
    for what in CAPABILITIES:
        credit = able.credits.get(what, "")
        assert bool(getattr(able, what)) == bool(credit), f"{engine}, {what}"
        named = re.match(r"[\w./-]+", credit)
        assert not credit or named[0] in names or named[0].endswith(".py"), f"{engine} has no {named[0]}"


def test_each_credit_of_ours_is_an_option_of_dsjax_serve():
    able = dsjax_engine()
    fields = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(EngineArgs)}
    for what in CAPABILITIES:
        credit = able.credits.get(what, "")
        assert bool(getattr(able, what)) == bool(credit), what
        assert set(re.findall(r"--[a-z-]+", credit)) <= fields
    assert "shared_beside" not in able.credits


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    """A decode step of a small model with a shared expert, as `dsjax serve` compiles it on a mesh with every axis."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY | {"torch_dtype": "bfloat16"}))
    spec, config = MeshSpec.parse("dp=8,tp=4,ep=16"), load_config(folder)
    assert config.n_shared_experts
    engine = EngineArgs(model=str(folder), mesh=str(spec), dispatch="padded", page_size=4)
    compiled = compile_step(DryRunArgs(engine=engine, batch=8, context=64), config, spec.build())
    trips = trip_counts(64, 16, 4, {"A_CC_ME": 128}, even_experts(compiled.step, 8))
    program = Program.parse(compiled.main.compiled.as_text())
    hosts = default_cluster(load_hardware("h200"), 32)
    collectives = program_collectives(
        program, dict(compiled.step.mesh.shape), host_devices=hosts.domain, trip_count=trips
    )
    return Timeline.of(program, collectives, hosts, trips), collectives


@pytest.mark.parametrize(
    ("dispatch", "weights", "rows", "ratio"),
    [
        ("padded", "bf16", 32, 0.93),
        ("padded", "fp8", 128, 0.80),
        ("padded", "bf16", 0, 0.70),
        ("auto", "bf16", 32, 1.37),
        ("auto", "fp8", 128, 1.01),
        ("auto", "bf16", 0, 0.66),
    ],
    ids=str,
)
def test_two_halves_gain_what_their_compiled_program_gains(ask, dispatch, weights, rows, ratio):
    """The ratios of docs/dryrun.md, "Two half batches": steps of 32 H200s by their programs' timelines, 4,096 positions."""
    options = PlanOptions(PRECISIONS[weights], skew=UNIFORM, engine=dsjax_engine(), dispatch=dispatch, overlap="on")
    question = ask("h200-16", hosts=4, options=options)
    whole, halves = question.instance(parse_layout("dp=32", 0, question.config), {}).step_models()
    seconds = [
        one.decode(rows, 4096).value if rows else one.prefill(2048, prompt=256, cached=3840).value
        for one in (whole, halves)
    ]
    # Of two stages the planner takes what runs beside a window for both exchanges; the program has a part of it beside each.
    assert seconds[1] / seconds[0] == pytest.approx(ratio, abs=0.06 if dispatch == "padded" else 0.08)
    assert halves.decode(8, 4096).value > whole.decode(8, 4096).value, "a small batch loses by it"


def test_halves_need_further_rounds_where_the_whole_sends_ragged_and_experts_are_chosen_unevenly(ask):
    options = PlanOptions(skew=UNIFORM, engine=dsjax_engine(), dispatch="auto", overlap="on")
    question = ask("gb200-nvl72-36", options=options)  # one domain of NVLink: no rows go in two stages
    _, halves = question.instance(parse_layout("dp=32", 0, question.config), {}).step_models()
    assert halves.own_method(2048, False) == "ragged"
    assert further_rounds(halves, 2048) == 0 < further_rounds(dataclasses.replace(halves, skew=DEFAULT_SKEW), 2048)


def test_ours_is_planned_in_halves_where_it_is_asked_to_and_gains(ask):
    def instance_of(overlap, dispatch="padded"):
        options = PlanOptions(engine=dsjax_engine(), dispatch=dispatch, overlap=overlap, modes=("aggregated",))
        question = ask("h200-16", hosts=4, options=options)
        return question.instance(parse_layout("dp=32", 0, question.config), {})

    instance = instance_of("on")
    least = instance.halved_from(128)
    assert instance.overlapped(least)
    assert not instance.overlapped(max(one for one in instance.batches() if one < least))
    chosen = serve_options("deepseek-v3", instance, 128, 4096)
    assert chosen["--enable-dbo"] == ""
    assert chosen["--dbo-decode-token-threshold"] == str(least)
    assert "--enable-dbo" not in serve_options("deepseek-v3", instance_of("auto"), 128, 4096)
    # Rows that go in two stages between hosts leave halves less to hide: they gain from a larger batch on.
    assert least < instance_of("on", "auto").halved_from(128)


def test_the_compiled_step_overlaps_what_ours_is_credited_with_and_no_more(timeline):
    step, collectives = timeline
    able = dsjax_engine()
    exchanges = [one for one in collectives if "dispatch" in one.op_name]
    assert exchanges
    beside = {scope for one in exchanges for scope in one.beside}
    assert not beside, "what runs beside an exchange without --enable-dbo, of a plan without --two-batch-overlap"
    # One thread computes: the shared expert's operations and the routed ones' stand one after the other.
    assert step.compute + step.exposed_network == pytest.approx(step.step.value)
    assert able.shared_beside is False


def test_a_shared_expert_that_waits_its_turn_makes_decode_slower(ask):
    def seconds(name, **changes):
        engine = dataclasses.replace(find_engine(name), **changes)
        question = ask("h200-8", options=PlanOptions(engine=engine, dispatch=engine.dispatch))
        instance = question.instance(parse_layout("dp=8", 0, question.config), {})
        return instance.decode_step(16).value

    assert seconds("dsjax") > seconds("dsjax", shared_beside=True)
    assert seconds("published") < seconds("published", shared_beside=False)


def test_parts_of_one_side_name_options_that_the_side_has_and_stand_on_the_page():
    planner, engine = ({field.name for field in dataclasses.fields(kind)} for kind in (PlanArgs, EngineArgs))
    for part in PARTS:
        assert set(part.planner) <= planner, part.name
        assert set(part.engine) <= engine, part.name
    assert {part.side for part in PARTS} >= {"both", "planner only", "engine only"}
    assert sides_table() in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


def test_no_option_of_either_side_is_left_out_of_the_table_of_sides():
    """A new option says in `dsjax/plan/sides.py` whether the other side has it: priced by a plan, or done by the engine."""
    for kind, column, apart in ((PlanArgs, "planner", QUESTION), (EngineArgs, "engine", RUNNING)):
        named = {name for part in PARTS for name in getattr(part, column)}
        fields = {field.name for field in dataclasses.fields(kind)}
        # How the scores of selected positions are computed; tests/test_house.py keeps this name to its own folder.
        fields -= {"index_scores"}
        assert fields - named - set(apart) == set(), f"options of the {column} that dsjax/plan/sides.py does not name"
        assert set(apart) <= fields - named, f"names of the {column} that are no options, or stand in two places"


def test_an_engine_that_holds_prompts_back_is_not_slowed_by_replicas_that_wait_one_by_one(ask):
    def added(holds):
        engine = dataclasses.replace(find_engine("published"), holds_prompts=holds)
        question = ask("h200-8", options=PlanOptions(engine=engine, dispatch=engine.dispatch))
        return prompts_beside_decodes(question.instance(parse_layout("dp=8", 0, question.config), {}), 16, 8192)[0]

    held, usual = added(True), added(False)
    assert usual.low <= held.value < usual.value
    assert held.high >= usual.high


def test_the_page_has_the_credits():
    assert credit_table() in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")

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
from dsjax.plan.launch import LAUNCHED
from dsjax.plan.layout import parse_layout
from dsjax.plan.prompts import prompts_beside_decodes
from dsjax.plan.sides import PARTS, sides_table
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


def test_the_compiled_step_overlaps_what_ours_is_credited_with_and_no_more(timeline):
    step, collectives = timeline
    able = dsjax_engine()
    exchanges = [one for one in collectives if "dispatch" in one.op_name]
    assert exchanges
    beside = {scope for one in exchanges for scope in one.beside}
    assert bool(beside) == able.overlaps, "what runs beside an exchange"
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

"""What an engine is credited with: each credit names an option that the engine has, or a file; what a
compiled step of ours overlaps is held in tests/dsjax/dryrun/test_timeline.py."""

import dataclasses
import json
import re
from importlib import resources
from pathlib import Path

import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.plan.arguments import FitArgs, PlanArgs, SimulateArgs, StepArgs
from dsjax.plan.engine import CAPABILITIES, credit_table, dsjax_engine, find_engine
from dsjax.plan.launch import LAUNCHED
from dsjax.plan.layout import parse_layout
from dsjax.plan.recipe import serve_options
from dsjax.plan.sides import PARTS, QUESTION, RUNNING, SUBCOMMANDS, sides_table
from dsjax.plan.workload import PlanOptions

ROOT = Path(__file__).parents[3]
PLANNER = {field.name for kind in (PlanArgs, FitArgs, SimulateArgs, StepArgs) for field in dataclasses.fields(kind)}


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


def test_no_more_is_credited_than_the_engine_can(ask):
    able = find_engine("published")
    for engine, can in ((able, True), (dataclasses.replace(able, balances=False, overlaps=False), False)):
        question = ask("h200-16", options=PlanOptions(engine=engine))
        instance = question.instance(parse_layout("dp=16", 32, question.config), {})
        assert (instance.overlapped(512), instance.step_models()[0].balancing) == (can, can)


def test_parts_of_one_side_name_options_that_the_side_has_and_stand_on_the_page_as_the_credits_do():
    planner, engine = PLANNER | set(SUBCOMMANDS), {field.name for field in dataclasses.fields(EngineArgs)}
    for part in PARTS:
        assert set(part.planner) <= planner, part.name
        assert set(part.engine) <= engine, part.name
    assert {part.side for part in PARTS} >= {"both", "planner only", "engine only"}
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert sides_table() in page
    assert credit_table() in page


def test_no_option_of_either_side_is_left_out_of_the_table_of_sides():
    """A new option says in `dsjax/plan/sides.py` whether the other side has it: priced by a plan, or done by the engine."""
    engine = {field.name for field in dataclasses.fields(EngineArgs)}
    for fields, column, apart in ((PLANNER, "planner", QUESTION), (engine, "engine", RUNNING)):
        named = {name for part in PARTS for name in getattr(part, column)} - set(SUBCOMMANDS)
        # How the scores of selected positions are computed; tests/test_house.py keeps this name to its own folder.
        fields = fields - {"index_scores"}
        assert fields - named - set(apart) == set(), f"options of the {column} that dsjax/plan/sides.py does not name"
        assert set(apart) <= fields - named, f"names of the {column} that are no options, or stand in two places"

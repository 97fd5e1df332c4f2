"""What an engine is credited with: each credit names an option that the engine has, or a file; what a
compiled step of ours overlaps is held in tests/dsjax/dryrun/test_timeline.py. docs/plan/credits.csv has all credits:

    python tests/dsjax/plan/test_engine_credits.py > docs/plan/credits.csv
"""

import csv
import dataclasses
import re
import sys
from pathlib import Path

import pytest
from step_models import options_for
from test_engine_options import accepted

from dsjax.engine.contract.speculative import MOST_DRAFTS
from dsjax.engine.setup.args import EngineArgs
from dsjax.plan.arguments import FitArgs, PlanArgs, SimulateArgs, StepArgs
from dsjax.plan.engine import CAPABILITIES, CREDITS, find_engine
from dsjax.plan.launch import LAUNCHED
from dsjax.plan.recipe import serve_options
from dsjax.plan.workload import PlanOptions

ROOT = Path(__file__).parents[3]
PLANNER = {field.name for kind in (PlanArgs, FitArgs, SimulateArgs, StepArgs) for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("engine", LAUNCHED)
def test_each_credit_of_another_engine_names_an_option_that_it_has_today_or_a_file(engine):
    known = accepted(engine)
    names = {*known["options"], *known["environment"], *known["objects"]}
    names |= {f"{above}.{key}" if above else key for above, keys in known["objects"].items() for key in keys}
    able = find_engine(engine)
    for what in CAPABILITIES:
        credit = CREDITS[engine].get(what, "")
        assert bool(getattr(able, what)) == bool(credit), f"{engine}, {what}"
        named = re.match(r"[\w./-]+", credit)
        assert not credit or named[0] in names or named[0].endswith(".py"), f"{engine} has no {named[0]}"


def test_each_credit_of_ours_is_an_option_of_dsjax_serve():
    able = find_engine("dsjax")
    fields = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(EngineArgs)}
    for what in CAPABILITIES:
        credit = CREDITS["dsjax"].get(what, "")
        assert bool(getattr(able, what)) == bool(credit), what
        assert set(re.findall(r"--[a-z-]+", credit)) <= fields
    assert not able.shared_beside
    assert able.most_drafts == MOST_DRAFTS
    choices = {field.name: field.metadata.get("choices") for field in dataclasses.fields(EngineArgs)}
    for option, choice in re.findall(r"--([a-z-]+) ((?:nvfp4|fp8))", " ".join(CREDITS["dsjax"].values())):
        assert choice in choices[option.replace("-", "_")]


def test_ours_is_planned_in_halves_where_it_is_asked_to_and_gains(instance):
    def planned(overlap, dispatch="padded"):
        options = options_for("dsjax", dispatch=dispatch, overlap=overlap, modes=("aggregated",))
        return instance("dp=32", "h200-16", hosts=4, options=options)

    halved = planned("on")
    least = halved.halved_from(128)
    assert halved.overlapped(least)
    assert not halved.overlapped(max(one for one in halved.batches() if one < least))
    chosen = serve_options("deepseek-v3", halved, 128, 4096)
    assert chosen["--enable-dbo"] == ""
    assert chosen["--dbo-decode-token-threshold"] == str(least)
    assert "--enable-dbo" not in serve_options("deepseek-v3", planned("auto"), 128, 4096)
    # Rows that go in two stages between hosts leave halves less to hide: they gain from a larger batch on.
    assert least < planned("on", "auto").halved_from(128)


def test_no_more_is_credited_than_the_engine_can(instance):
    able = find_engine("published")
    for engine, can in ((able, True), (dataclasses.replace(able, balances=False, overlaps=False), False)):
        made = instance("dp=16", "h200-16", 32, options=PlanOptions(engine=engine))
        assert (made.overlapped(512), made.step_models()[0].balancing) == (can, can)


def credit_rows() -> list[list[str]]:
    """The rows of docs/plan/credits.csv: what each engine is credited with, and by what option or file."""
    names = [name for name in CREDITS if name != "words"]
    rows = [[words, *(CREDITS[name].get(what, "no") for name in names)] for what, words in CREDITS["words"].items()]
    return [["credit", *names], *rows]


QUESTION = """
    model cluster hosts input_tokens output_tokens classes ttft_ms tpot_ms throughput measured network engine
    operators mode batch context max_devices max_devices_per_instance price_per_hour explain sweep num_prompts
    request_rate warmup random_range_ratio burstiness seed rows pareto json_file
"""
"""Options of `dsjax plan` that say what is asked, on which grounds, and how the answer is given."""
RUNNING = """
    model revision tokenizer tokenizer_mode chat_template dtype router page_source kv_events_config
    scheduling_policy stream_interval seed record_steps transfer_timeout transfer_host
    coordinator_address num_processes process_id host_address start_timeout link_monitor_interval cluster_key_file
    encrypt_bulk index_scores
"""
"""Options of `dsjax serve` that say what is served, between whom, and what is recorded: no plan's figure depends on them."""


def test_the_table_of_options_says_who_has_each_option_of_the_planner_and_of_the_engine():
    """A new option says in docs/plan/options.csv whether the other side has it: priced by a plan, or done by the engine."""
    with (ROOT / "docs" / "plan" / "options.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    words = {(True, True): "both", (True, False): "planner only", (False, True): "engine only"}
    assert {row["who"] for row in rows} == set(words.values())
    for row in rows:
        assert row["who"] == words[bool(row["planner"]), bool(row["engine"])], row["part"]
    engine, commands = {field.name for field in dataclasses.fields(EngineArgs)}, {"plan fit", "plan recipe"}
    for fields, side, apart in ((PLANNER, "planner", QUESTION), (engine, "engine", RUNNING)):
        named = {name for row in rows for name in row[side].split("; ") if name} - commands
        named, apart = {name.removeprefix("--").replace("-", "_") for name in named}, set(apart.split())
        assert named | apart == fields, "options that the table does not name, or names that are no options"
        assert not named & apart


def test_the_table_in_the_docs_has_the_credits():
    with (ROOT / "docs" / "plan" / "credits.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == credit_rows(), __doc__


if __name__ == "__main__":
    csv.writer(sys.stdout, lineterminator="\n").writerows(credit_rows())

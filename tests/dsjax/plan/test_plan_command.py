"""`dsjax plan` on the command line, its recipe and its pages."""

import dataclasses
import itertools
import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.config import load_config
from dsjax.engine.args import EngineArgs
from dsjax.errors import UserError
from dsjax.plan.engine import dsjax_engine
from dsjax.plan.recipe import recipe
from dsjax.plan.search import search
from dsjax.plan.workload import Objective, Options
from sharding.mesh import MeshSpec

# What the engines that publish their kernels can do, in front of what dsjax serve can.
BASE = ["plan", "--cluster", "h200-8", "--input", "1000", "--output", "200", "--mode", "aggregated"]


def run(*options):
    found = CliRunner().invoke(app, [*BASE, *options], catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def test_the_table_names_winner_command_and_bottleneck():
    output = run("--tpot-ms", "50", "--rows", "3")
    assert "meet the objectives, best first" in output
    assert "dsjax serve --model deepseek-v3 --mesh" in output
    assert "twice as much of one thing would give" in output


def test_explain_shows_sources_intervals_and_kinds():
    output = run("--explain", "tpot")
    assert "operator tables of aiconfigurator" in output
    assert "(exact" in output
    assert " … " in output
    assert "GB  experts  (exact)" in run("--explain", "memory")


def test_assumptions_are_ranked_by_how_much_they_widen_the_interval():
    output = run("--mesh", "tp=8,ep=1", "--explain", "tpot").partition(
        "narrower by so much if an assumption were known"
    )[2]
    shares = {name: int(share) for share, name in re.findall(r"^ +(\d+)%  (.+)$", output, re.MULTILINE)}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert shares["whole engine ÷ its operations"] == max(shares.values()) > 10
    assert 0 < sum(shares.values()) < 100


def test_json_and_recipe_agree(tmp_path):
    path = tmp_path / "recipe.json"
    found = json.loads(run("--json", "-", "--recipe", str(path)))
    assert json.loads(path.read_text()) == found["winner"]


def test_the_front_is_one_page_that_loads_nothing(tmp_path):
    path = tmp_path / "front.html"
    run("--pareto", str(path))
    page = path.read_text()
    assert "<svg" in page
    assert page.count("<circle") == page.count("<title>") - 1 > 3
    assert "http" not in page
    assert "<script" not in page


def test_the_front_says_that_it_keeps_the_ttft(tmp_path):
    path = tmp_path / "front.html"
    run("--pareto", str(path), "--ttft-ms", "150", "--tpot-ms", "40")
    page = path.read_text()
    assert "The front keeps a TTFT of 0.15 s" in page
    assert page.count('fill="#fff"') >= 1
    assert "A hollow dot breaks the TTFT of 0.15 s" in page
    assert "stroke-dasharray" in page


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run("--pareto", str(tmp_path / "front.png"), "--sweep", "loss-of-hosts", "--plots", str(tmp_path))
    for name in ("front.png", "loss-of-hosts.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options", [Options(), Options(modes=("separated",)), Options(redundant=32, fused=True), Options(dispatch="auto")]
)
def test_every_recipe_is_made_of_options_that_serve_has(ask, options):
    question = ask("h200-16", objective=Objective(tpot=0.05), options=options)
    made = recipe("demo", question, search(question).winner)
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    for service in made["services"]:
        words = shlex.split(service["command"])
        assert words[:2] == ["dsjax", "serve" if service["role"] == "prefill and decode" else "dynamo"]
        given = {}
        for flag, value in itertools.pairwise([*words[2:], "--end"]):
            if flag.startswith("--"):
                name = flag.removeprefix("--").replace("-", "_")
                numeric = fields[name].metadata["least"] is not None
                given[name] = True if value.startswith("--") else int(value) if numeric else value
        if "gpu_memory_utilization" in given:
            given["gpu_memory_utilization"] = float(given["gpu_memory_utilization"])
        args = EngineArgs(**given)
        assert (args.num_redundant > 0) == args.enable_eplb, "what was priced as balanced is balanced"
        assert args.enable_shared_experts_fusion == options.fused
    assert [s["role"] for s in made["services"]][-1] in ("decode", "prefill and decode")


def test_a_recipe_starts_an_engine_whose_limits_are_those_that_were_priced(ask, tmp_path):
    from dsjax.engine.llm import LLM

    small = dataclasses.replace(ask("h200-8", prompt=300, output=40), config=load_config("demo"))
    options = dataclasses.replace(
        small.options, modes=("aggregated",), mesh=MeshSpec.parse("dp=2"), engine=dsjax_engine(), dispatch="auto"
    )
    question = dataclasses.replace(
        small, options=options, workload=dataclasses.replace(small.workload, concurrency=16.0)
    )
    winner = search(question).winner
    made = recipe("demo", question, winner)["services"][0]["options"]
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    given = {}
    for flag, value in made.items():
        name = flag.removeprefix("--").replace("-", "_")
        given[name] = int(value) if fields[name].metadata["least"] is not None else value
    given.pop("weights", None)  # the demo's are not quantised
    llm = LLM(**given)
    assert llm.facts.max_num_seqs >= winner.batch
    args = EngineArgs(**given)
    assert args.max_num_batched_tokens >= winner.prefill_tokens + winner.batch
    assert args.prefill_chunk >= min(winner.prefill_tokens, 300)
    assert llm.facts.max_model_len >= 340


def test_prefill_instances_run_as_many_prompts_as_their_step_was_priced_with(ask):
    question = ask("h200-16", prompt=2000, options=Options(modes=("separated",)))
    winner = search(question).winner
    service = recipe("deepseek-v3", question, winner)["services"][0]
    assert service["role"] == "prefill"
    assert int(service["options"]["--max-num-seqs"]) * 2000 >= winner.prefill_tokens
    assert int(service["options"]["--max-num-batched-tokens"]) >= winner.prefill_tokens
    assert int(service["options"]["--prefill-chunk"]) >= min(winner.prefill_tokens, 2000)


def test_what_dsjax_serve_cannot_do_is_refused_or_told_beside():
    engine = dsjax_engine()
    output = run("--engine", "dsjax")
    assert "engine dsjax" in output
    assert "published: Engines with published kernels" in output
    if not engine.overlaps:
        with pytest.raises(UserError, match="does not overlap two half batches"):
            run("--two-batch-overlap", "on")
    if not engine.fp4:
        with pytest.raises(UserError, match="does not load FP4 experts"):
            run("--precision", "nvfp4", "--cluster", "b200-8")


def test_no_more_is_credited_than_the_engine_can(ask):
    able = dataclasses.replace(dsjax_engine(), balances=False, overlaps=False, transfers=False)
    limited = search(ask("h200-16", options=Options(engine=able, dispatch="auto"))).winner
    assert limited.mode == "aggregated"
    assert not limited.decode.overlapped(limited.batch)
    uneven = limited.decode.step_models()[0]
    assert not uneven.balancing


def test_static_modes_say_what_is_missing_and_refuse_what_is_of_a_service():
    assert "holds most" in run("--mode", "static_gen", "--batch", "100000")
    assert "GB a device; give --batch" in " ".join(run("--mode", "static_gen", "--batch", "100000").split())
    with pytest.raises(UserError, match="--explain is of a service"):
        run("--mode", "static", "--explain", "tpot")


def test_the_header_repeats_the_question_and_a_narrow_terminal_keeps_the_deployment(monkeypatch):
    assert "1000 tokens in, 200 out; no objectives" in " ".join(run().split())
    assert "meet the objectives" not in run()
    monkeypatch.setenv("COLUMNS", "80")
    narrow = " ".join(run("--tpot-ms", "50", "--rows", "2").split())
    found = re.findall(r"\d × [dt]p=\d", narrow.partition("winner")[0])
    assert len(found) == 4, "the table comes in two parts, each with the deployments of its two rows"
    assert "first bottleneck" in narrow


def test_no_instance_is_wider_than_is_allowed_and_a_price_gives_a_cost():
    base = ["plan", "--cluster", "h200-32", "--mode", "aggregated", "--redundant-experts", "0", "--json", "-"]
    options = [*base, "--max-devices-per-instance", "8", "--price-per-hour", "2"]
    found = json.loads(CliRunner().invoke(app, options, catch_exceptions=False).stdout)
    assert all(one["devices"] // one["instances"] <= 8 for one in found["ranked"])
    first = found["ranked"][0]
    per_hour = first["output_tokens_per_s"]["value"] * 3600
    assert first["cost_per_million_output_tokens"]["value"] == pytest.approx(2 * first["devices"] / per_hour * 1e6)
    assert "at 2 a device and hour" in run("--price-per-hour", "2")
    assert json.loads(run("--json", "-"))["ranked"][0]["cost_per_million_output_tokens"] is None


def test_a_sweep_has_the_points_that_were_asked_for():
    found = json.loads(run("--mesh", "tp=8,ep=1", "--sweep", "latency=50,3", "--sweep", "bandwidth=1", "--json", "-"))
    latency, bandwidth = found["sweeps"]
    now = latency["now"]
    assert [point["value"] for point in latency["points"]] == sorted({3, 50, now})
    assert bandwidth["points"][0]["value"] == 1


def test_a_sweep_over_users_is_answered_for_as_many_and_over_hosts_for_those_given_with_them():
    options = ("--mesh", "tp=8,ep=1", "--sweep", "concurrency=4,64,100000", "--sweep", "hosts=2,2:96", "--json", "-")
    users, hosts = json.loads(run(*options))["sweeps"]
    few, many = users["points"][0], users["points"][-1]
    assert few["best"]["batch_per_dp_rank"] * few["best"]["instances"] == 4
    assert few["same"]["tpot_s"]["value"] < users["points"][1]["same"]["tpot_s"]["value"]
    assert many["best"] is None
    assert many["same"] is None
    free, loaded = hosts["points"]
    assert free["same"]["instances"] == loaded["same"]["instances"] == 2
    assert loaded["concurrency"] == 96 == loaded["best"]["batch_per_dp_rank"] * loaded["best"]["instances"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("power", "expected one of latency, bandwidth, loss-of-hosts"),
        ("latency=", "'' is no number"),
        ("latency=1,fast", "'fast' is no number"),
        ("latency=1:5", "'1:5' is no number"),
        ("hosts=0", "0 is not a number of hosts"),
        ("hosts=2:0", "0 is not above 0"),
        ("bandwidth=0", "0 is not above 0"),
        ("loss-of-hosts=0.5", "0.5 is not a number of hosts"),
        ("loss-of-hosts=1", "the cluster has 1 hosts; expected fewer"),
        ("hosts --max-devices 8", "and --max-devices 8 bounds the devices; leave one of them out"),
    ],
)
def test_a_sweep_at_no_possible_points_is_refused(text, reason):
    found = CliRunner().invoke(app, [*BASE, "--mesh", "tp=8,ep=1", "--sweep", *text.split()])
    assert isinstance(found.exception, UserError)
    assert reason in str(found.exception)

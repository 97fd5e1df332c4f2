"""`dsjax plan` on the command line, its recipe and its pages."""

import dataclasses
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.config import load_config
from dsjax.engine.contract.speculative import MOST_DRAFTS
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.side_options import decode_args, prefill_args
from dsjax.errors import UserError
from dsjax.plan.dynamo_graph import deployment_name, planned_graph
from dsjax.plan.engine import dsjax_engine
from dsjax.plan.kubernetes import overlay, write_overlay
from dsjax.plan.precision import precision
from dsjax.plan.recipe import front_ends, notes, recipe
from dsjax.plan.search import search
from dsjax.plan.workload import Objective, Pins, PlanOptions
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


def given_by(command):
    """Keyword arguments of `EngineArgs` that a command line gives."""
    fields, given = {field.name: field for field in dataclasses.fields(EngineArgs)}, {}
    for flag, value in itertools.pairwise([*shlex.split(command)[2:], "--end"]):
        if flag.startswith("--"):
            name = flag.removeprefix("--").replace("-", "_")
            if name == "api_server_count":  # of the server, not of its engine
                continue
            numeric = fields[name].metadata.get("least") is not None
            given[name] = True if value.startswith("--") else int(value) if numeric else value
    if "gpu_memory_utilization" in given:
        given["gpu_memory_utilization"] = float(given["gpu_memory_utilization"])
    return given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "static", "--ttft-ms", "100"], "--ttft-ms is of a service, --mode static is one batch"),
        (["--mode", "static_gen", "--decode-mesh", "dp=8"], "--decode-mesh is of a service"),
        (["--mode", "static", "--simulate"], "--simulate is of a service"),
        (["--prefill-mesh", "dp=8"], "which --mode aggregated leaves out"),
        (["--plots", "somewhere"], "--plots draws sweeps, and there is none"),
        (["--json", "-", "--explain", "tpot"], "give one of them"),
        (["--class", "a=1,100,100"], "--class has lengths of its own"),
        (["--cluster", "h800-16-h20-16", "--price-per-hour", "2"], "h800-16-h20-16 has two"),
        (
            ["--price-per-hour", "2", "--afd", "on", "--expert-device", "h20"],
            "of one kind of device, and --expert-device is another",
        ),
        (["--price-per-hour", "inf"], "--price-per-hour is inf, expected a number above 0"),
        (["--concurrency", "inf"], "--concurrency is inf, expected a number above 0"),
        (["--concurrency", "4", "--burstiness", "0.5"], "--burstiness is of arrivals at a rate"),
        (["--mtp", "5"], "--mtp 5 is asked for, but dsjax serve drafts at most 4 tokens a step"),
        (["--engine", "vllm", "--precision", "int8"], "vllm does not load block-wise INT8 weights"),
        (["--expert-skew", "zipf:-1"], "expected zipf:S with a number S of 0 or more"),
        (["--expert-skew", "zipf:nan"], "expected zipf:S with a number S of 0 or more"),
        (["--rate", "1000", "--simulate", "--mesh", "tp=8,ep=1"], "requests a second, so that queues would grow"),
        (["--mesh", "tp=8", "--stages", "2"], "--stages is of a search over layouts, and --mesh tp=8 is one"),
        (["--mesh", ""], "--mesh is '', expected axes"),
        (["--mtp-acceptance", "0.7"], "--mtp-acceptance is of drafts, and there are none"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(options, message):
    found = CliRunner().invoke(app, [*BASE, *options])
    assert isinstance(found.exception, UserError)
    assert message in str(found.exception)


@pytest.mark.parametrize("flag", ["--prefill-mesh", "--decode-mesh"])
def test_a_mesh_of_one_side_is_looked_at_where_one_device_has_no_room_for_two_sides(flag, tmp_path):
    cluster = tmp_path / "one.toml"
    cluster.write_text(
        'name = "one"\ndescription = "1 H200"\nhardware = "h200"\nhosts = 1\ndevices_per_host = 1\nscale_up_devices = 1\n'
        'network = "none"\nnetwork_gbps = 400\nnics_per_host = 1\nlatency_us = 2\nlatency_us_range = [1, 5]\n[sources]\n'
    )
    base = ["plan", "--model", "deepseek-v2-lite", "--cluster", str(cluster), "--mode", "separated"]
    found = CliRunner().invoke(app, [*base, flag, "dp=2"])
    assert isinstance(found.exception, UserError)
    assert f"{flag} dp=2 is no layout that fits here; nearest are dp=1" in str(found.exception)


def test_a_recipe_that_there_is_none_of_is_said_and_not_written(tmp_path):
    path = tmp_path / "recipe.json"
    found = CliRunner().invoke(app, [*BASE, "--mesh", "tp=8,ep=1", "--concurrency", "100000", "--recipe", str(path)])
    assert found.exit_code == 0
    assert "is not written: nothing fits" in " ".join(found.stderr.split())
    assert not path.exists()


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(),
        PlanOptions(modes=("separated",)),
        PlanOptions(redundant=32, fused=True),
        PlanOptions(dispatch="auto"),
    ],
)
def test_every_recipe_is_made_of_options_that_serve_has(ask, options):
    question = ask("h200-16", objective=Objective(tpot=0.05), options=options)
    made = recipe("demo", question, search(question).winner)
    for service in made["services"]:
        words = shlex.split(service["command"])
        assert words[:2] == ["dsjax", "serve" if service["role"] == "prefill and decode" else "dynamo"]
        given = given_by(service["command"])
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
        given[name] = int(value) if fields[name].metadata.get("least") is not None else value
    given.pop("weights", None)  # the demo's are not quantised
    llm = LLM(**given)
    assert llm.facts.max_num_seqs >= winner.batch
    args = EngineArgs(**given)
    assert args.max_num_batched_tokens >= winner.prefill_tokens + winner.batch
    assert args.prefill_chunk >= min(winner.prefill_tokens, 300)
    assert llm.facts.max_model_len >= 340


def test_prefill_instances_run_as_many_prompts_as_their_step_was_priced_with(ask):
    question = ask("h200-16", prompt=2000, options=PlanOptions(modes=("separated",)))
    winner = search(question).winner
    service, decode = recipe("deepseek-v3", question, winner)["services"]
    assert service["role"] == "prefill"
    assert int(service["options"]["--max-num-seqs"]) * 2000 >= winner.prefill_tokens
    assert int(service["options"]["--max-num-batched-tokens"]) >= winner.prefill_tokens
    assert int(service["options"]["--prefill-chunk"]) >= min(winner.prefill_tokens, 2000)
    assert decode["role"] == "decode"
    assert winner.batch <= int(decode["options"]["--max-num-batched-tokens"]) <= winner.batch + 257, (
        "only decodes were priced"
    )
    assert int(decode["options"]["--prefill-chunk"]) == 256


def separated(ask, config, prefill, decode, redundant=None, cluster="h200-8", counts=(1, 1), **load):
    """A question about so many prefill and decode engines on these meshes, and its winner."""
    pins = Pins(MeshSpec.parse(prefill), MeshSpec.parse(decode), *counts)
    options = PlanOptions(modes=("separated",), pins=pins, redundant=redundant)
    question = dataclasses.replace(ask(cluster, options=options, **load), config=load_config(config))
    return question, search(question).winner


def test_a_separated_plan_that_a_host_has_room_for_is_one_process_with_the_sizes_of_each_side(ask):
    from dsjax.engine.llm import LLM

    question, winner = separated(ask, "demo", "dp=1", "dp=2", prompt=300, output=40, concurrency=32.0)
    one = recipe("demo", question, winner)["one_process"]
    assert one["command"].startswith("dsjax serve ")
    given = given_by(one["command"])
    for name in ("weights", "dispatch_wire"):  # the demo's are not quantised
        given.pop(name, None)
    llm = LLM(**given)
    try:
        decode, prefill = llm.facts, llm.facts.prefill_sizes
        assert (decode.mesh, decode.prefill_meshes) == ("dp=2", ["dp=1"])
        assert decode.max_num_seqs >= winner.batch
        assert decode.max_num_batched_tokens >= winner.batch
        assert prefill.max_num_seqs * 300 >= winner.prefill_tokens > decode.max_num_seqs
        assert prefill.max_num_batched_tokens >= winner.prefill_tokens
        assert prefill.prefill_chunk >= min(winner.prefill_tokens, 300)
        assert prefill.max_num_seqs != decode.max_num_seqs
        assert min(decode.max_model_len, prefill.max_model_len) >= 340
    finally:
        llm.shutdown()


@pytest.mark.parametrize(("prefill", "decode", "redundant"), [("dp=1", "dp=4", 8), ("dp=2", "dp=4", 0)])
def test_one_process_gives_each_side_what_its_own_command_would(ask, prefill, decode, redundant):
    question, winner = separated(ask, "deepseek-v2-lite", prefill, decode, redundant)
    made = recipe("deepseek-v2-lite", question, winner)
    args = EngineArgs(**given_by(made["one_process"]["command"]))
    assert args.num_devices == winner.devices <= 8
    lines = overlay("deepseek-v2-lite", question, winner, "base", "dsjax plan").splitlines()
    assert f'          - "--prefill-mesh={prefill}"' in lines, "a manifest has the same"
    for service, side in zip(made["services"], (prefill_args(args), decode_args(args)), strict=True):
        own = EngineArgs(**given_by(service["command"]))
        share = max(args.gpu_memory_utilization, own.gpu_memory_utilization)
        moves = {"enable_eplb": side.enable_eplb, "eplb_config": side.eplb_config}
        copies = {"redundant_experts": side.redundant_experts}
        assert side == dataclasses.replace(own, gpu_memory_utilization=share, **moves, **copies)
        assert (side.num_redundant, own.enable_eplb <= side.enable_eplb) == (own.num_redundant, True)


def test_files_that_the_users_command_names_are_written_where_the_deployment_needs_them_alone(ask, tmp_path):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=2", 0)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "experts.yaml").write_text("of the last plan")
    command = "dsjax plan --expert-file experts.yaml --cluster computedomain.yaml"
    write_overlay(folder, "deepseek-v2-lite", question, winner, command)
    assert command in (folder / "kustomization.yaml").read_text()
    assert sorted(one.name for one in folder.iterdir()) == ["base", "kustomization.yaml", "recipe.json"]


def test_what_a_host_has_no_room_for_is_no_process(ask):
    question, winner = separated(ask, "deepseek-v3", "dp=8", "dp=8", 0, cluster="h200-16")
    assert recipe("deepseek-v3", question, winner)["one_process"] is None
    with pytest.raises(UserError, match=r"prefill and decode apart, which one process on a host cannot have"):
        overlay("deepseek-v3", question, winner, "base", "dsjax plan")


def test_an_engine_that_was_priced_for_one_of_two_kinds_of_hosts_is_placed_there(ask):
    options = PlanOptions(modes=("aggregated",), engine=dsjax_engine(), dispatch="auto", redundant=0)
    question = ask("h800-16-h20-16", options=options)
    text = overlay("deepseek-v3", question, search(question).winner, "base", "a plan")
    assert '"value": {"dsjax-device": "h20"}' in text
    assert "Nodes with H20 SXM must say so: kubectl label node NAME dsjax-device=h20" in text


def test_several_engines_of_a_kind_are_processes_of_their_own_behind_dynamo(ask):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=2", 0, counts=(2, 3))
    made = recipe("deepseek-v2-lite", question, winner)
    assert made["one_process"] is None
    for service, (role, count, mesh) in zip(
        made["services"], (("prefill", 2, "dp=1"), ("decode", 3, "dp=2")), strict=True
    ):
        assert (service["role"], service["instances"]) == (role, count)
        args = EngineArgs(**given_by(service["command"]))
        assert service["command"].startswith("dsjax dynamo ")
        assert (args.mesh, args.disaggregation_mode, args.separated) == (mesh, role, False)
    graph = planned_graph("pd", "deepseek-v2-lite", question, winner, "dsjax plan")
    assert [(side.kind, side.workers) for side in graph.sides] == [("prefill", 2), ("decode", 3)]
    with pytest.raises(UserError, match=r"give FILE\.yaml for NVIDIA Dynamo"):
        overlay("deepseek-v2-lite", question, winner, "base", "dsjax plan")


def test_dynamo_s_workers_are_on_the_hosts_of_their_side(ask):
    """Hosts for prompts have four devices here, and those for tokens eight."""
    pins = Pins(MeshSpec.parse("dp=16"), MeshSpec.parse("dp=16"))
    question = ask("h800-16-h20-16", options=PlanOptions(modes=("separated",), redundant=0, pins=pins))
    first = dataclasses.replace(question.cluster.prefill, hosts=4, devices_per_host=4)
    question = dataclasses.replace(question, cluster=dataclasses.replace(question.cluster, prefill=first))
    graph = planned_graph("pd", "deepseek-v3", question, search(question).winner, "dsjax plan")
    assert {side.kind: (side.hosts, side.devices) for side in graph.sides} == {"prefill": (4, 4), "decode": (2, 8)}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("r1.yaml", "r1"),
        ("R1 on H200.yaml", "r1-on-h200"),
        ("2026-plan.yaml", "dsjax-2026-plan"),  # a service's name begins with a letter
        ("prüfung².yaml", "pr-fung"),
        ("---.yaml", "dsjax"),
        ("a" * 60 + ".yaml", "a" * 40),
    ],
)
def test_a_deployment_has_a_name_that_kubernetes_takes(file, name):
    assert deployment_name(Path(file)) == name


def test_a_model_that_pods_cannot_download_is_refused(ask, tmp_path):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=2", 0, counts=(2, 3))
    for model in (str(tmp_path), "demo", 'org/name" && ls', "org/a b"):
        with pytest.raises(UserError, match="expected a repository"):
            planned_graph("pd", model, question, winner, "dsjax plan")


def test_what_a_user_has_named_in_several_lines_stays_a_comment(ask):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=2", 0, counts=(2, 3))
    cluster = dataclasses.replace(question.cluster, description="ours\nkind: Pod")
    question = dataclasses.replace(question, cluster=cluster)
    text = planned_graph("pd", "deepseek-v2-lite", question, winner, "dsjax plan --model 'a\nkind: Pod'").text()
    head = text[: text.index("---")]
    assert head.count("kind: Pod") == 2
    assert all(line.startswith("#") for line in head.splitlines())


def test_sides_of_a_recipe_take_one_another_s_pages(ask):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=4", 0)
    wires = [service["options"].get("--dispatch-wire") for service in recipe("m", question, winner)["services"]]
    assert wires == ["fp8", "fp8"], "a page's values depend on it, also where nothing is sent to experts"


def test_what_dsjax_serve_cannot_do_is_refused_or_told_beside():
    engine = dsjax_engine()
    output = run("--engine", "dsjax")
    assert "engine dsjax" in output
    assert "published: Engines with published kernels" in output
    if not engine.overlaps:
        with pytest.raises(UserError, match="dsjax serve is priced without its --enable-dbo"):
            run("--two-batch-overlap", "on")
    with pytest.raises(UserError, match=r"--precision mxfp4 .* experts of vllm are priced in NVFP4 only"):
        run("--precision", "mxfp4", "--cluster", "b200-8", "--engine", "vllm")
    with pytest.raises(UserError, match=f"--mtp {MOST_DRAFTS + 1} is asked for, .* at most {MOST_DRAFTS} tokens"):
        run("--mtp", str(MOST_DRAFTS + 1))


@pytest.mark.parametrize(("cluster", "weights"), [("b200-8", "nvfp4"), ("h200-8", "mxfp4-bf16")])
def test_a_plan_with_fp4_experts_is_one_that_dsjax_serves(ask, cluster, weights):
    engine = dsjax_engine()
    options = PlanOptions(
        engine=engine, precision=engine.precision(precision(weights)), modes=("aggregated",), dispatch="auto"
    )
    question = ask(cluster, options=options)
    winner = search(question).winner
    assert recipe("deepseek-v3", question, winner)["services"][0]["options"]["--weights"] == weights
    assert not [note for note in notes(winner) if "FP4" in note]


def test_no_more_is_credited_than_the_engine_can(ask):
    able = dataclasses.replace(dsjax_engine(), balances=False, overlaps=False, transfers=False)
    limited = search(ask("h200-16", options=PlanOptions(engine=able, dispatch="auto"))).winner
    assert limited.mode == "aggregated"
    assert not limited.decode.overlapped(limited.batch)
    uneven = limited.decode.step_models()[0]
    assert not uneven.balancing


def test_static_modes_say_what_is_missing_and_refuse_what_is_of_a_service():
    assert "holds most" in run("--mode", "static_gen", "--batch", "100000")
    assert "GB a device; give --batch" in " ".join(run("--mode", "static_gen", "--batch", "100000").split())
    with pytest.raises(UserError, match="--explain is of a service"):
        run("--mode", "static", "--explain", "tpot")


def test_where_no_layout_is_left_a_plan_and_a_static_mode_say_so():
    too_wide = ("--attention-mesh", "dp=8", "--expert-mesh", "ep=8")
    assert "No layout of the model is left to look at: the devices at hand" in run(*too_wide)
    assert "no layout of the model is left to look at: the devices at hand" in run(*too_wide, "--mode", "static_gen")


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


@pytest.mark.parametrize(
    ("rate", "count"), [(100, 1), (15_000, 1), (15_001, 1), (20_000, 2), (31_500, 2), (60_000, 4), (1e6, 5)]
)
def test_a_server_gets_the_front_ends_that_its_tokens_take(rate, count):
    assert front_ends(rate) == count


def test_a_fast_instance_is_served_by_several_front_ends_and_a_slow_one_by_none(ask):
    options = PlanOptions(modes=("aggregated",), mesh=MeshSpec.parse("dp=32"), redundant=32)
    for load, several in (({}, True), ({"concurrency": 32}, False)):
        question = ask("h200-32", prompt=500, output=500, options=options, **load)
        made = recipe("deepseek-v3", question, search(question).winner)
        given = shlex.split(made["services"][0]["command"])
        assert ("--api-server-count" in given) == several
        assert not several or int(given[given.index("--api-server-count") + 1]) > 1
        graph = planned_graph("name", "deepseek-v3", question, search(question).winner, "dsjax plan").text()
        assert "--api-server-count" not in graph, "Dynamo's frontend speaks HTTP"

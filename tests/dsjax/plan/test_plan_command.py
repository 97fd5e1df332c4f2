"""`dsjax plan` on the command line, its recipe and its pages."""

import dataclasses
import math
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import yaml
from plan_words import plan, plan_json, refusal_of
from step_models import options_for
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.config import load_config
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.side_options import decode_args, prefill_args
from dsjax.errors import UserError
from dsjax.plan.engine import find_engine
from dsjax.plan.manifests import deployment_name, fill, overlay, planned_graph
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.recipe import front_ends, notes, read_recipe, recipe
from dsjax.plan.search import search
from dsjax.plan.workload import Objective, Pins, PlanOptions
from sharding.mesh import MeshSpec

LENGTHS = ["--cluster", "h200-8", "--input", "1000", "--output", "200"]
BASE = [*LENGTHS, "--mode", "aggregated"]
ONE_LAYOUT = ("--mesh", "tp=8,ep=1")  # where a test is not about the search
AFD = ("--attention-mesh", "dp=4", "--expert-mesh", "ep=4")


@pytest.mark.parametrize(
    "words",
    [
        ["--cluster", "h100-32", "--input", "2000", "--output", "500", "--ttft-ms", "2000", "--tpot-ms", "50"],
        ["--cluster", "h20-32", "--max-concurrency", "200", "--input", "4000", "--engine", "sglang"],
        pytest.param(["--cluster", "h20-32", "--tpot-ms", "3", "--ttft-ms", "10"], marks=pytest.mark.slow),
    ],
)
def test_the_first_screen_fits_24_lines_of_80_columns(monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    output = plan(*words)
    lines = [max(1, math.ceil(len(line.rstrip()) / 80)) for line in output.splitlines()]
    assert sum(lines) <= 24
    assert len(re.findall(r"^\d .*\d × (?:dp|tp)=", output, re.MULTILINE)) == 5, "five rows"
    assert ("winner" in output) == ("forbids it" not in output)


def test_the_first_screen_has_question_command_and_limits_and_the_rest_is_explained(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = plan(*BASE, "--tpot-ms", "50", "--rows", "2", "--explain", "plan")
    first, _, rest = output.partition("--explain plan")
    for said in (
        "1000 tokens in, 200 out",
        "dsjax serve --model deepseek-v3 --mesh",
        "limits: ",
        "winner, never measured: ",
    ):
        assert said in first
    assert "cold start: a host" not in first
    for said in ("first bottleneck", "cold start", "GB weights (exact)"):
        assert said in " ".join(rest.split())
    found = re.findall(r"\d × [dt]p=\d", rest.partition("a device:")[0])
    assert len(found) == 4, "the table comes in two parts, each with the deployments of its two rows"


def test_explain_shows_the_parts_of_steps_and_how_much_each_input_moves_the_result_with_its_kind_and_source():
    output = plan(*BASE, *ONE_LAYOUT, "--explain", "tpot")
    steps, _, inputs = output.partition("the result × so much at either end of an input's range")
    shares = [int(share) for share in re.findall(r"^ +[\d.]+ [mµ]?s +(\d+)%  ", steps, re.MULTILINE)]
    assert sum(shares) == pytest.approx(200, abs=10), "of a decode and of a prefill step"
    found = re.findall(r"^ +([\d.]+) … ([\d.]+)  (.+?): .+ \((measured|assumption): .+\)$", inputs, re.MULTILINE)
    assert found[0][2] == "engine time ÷ sum of kernel times"
    moved = [abs(float(high) - float(low)) for low, high, *_ in found]
    assert all(more >= less - 0.011 for more, less in pairwise(moved))  # ends are rounded
    assert "(measured: operator tables of aiconfigurator" in inputs
    assert "within 1 %: " in inputs
    assert "GB  experts  (exact)" in plan(*BASE, *ONE_LAYOUT, "--explain", "memory")


def test_json_is_complete_and_the_recipe_is_its_winner(tmp_path):
    path = tmp_path / "recipe.json"
    found = plan_json("recipe", path, *BASE, "--tpot-ms", "50")
    assert read_recipe(path) == found["winner"]
    first = found["ranked"][0]
    assert first["tpot_s"]["low"] < first["tpot_s"]["value"] < first["tpot_s"]["high"]
    assert first["bottleneck"]["resource"]
    assert found["winner"]["expected"]["mesh"] == first["mesh"]
    assert all(math.isfinite(c["output_tokens_per_s"]["value"]) for c in found["frontier"])


def test_the_front_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plan(*BASE, *ONE_LAYOUT, "--pareto", tmp_path / "front.png", "--ttft-ms", "150", "--tpot-ms", "40")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def engine_of(command):
    """The options of the engine that a command line starts, as `dsjax` itself reads them."""
    _, name, *words = shlex.split(command)
    given = typer.main.get_command(app).get_command(None, name).make_context(name, words).params
    return EngineArgs(**{name: value for name, value in given.items() if name in EngineArgs.__dataclass_fields__})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "static"], "--mode is 'static', expected one of both, aggregated, separated"),
        (["--prefill-mesh", "dp=8"], "which --mode aggregated leaves out"),
        (["--json", "-", "--explain", "tpot"], "--explain and --json exclude each other"),
        (["--class", "a=1,100,100"], "--class and --input exclude each other; leave one of them out"),
        (["--cluster", "h800-16-h20-16", "--price-per-hour", "2"], "h800-16-h20-16 has two"),
        (["--max-concurrency", "inf"], "--max-concurrency is inf, expected a number above 0"),
        (["--mtp", "5"], "--mtp 5 is asked for, but dsjax serve drafts at most 4 tokens a step"),
        (["--engine", "vllm", "--precision", "int8"], "vllm does not load block-wise INT8 weights"),
        (["--engine", "vllm", "--precision", "mxfp4", "--cluster", "b200-8"], "vllm are priced in NVFP4 only"),
        ([*AFD, "--engine", "vllm"], "vllm has no released option"),
        (["--attention-mesh", "dp=8"], "--attention-mesh needs --expert-mesh; give that too"),
        (["--num-afd-stages", "3"], "--num-afd-stages needs --attention-mesh"),
        ([*AFD, "--mesh", "dp=8"], "exclude each other"),
        (["--attention-mesh", "dp=8", "--expert-mesh", "dp=8"], "such as ep=24"),
        (["--fp8-gemm-backend", "triton"], "is 'triton', expected one of deep_gemm, flashinfer_trtllm"),
        (["--fp8-gemm-backend", "flashinfer_trtllm", "--engine", "sglang"], "h200-8 has h200"),
        ([*ONE_LAYOUT, "--sweep", "power"], "expected one of latency, bandwidth, loss-of-hosts"),
        ([*ONE_LAYOUT, "--sweep", "latency="], "'' is no number"),
        ([*ONE_LAYOUT, "--sweep", "latency=1:5"], "'1:5' is no number"),
        ([*ONE_LAYOUT, "--sweep", "hosts=0"], "0 is not a number of hosts"),
        ([*ONE_LAYOUT, "--sweep", "bandwidth=0"], "0 is not above 0"),
        ([*ONE_LAYOUT, "--sweep", "loss-of-hosts=1"], "the cluster has 1 hosts; expected fewer"),
        ([*ONE_LAYOUT, "--sweep", "hosts", "--max-devices", "8"], "and --max-devices 8 bounds the devices; leave one"),
        (["--expert-skew", "zipf:-1"], "expected zipf:S with a number S of 0 or more"),
        (["--mesh", "tp=8", "--stages", "2"], "--stages and --mesh exclude each other"),
        (["--mesh", ""], "--mesh is '', expected axes"),
        (["--mtp-acceptance", "0.7"], "--mtp-acceptance needs --mtp; give that too"),
        (["--dispatch", "x"], "--dispatch is 'x', expected one of deepep, auto, gather"),
        (["--dispatch", "deepep"], "dsjax serve has dispatches of its own"),
        (["--precision", "x"], "--precision is 'x', expected one of auto, fp8"),
        (["--precision", "nvfp4", "--engine", "published"], "H200 SXM has no FP4 unit; choose fp8 or bf16"),
        (["--precision", "int8", "--cluster", "gb300-nvl72-36", "--engine", "published"], "GB300 has no INT8 unit"),
        (["--kv-cache-dtype", "x"], "--kv-cache-dtype is 'x', expected one of auto, bf16, fp8"),
        (["--mode", "separated", "--prefill-instances", "0"], "--prefill-instances is 0, expected at least 1"),
        (["--mode", "separated", "--decode-instances", "0"], "--decode-instances is 0, expected at least 1"),
        (["--mtp", "-1"], "--mtp is -1, expected at least 0"),
        (["--prefill-tokens", "0"], "--prefill-tokens is 0, expected at least 1"),
        (["--max-devices", "0"], "--max-devices is 0, expected at least 1"),
        (["--max-devices-per-instance", "0"], "--max-devices-per-instance is 0, expected at least 1"),
        (["--redundant-experts", "-1"], "--redundant-experts is -1, expected at least 0"),
        (["--stages", "0"], "--stages is 0, expected at least 1"),
        (["--request-rate", "0"], "--request-rate is 0.0, expected a number above 0"),
        (["--ttft-ms", "0"], "--ttft-ms is 0, expected a number above 0"),
        (["--tpot-ms", "0"], "--tpot-ms is 0, expected a number above 0"),
        (["--throughput", "0"], "--throughput is 0, expected a number above 0"),
        ([*AFD, "--enable-shared-experts-fusion"], "--enable-shared-experts-fusion is of one mesh"),
        (["--enable-shared-experts-fusion", "--model", "deepseek-v2-lite"], "this one has 2"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(options, message):
    assert message in refusal_of(*BASE, *options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["simulate", "--request-rate", "1000", *ONE_LAYOUT], "requests a second, so that queues would grow"),
        (["simulate", "--request-rate", "4", "--burstiness", "0"], "--burstiness is 0.0, expected a number above 0"),
        (
            ["simulate", "--max-concurrency", "4", "--burstiness", "0.5"],
            "--burstiness and --max-concurrency exclude each other",
        ),
        (["simulate", "--request-rate", "inf", "--burstiness", "0.5"], "--burstiness is of arrivals at a rate"),
        (["simulate", *AFD], "plan simulate knows layouts of one mesh"),
        (["step", "--mode", "separated"], "--mode is 'separated', expected one of static, static_ctx, static_gen"),
        (["step", "--context", "100"], "--context needs --mode static_gen"),
        (["compare", "dp=1", "tp=2"], "dp=1 does not fit h200-8: its weights leave no room for one request"),
        (["compare", "dp=8", "tp=8", "--max-concurrency", "100000"], "dp=8 does not fit h200-8: it holds too few"),
    ],
)
def test_a_subcommand_refuses_what_it_cannot_answer(words, message):
    assert message in refusal_of(words[0], *LENGTHS, *words[1:])


@pytest.mark.parametrize("words", ["step --ttft-ms", "step --explain", "fit --mesh tp=8 --request-rate", "--warmup"])
def test_a_subcommand_has_no_option_that_it_would_not_look_at(words):
    *words, flag = words.split()
    found = CliRunner().invoke(app, ["plan", *words, flag, "3"])
    assert found.exit_code == 2
    assert f"No such option: {flag}" in found.output


def test_plan_alone_is_the_search_and_its_help_lists_the_others():
    shown = plan("--help")
    for said in ("--pareto", "fit", "step", "simulate", "recipe"):
        assert re.search(rf"^  {said}\b", shown, re.MULTILINE), said


@pytest.mark.slow
def test_options_go_by_the_field_s_names_too():
    ours = ["--input", "900", "--output", "100", "--ttft-ms", "500", "--tpot-ms", "60", "--prefill-tokens", "4096"]
    theirs = ["--isl", "900", "--osl", "100", "--ttft", "500", "--itl", "60", "--max-num-batched-tokens", "4096"]
    alone = ([*words, *ONE_LAYOUT] for words in (ours, theirs))
    for one, other in (alone, (["--stages", "2"], ["--pipeline-parallel-size", "2"])):
        assert plan_json("--cluster", "h200-8", *one) == plan_json("--cluster", "h200-8", *other)


def test_a_recipe_that_there_is_none_of_is_said_and_not_written(tmp_path):
    path = tmp_path / "recipe.json"
    found = CliRunner().invoke(app, ["plan", "recipe", str(path), *BASE, *ONE_LAYOUT, "--max-concurrency", "100000"])
    assert found.exit_code == 1
    assert "is not written: nothing fits" in " ".join(found.stderr.split())
    assert not path.exists()


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(modes=("separated",), redundant=0),
        PlanOptions(modes=("aggregated",), mesh=MeshSpec.parse("dp=16"), redundant=32, fused=True),
        PlanOptions(modes=("aggregated",), mesh=MeshSpec.parse("dp=16"), dispatch="auto"),
    ],
)
def test_every_recipe_is_made_of_options_that_serve_has(ask, options):
    question = ask("h200-16", objective=Objective(tpot=0.05), options=options)
    made = recipe("demo", question, search(question).winner)
    for service in made["services"]:
        words = shlex.split(service["command"])
        assert words[:2] == ["dsjax", "serve" if service["role"] == "prefill and decode" else "dynamo"]
        args = engine_of(service["command"])
        assert (args.num_redundant > 0) == args.enable_eplb, "what was priced as balanced is balanced"
        assert args.enable_shared_experts_fusion == options.fused
    assert [s["role"] for s in made["services"]][-1] in ("decode", "prefill and decode")


def test_a_recipe_is_of_an_engine_whose_limits_are_those_that_were_priced(ask):
    options = options_for("dsjax", modes=("aggregated",), mesh=MeshSpec.parse("dp=2"))
    question = ask(prompt=300, output=40, concurrency=16.0, options=options, config=load_config("demo"))
    winner = search(question).winner
    args = engine_of(recipe("demo", question, winner)["services"][0]["command"])
    assert args.max_num_seqs >= winner.batch
    assert args.max_num_batched_tokens >= winner.prefill_tokens + winner.batch
    assert args.chunk_tokens >= min(winner.prefill_tokens, 300)
    assert args.max_model_len >= 340


def separated(ask, config, prefill, decode, redundant=None, cluster="h200-8", counts=(1, 1), **load):
    """A question about so many prefill and decode engines on these meshes, and its winner."""
    pins = Pins(MeshSpec.parse(prefill), MeshSpec.parse(decode), *counts)
    options = PlanOptions(modes=("separated",), pins=pins, redundant=redundant)
    question = ask(cluster, options=options, config=load_config(config), **load)
    return question, search(question).winner


def test_a_separated_plan_that_a_host_has_room_for_is_one_process_with_the_sizes_of_each_side(ask):
    question, winner = separated(ask, "demo", "dp=1", "dp=2", prompt=300, output=40, concurrency=32.0)
    one = recipe("demo", question, winner)["one_process"]
    assert one["command"].startswith("dsjax serve ")
    args = engine_of(one["command"])
    decode, prefill = decode_args(args), prefill_args(args)
    assert (decode.mesh, prefill.mesh) == ("dp=2", "dp=1")
    assert min(decode.max_num_seqs, decode.max_num_batched_tokens) >= winner.batch
    assert prefill.max_num_seqs * 300 >= winner.prefill_tokens > decode.max_num_seqs != prefill.max_num_seqs
    assert prefill.max_num_batched_tokens >= winner.prefill_tokens
    assert prefill.chunk_tokens >= min(winner.prefill_tokens, 300)
    assert min(decode.max_model_len, prefill.max_model_len) >= 340


@pytest.mark.parametrize(("prefill", "decode", "redundant"), [("dp=1", "dp=4", 8), ("dp=2", "dp=4", 0)])
def test_one_process_gives_each_side_what_its_own_command_would(ask, prefill, decode, redundant):
    question, winner = separated(ask, "deepseek-v2-lite", prefill, decode, redundant)
    made = recipe("deepseek-v2-lite", question, winner)
    args = engine_of(made["one_process"]["command"])
    assert args.num_devices == winner.devices <= 8
    (text,) = overlay("deepseek-v2-lite", question, winner, "base", "dsjax plan").values()
    assert f'          - "--prefill-mesh={prefill}"' in text.splitlines(), "a manifest has the same"
    for service, side in zip(made["services"], (prefill_args(args), decode_args(args)), strict=True):
        own = engine_of(service["command"])
        share = max(args.gpu_memory_utilization, own.gpu_memory_utilization)
        moves = {name: getattr(side, name) for name in ("enable_eplb", "eplb_config", "redundant_experts")}
        assert side == dataclasses.replace(own, gpu_memory_utilization=share, **moves)
        assert (side.num_redundant, own.enable_eplb <= side.enable_eplb) == (own.num_redundant, True)


def test_what_a_host_has_no_room_for_is_no_process(ask):
    question, winner = separated(ask, "deepseek-v3", "dp=8", "dp=8", 0, cluster="h200-16")
    assert recipe("deepseek-v3", question, winner)["one_process"] is None
    with pytest.raises(UserError, match=r"prefill and decode apart, which one process on a host cannot have"):
        overlay("deepseek-v3", question, winner, "base", "dsjax plan")


def test_an_engine_that_was_priced_for_one_of_two_kinds_of_hosts_is_placed_there(ask):
    question = ask("h800-16-h20-16", options=options_for("dsjax", modes=("aggregated",), redundant=0))
    (text,) = overlay("deepseek-v3", question, search(question).winner, "base", "a plan").values()
    assert 'value: {"dsjax-device": "h20"}' in text
    assert "Nodes with H20 SXM must say so: kubectl label node NAME dsjax-device=h20" in text


def test_several_engines_of_a_kind_are_processes_of_their_own_behind_dynamo(ask):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=2", 0, counts=(2, 3))
    made = recipe("deepseek-v2-lite", question, winner)
    assert made["one_process"] is None
    sides = [(service["role"], service["instances"]) for service in made["services"]]
    assert sides == [("prefill", 2), ("decode", 3)]
    for service, mesh in zip(made["services"], ("dp=1", "dp=2"), strict=True):
        args = engine_of(service["command"])
        assert service["command"].startswith("dsjax dynamo ")
        assert (args.mesh, args.disaggregation_mode, args.separated) == (mesh, service["role"], False)
    workers = workers_of(planned_graph("pd", "deepseek-v2-lite", question, winner, "dsjax plan"))
    assert {kind: worker["replicas"] for kind, worker in workers.items()} == {"prefill": 2, "decode": 3}
    with pytest.raises(UserError, match=r"give FILE\.yaml for NVIDIA Dynamo"):
        overlay("deepseek-v2-lite", question, winner, "base", "dsjax plan")


def workers_of(text):
    """Dynamo's workers by their type."""
    (graph,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "DynamoGraphDeployment"]
    return {one["type"]: one for one in graph["spec"]["components"][1:]}


def test_dynamo_s_workers_are_on_the_hosts_of_their_side(ask):
    """Hosts for prompts have four devices here, and those for tokens eight."""
    question, _ = separated(ask, "deepseek-v3", "dp=16", "dp=16", 0, cluster="h800-16-h20-16")
    first = dataclasses.replace(question.cluster.prefill, hosts=4, devices_per_host=4)
    question = dataclasses.replace(question, cluster=dataclasses.replace(question.cluster, prefill=first))
    workers = workers_of(planned_graph("pd", "deepseek-v3", question, search(question).winner, "dsjax plan"))
    assert {kind: worker["multinode"]["nodeCount"] for kind, worker in workers.items()} == {"prefill": 4, "decode": 2}
    (prefill,), (decode,) = (one["podTemplate"]["spec"]["containers"] for one in workers.values())
    limits = [one["resources"]["limits"]["nvidia.com/gpu"] for one in (prefill, decode)]
    assert limits == ["4", "8"]


def test_what_a_user_has_named_stays_a_comment_or_becomes_a_name_that_kubernetes_takes(ask):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=2", 0, counts=(2, 3))
    cluster = dataclasses.replace(question.cluster, description="ours\nkind: Pod")
    question = dataclasses.replace(question, cluster=cluster)
    text = planned_graph("pd", "deepseek-v2-lite", question, winner, "dsjax plan --model 'a\nkind: Pod'")
    head = text[: text.index("---")]
    assert head.count("kind: Pod") == 2
    assert all(line.startswith("#") for line in head.splitlines())
    for model in ("demo", 'org/name" && ls', "org/a b"):
        with pytest.raises(UserError, match="expected a repository"):
            planned_graph("pd", model, question, winner, "dsjax plan")
    names = {"R1 on H200": "r1-on-h200", "2026-plan": "dsjax-2026-plan", "---": "dsjax", "true": "dsjax-true"}
    assert {stem: deployment_name(Path(f"{stem}.yaml")) for stem in ("r1", *names)} == names | {"r1": "r1"}


def test_a_value_is_a_word_of_a_manifest_or_goes_into_it_as_json_or_a_comment():
    """Names of models and clusters are chosen by others: none becomes more of the YAML than its value."""
    values = {"name": "pd", "nodes": 2}
    assert "numNodes: 2" in fill("computedomain.yaml", **values)
    for name in ("a\nkind: Pod", "a: b", "a # b", "{a}", "true", "{{ nodes }}"):
        with pytest.raises(UserError, match="cannot stand in a manifest"):
            fill("computedomain.yaml", **values | {"name": name})


@pytest.mark.parametrize(
    ("cluster", "weights"), [("b200-8", "nvfp4"), ("h200-8", "mxfp4-bf16"), ("h200-8", "int4-bf16")]
)
def test_a_plan_with_packed_experts_is_one_that_dsjax_serves(ask, cluster, weights):
    kept = find_engine("dsjax").precision(PRECISIONS[weights])
    options = options_for("dsjax", precision=kept, modes=("aggregated",), mesh=MeshSpec.parse("dp=8"))
    question = ask(cluster, options=options)
    winner = search(question).winner
    assert recipe("deepseek-v3", question, winner)["services"][0]["options"]["--weights"] == weights
    assert not [note for note in notes(winner) if "FP4" in note]


def test_sides_of_a_recipe_take_one_another_s_pages(ask):
    question, winner = separated(ask, "deepseek-v2-lite", "dp=1", "dp=4", 0)
    wires = [service["options"].get("--dispatch-wire") for service in recipe("m", question, winner)["services"]]
    assert wires == ["fp8", "fp8"], "a page's values depend on it, also where nothing is sent to experts"


def test_where_no_layout_is_left_a_plan_and_a_static_mode_say_so():
    too_wide = ("--attention-mesh", "dp=8", "--expert-mesh", "ep=8")
    assert "No layout of the model is left to look at: the devices at hand" in plan(*BASE, *too_wide)
    base = ["plan", "step", *LENGTHS, "--mode", "static_gen"]
    left, most = (CliRunner().invoke(app, [*base, *more]).output for more in (too_wide, ("--batch", "100000")))
    assert "no layout of the model is left to look at: the devices at hand" in left
    assert "holds most" in " ".join(most.split())


def test_no_instance_is_wider_than_is_allowed_and_a_price_gives_a_cost():
    words = ["--cluster", "h200-16", "--mode", "aggregated", "--redundant-experts", "0"]
    found = plan_json(*words, "--max-devices-per-instance", "8", "--price-per-hour", "2")
    assert all(one["devices"] // one["instances"] <= 8 for one in found["ranked"])
    first = found["ranked"][0]
    per_hour = first["output_tokens_per_s"]["value"] * 3600
    assert first["cost_per_million_output_tokens"]["value"] == pytest.approx(2 * first["devices"] / per_hour * 1e6)
    assert "at 2 a device and hour" in plan(*BASE, *ONE_LAYOUT, "--price-per-hour", "2", "--explain", "plan")


def test_a_sweep_over_users_is_answered_for_as_many_and_over_hosts_for_those_given_with_them():
    sweeps = ("--sweep", "concurrency=4,64,100000", "--sweep", "hosts=2,2:96")
    users, hosts = plan_json(*BASE, *ONE_LAYOUT, *sweeps)["sweeps"]
    few, some, *_, many = users["points"]
    assert few["best"]["batch_per_dp_rank"] * few["best"]["instances"] == 4
    assert few["same"]["tpot_s"]["value"] < some["same"]["tpot_s"]["value"]
    assert (many["best"], many["same"]) == (None, None)
    free, loaded = hosts["points"]
    assert free["same"]["instances"] == loaded["same"]["instances"] == 2
    assert loaded["concurrency"] == 96 == loaded["best"]["batch_per_dp_rank"] * loaded["best"]["instances"]


def test_a_fast_instance_is_served_by_several_front_ends_and_a_slow_one_by_one(ask):
    assert front_ends(15_000) == 1 < front_ends(20_000) < front_ends(60_000) < front_ends(1e6)
    question = ask("h200-32", options=PlanOptions(modes=("aggregated",), mesh=MeshSpec.parse("dp=32"), redundant=32))
    winner = search(question).winner
    assert int(recipe("deepseek-v3", question, winner)["services"][0]["options"]["--api-server-count"]) > 1
    graph = planned_graph("name", "deepseek-v3", question, winner, "dsjax plan")
    assert "--api-server-count" not in graph, "Dynamo's frontend speaks HTTP"

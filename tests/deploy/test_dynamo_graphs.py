"""`deploy/dynamo`: files that the published schemas accept, with options that `dsjax dynamo` takes, on as many devices as they ask for."""

import importlib.metadata
import json
import shlex
from pathlib import Path

import pytest
import typer
from test_deploy import check, check_restricted, plan, read, secret, secrets_of
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.config import load_config
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from sharding import MeshSpec

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "dynamo").glob("*.yaml"))
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
KINDS = ["PersistentVolumeClaim", "Job", "DynamoGraphDeployment", "Job", "NetworkPolicy", "NetworkPolicy"]
DYNAMOS_GRACE_SECONDS = 5
"""Default of DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS."""


def documents(path: Path) -> list[dict]:
    return json.loads(json.dumps(read(path)))


def kinds(found: list[dict]) -> list[str]:
    return [document["kind"] for document in found]


def pod_of(job: dict) -> dict:
    return job["spec"]["template"]["spec"]


def workers_of(found: list[dict]) -> list[tuple[dict, dict]]:
    """A deployment's kinds of workers, each with the container that the operator takes for the engine's."""
    made = []
    for worker in found[2]["spec"]["components"][1:]:
        (container,) = worker["podTemplate"]["spec"]["containers"]
        assert container["name"] == "main"
        made.append((worker, container))
    return made


def devices_each(worker: dict, container: dict) -> int:
    """Devices of one worker, over its hosts."""
    hosts = worker.get("multinode", {}).get("nodeCount", 1)
    return hosts * int(container["resources"]["limits"]["nvidia.com/gpu"])


def devices_of(found: list[dict]) -> int:
    return sum(worker["replicas"] * devices_each(worker, container) for worker, container in workers_of(found))


def engine_args(options: dict) -> EngineArgs:
    return EngineArgs(**{name: value for name, value in options.items() if name in EngineArgs.__dataclass_fields__})


def parsed(arguments: list[str]) -> dict:
    """What `dsjax dynamo` reads of its command line; without Dynamo, whose own options would be left."""
    from dsjax.dynamo.command import app as dynamo

    context = typer.main.get_command(dynamo).make_context("dsjax dynamo", list(arguments))
    assert context.args == [], "options that are not dsjax's"
    return context.params


@EACH_FILE
def test_every_file_is_what_the_published_schemas_say_and_what_the_tool_writes(path):
    from make_deploy import graph, published

    found = documents(path)
    assert kinds(found) == KINDS + (["ComputeDomain"] if "gb200" in path.stem else [])
    for document in found:
        check(document)
    assert path.stem in published()["graphs"]
    assert path.read_text() == graph(path.stem)


@EACH_FILE
def test_pods_are_restricted_have_their_secrets_and_are_fenced(path):
    _, download, graph, benchmark, frontend_policy, engine_policy, *domain = documents(path)
    for job in (download, benchmark):
        check_restricted(pod_of(job))
    name, components = graph["metadata"]["name"], graph["spec"]["components"]
    for component in components:
        check_restricted(component["podTemplate"]["spec"], locks_memory=True)
    frontend, *workers = [component["podTemplate"]["metadata"]["labels"] for component in components]
    assert frontend_policy["spec"]["podSelector"]["matchLabels"] == frontend
    own = {"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": name}}}]}
    assert engine_policy["spec"]["ingress"] == [own]
    assert {"app.kubernetes.io/part-of": name}.items() <= frontend.items()
    for worker, labels in zip(components[1:], workers, strict=True):
        assert engine_policy["spec"]["podSelector"]["matchLabels"] == labels
        (container,) = worker["podTemplate"]["spec"]["containers"]
        keys = {"DSJAX_CLUSTER_KEY": secret("cluster-key"), "DSJAX_API_KEY": secret("api-key")}
        assert secrets_of(container).items() >= keys.items()
        assert ("--transfer-host=$(POD_IP)" in container["args"]) == (worker["type"] != "worker")
        several = worker.get("multinode", {}).get("nodeCount", 1) > 1
        assert ("rdma/ib" in container["resources"]["limits"]) == (several and not domain)
        assert ("claims" in container["resources"]) == (several and bool(domain))


@EACH_FILE
def test_the_workers_options_are_dsjaxs_and_fit_the_model_and_the_devices(path):
    from dsjax.dynamo.arguments import CLEANUP_SECONDS

    found = documents(path)
    assert [worker["type"] for worker, _ in workers_of(found)] in (["worker"], ["prefill", "decode"])
    for worker, container in workers_of(found):
        assert container["command"] == ["dsjax", "dynamo"]
        options = parsed(container["args"])
        args = engine_args(options)
        assert args.disaggregation_mode == {"worker": "agg"}.get(worker["type"], worker["type"])
        grace = worker["podTemplate"]["spec"]["terminationGracePeriodSeconds"]
        assert grace >= DYNAMOS_GRACE_SECONDS + options["shutdown_timeout"] + CLEANUP_SECONDS
        mesh = MeshSpec.parse(args.mesh)
        assert mesh.num_devices == devices_each(worker, container)
        config = load_config("deepseek-r1")
        heads, experts, width = config.num_attention_heads, config.n_routed_experts, config.moe_intermediate_size
        mesh.check_fits(heads=heads, experts=experts, expert_width=width, redundant=args.num_redundant, block=128)


@EACH_FILE
def test_all_parts_of_a_file_belong_together_and_the_benchmarks_command_is_one_that_bench_serve_takes(path):
    from dsjax.bench.command import bench

    claim, download, graph, benchmark, *_ = documents(path)
    text, name = path.read_text(), graph["metadata"]["name"]
    volumes = {volume["persistentVolumeClaim"]["claimName"] for volume in _volumes(download, graph, benchmark)}
    assert volumes == {claim["metadata"]["name"]}
    given = [parsed(container["args"]) for _, container in workers_of([claim, download, graph])]
    (folder,) = {one["model"] for one in given}
    assert f"--local-dir {folder} " in pod_of(download)["containers"][0]["args"][0]
    assert text.count(f"{folder}/.complete") == 2, "the download leaves the mark that pods wait for"
    assert f"--tokenizer {folder} " in text
    (container,) = pod_of(benchmark)["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert environment["URL"] == f"http://{name}-frontend:8000"
    assert all(environment["MODEL"] in one["served_model_name"] for one in given)
    assert benchmark["spec"]["suspend"]
    script = container["args"][0]
    words = shlex.split(script[script.index("dsjax bench serve") :])
    options = typer.main.get_command(bench).commands["serve"].params
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= flags
    assert words[words.index("--devices") + 1] == str(devices_of(documents(path)))


def _volumes(download, graph, benchmark) -> list[dict]:
    pods = [pod_of(download), pod_of(benchmark)]
    pods += [component["podTemplate"]["spec"] for component in graph["spec"]["components"]]
    return [volume for pod in pods for volume in pod["volumes"] if "emptyDir" not in volume]


def planned(path: Path, words: str) -> tuple[list[dict], dict[str, tuple[dict, dict]]]:
    """The documents of a plan's file; and by its type each worker, with the options of its engine."""
    plan(path, words)
    found = documents(path)
    for document in found:
        check(document)
    return found, {worker["type"]: (worker, parsed(container["args"])) for worker, container in workers_of(found)}


def test_a_plan_writes_a_file_of_its_own_and_a_separated_one_prefill_and_decode_workers(tmp_path):
    found, workers = planned(tmp_path / "my service.yaml", "--cluster h200-16 --mesh dp=16 --max-concurrency 64")
    assert kinds(found) == KINDS
    assert found[2]["metadata"]["name"] == "my-service"
    [(worker, options)] = workers.values()
    assert worker["multinode"] == {"nodeCount": 2}
    assert (options["mesh"], options["weights"], options["model"]) == ("dp=16", "fp8", "/models/deepseek-v3")
    found, workers = planned(tmp_path / "apart.yaml", "--cluster h200-32 --mode separated --max-concurrency 64")
    modes = {side: options["disaggregation_mode"] for side, (_, options) in workers.items()}
    assert modes == {"prefill": "prefill", "decode": "decode"}
    assert devices_of(found) == 32


def test_attention_and_experts_of_one_process_are_a_worker_and_experts_in_processes_of_their_own_are_none(tmp_path):
    words = "--cluster h200-8 --attention-mesh dp=2 --expert-mesh ep=6 --mode aggregated"
    found, workers = planned(tmp_path / "apart.yaml", words)
    assert workers.keys() == {"worker"}
    assert (engine_args(workers["worker"][1]).num_devices, devices_of(found)) == (8, 8)
    path = tmp_path / "experts-apart.yaml"
    words = f"plan recipe {path} --cluster h200-32 --attention-mesh dp=8 --expert-mesh ep=16 --mode aggregated"
    refused = CliRunner().invoke(app, words.split())
    assert isinstance(refused.exception, UserError)
    assert "give a folder, which has both sides for Kubernetes" in str(refused.exception)
    assert not path.exists()


@pytest.mark.dynamo
@pytest.mark.skipif(not any(importlib.metadata.distributions(name="ai-dynamo-runtime")), reason="Dynamo is not here")
def test_the_frontends_options_are_dynamos():
    import argparse

    from dynamo.frontend.frontend_args import FrontendArgGroup

    parser = argparse.ArgumentParser(allow_abbrev=False)
    FrontendArgGroup().add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    for path in FILES:
        (container,) = documents(path)[2]["spec"]["components"][0]["podTemplate"]["spec"]["containers"]
        missing = {word.partition("=")[0] for word in container["args"]} - known
        assert not missing

"""Kubernetes manifests of a plan: a kustomize overlay of `deploy/base`, or one file for NVIDIA Dynamo's operator.

Both are templates of `deploy/templates`, filled with a recipe.
"""

import importlib.resources
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from markupsafe import Markup

from dsjax.errors import UserError
from dsjax.hardware import Hardware
from dsjax.plan.candidate import Candidate
from dsjax.plan.cluster import Cluster
from dsjax.plan.cold_start import files_precision
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import weight_bytes
from dsjax.plan.moves import processes_of
from dsjax.plan.question import Question
from dsjax.plan.recipe import REPOSITORIES, recipe, write_json_recipe
from dsjax.plan.rules import comment, refuse

DOMAIN_FILE, EXPERTS_FILE = "computedomain.yaml", "experts.yaml"
ROOM = 1.25
"""Size of the volume ÷ size of the model's files; the rest holds compiled programs."""
_TPU = {"tpu-v5e": "tpu-v5-lite-podslice", "tpu-v6e": "tpu-v6e-slice"}
"""Hardware → label `cloud.google.com/gke-tpu-accelerator` of its nodes (GKE's documentation, "Plan TPUs in GKE")."""
_START_SECONDS = 600
"""Assumed start time of an expert process besides reading its weights: scheduling its pod, starting Python and JAX, compiling programs."""
_HOST_MEMORY, _DEVICE_MEMORY = 16, 4
"""GiB of host memory that a pod requests: for its process, and for each device to pass weights through while they are read."""
_NOT_A_WORKERS = ("--model", "--disaggregation-mode", "--api-server-count")
"""Options that Dynamo's template sets itself, or that Dynamo's frontend replaces."""
_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")
_LONGEST_NAME = 40
"""Maximum characters of a deployment's name: a label has 63, and names of pods and services append up to 23."""


def fill(template: str, **values: Any) -> str:
    """Fill a template of `deploy/templates`.

    A value is a number or a plain word, or goes through the filter `json` (any value, on one line) or `comment` (any text).

    Raises:
        UserError: a value is more than one word of the YAML.
    """
    loader = jinja2.FunctionLoader(lambda name: (_deploy() / "templates" / name).read_text(encoding="utf-8"))
    how = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(loader=loader, finalize=_checked, **how)
    environment.filters["json"] = lambda value: Markup(json.dumps(value))
    environment.filters["comment"] = lambda text: Markup(comment(text))
    return environment.get_template(template).render(values)


def _checked(value: Any) -> Any:
    if isinstance(value, int | Markup) or (_PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS):
        return value
    raise UserError(f"{value!r} cannot stand in a manifest; expected a word of letters, digits and any of _ . / -")


def _deploy() -> Any:
    """Return `deploy` from the wheel, or else from the source tree."""
    package = importlib.resources.files("dsjax")
    carried = package / "deploy"
    return carried if carried.is_dir() else package / ".." / "deploy"


def overlay(model: str, question: Question, candidate: Candidate, base: str, command: str) -> dict[str, str]:
    """Return name → text of the files of the winner's overlay, without the base. base: its path from the overlay. command: the
    command that planned the winner, for the first line.

    Raises:
        UserError: `dsjax serve` cannot run it, because prefill and decode are disaggregated and not on one host.
    """
    planned = recipe(model, question, candidate)
    cluster = question.cluster
    experts = [service for service in planned["services"] if service["role"] == "experts"]
    refuse("folder", many=len(planned["services"]) > 1 and planned["one_process"] is None, experts=experts)
    service = planned["one_process"] or planned["services"][0]
    pods = _pods(cluster, service)
    start = service["cold_start_s"]
    engines = service["instances"]
    hosts, devices, options = pods["hosts"], pods["devices"], service["options"]
    notes = [f"Note: {note}" for note in planned["notes"]]
    images = ["dsjax"]
    files = {}
    if pods["domain"]:
        files[DOMAIN_FILE] = fill(DOMAIN_FILE, name="dsjax", nodes=engines * hosts)
    if experts:
        images.append("dsjax-experts")
        options = options | _where_experts_are(experts)
        files[EXPERTS_FILE] = _expert_pods(cluster, experts)
        notes.insert(
            0,
            f"Beside each engine, which has attention: {len(experts)} process{'es' * (len(experts) > 1)} with experts ({EXPERTS_FILE}) of "
            f"{experts[0]['devices_each']} devices each.",
        )
    for key, value in _label_of(cluster).items() if cluster.hardware.key not in _TPU else ():
        notes.append(f"Nodes with {cluster.hardware.name} must say so: kubectl label node NAME {key}={value}")
    files["kustomization.yaml"] = fill(
        "overlay.yaml",
        command=command,
        about=f"{cluster.description}: {engines} engine{'s' * (engines > 1)} of {hosts} host{'s' * (hosts > 1)} with {devices} devices "
        f"each; weights are read in about {start['value']:,.0f} s [{start['low']:,.0f} … {start['high']:,.0f}].",
        notes=notes,
        resources=[base, *files],
        images=[{"name": name, "newName": "dsjax", "newTag": cluster.hardware.platform} for name in images],
        replicas=engines,
        args=_serve(options, {"--shutdown-timeout": "600"}),
        pod=pods,
        experts=bool(experts),
        node_selector=_node_selector(cluster, service["devices_each"]),
        model=REPOSITORIES.get(model, model),
        volume=volume(candidate),
    )
    return files


def write_overlay(folder: Path, model: str, question: Question, candidate: Candidate, command: str) -> None:
    """Write an overlay, and unless the folder is one of the project's own `deploy/overlays`, also the base and `recipe.json`."""
    beside_base = folder.resolve().parent.name == "overlays" and (folder.resolve().parents[1] / "base").is_dir()
    files = overlay(model, question, candidate, "../../base" if beside_base else "base", command)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (DOMAIN_FILE, EXPERTS_FILE):
        (folder / name).unlink(missing_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if not beside_base:
        write_json_recipe(folder / "recipe.json", model, question, candidate)
        with importlib.resources.as_file(_deploy() / "base") as base:
            shutil.copytree(base, folder / "base", dirs_exist_ok=True)


def _where_experts_are(experts: list[dict[str, Any]]) -> dict[str, str]:
    """Return options of the attention process: the addresses of its experts, and how long a step waits for one to come back."""
    wait = math.ceil(max(expert["cold_start_s"]["high"] for expert in experts)) + _START_SECONDS
    waits = {"--start-timeout": str(wait), "--step-timeout": str(wait + _START_SECONDS)}
    return {"--afd-address": _addresses("$(AFD_GROUP)", len(experts)), **waits}


def _addresses(group: int | str, processes: int) -> str:
    """Return the addresses of a group's StatefulSet pods, in rank order; a restarted pod keeps its name."""
    return ",".join(f"dsjax-experts-{group}-{rank}.dsjax-experts:7000" for rank in range(processes))


def _expert_pods(cluster: Cluster, experts: list[dict[str, Any]]) -> str:
    """Return the manifest of all instances' expert processes: one StatefulSet per instance, which that instance's group calls."""
    one = experts[0]
    processes = len(experts)
    options = {flag: value for flag, value in one["options"].items() if flag != "--afd-server-rank"}
    rank = {"--afd-server-rank": "$(AFD_RANK)"} if processes > 1 else {}
    groups = [options | {"--afd-address": _addresses(group, processes)} | rank for group in range(one["instances"])]
    return fill(
        EXPERTS_FILE,
        instances=one["instances"],
        processes=processes,
        args=[_serve(given) for given in groups],
        resources=_pod_resources(cluster.hardware.platform, one["devices_each"]),
        node_selector=_node_selector(cluster, one["devices_each"]),
    )


def _serve(options: Mapping[str, str], server: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return the arguments of `dsjax serve`; the model comes from the ConfigMap."""
    probed = {"--host": "0.0.0.0", "--port": "8000"}
    return ["serve", *_words({**probed, **server, "--log-json": "", **options, "--model": "$(MODEL)"})]


def _words(options: Mapping[str, str]) -> list[str]:
    """Return options as words; one without a value is a flag."""
    return [f"{flag}={value}" if value else flag for flag, value in options.items()]


def _pods(cluster: Cluster, service: Mapping[str, Any]) -> dict[str, Any]:
    """Return `pods_of` an engine, whose devices are divided equally among its hosts."""
    hosts = processes_of(cluster, service["devices_each"])
    is_beyond = hosts > 1 and hosts * cluster.devices_per_host > cluster.domain
    rdma = is_beyond and cluster.hardware.platform == "cuda" and cluster.network in ("InfiniBand", "RoCE")
    domain = needs_compute_domain(cluster.hardware, hosts)
    return pods_of(cluster.hardware.platform, hosts, service["devices_each"] // hosts, rdma, domain)


def pods_of(platform: str, hosts: int, devices: int, rdma: bool, domain: bool) -> dict[str, Any]:
    """Return an engine's pods as the templates take them. devices: of one host. rdma: GPUs beyond NVLink's reach, which need network cards.
    domain: hosts that share memory over NVLink, for which NVIDIA's driver needs a ComputeDomain."""
    resources = _pod_resources(platform, devices, rdma, domain)
    return {"hosts": hosts, "devices": devices, "resources": resources, "rdma": rdma, "domain": domain}


def _pod_resources(platform: str, devices: int, rdma: bool = False, domain: bool = False) -> dict[str, Any]:
    """Return a pod's requests: devices, host memory and cores; network cards, as a device plugin offers them; a ComputeDomain's channel."""
    kind = "google.com/tpu" if platform == "tpu" else "nvidia.com/gpu"
    limits = {kind: str(devices)} | ({"rdma/ib": "1"} if rdma else {})
    host = {"cpu": str(4 + 2 * devices), "memory": f"{_HOST_MEMORY + devices * _DEVICE_MEMORY}Gi"}
    return {"requests": host | limits, "limits": limits} | (
        {"claims": [{"name": "compute-domain-channel"}]} if domain else {}
    )


def needs_compute_domain(hardware: Hardware, hosts: int) -> bool:
    """Return whether an engine's pods share memory over NVLink between hosts."""
    return hosts > 1 and hardware.links_hosts


def _node_selector(cluster: Cluster, devices: int) -> dict[str, str]:
    """Return the node selector. GKE places a TPU slice by chip and topology; GPU nodes are selected by their resources, or by a label."""
    chip = _TPU.get(cluster.hardware.key)
    if chip is None:
        return _label_of(cluster)
    wide = 2 ** math.ceil(math.log2(devices) / 2)
    short, long = sorted((wide, devices // wide))
    return {"cloud.google.com/gke-tpu-accelerator": chip, "cloud.google.com/gke-tpu-topology": f"{short}x{long}"}


def _label_of(cluster: Cluster) -> dict[str, str]:
    """Return the label that separates decode nodes from prefill nodes if a cluster has two kinds of GPUs."""
    has_two_kinds = cluster.prefill is not None and cluster.prefill.hardware.key != cluster.hardware.key
    return {"dsjax-device": cluster.hardware.key} if has_two_kinds else {}


def checkpoint_bytes(candidate: Candidate) -> float:
    """Return the bytes of the whole checkpoint, as a mesh of one device holds it."""
    instance = candidate.decode
    whole = parse_layout("dp=1", 0, instance.config)
    return sum(weight_bytes(instance.config, whole, files_precision(instance), mtp=True).values())


def volume(candidate: Candidate) -> str:
    """Return the size of the volume in Kubernetes notation, rounded up to tens of GiB."""
    return f"{math.ceil(checkpoint_bytes(candidate) * ROOM / (1 << 30) / 10) * 10}Gi"


def planned_graph(name: str, model: str, question: Question, candidate: Candidate, command: str) -> str:
    """Return the winner of a plan as a manifest for Dynamo's operator. command: the command that planned it, for the first line.

    Raises:
        UserError: the operator cannot place it (no NVIDIA GPUs, or AFD expert processes, which are not workers), or its pods cannot
            download the model.
    """
    repository = REPOSITORIES.get(model, model)
    cluster = question.cluster
    work = question.workload
    local = not _REPOSITORY.fullmatch(repository) or Path(model).exists()
    planned = recipe(model, question, candidate)
    refuse("graph", local=local, model=model, roles=[one["role"] for one in planned["services"]], cluster=cluster)
    sides = [
        {
            "kind": service["role"] if service["role"] in ("prefill", "decode") else "worker",
            "options": {flag: value for flag, value in service["options"].items() if flag not in _NOT_A_WORKERS},
            "workers": service["instances"],
            **_pods((service["role"] == "prefill" and cluster.prefill) or cluster, service),
        }
        for service in planned["services"]
    ]
    about = [command, cluster.description, *(f"Note: {note}" for note in planned["notes"])]
    return graph(name, about, repository, sides, volume(candidate), round(work.input.mean), round(work.output.mean))


def graph(name: str, about: list[str], model: str, sides: list[dict[str, Any]], volume: str, *lengths: int) -> str:
    """Return the volume, download, DynamoGraphDeployment and benchmark, for `kubectl apply`.

    Args:
        name: of the deployment; its frontend's service is `NAME-frontend`, port 8000.
        about: comments at the top.
        model: the Hugging Face repository.
        volume: size of the model's volume, such as `800Gi`.
        sides: `pods_of` each, with `kind` (Dynamo's types: `worker`, which does both, or `prefill` and `decode`), `workers` (engines)
            and the `options` of `dsjax dynamo`.
        lengths: prompt and output tokens of the benchmark's requests.
    """
    folder = f"/models/{model.rpartition('/')[2].lower()}"
    for side in sides:
        options = {"--model": folder, "--served-model-name": model, "--shutdown-timeout": "600", **side["options"]}
        if side["kind"] != "worker":  # the other side's workers are on other hosts
            options |= {"--disaggregation-mode": side["kind"], "--transfer-host": "$(POD_IP)"}
        side["args"] = _words(options)
    devices = sum(side["workers"] * side["hosts"] * side["devices"] for side in sides)
    nodes = sum(side["workers"] * side["hosts"] for side in sides if side["domain"])
    values = {"name": name, "about": about, "model": model, "folder": folder, "volume": volume, "sides": sides}
    values |= {"devices": devices, "nodes": nodes, "input_tokens": lengths[0], "output_tokens": lengths[1]}
    return fill("dynamo.yaml", **values)


def deployment_name(file: Path) -> str:
    """Return a file's name as a Kubernetes service name: ASCII letters, digits and dashes after a letter, at most `_LONGEST_NAME`."""
    name = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")
    if not name[:1].isalpha() or name in _YAML_WORDS:
        name = f"dsjax-{name}" if name else "dsjax"
    return name[:_LONGEST_NAME].rstrip("-")


def write_graph(file: Path, model: str, question: Question, candidate: Candidate, command: str) -> None:
    """Write a plan's winner to `FILE.yaml`; the file's name becomes the deployment's."""
    file.write_text(planned_graph(deployment_name(file), model, question, candidate, command), encoding="utf-8")

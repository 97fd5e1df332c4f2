"""A planned service as a kustomize overlay of `deploy/base`: how many groups of how many hosts, their command, devices and memory."""

from __future__ import annotations

import importlib.resources
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsjax.errors import UserError
from dsjax.hardware import Hardware
from dsjax.plan.candidate import Candidate
from dsjax.plan.cluster import Cluster
from dsjax.plan.cold_start import files_precision
from dsjax.plan.expert_pods import EXPERTS_FILE, EXPERTS_IMAGE, GROUP, GROUP_VARIABLE, ExpertPods, addresses
from dsjax.plan.launch import comment
from dsjax.plan.memory import weight_bytes
from dsjax.plan.moves import processes_of
from dsjax.plan.question import Question
from dsjax.plan.recipe import REPOSITORIES, recipe

_TPU = {"tpu-v5e": "tpu-v5-lite-podslice", "tpu-v6e": "tpu-v6e-slice"}
"""Hardware → label `cloud.google.com/gke-tpu-accelerator` of its nodes (GKE's documentation, "Plan TPUs in GKE")."""
_PROBED = {"--host": "0.0.0.0", "--port": "8000"}
_SERVER = _PROBED | {"--shutdown-timeout": "600"}
_START_SECONDS = 600
"""Assumed for a process with experts, beside reading its weights: its pod is placed, Python and JAX start, programs are compiled."""
_RDMA = ("InfiniBand", "RoCE")
_LOCKS_MEMORY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
}
"""A container's securityContext where network cards read and write its memory, which must stay where it is."""
DOMAIN_FILE, DOMAIN_CLAIM = "computedomain.yaml", "compute-domain-channel"
_HOST_MEMORY = 16 << 30
_DEVICE_MEMORY = 4 << 30
ROOM = 1.25
"""The volume's size ÷ that of a model's files: compiled programs lie beside them."""


def overlay(model: str, question: Question, candidate: Candidate, base: str, command: str) -> str:
    """`kustomization.yaml` of the winner. base: its path from there; command: what it was planned with, for the first line.

    Raises:
        UserError: `dsjax serve` cannot run it: prefill and decode apart, and not on one host.
    """
    made = recipe(model, question, candidate)
    apart = _experts(made)
    if len(made["services"]) > 1 and made["one_process"] is None and not apart:
        raise UserError(
            "--recipe FOLDER writes what dsjax serve can run, and the winner has prefill and decode apart, which one process on a host "
            "cannot have as they were priced; give FILE.yaml for NVIDIA Dynamo, or add --mode aggregated"
        )
    service, cluster = _service_of(made), question.cluster
    hosts = _hosts(question, made)
    devices = math.ceil(service["devices_each"] / hosts)
    name = repository(model)
    options = _attention_options(service["options"], apart) if apart else service["options"]
    container = "/spec/leaderWorkerTemplate/workerTemplate/spec/containers/0"
    group = [
        {"op": "replace", "path": "/spec/replicas", "value": service["instances"]},
        {"op": "replace", "path": "/spec/leaderWorkerTemplate/size", "value": hosts},
        {"op": "replace", "path": f"{container}/args", "value": _arguments(_SERVER, options)},
        {
            "op": "replace",
            "path": f"{container}/resources",
            "value": pod_resources(
                cluster.hardware.platform,
                devices,
                uses_rdma(cluster, hosts),
                needs_compute_domain(cluster.hardware, hosts),
            ),
        },
    ]
    pod = "/spec/leaderWorkerTemplate/workerTemplate/spec"
    domain = needs_compute_domain(cluster.hardware, hosts)
    if uses_rdma(cluster, hosts):
        group.append({"op": "replace", "path": f"{container}/securityContext", "value": _LOCKS_MEMORY})
    if domain:
        group.append({"op": "add", "path": f"{pod}/resourceClaims", "value": [compute_domain_claim("dsjax")]})
    if apart:
        group.append({"op": "add", "path": f"{container}/env/-", "value": GROUP})
    selector = _node_selector(cluster, service["devices_each"]) or _own_hosts(cluster, cluster)
    if selector:
        group.append({"op": "add", "path": f"{pod}/nodeSelector", "value": selector})
    volume = gib(checkpoint_bytes(candidate) * ROOM)
    start = service["cold_start_s"]
    resources = [base, *files_beside(question, made)]
    images = [("dsjax", cluster), *([(EXPERTS_IMAGE, cluster.experts or cluster)] if apart else [])]
    lines = [
        comment(command),
        f"{comment(cluster.description)}: {service['instances']} engine{'s' * (service['instances'] > 1)} of {hosts} "
        f"host{'s' * (hosts > 1)} with {devices} devices each; weights are read in about {start['value']:,.0f} s "
        f"[{start['low']:,.0f} … {start['high']:,.0f}].",
        *_about_experts(apart, cluster),
        *(comment(f"Note: {note}") for note in made["notes"]),
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        f"resources: [{', '.join(resources)}]",
        f"images: [{', '.join(map(_image, *zip(*images, strict=True)))}]  # newName: with your registry before it",
        "patches:",
        *_patch("LeaderWorkerSet", "dsjax", group),
        *_patch("ConfigMap", "dsjax-model", [{"op": "replace", "path": "/data/MODEL", "value": name}]),
        *_patch(
            "PersistentVolumeClaim",
            "dsjax-models",
            [{"op": "replace", "path": "/spec/resources/requests/storage", "value": volume}],
        ),
    ]
    return "\n".join(lines) + "\n"


def files_beside(question: Question, made: Mapping[str, Any]) -> list[str]:
    """Names of the files that `kustomization.yaml` takes beside the base. made: the recipe."""
    domain = needs_compute_domain(question.cluster.hardware, _hosts(question, made))
    return [*([DOMAIN_FILE] if domain else []), *([EXPERTS_FILE] if _experts(made) else [])]


def write_overlay(folder: Path, model: str, question: Question, candidate: Candidate, command: str) -> None:
    """An overlay, and beside it the base, unless the folder is one of the project's own `deploy/overlays`; and `recipe.json`."""
    beside_base = folder.resolve().parent.name == "overlays" and (folder.resolve().parents[1] / "base").is_dir()
    text = overlay(model, question, candidate, "../../base" if beside_base else "base", command)
    made = recipe(model, question, candidate)
    wanted = files_beside(question, made)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
    for name in (DOMAIN_FILE, EXPERTS_FILE):
        (folder / name).unlink(missing_ok=True)
    if DOMAIN_FILE in wanted:
        count = _service_of(made)["instances"] * _hosts(question, made)
        (folder / DOMAIN_FILE).write_text(compute_domain("dsjax", count), encoding="utf-8")
    if EXPERTS_FILE in wanted:
        (folder / EXPERTS_FILE).write_text(expert_pods(question, made).text(), encoding="utf-8")
    if beside_base:
        return
    body = json.dumps(made, indent=2, allow_nan=False)
    (folder / "recipe.json").write_text(body + "\n", encoding="utf-8")
    with importlib.resources.as_file(_base()) as base:
        shutil.copytree(base, folder / "base", dirs_exist_ok=True)


def _service_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """The service that the LeaderWorkerSet runs."""
    return made["one_process"] or made["services"][0]


def _hosts(question: Question, made: Mapping[str, Any]) -> int:
    """Hosts of a group of the service's processes, which have equal parts of its devices."""
    return processes_of(question.cluster, _service_of(made)["devices_each"])


def _experts(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The services of processes with experts of a recipe's instance."""
    return [service for service in made["services"] if service["role"] == "experts"]


def _attention_options(options: Mapping[str, str], apart: list[dict[str, Any]]) -> dict[str, str]:
    """Options of the process with attention: where its experts are, and how long a step waits for one that comes back."""
    wait = math.ceil(max(one["cold_start_s"]["high"] for one in apart)) + _START_SECONDS
    address = addresses(f"$({GROUP_VARIABLE})", len(apart))
    waits = {"--start-timeout": str(wait), "--step-timeout": str(wait + _START_SECONDS)}
    return {**options, "--afd-address": address, **waits}


def _about_experts(apart: list[dict[str, Any]], cluster: Cluster) -> list[str]:
    """Say in comments what is beside the engines, and what nodes of two kinds need."""
    lines = [
        f"# Beside each engine, which has attention: {len(apart)} process{'es' * (len(apart) > 1)} with experts ({EXPERTS_FILE}) of "
        f"{one['devices_each']} devices each."
        for one in apart[:1]
    ]
    for side in (cluster, cluster.experts) if apart else (cluster,):
        label = {} if side is None or side.hardware.key in _TPU else _own_hosts(side, cluster)
        lines += [
            f"# Nodes with {side.hardware.name} must say so: kubectl label node NAME {k}={v}" for k, v in label.items()
        ]
    return lines


def expert_pods(question: Question, made: Mapping[str, Any]) -> ExpertPods:
    """The processes with experts of a recipe, all instances'."""
    services, cluster = _experts(made), question.cluster
    own, one = cluster.experts or cluster, services[0]
    options = {k: v for k, v in one["options"].items() if k not in ("--afd-address", "--afd-server-rank")}
    return ExpertPods(
        one["instances"],
        len(services),
        _arguments(_PROBED, options),
        pod_resources(own.hardware.platform, one["devices_each"]),
        _node_selector(own, one["devices_each"]) or _own_hosts(own, cluster),
    )


def _own_hosts(side: Cluster, cluster: Cluster) -> dict[str, str]:
    """The label that tells nodes of one kind from those of the other, where a cluster has two kinds of GPUs."""
    both = {one.hardware.key for one in (cluster, cluster.experts, cluster.prefill) if one is not None}
    return {"dsjax-device": side.hardware.key} if len(both) > 1 else {}


def _image(name: str, cluster: Cluster) -> str:
    return f"{{name: {name}, newName: dsjax, newTag: {'tpu' if cluster.hardware.platform == 'tpu' else 'cuda'}}}"


def _base() -> Any:
    """`deploy/base`: in the source tree, or as the wheel carries it."""
    package = importlib.resources.files("dsjax")
    carried = package / "deploy_base"
    return carried if carried.is_dir() else package / ".." / "deploy" / "base"


def _arguments(server: Mapping[str, str], options: Mapping[str, str]) -> list[str]:
    """`dsjax serve`'s, one a line; the model is the ConfigMap's."""
    return ["serve", *arguments_of({**server, "--log-json": "", **options, "--model": "$(MODEL)"})]


def arguments_of(options: Mapping[str, str]) -> list[str]:
    """Options as words; one without a value is a flag."""
    return [f"{flag}={value}" if value else flag for flag, value in options.items()]


def repository(model: str) -> str:
    """Where a model's weights are: a bundled configuration has none."""
    return REPOSITORIES.get(model, model)


def pod_resources(platform: str, devices: int, rdma: bool = False, domain: bool = False) -> dict[str, Any]:
    """Requests of one pod: its devices; host memory for the process and what passes through it while weights are read.

    rdma: the network cards too, as a device plugin offers them. domain: a channel of the pods' ComputeDomain.
    """
    kind = "google.com/tpu" if platform == "tpu" else "nvidia.com/gpu"
    memory = f"{(_HOST_MEMORY + devices * _DEVICE_MEMORY) >> 30}Gi"
    given = {kind: str(devices)} | ({"rdma/ib": "1"} if rdma else {})
    made: dict[str, Any] = {"requests": {"cpu": str(4 + 2 * devices), "memory": memory, **given}, "limits": given}
    return made | ({"claims": [{"name": DOMAIN_CLAIM}]} if domain else {})


def uses_rdma(cluster: Cluster, hosts: int) -> bool:
    """Say whether an engine's pods need the network cards themselves: GPUs beyond NVLink's reach, over InfiniBand or RoCE."""
    is_beyond = hosts > 1 and hosts * cluster.devices_per_host > cluster.domain
    return is_beyond and cluster.hardware.platform == "cuda" and cluster.network in _RDMA


def needs_compute_domain(hardware: Hardware, hosts: int) -> bool:
    """Say whether an engine's pods share memory over NVLink between hosts, for which NVIDIA's driver wants a ComputeDomain."""
    return hosts > 1 and hardware.links_hosts


def compute_domain(name: str, nodes: int) -> str:
    """Write the ComputeDomain of a service's pods on so many nodes; the driver makes the template of their claims."""
    return f"""\
# NVLink between hosts: NVIDIA's DRA driver lets these pods, and no others, export and import each other's memory.
apiVersion: resource.nvidia.com/v1beta1
kind: ComputeDomain
metadata:
  name: {name}
spec:
  numNodes: {nodes}
  channel:
    resourceClaimTemplate:
      name: {name}-channel
"""


def compute_domain_claim(name: str) -> dict[str, str]:
    """Make a pod's claim of a channel of its ComputeDomain."""
    return {"name": DOMAIN_CLAIM, "resourceClaimTemplateName": f"{name}-channel"}


def _node_selector(cluster: Cluster, devices: int) -> dict[str, str]:
    """GKE places a TPU slice by its chip and topology; GPU nodes are told apart by what they offer."""
    chip = _TPU.get(cluster.hardware.key)
    if chip is None:
        return {}
    wide = 2 ** math.ceil(math.log2(devices) / 2)
    sides = sorted((wide, devices // wide))
    return {
        "cloud.google.com/gke-tpu-accelerator": chip,
        "cloud.google.com/gke-tpu-topology": f"{sides[0]}x{sides[1]}",
    }


def checkpoint_bytes(candidate: Candidate) -> float:
    """Bytes of the whole model as it is kept: one device of a mesh of one has all of it."""
    from dsjax.plan.layout import parse_layout

    instance = candidate.decode
    whole = parse_layout("dp=1", 0, instance.config)
    return sum(weight_bytes(instance.config, whole, files_precision(instance), mtp=True).values())


def gib(size: float) -> str:
    """Bytes as Kubernetes writes them, in tens of GiB, rounded up."""
    return f"{math.ceil(size / (1 << 30) / 10) * 10}Gi"


def _patch(kind: str, name: str, operations: list[dict[str, Any]]) -> list[str]:
    """A patch as kustomize takes it; each operation a line of JSON, which is YAML too, long lists one value a line."""
    lines = [f"  - target: {{kind: {kind}, name: {name}}}", "    patch: |"]
    for operation in operations:
        value = operation["value"]
        if isinstance(value, list):
            lines += [f"      - op: {operation['op']}", f"        path: {operation['path']}", "        value:"]
            lines += [f"          - {json.dumps(entry)}" for entry in value]
        else:
            lines.append(f"      - {json.dumps(operation)}")
    return lines

"""`deploy/`: manifests that the published schemas accept, with commands that `dsjax serve` takes and devices that the clusters have."""

import functools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from custom_resources import COMPUTE_DOMAIN, DYNAMO_GRAPH_DEPLOYMENT, LEADER_WORKER_SET, POD_MONITOR
from lock_requirements import FILES, lock_file, mistakes
from typer.testing import CliRunner

from dsjax.cli import app
from dsjax.hosts.options import COORDINATOR_PORT
from dsjax.plan.cluster import bundled_clusters, load_cluster
from dsjax.serve.guards import OPEN_PATHS
from sharding import MeshSpec

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(folder.name for folder in (DEPLOY / "overlays").iterdir())
KUBERNETES = ("1.30", "1.37")
CUSTOM = {
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "PodMonitor": POD_MONITOR,
    "ComputeDomain": COMPUTE_DOMAIN,
    "DynamoGraphDeployment": DYNAMO_GRAPH_DEPLOYMENT,
}

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""`yaml.safe_load`'s, in C where it is."""

# Read anew for every document otherwise.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


@functools.cache
def read(path: Path) -> list[dict]:
    """A file's documents. Nobody may change them: reading YAML takes long, and every overlay has the base's files."""
    return [document for document in yaml.load_all(path.read_text(), LOADER) if document]


def render(folder: Path) -> list[dict]:
    """What `kubectl kustomize` makes of a folder, of the features that `deploy/` uses: resources, images' tags, JSON patches."""
    custom = yaml.load((folder / "kustomization.yaml").read_text(), LOADER)
    assert custom.keys() <= {"apiVersion", "kind", "resources", "images", "patches"}
    found = []
    for name in custom["resources"]:
        path = folder / name
        found += render(path) if path.is_dir() else read(path)
    found = json.loads(json.dumps(found))  # a copy, in which nothing is shared as anchors have it
    for patch in custom.get("patches", ()):
        target = patch["target"]
        (one,) = [d for d in found if (d["kind"], d["metadata"]["name"]) == (target["kind"], target["name"])]
        for operation in yaml.load(patch["patch"], LOADER):
            *way, last = [int(k) if k.isdigit() else k for k in operation["path"].split("/")[1:]]
            place = one
            for key in way:
                place = place[key]
            if last == "-":
                assert operation["op"] == "add"
                place.append(operation["value"])
                continue
            assert (last in place) == (operation["op"] == "replace")
            place[last] = operation["value"]
    for image in custom.get("images", ()):
        name, new = f'"image": "{image["name"]}"', f'"image": "{image["newName"]}:{image["newTag"]}"'
        found = json.loads(json.dumps(found).replace(name, new))
    return found


def by_kind(folder: Path) -> dict[str, dict]:
    return {document["kind"]: document for document in render(folder)}


def template_of(group: dict) -> dict:
    return group["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def engine_of(found: dict[str, dict]) -> tuple[dict, int, dict, dict]:
    """Return a LeaderWorkerSet's spec, the size of a group, and the spec of its pods and of their only container."""
    spec, pod = found["LeaderWorkerSet"]["spec"], template_of(found["LeaderWorkerSet"])["spec"]
    (container,) = pod["containers"]
    return spec, spec["leaderWorkerTemplate"]["size"], pod, container


def options_of(container: dict) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in container["args"][1:] if "=" in word)


def plan(path: Path, words: str) -> None:
    result = CliRunner().invoke(app, ["plan", "recipe", str(path), *words.split()])
    assert result.exit_code == 0, result.output


def versions_for(document: dict) -> tuple[str, ...]:
    """Versions of Kubernetes that a document is for: a claim names its template as from 1.31 on, which ComputeDomains need."""
    return KUBERNETES[1:] if "resourceClaimTemplateName" in json.dumps(document) else KUBERNETES


@functools.cache
def validator_of(kind: str) -> jsonschema.protocols.Validator:
    made = jsonschema.validators.validator_for(CUSTOM[kind])
    made.check_schema(CUSTOM[kind])
    return made(CUSTOM[kind])


def check(document: dict) -> None:
    """Hold a document against the published schema of its kind, and its pods against Kubernetes' own."""
    custom, spec = document["kind"] in CUSTOM, document.get("spec", {})
    templates = [one for name, one in spec.get("leaderWorkerTemplate", {}).items() if name.endswith("Template")]
    templates += [component["podTemplate"] for component in spec.get("components", ())]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "made"}, **one} for one in templates]
    if custom:
        validator_of(document["kind"]).validate(document)
    for version in versions_for(document):
        for one in pods if custom else [document]:
            kubernetes_validate.validate(one, version, strict=True)


EACH_FOLDER = pytest.mark.parametrize(
    "folder", [DEPLOY / "base", *(DEPLOY / "overlays" / name for name in OVERLAYS)], ids=lambda folder: folder.name
)


@EACH_FOLDER
def test_every_manifest_is_what_the_published_schemas_say_with_options_that_serve_has(folder):
    documents = render(folder)
    kinds = ["ConfigMap", "Job", "LeaderWorkerSet", "NetworkPolicy", "PersistentVolumeClaim", "PodMonitor", "Service"]
    domain = ["ComputeDomain"] if folder.name.startswith("gb") else []
    assert sorted(d["kind"] for d in documents) == [*domain, *kinds]
    for document in documents:
        check(document)
    _, _, _, container = engine_of(by_kind(folder))
    command, *words = container["args"]
    assert command == "serve"
    flags = {flag for option in serve_command().params for flag in option.opts}
    assert {word.partition("=")[0] for word in words} <= flags


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("name", ["base", "overlays/hosts-2", "overlays/tpu-v6e-32", "overlays/gb200-nvl72-36"])
def test_kustomize_renders_the_same(name):
    words = ["kubectl", "kustomize", DEPLOY / name]
    made = subprocess.run(words, capture_output=True, text=True, check=True, timeout=240)
    theirs = {d["kind"]: d for d in yaml.load_all(made.stdout, LOADER)}
    assert theirs == by_kind(DEPLOY / name)


def test_there_is_an_overlay_for_each_cluster_and_for_1_2_and_4_hosts():
    alike = {name for name in bundled_clusters() if load_cluster(name).prefill is None}
    assert set(OVERLAYS) == {*alike, "hosts-1", "hosts-2", "hosts-4"}
    for hosts in (1, 2, 4):
        group, size, *_ = engine_of(by_kind(DEPLOY / "overlays" / f"hosts-{hosts}"))
        assert (group["replicas"], size) == (1, hosts)


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_takes_the_devices_that_the_cluster_has_and_several_hosts_get_cards_or_a_compute_domain(name):
    folder = DEPLOY / "overlays" / name
    found = by_kind(folder)
    spec, hosts, pod, container = engine_of(found)
    resources = container["resources"]
    (devices,) = [int(n) for kind, n in resources["limits"].items() if kind in ("nvidia.com/gpu", "google.com/tpu")]
    assert MeshSpec.parse(options_of(container)["mesh"]).num_devices == hosts * devices
    cluster = load_cluster(re.search(r"--cluster (\S+)", (folder / "kustomization.yaml").read_text())[1])
    assert spec["replicas"] * hosts <= cluster.hosts
    assert devices <= cluster.devices_per_host
    assert container["image"].endswith(":tpu" if cluster.hardware.platform == "tpu" else ":cuda")
    if topology := pod.get("nodeSelector", {}).get("cloud.google.com/gke-tpu-topology"):
        assert math.prod(map(int, topology.split("x"))) == hosts * devices
    assert "/" in found["ConfigMap"]["data"]["MODEL"], "a repository with weights, not a bundled configuration"
    is_grace = name.startswith("gb")
    assert ("rdma/ib" in resources["limits"]) == (hosts > 1 and not is_grace and "tpu" not in name)
    assert ("claims" in resources) == ("ComputeDomain" in found) == (hosts > 1 and is_grace)
    if is_grace:
        domain = found["ComputeDomain"]["spec"]
        assert domain["numNodes"] == spec["replicas"] * hosts
        (claim,) = pod["resourceClaims"]
        assert resources["claims"] == [{"name": claim["name"]}]
        assert claim["resourceClaimTemplateName"] == domain["channel"]["resourceClaimTemplate"]["name"]


@functools.cache
def serve_command():
    return typer.main.get_command(app).get_command(None, "serve")


def test_probes_drain_and_ports_agree_with_the_server():
    found = by_kind(DEPLOY / "base")
    labels = template_of(found["LeaderWorkerSet"])["metadata"]["labels"]
    _, _, pod, container = engine_of(found)
    check_probes(container)
    options = options_of(container)
    drain, waits = int(options["shutdown-timeout"]), int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert waits + drain < pod["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": int(options["port"]), "coordinator": COORDINATOR_PORT}
    selector = found["Service"]["spec"]["selector"]
    assert selector.items() <= {**labels, "leaderworkerset.sigs.k8s.io/worker-index": "0"}.items()
    assert found["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


@EACH_FOLDER
def test_every_container_is_restricted_keys_open_its_ports_and_only_the_engine_s_pods_reach_any_but_http(folder):
    found = by_kind(folder)
    _, _, engine, container = engine_of(found)
    for pod in (engine, found["Job"]["spec"]["template"]["spec"]):
        check_restricted(pod, "rdma/ib" in container["resources"].get("limits", {}))
    assert "--host=0.0.0.0" in container["args"]
    keys = {
        f"DSJAX_{name}_KEY": secret(f"{name.replace('_', '-').lower()}-key") for name in ("API", "ADMIN_API", "CLUSTER")
    }
    assert secrets_of(container) == keys, "none is optional: a pod without its secret does not start"
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": secret("api-key")}
    labels = template_of(found["LeaderWorkerSet"])["metadata"]["labels"]
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["policyTypes"] == ["Ingress"]
    everybody, own = policy["ingress"]
    assert everybody == {"ports": [{"port": "http", "protocol": "TCP"}]}
    assert own == {"from": [{"podSelector": {"matchLabels": labels}}]}


def check_restricted(pod: dict, locks_memory: bool = False) -> None:
    """Hold a pod against Kubernetes' restricted standard, and more: its root file system is read-only. locks_memory: for RDMA."""
    user = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["securityContext"].items() >= user.items()
    writable = {one["name"] for one in pod["volumes"] if "emptyDir" in one}
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        has_cards = container in pod["containers"] and "rdma/ib" in container.get("resources", {}).get("limits", {})
        capabilities = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if locks_memory and has_cards else {})
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities
        }  # fmt: skip
    for container in pod["containers"]:
        assert {one["mountPath"] for one in container["volumeMounts"] if one["name"] in writable} >= {"/tmp"}


def check_probes(container: dict) -> None:
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert set(probes.values()) <= OPEN_PATHS, "a probe has no key"


def secrets_of(container: dict) -> dict[str, dict]:
    return {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "secretKeyRef" in str(one)}


def secret(name: str) -> dict[str, str]:
    return {"name": "dsjax-secrets", "key": name}


def test_the_image_has_no_compiler_and_no_root():
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert all(re.match(r"\S+@(sha256:[0-9a-f]{64}|\$\{PYTHON_DIGEST\})\s", stage) for stage in stages)
    assert re.search(r"^ARG PYTHON_DIGEST$", text, re.MULTILINE), "it has no default that grows old"
    assert not re.search(r"apt|gcc|clang|build-essential|ziglang|native", re.sub(r"#.*", "", text))
    commands = [one for line in text.replace("\\\n", " ").splitlines() for one in line.split("&&")]
    installs = [one for one in commands if "pip install" in one]
    assert len(installs) == 3
    for line in installs:
        assert "--no-deps" in line
        assert ("--require-hashes" in line and "--only-binary :all:" in line) or "--no-index" in line
    assert re.findall(r"^USER (.*)", stages[-1], re.MULTILINE) == ["10001:10001"]
    copied = set(re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE))
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    locks = {"deploy/requirements-build.txt", "deploy/requirements-${VARIANT}.txt"}
    assert {name for names in copied for name in names.split()} - locks == allowed - {"deploy/requirements-*.txt"}


@pytest.mark.parametrize("name", FILES)
def test_every_locked_package_has_hashes_and_satisfies_the_project(name):
    assert list(mistakes(name, lock_file(name).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(("pattern", "by", "said"), [
    (r"^jax==\S+", "jax==0.11.2", r"jax\S* is locked at 0\.11\.2"),
    (r"^einops==(.*\n\s+--hash.*)+\n", "", "einops>=0.8 is not locked"),
    (r"^einops==.*", "einops>=0.8", "is not one version with hashes"),
    (r"\Z", "left==1.0\n", "is not one version with hashes"),
    (r"\Z", "--index-url https://example.org\n", "no locked package"),
    (r"\Z", f"einops==0.8.0 \\\\\n    --hash=sha256:{'0' * 64}\n", "locked twice"),
])  # fmt: skip
def test_a_lock_that_is_out_of_date_is_found(pattern, by, said):
    text = lock_file("cuda").read_text(encoding="utf-8")
    changed = re.sub(pattern, by, text, flags=re.MULTILINE)
    assert changed != text
    assert re.search(said, "; ".join(mistakes("cuda", changed)))


def test_a_plan_writes_an_overlay_with_all_that_it_needs(tmp_path):
    folder = tmp_path / "mine"
    plan(folder, "--cluster h20-32 --mesh dp=32 --max-concurrency 64")
    found = by_kind(folder)
    for document in found.values():
        check(document)
    spec, hosts, _, container = engine_of(found)
    assert (spec["replicas"], hosts) == (1, 4)
    (service,) = json.loads((folder / "recipe.json").read_text())["services"]
    options = {flag: value for flag, value in service["options"].items() if flag != "--model"}
    assert {f"{flag}={value}" if value else flag for flag, value in options.items()} <= {*container["args"]}
    assert found["ConfigMap"]["data"]["MODEL"] == "deepseek-ai/DeepSeek-V3"
    # 671 B parameters and the MTP module in FP8, and a quarter.
    assert found["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"] == "800Gi"

"""Attention and experts apart on Kubernetes: what `dsjax plan recipe FOLDER` writes of both sides."""

import functools
import json

import pytest
from test_deploy import check, check_probes, check_restricted, plan, render, secrets_of, serve_command, template_of

from dsjax.engine.afd.options import afd_addresses
from dsjax.engine.setup.args import EngineArgs
from dsjax.hosts import HostOptions

GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
RANK_LABEL = "apps.kubernetes.io/pod-index"
"""What their controllers write on each pod."""


def planned(folder, words):
    """The documents of a plan's folder by kind, in lists."""
    plan(folder, f"--cluster h200-32 --mode aggregated {words}")
    found: dict[str, list[dict]] = {}
    for document in render(folder):
        check(document)
        found.setdefault(document["kind"], []).append(document)
    return found


@pytest.fixture(scope="module")
def planned_for(tmp_path_factory):
    """A function that gives the documents of a plan with so many devices of each side, on hosts of eight."""

    @functools.cache
    def made(attention: int, experts: int):
        folder = tmp_path_factory.mktemp("plan") / "mine"
        return planned(folder, f"--attention-mesh dp={attention} --expert-mesh ep={experts}")

    return made


@pytest.fixture
def one_kind(planned_for):
    return planned_for(8, 16)


@pytest.fixture
def group(planned_for):
    return planned_for(16, 16)


def read(pod: dict, labels: dict[str, str]) -> tuple[EngineArgs, dict]:
    """What `dsjax serve` reads of a pod's command line, once Kubernetes has filled in what the pod's labels say."""
    (container,) = pod["containers"]
    given = {"MODEL": "deepseek-v3"}
    for one in container["env"]:
        path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if path:
            given[one["name"]] = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
    words = container["args"]
    for name, value in given.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert words[0] == "serve"
    assert not any("$(" in word or "EXPERTS" in word for word in words), "something is left open"
    context = serve_command().make_context("dsjax serve", words[1:])
    assert context.args == []
    own = {name: value for name, value in context.params.items() if name in EngineArgs.__dataclass_fields__}
    return EngineArgs(**own), context.params


def groups_of(found):
    """Read each instance's arguments: those that all attention processes have, and those of the expert processes, by host name."""
    (group,) = found["LeaderWorkerSet"]
    pod = template_of(group)["spec"]
    sets = {one["metadata"]["name"]: one["spec"] for one in found["StatefulSet"]}
    assert len(sets) == group["spec"]["replicas"]
    for number in range(group["spec"]["replicas"]):
        spec = sets[f"dsjax-experts-{number}"]
        names = [f"dsjax-experts-{number}-{rank}.{spec['serviceName']}" for rank in range(spec["replicas"])]
        pods = [read(spec["template"]["spec"], {RANK_LABEL: str(rank)})[0] for rank in range(spec["replicas"])]
        yield *read(pod, {GROUP_LABEL: str(number)}), dict(zip(names, pods, strict=True))


@pytest.mark.parametrize(("attention", "experts", "instances"), [(8, 16, 1), (16, 16, 1), (8, 8, 2)])
def test_each_attention_process_calls_the_pods_of_its_group_at_their_names_and_ranks(
    planned_for, attention, experts, instances
):
    groups = list(groups_of(planned_for(attention, experts)))
    assert len(groups) == instances
    for attention, _, experts in groups:
        assert attention.afd_role == "attention"
        assert afd_addresses(attention) == [f"{name}:7000" for name in experts]
        for rank, one in enumerate(experts.values()):
            assert (one.afd_role, one.afd_server_rank or 0) == ("expert", rank)
            assert one.afd_address == attention.afd_address
            for name in ("attention_mesh", "expert_mesh", "weights", "dispatch_wire", "eplb_config"):
                assert getattr(one, name) == getattr(attention, name)
    assert len({attention.afd_address for attention, *_ in groups}) == instances, "no two share experts"


def test_a_pod_has_the_devices_of_its_side_and_a_step_waits_longer_than_experts_take_to_come_back(one_kind):
    ((attention, server, experts),) = groups_of(one_kind)
    (group,), (experts_set,) = one_kind["LeaderWorkerSet"], one_kind["StatefulSet"]
    pods = [template_of(group)["spec"], experts_set["spec"]["template"]["spec"]]
    devices = [int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in pods]
    assert devices == [attention.num_devices, next(iter(experts.values())).num_devices] == [8, 8]
    assert 600 < attention.start_timeout < server["step_timeout"]


def test_pods_with_experts_are_fenced_restricted_have_their_keys_and_are_scraped_and_probed(one_kind):
    (pods,), (policy,), (monitor,) = one_kind["StatefulSet"], one_kind["NetworkPolicy"], one_kind["PodMonitor"]
    labels = pods["spec"]["template"]["metadata"]["labels"].items()
    assert pods["spec"]["selector"]["matchLabels"].items() <= labels
    services = {one["metadata"]["name"]: one["spec"] for one in one_kind["Service"]}
    headless = services[pods["spec"]["serviceName"]]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"], "who loads listens at a name already"
    assert headless["selector"].items() <= labels
    assert not services["dsjax"]["selector"].items() <= labels, "clients do not reach them"
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert policy["spec"]["ingress"][1]["from"][0]["podSelector"]["matchLabels"].items() <= labels
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels
    pod = pods["spec"]["template"]["spec"]
    check_restricted(pod)
    (container,) = pod["containers"]
    (attention,) = template_of(one_kind["LeaderWorkerSet"][0])["spec"]["containers"]
    assert secrets_of(container) == secrets_of(attention) != {}
    assert container["image"] == attention["image"]
    check_probes(container)


def test_both_sides_on_one_host_are_one_process(tmp_path):
    words = "--cluster h200-8 --mode aggregated --attention-mesh dp=2 --expert-mesh ep=6 --redundant-experts 2 --num-afd-stages 3 "
    plan(tmp_path / "mine", words + "--max-concurrency 1024 --input 512 --output 512")
    found = {one["kind"]: one for one in render(tmp_path / "mine")}
    assert "StatefulSet" not in found
    args, _ = read(template_of(found["LeaderWorkerSet"])["spec"], {})
    assert (args.afd_role, args.num_devices) == ("both", 8)
    assert (args.enable_dbo, args.num_afd_stages) == (True, 3)
    assert json.loads((tmp_path / "mine" / "recipe.json").read_text())["services"][0]["devices_each"] == 8


def test_attention_on_two_hosts_is_a_group_whose_processes_find_each_other_and_experts_know_none(group, monkeypatch):
    """The pods are those of any engine of several hosts: each has its place from LeaderWorkerSet, and its network cards."""
    ((attention, server, experts),) = groups_of(group)
    spec = group["LeaderWorkerSet"][0]["spec"]["leaderWorkerTemplate"]
    (container,) = spec["workerTemplate"]["spec"]["containers"]
    assert spec["size"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == attention.num_devices == 16
    assert container["resources"]["limits"]["rdma/ib"] == "1"
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    monkeypatch.setenv("DSJAX_CLUSTER_KEY", "k" * 32)
    for name, value in {"LEADER_ADDRESS": "127.0.0.1", "GROUP_SIZE": str(spec["size"]), "WORKER_INDEX": "1"}.items():
        monkeypatch.setenv(f"LWS_{name}", value)
    found = HostOptions.find(attention)
    assert (found.coordinator_text, found.num_processes, found.process_id) == ("127.0.0.1:8476", 2, 1)
    assert {"name": "coordinator", "containerPort": 8476} in container["ports"]
    (pods,) = group["StatefulSet"]
    assert not any("rdma/ib" in one["resources"]["limits"] for one in pods["spec"]["template"]["spec"]["containers"])
    assert {one.num_devices for one in experts.values()} == {8}
    assert attention.start_timeout < server["step_timeout"]


def test_clients_reach_process_0_of_attention_and_its_group_reaches_every_port(group):
    services = {one["metadata"]["name"]: one["spec"] for one in group["Service"]}
    assert services["dsjax"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    labels = template_of(group["LeaderWorkerSet"][0])["metadata"]["labels"].items()
    (policy,) = group["NetworkPolicy"]
    only_http, among_engines = policy["spec"]["ingress"]
    assert [one["port"] for one in only_http["ports"]] == ["http"]
    assert "ports" not in among_engines
    assert among_engines["from"][0]["podSelector"]["matchLabels"].items() <= labels


def test_experts_leave_a_folder_with_the_plan(one_kind, tmp_path):
    assert "StatefulSet" in one_kind, "which is in experts.yaml"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experts.yaml").touch()
    plan(tmp_path / "mine", "--cluster h200-32 --mesh dp=8 --mode aggregated")
    assert not (tmp_path / "mine" / "experts.yaml").exists()

"""A service for NVIDIA Dynamo's operator: volume, download, DynamoGraphDeployment and benchmark as one file for `kubectl apply`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.errors import UserError
from dsjax.plan.candidate import Candidate
from dsjax.plan.cluster import Cluster
from dsjax.plan.kubernetes import (
    ROOM,
    arguments_of,
    checkpoint_bytes,
    compute_domain,
    compute_domain_claim,
    gib,
    needs_compute_domain,
    pod_resources,
    repository,
    uses_rdma,
)
from dsjax.plan.launch import comment
from dsjax.plan.question import Question
from dsjax.plan.recipe import recipe

CONCURRENCIES = (1, 4, 16, 64, 256, 1024)
_USER = (
    "{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch, "
    "seccompProfile: {type: RuntimeDefault}}"
)
_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_LONGEST_NAME = 40
"""Characters of a deployment's name: a label has 63, of which names of pods and services add up to 23."""
_RESTRICTED = "{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}"


@dataclass(frozen=True)
class Side:
    """Workers of one kind.

    Attributes:
        kind: `worker`, which does both, `prefill` or `decode`: Dynamo's types.
        options: as `dsjax dynamo` names them.
        workers: engines. hosts, devices: of each engine, and of each host.
        resources: of one host's pod.
    """

    kind: str
    options: Mapping[str, str]
    workers: int
    hosts: int
    devices: int
    resources: Mapping[str, Any]


@dataclass(frozen=True)
class Graph:
    """What a file says.

    Attributes:
        name: of the deployment; its frontend's service is `NAME-frontend`, port 8000.
        about: lines of comment at the top.
        model: the Hugging Face repository.
        sides: one, or prefill and decode. volume: of the model's, such as `800Gi`.
        input_tokens, output_tokens: of the benchmark's requests.
    """

    name: str
    about: tuple[str, ...]
    model: str
    sides: tuple[Side, ...]
    volume: str
    input_tokens: int
    output_tokens: int

    @property
    def folder(self) -> str:
        """The model's, on the volume."""
        return f"/models/{self.model.rpartition('/')[2].lower()}"

    def text(self) -> str:
        """The file."""
        parts = [self._head(), self._cache(), self._download(), self._deployment(), self._benchmark(), self._policies()]
        nodes = sum(side.workers * side.hosts for side in self.sides if "claims" in side.resources)
        return "---\n".join([*parts, *([compute_domain(self.name, nodes)] if nodes else [])])

    def _head(self) -> str:
        return "".join(f"{comment(text)}\n" for text in self.about)

    def _cache(self) -> str:
        return f"""\
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {self.name}-models
spec:
  accessModes: [ReadWriteMany]  # every pod mounts it; a storage class that can is the cluster's default, or named here
  resources:
    requests:
      storage: {self.volume}
"""

    def _download(self) -> str:
        return f"""\
# Fills the volume once, and leaves a mark that the pods wait for; a download that was interrupted resumes.
apiVersion: batch/v1
kind: Job
metadata:
  name: {self.name}-download
spec:
  backoffLimit: 10
  template:
    spec:
      restartPolicy: OnFailure
      securityContext: {_USER}
      containers:
        - name: download
          image: dsjax:cuda-dynamo
          securityContext: {_RESTRICTED}
          command: [sh, -ec]
          args: ["hf download {self.model} --local-dir {self.folder} && touch {self.folder}/.complete"]
          env:
            - name: HF_TOKEN  # of gated models
              valueFrom:
                secretKeyRef: {{name: hf-token-secret, key: HF_TOKEN, optional: true}}
          resources:
            requests: {{cpu: "2", memory: 4Gi}}
            limits: {{memory: 8Gi}}
          volumeMounts:
            - {{name: models, mountPath: /models}}
            - {{name: tmp, mountPath: /tmp}}
      volumes:
        - name: models
          persistentVolumeClaim: {{claimName: {self.name}-models}}
        - name: tmp
          emptyDir: {{}}
"""

    def _deployment(self) -> str:
        return self._frontend() + "".join(self._side(side) for side in self.sides)

    def _frontend(self) -> str:
        return f"""\
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata:
  name: {self.name}
  annotations:
    nvidia.com/enable-grove: "false"  # several hosts by LeaderWorkerSet, whose variables tell dsjax which process it is
spec:
  components:
    - name: Frontend
      type: frontend
      replicas: 1
      podTemplate:
        metadata:
          labels: {{app.kubernetes.io/part-of: {self.name}, app.kubernetes.io/component: frontend}}
        spec:
          securityContext: &user {_USER}
          initContainers: &wait
            - name: wait-for-model
              image: dsjax:cuda-dynamo
              securityContext: &security {_RESTRICTED}
              command: [sh, -ec]
              args: ["until [ -e {self.folder}/.complete ]; do echo waiting for the download; sleep 10; done"]
              volumeMounts: &mounts
                - {{name: models, mountPath: /models}}
                - {{name: tmp, mountPath: /tmp}}
          containers:
            - name: main
              image: dsjax:cuda-dynamo
              securityContext: *security
              command: [python, -m, dynamo.frontend]
              args: [--router-mode=kv, --http-port=8000, --migration-limit=3]
              volumeMounts: *mounts  # the tokenizer and the template
          volumes: &volumes
            - name: models
              persistentVolumeClaim: {{claimName: {self.name}-models}}
            - name: tmp
              emptyDir: {{}}
"""

    def _side(self, side: Side) -> str:
        given = {"--model": self.folder, "--served-model-name": self.model, "--shutdown-timeout": "600", **side.options}
        if side.kind != "worker":
            given["--disaggregation-mode"] = side.kind
            given["--transfer-host"] = "$(POD_IP)"  # the other side's workers are on other hosts
        lines = "\n".join(f"                - {json.dumps(word)}" for word in arguments_of(given))
        adds = ", add: [IPC_LOCK]" if "rdma/ib" in side.resources["limits"] else ""
        claims = (
            f"          resourceClaims: {json.dumps([compute_domain_claim(self.name)])}\n"
            if "claims" in side.resources
            else ""
        )
        nodes = f"      multinode: {{nodeCount: {side.hosts}}}\n" if side.hosts > 1 else ""
        return f"""\
    - name: {side.kind.capitalize()}
      type: {side.kind}
      replicas: {side.workers}
{nodes}      sharedMemorySize: 16Gi  # NCCL's, between the devices of a host
      podTemplate:
        metadata:
          labels: {{app.kubernetes.io/part-of: {self.name}, app.kubernetes.io/component: engine}}
        spec:
          terminationGracePeriodSeconds: 630  # Dynamo's grace period, then --shutdown-timeout, then some
          securityContext: *user
{claims}          initContainers: *wait
          containers:
            - name: main
              image: dsjax:cuda-dynamo
              securityContext:
                allowPrivilegeEscalation: false
                readOnlyRootFilesystem: true
                capabilities: {{drop: [ALL]{adds}}}
              command: [dsjax, dynamo]
              args:
{lines}
              env:
                - {{name: HF_HUB_OFFLINE, value: "1"}}
                - name: POD_IP
                  valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}
                - name: DSJAX_CLUSTER_KEY  # how the processes of a deployment know each other (docs/security.md)
                  valueFrom: {{secretKeyRef: {{name: dsjax-secrets, key: cluster-key}}}}
                - name: DSJAX_API_KEY  # of /metrics, in processes behind an engine's first
                  valueFrom: {{secretKeyRef: {{name: dsjax-secrets, key: api-key}}}}
              # Weights are read and programs compiled before the worker is ready; an hour is more than any storage needs.
              startupProbe:
                httpGet: {{path: /live, port: 9090}}
                periodSeconds: 10
                failureThreshold: 360
              resources: {json.dumps(side.resources)}
              volumeMounts: *mounts
          volumes: *volumes
"""

    def _benchmark(self) -> str:
        sweep = ",".join(map(str, CONCURRENCIES))
        devices = sum(side.workers * side.hosts * side.devices for side in self.sides)
        return f"""\
# Suspended until asked for: kubectl patch job {self.name}-benchmark -p '{{"spec": {{"suspend": false}}}}'
# Writes what `dsjax bench serve` writes to /models/benchmarks: TTFT, ITL, tokens a second a user and a GPU for each concurrency.
apiVersion: batch/v1
kind: Job
metadata:
  name: {self.name}-benchmark
spec:
  suspend: true
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      securityContext: {_USER}
      containers:
        - name: benchmark
          image: dsjax:cuda-dynamo
          securityContext: {_RESTRICTED}
          command: [sh, -ec]
          args:
            - |
              until python -c 'import sys, urllib.request as web; sys.exit(sys.argv[2] not in web.urlopen(sys.argv[1]).read().decode())' \\
                "$URL/v1/models" "$MODEL"; do echo "waiting for $MODEL at $URL"; sleep 10; done
              mkdir -p /models/benchmarks
              dsjax bench serve --base-url "$URL" --model "$MODEL" --tokenizer {self.folder} --devices {devices} --ignore-eos \\
                --random-input-len {self.input_tokens} --random-output-len {self.output_tokens} \\
                --sweep-concurrency {sweep} --num-prompts 10240 --duration 120 --num-warmups 32 --no-progress \\
                --json /models/benchmarks/{self.name}.json --csv-points /models/benchmarks/{self.name}.csv
          env:
            - {{name: URL, value: "http://{self.name}-frontend:8000"}}
            - {{name: MODEL, value: {self.model}}}
          resources:
            requests: {{cpu: "4", memory: 4Gi}}
          volumeMounts:
            - {{name: models, mountPath: /models}}
            - {{name: tmp, mountPath: /tmp}}
      volumes:
        - name: models
          persistentVolumeClaim: {{claimName: {self.name}-models}}
        - name: tmp
          emptyDir: {{}}
"""

    def _policies(self) -> str:
        return f"""\
# The frontend asks for no key: this namespace's pods reach it, and what clients elsewhere talk to belongs before it.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {self.name}-frontend
spec:
  podSelector:
    matchLabels: {{app.kubernetes.io/part-of: {self.name}, app.kubernetes.io/component: frontend}}
  policyTypes: [Ingress]
  ingress:
    - ports: [{{port: 8000, protocol: TCP}}]
      from: [{{podSelector: {{}}}}]
    - from: [{{podSelector: {{matchLabels: {{app.kubernetes.io/part-of: {self.name}}}}}}}]
---
# Only the deployment's own pods reach the engines: Dynamo's requests, JAX's transfer server and coordination service, and NCCL know no
# authentication (docs/security.md).
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {self.name}-engines
spec:
  podSelector:
    matchLabels: {{app.kubernetes.io/part-of: {self.name}, app.kubernetes.io/component: engine}}
  policyTypes: [Ingress]
  ingress:
    - from: [{{podSelector: {{matchLabels: {{app.kubernetes.io/part-of: {self.name}}}}}}}]
"""


def planned_graph(name: str, model: str, question: Question, candidate: Candidate, command: str) -> Graph:
    """The winner of a plan. command: what it was planned with, for the first line.

    Raises:
        UserError: Dynamo's operator cannot place it: no NVIDIA GPUs, or processes with experts that no worker is; or its pods cannot
            download the model.
    """
    if not _REPOSITORY.fullmatch(repository(model)) or Path(model).exists():
        raise UserError(
            f"--recipe FILE.yaml has pods download the model from Hugging Face, and --model is {model!r}; expected a repository, such as "
            "deepseek-ai/DeepSeek-V3; give that, or a folder for manifests whose volume you fill yourself"
        )
    made = recipe(model, question, candidate)
    if any(service["role"] == "experts" for service in made["services"]):
        raise UserError(
            "--recipe FILE.yaml is for Dynamo, whose operator starts workers that take requests, and the winner has experts in processes "
            "of their own, which take none and must keep their addresses; give a folder, which has both sides for Kubernetes"
        )
    cluster = question.cluster
    if cluster.hardware.platform != "cuda":
        raise UserError(
            f"--recipe FILE.yaml is for Dynamo, whose operator places NVIDIA GPUs, and {cluster.name} has {cluster.hardware.platform}; "
            "give a folder for LeaderWorkerSet's manifests"
        )
    work = question.workload
    return Graph(
        name,
        (command, cluster.description, *(f"Note: {note}" for note in made["notes"])),
        repository(model),
        tuple(
            _side(service, (service["role"] == "prefill" and cluster.prefill) or cluster)
            for service in made["services"]
        ),
        gib(checkpoint_bytes(candidate) * ROOM),
        round(work.input.mean),
        round(work.output.mean),
    )


_NOT_A_WORKERS = ("--model", "--disaggregation-mode", "--api-server-count")
"""Options that the graph says in its own words, or that Dynamo's frontend stands for."""


def _side(service: Mapping[str, Any], cluster: Cluster) -> Side:
    """Describe one side of a recipe's service."""
    hosts = _hosts(service, cluster)
    devices = math.ceil(service["devices_each"] / hosts)
    return Side(
        service["role"] if service["role"] in ("prefill", "decode") else "worker",
        {flag: value for flag, value in service["options"].items() if flag not in _NOT_A_WORKERS},
        service["instances"],
        hosts,
        devices,
        pod_resources(
            cluster.hardware.platform,
            devices,
            rdma=uses_rdma(cluster, hosts),
            domain=needs_compute_domain(cluster.hardware, hosts),
        ),
    )


def _hosts(service: Mapping[str, Any], cluster: Cluster) -> int:
    return math.ceil(service["devices_each"] / cluster.devices_per_host)


def deployment_name(file: Path) -> str:
    """The name of a file as Kubernetes takes it for a service: ASCII letters, digits and dashes behind a letter, not too many."""
    name = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"dsjax-{name}" if name else "dsjax"
    return name[:_LONGEST_NAME].rstrip("-")


def write_graph(file: Path, model: str, question: Question, candidate: Candidate, command: str) -> None:
    """A plan's winner to `FILE.yaml`; the file's name is the deployment's."""
    text = planned_graph(deployment_name(file), model, question, candidate, command).text()
    file.write_text(text, encoding="utf-8")

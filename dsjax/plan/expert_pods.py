"""Processes with experts on Kubernetes: a StatefulSet for each instance, beside the LeaderWorkerSet of the processes that call them.

A StatefulSet's pods keep their names: one that comes back, on another node too, is at the address that attention was given, and has the
same place among the processes. Group N of the LeaderWorkerSet calls the pods of StatefulSet N.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EXPERTS_FILE = "experts.yaml"
EXPERTS_IMAGE = "dsjax-experts"
"""What the manifests call the image, so that experts on devices of another platform can have another one."""
GROUP_VARIABLE, RANK_VARIABLE = "AFD_GROUP", "AFD_RANK"
GROUP = {
    "name": GROUP_VARIABLE,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}},
}
"""The environment variable of a process with attention that says whose experts it calls."""
_NAME, _PORT = "dsjax-experts", 7000


def addresses(group: int | str, processes: int) -> str:
    """`--afd-address`: the pods of a group's StatefulSet, in the order of their ranks."""
    return ",".join(f"{_NAME}-{group}-{rank}.{_NAME}:{_PORT}" for rank in range(processes))


@dataclass(frozen=True)
class ExpertPods:
    """The processes with experts of all instances.

    Attributes:
        instances: StatefulSets. processes: pods of each.
        arguments: of `dsjax`, but for the address and the rank.
        resources, node_selector: of a pod.
    """

    instances: int
    processes: int
    arguments: Sequence[str]
    resources: Mapping[str, Any]
    node_selector: Mapping[str, str]

    def text(self) -> str:
        """`experts.yaml`."""
        return "---\n".join([_SERVICE, *(self._set(group) for group in range(self.instances))])

    def _set(self, group: int) -> str:
        own = [f"--afd-address={addresses(group, self.processes)}"]
        if self.processes > 1:
            own.append(f"--afd-server-rank=$({RANK_VARIABLE})")
        lines = "\n".join(f"            - {json.dumps(word)}" for word in (*self.arguments, *own))
        selector = f"      nodeSelector: {json.dumps(self.node_selector)}\n" if self.node_selector else ""
        return f"""\
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {_NAME}-{group}
  labels: {{app.kubernetes.io/name: dsjax}}
spec:
  serviceName: {_NAME}
  replicas: {self.processes}
  podManagementPolicy: Parallel  # none waits for another
  selector:
    matchLabels: {{app.kubernetes.io/name: dsjax, dsjax-experts-of-group: "{group}"}}
  template:
    metadata:
      labels: {{app.kubernetes.io/name: dsjax, app.kubernetes.io/component: engine, dsjax-experts-of-group: "{group}", dsjax-role: experts}}
    spec:
{selector}      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {{type: RuntimeDefault}}
      initContainers:
        - name: wait-for-model
          image: {EXPERTS_IMAGE}
          command: [sh, -ec]
          args:
            - until [ -d "/models/complete/$MODEL" ]; do echo "waiting for the download of $MODEL"; sleep 10; done
          envFrom:
            - configMapRef: {{name: dsjax-model}}
          resources:
            requests: {{cpu: 10m, memory: 16Mi}}
          securityContext: {_RESTRICTED}
          volumeMounts:
            - {{name: models, mountPath: /models}}
      containers:
        - name: dsjax
          image: {EXPERTS_IMAGE}
          args:
{lines}
          envFrom:
            - configMapRef: {{name: dsjax-model}}
          env:
            - {{name: HF_HUB_OFFLINE, value: "1"}}  # only the job downloads
            - name: {RANK_VARIABLE}  # which of the processes of --afd-address this is
              valueFrom:
                fieldRef: {{fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
            - name: DSJAX_API_KEY  # of /metrics
              valueFrom:
                secretKeyRef: {{name: dsjax-secrets, key: api-key}}
            - name: DSJAX_ADMIN_API_KEY
              valueFrom:
                secretKeyRef: {{name: dsjax-secrets, key: admin-api-key}}
            - name: DSJAX_CLUSTER_KEY  # how the two sides know each other (docs/security.md)
              valueFrom:
                secretKeyRef: {{name: dsjax-secrets, key: cluster-key}}
          ports:
            - {{name: http, containerPort: 8000}}
            - {{name: experts, containerPort: {_PORT}}}
          # The port answers at once, while experts are still read.
          startupProbe:
            httpGet: {{path: /health, port: http}}
            periodSeconds: 10
            failureThreshold: 360
          livenessProbe:
            httpGet: {{path: /health, port: http}}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          # 503 until the experts are loaded.
          readinessProbe:
            httpGet: {{path: /ready, port: http}}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 1
          resources: {json.dumps(self.resources)}
          securityContext: {_RESTRICTED}
          volumeMounts:
            - {{name: models, mountPath: /models}}
            - {{name: tmp, mountPath: /tmp}}
      volumes:
        - name: models
          persistentVolumeClaim: {{claimName: dsjax-models}}
        - name: tmp
          emptyDir: {{}}
"""


_RESTRICTED = "{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}"
_SERVICE = f"""\
# The processes with experts (docs/attention-ffn-disaggregation.md): the pods of StatefulSet N are called by group N of the LeaderWorkerSet.
# One that dies starts again under the same name, and the step that waits for it goes on.
apiVersion: v1
kind: Service
metadata:
  name: {_NAME}
  labels: {{app.kubernetes.io/name: dsjax}}
spec:
  clusterIP: None  # it gives each pod a name, and no address of its own, at which none could listen
  publishNotReadyAddresses: true  # a pod listens at its name before it is ready
  selector: {{app.kubernetes.io/name: dsjax, dsjax-role: experts}}
  ports:
    - {{name: experts, port: {_PORT}, targetPort: experts}}
"""

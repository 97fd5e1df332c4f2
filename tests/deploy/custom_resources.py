"""Schemas of the four custom resources that `deploy/` uses, as far as it uses them; they take no unknown field, as the API server does.

LeaderWorkerSet: version v1, in kubernetes-sigs/lws at commit 060ab4d (2026-08-21),
config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml.
PodMonitor: version v1 of the operator's 0.91.0, in prometheus-operator/prometheus-operator,
example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml.
DynamoGraphDeployment: version v1beta1, in ai-dynamo/dynamo at commit 01cc1c3 (2026),
deploy/operator/config/crd/bases/nvidia.com_dynamographdeployments.yaml.
ComputeDomain: version v1beta1 of NVIDIA's DRA driver for GPUs, whose field `numNodes` and `channel` are required.
Names, types, enumerations and what is required are theirs; a pod's template is the core schema's, held against it as a Pod.
"""

from typing import Any

_INT, _STRING = {"type": "integer"}, {"type": "string"}
_MAP = {"type": "object", "additionalProperties": _STRING}
_INT_OR_STRING = {"anyOf": [_INT, _STRING]}
_STRINGS = {"type": "array", "items": _STRING}
_UNITS = "".join(f"(([0-9]+){unit})?" for unit in ("y", "w", "d", "h", "m", "s", "ms"))
_DURATION = {"type": "string", "pattern": f"^(0|{_UNITS})$"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


_METADATA = _object(("name",), name=_STRING, namespace=_STRING, labels=_MAP, annotations=_MAP)
_TEMPLATE = _object(metadata={"type": "object"}, spec={"type": "object"})

LEADER_WORKER_SET = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=_choice("leaderworkerset.x-k8s.io/v1"),
    kind=_choice("LeaderWorkerSet"),
    metadata=_METADATA,
    spec=_object(
        ("leaderWorkerTemplate",),
        replicas={"type": "integer", "minimum": 0, "maximum": 1_000_000},
        startupPolicy=_choice("LeaderCreated", "LeaderReady"),
        rolloutStrategy=_object(
            ("type",),
            type=_choice("RollingUpdate"),
            rollingUpdateConfiguration=_object(maxSurge=_INT_OR_STRING, maxUnavailable=_INT_OR_STRING, partition=_INT),
        ),
        leaderWorkerTemplate=_object(
            ("workerTemplate",),
            size=_INT,
            restartPolicy=_choice("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            workerTemplate=_TEMPLATE,
        ),
    ),
)

POD_MONITOR = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=_choice("monitoring.coreos.com/v1"),
    kind=_choice("PodMonitor"),
    metadata=_METADATA,
    spec=_object(
        ("selector",),
        selector=_object(matchLabels=_MAP),
        podTargetLabels=_STRINGS,
        podMetricsEndpoints={
            "type": "array",
            "items": _object(
                port=_STRING,
                path=_STRING,
                interval=_DURATION,
                authorization=_object(
                    type=_STRING, credentials=_object(("key",), key=_STRING, name=_STRING, optional={"type": "boolean"})
                ),
            ),
        },
    ),
)

COMPUTE_DOMAIN = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=_choice("resource.nvidia.com/v1beta1"),
    kind=_choice("ComputeDomain"),
    metadata=_METADATA,
    spec=_object(
        ("numNodes", "channel"),
        numNodes={"type": "integer", "minimum": 0},
        channel=_object(("resourceClaimTemplate",), resourceClaimTemplate=_object(("name",), name=_STRING)),
    ),
)

DYNAMO_GRAPH_DEPLOYMENT = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion=_choice("nvidia.com/v1beta1"),
    kind=_choice("DynamoGraphDeployment"),
    metadata=_METADATA,
    spec=_object(
        components={
            "type": "array",
            "items": _object(
                ("name",),
                name={"type": "string", "minLength": 1, "maxLength": 63},
                type=_choice("frontend", "worker", "prefill", "decode", "planner", "epp"),
                replicas={"type": "integer", "minimum": 0},
                multinode=_object(nodeCount={"type": "integer", "minimum": 2}),
                sharedMemorySize=_INT_OR_STRING,
                podTemplate=_TEMPLATE,
            ),
        },
    ),
)
"""The operator's own containers are named `main`; it fills in what a template leaves out."""

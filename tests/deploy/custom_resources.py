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
_UNITS = "".join(f"(([0-9]+){unit})?" for unit in ("y", "w", "d", "h", "m", "s", "ms"))
_DURATION = {"type": "string", "pattern": f"^(0|{_UNITS})$"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _resource(api_version: str, kind: str, required: tuple[str, ...] = (), **spec: Any) -> dict[str, Any]:
    top = {"apiVersion": _choice(api_version), "kind": _choice(kind), "metadata": _METADATA}
    return _object((*top, "spec"), **top, spec=_object(required, **spec))


_METADATA = _object(("name",), name=_STRING, namespace=_STRING, labels=_MAP, annotations=_MAP)
_TEMPLATE = _object(metadata={"type": "object"}, spec={"type": "object"})

LEADER_WORKER_SET = _resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
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
)

_CREDENTIALS = _object(("key",), key=_STRING, name=_STRING, optional={"type": "boolean"})
_AUTHORIZATION = _object(type=_STRING, credentials=_CREDENTIALS)

POD_MONITOR = _resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    ("selector",),
    selector=_object(matchLabels=_MAP),
    podTargetLabels=_list_of(_STRING),
    podMetricsEndpoints=_list_of(_object(port=_STRING, path=_STRING, interval=_DURATION, authorization=_AUTHORIZATION)),
)

COMPUTE_DOMAIN = _resource(
    "resource.nvidia.com/v1beta1",
    "ComputeDomain",
    ("numNodes", "channel"),
    numNodes={"type": "integer", "minimum": 0},
    channel=_object(("resourceClaimTemplate",), resourceClaimTemplate=_object(("name",), name=_STRING)),
)

_COMPONENT = _object(
    ("name",),
    name={"type": "string", "minLength": 1, "maxLength": 63},
    type=_choice("frontend", "worker", "prefill", "decode", "planner", "epp"),
    replicas={"type": "integer", "minimum": 0},
    multinode=_object(nodeCount={"type": "integer", "minimum": 2}),
    sharedMemorySize=_INT_OR_STRING,
    podTemplate=_TEMPLATE,
)
DYNAMO_GRAPH_DEPLOYMENT = _resource("nvidia.com/v1beta1", "DynamoGraphDeployment", components=_list_of(_COMPONENT))
"""The operator's own containers are named `main`; it fills in what a template leaves out."""

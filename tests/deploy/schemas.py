"""Schemas of other projects' kinds, for the fields used in k8s/: written by hand from their definitions, and strict.

A misspelled field, a wrong type or a missing required field fails. A valid field that is not listed fails, too, and
must be looked up and added here.
"""

from __future__ import annotations

from typing import Any

import jsonschema

from tests.deploy.kustomize import Resource

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d|w|y))+$"}  # Prometheus's
GATEWAY_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
QUOTED_NUMBER: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(*required: str, **properties: Schema) -> Schema:
    """Returns a schema for an object with exactly these fields."""
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def listed(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, **bounds}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


SELECTOR = closed("matchLabels", matchLabels=TEXTS)

# keda.sh/v1alpha1; what `metadata` may hold is the scaler's own affair, here Prometheus's.
TRIGGER = closed(
    "type", "metadata",
    type=one_of("prometheus"),
    name=TEXT,
    metricType=one_of("AverageValue", "Value", "Utilization"),
    metadata=closed(
        "serverAddress", "query", "threshold",
        serverAddress={"type": "string", "pattern": "^https?://"},
        query=TEXT,
        threshold=QUOTED_NUMBER,
        activationThreshold=QUOTED_NUMBER,
        ignoreNullValues=one_of("true", "false"),
    ),
)  # fmt: skip
SCALING = closed(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=one_of("Max", "Min", "Disabled"),
    policies=listed(
        closed(
            "type", "value", "periodSeconds",
            type=one_of("Pods", "Percent"),
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)  # fmt: skip
SCALED_OBJECT = closed(
    "scaleTargetRef", "triggers",
    scaleTargetRef=closed("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    pollingInterval=NUMBER,
    cooldownPeriod=NUMBER,
    advanced=closed(
        horizontalPodAutoscalerConfig=closed(behavior=closed(scaleUp=SCALING, scaleDown=SCALING)),
        restoreToOriginalReplicaCount={"type": "boolean"},
    ),
    triggers=listed(TRIGGER),
)  # fmt: skip

# monitoring.coreos.com/v1
RELABELING = closed(
    action=one_of("replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"),
    sourceLabels=listed({"type": "string", "pattern": r"^[a-zA-Z_][a-zA-Z0-9_]*$"}),
    targetLabel=TEXT,
    regex=TEXT,
    replacement=TEXT,
    separator={"type": "string"},
)
POD_MONITOR = closed(
    "selector", "podMetricsEndpoints",
    selector=SELECTOR,
    podMetricsEndpoints=listed(
        closed(
            port=TEXT,
            path={"type": "string", "pattern": "^/"},
            interval=DURATION,
            relabelings=listed(RELABELING),
        )
    ),
)  # fmt: skip
RULE = closed("alert", "expr", **{"for": DURATION}, alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS)
GROUP = closed("name", "rules", name=TEXT, interval=DURATION, rules=listed(RULE))
PROMETHEUS_RULE = closed("groups", groups=listed(GROUP))

# inference.networking.k8s.io/v1
INFERENCE_POOL = closed(
    "selector", "targetPorts", "endpointPickerRef",
    selector=SELECTOR,
    targetPorts=listed(closed("number", number=PORT), maxItems=8),
    endpointPickerRef=closed(
        "name",
        group=TEXT,
        kind=TEXT,
        name=TEXT,
        port=closed("number", number=PORT),
        failureMode=one_of("FailOpen", "FailClose"),
    ),
)  # fmt: skip

# gateway.networking.k8s.io/v1
HTTP_ROUTE = closed(
    "parentRefs", "rules",
    parentRefs=listed(closed("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
    hostnames=listed(TEXT),
    rules=listed(
        closed(
            matches=listed(
                closed(path=closed("type", "value", type=one_of("Exact", "PathPrefix"), value={"pattern": "^/"}))
            ),
            backendRefs=listed(closed("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT)),
            timeouts=closed(request=GATEWAY_DURATION, backendRequest=GATEWAY_DURATION),
        )
    ),
)  # fmt: skip

# leaderworkerset.x-k8s.io/v1; the templates are Kubernetes' own.
LEADER_WORKER_SET = closed(
    "leaderWorkerTemplate",
    replicas=NUMBER,
    leaderWorkerTemplate=closed(
        "workerTemplate",
        leaderTemplate={"type": "object"},
        workerTemplate={"type": "object"},
        size={"type": "integer", "minimum": 1},
        restartPolicy=one_of("RecreateGroupOnPodRestart", "None"),
    ),
)

SPECS: dict[tuple[str, str], Schema] = {
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
}


def knows(resource: Resource) -> bool:
    return (resource["apiVersion"], resource["kind"]) in SPECS


def check(resource: Resource) -> None:
    """Validates a resource. Raises jsonschema.ValidationError."""
    metadata = closed("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
    spec = SPECS[resource["apiVersion"], resource["kind"]]
    jsonschema.validate(resource, closed("spec", "metadata", apiVersion={}, kind={}, metadata=metadata, spec=spec))

"""Generates every file of the chart."""

from __future__ import annotations

import json
from typing import Any

import yaml

from quire.shared.version import VERSION
from tests.deploy.chart import templates, values
from tests.deploy.paths import GRAFANA, K8S, PROMETHEUS

CHART = K8S / "chart"
MADE = "# Generated from the kustomizations in k8s by python -m tests.deploy.chart\n"
OVERLAYS = {
    "cpu-demo": "overlays/cpu-demo",
    "gpu": "overlays/gpu",
    "gpu-to-zero": "overlays/gpu-to-zero",
    "gpu-tiers": "overlays/gpu-tiers",
    "gpu-roles": "overlays/gpu-roles",
    "gpu-encode": "overlays/gpu-encode",
    "gateway": "overlays/gateway",
}
WORDS = {
    "roles": "Prefill and decode on separate workers: `prefill` and `worker` below",
    "encodeWorkers": "Workers that encode pictures for the others: `encode` below (values/gpu-encode.yaml)",
    "cuda": "One NVIDIA GPU per worker; set the worker's image and resources below (values/gpu.yaml)",
    "models": "A volume with model folders at /models",
    "kvTiers": "Volumes for KV tiers at /dev/shm and /var/lib/quire/kv; named in `settings` (values/gpu-tiers.yaml)",
    "monitoring": "A small Prometheus, and Grafana",
    "prometheusOperator": "PodMonitor, rules and dashboard for clusters that have the operator",
    "autoscaling": "KEDA. toZero: 0 workers without requests; roles: each by its own load; "
    "prometheus: its address for KEDA",
    "inferenceGateway": "An InferencePool of the frontends and an HTTPRoute to it (docs/operations/kubernetes.md)",
    "settings": "Settings of every service, as in base/quire.yaml",
}


def links() -> dict[str, str]:
    """Returns the files included in ConfigMaps, by path; Helm follows links."""
    found = {}
    for folder in (GRAFANA, PROMETHEUS):
        document = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for generator in document["configMapGenerator"]:
            for entry in generator["files"]:
                key, _, file = entry.rpartition("=")
                target = (folder / file).relative_to(K8S)
                found[f"files/{generator['name']}/{key or target.name}"] = f"../../../{target}"
    return found


def texts() -> dict[str, str]:
    """Returns all other files of the chart, by path."""
    defaults = values.defaults()
    found = {
        "Chart.yaml": MADE + _dumped(_chart()),
        "values.yaml": MADE + "".join(_commented(key, {key: value}) for key, value in defaults.items()),
        "values.schema.json": json.dumps(_schema(defaults), indent=2) + "\n",
    }
    for name, folder in OVERLAYS.items():
        found[f"values/{name}.yaml"] = f"{MADE}# As {folder}.\n" + _dumped(
            values.differing(values.of(folder), defaults)
        )
    for name, text in templates.all_templates().items():
        found[f"templates/{name}"] = text
    return found


def _chart() -> dict[str, str]:
    return {
        "apiVersion": "v2",
        "name": "quire",
        "description": "Frontends, schedulers and workers of Quire",
        "type": "application",
        "version": VERSION,
        "appVersion": VERSION,
        "kubeVersion": ">=1.30.0-0",
    }


def _commented(key: str, part: dict[str, Any]) -> str:
    words = f"# {WORDS[key]}.\n" if key in WORDS else ""
    return f"\n{words}{_dumped(part)}"


def _dumped(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=120)


def _schema(defaults: values.Values) -> dict[str, Any]:
    """Returns the schema of the values: misspelled names are errors; values that Kubernetes or the services validate
    are not checked."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_schema_of(defaults, is_open=("resources", "settings")),
    }


def _schema_of(value: Any, is_open: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                key: {"type": "object"} if key in is_open else _schema_of(inner, is_open)
                for key, inner in value.items()
            },
        }
    return {"type": {bool: "boolean", int: "integer", str: "string"}[type(value)]}

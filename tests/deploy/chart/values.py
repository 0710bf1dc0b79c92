"""Values of the chart: where each is placed in the objects, and which components it enables."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from tests.deploy import kustomize
from tests.deploy.kustomize import Resource
from tests.deploy.paths import K8S

Values = dict[str, Any]

# By component: the value that turns it on.
SWITCHES = {
    "roles": "roles.enabled",
    "encode-workers": "encodeWorkers.enabled",
    "cuda": "cuda.enabled",
    "models": "models.enabled",
    "kv-tiers": "kvTiers.enabled",
    "monitoring": "monitoring.enabled",
    "prometheus-operator": "prometheusOperator.enabled",
    "autoscaling": "autoscaling.enabled",
    "roles-autoscaling": "autoscaling.roles",
    "scale-to-zero": "autoscaling.toZero",
    "inference-gateway": "inferenceGateway.enabled",
}
POD = ("spec", "template", "spec")
CONTAINER = (*POD, "containers", 0)
# By value: (kind, name, where it stands).
PLACES: dict[str, tuple[str, str, tuple[str | int, ...]]] = {
    **{
        f"{role}.{value}": ("Deployment", role, place)
        for role in ("frontend", "scheduler", "worker", "prefill", "encode", "redis")
        for value, place in (("image", (*CONTAINER, "image")), ("resources", (*CONTAINER, "resources")))
    },
    "frontend.replicas": ("Deployment", "frontend", ("spec", "replicas")),
    "worker.replicas": ("Deployment", "worker", ("spec", "replicas")),
    "encode.replicas": ("Deployment", "encode", ("spec", "replicas")),
    "prefill.replicas": ("Deployment", "prefill", ("spec", "replicas")),
    "frontend.terminationGracePeriodSeconds": ("Deployment", "frontend", (*POD, "terminationGracePeriodSeconds")),
    "models.storageClassName": ("PersistentVolumeClaim", "models", ("spec", "storageClassName")),
    "models.size": ("PersistentVolumeClaim", "models", ("spec", "resources", "requests", "storage")),
    "kvTiers.diskSize": ("Deployment", "worker", (*POD, "volumes", "kv-disk", "emptyDir", "sizeLimit")),
    "kvTiers.memorySize": ("Deployment", "worker", (*POD, "volumes", "kv-memory", "emptyDir", "sizeLimit")),
    "autoscaling.minReplicas": ("ScaledObject", "worker", ("spec", "minReplicaCount")),
    "autoscaling.maxReplicas": ("ScaledObject", "worker", ("spec", "maxReplicaCount")),
    "autoscaling.cooldownSeconds": ("ScaledObject", "worker", ("spec", "cooldownPeriod")),
    "prefill.minReplicas": ("ScaledObject", "prefill", ("spec", "minReplicaCount")),
    "prefill.maxReplicas": ("ScaledObject", "prefill", ("spec", "maxReplicaCount")),
}
# Components with values of their own.
BRINGING = ("roles", "encode-workers", "models", "kv-tiers", "autoscaling", "roles-autoscaling")
SETTINGS = "settings"  # the whole of quire.yaml
PROMETHEUS = "autoscaling.prometheus"  # wherever a trigger names its address


def components_of(folder: str) -> list[str]:
    """Returns the components of an overlay and of the overlays it extends, in the order of application."""
    document = yaml.safe_load((K8S / folder / "kustomization.yaml").read_text())
    below = [
        name
        for entry in document.get("resources", [])
        if (K8S / folder / entry / "kustomization.yaml").exists()
        for name in components_of(str((K8S / folder / entry).resolve().relative_to(K8S)))
    ]
    return [*below, *(Path(entry).name for entry in document.get("components", []))]


def of(folder: str) -> Values:
    """Returns all values that make the chart equal to an overlay."""
    return _of(kustomize.build(K8S / folder, hashed=False), components_of(folder))


def defaults() -> Values:
    """Returns the default values: those of the base and of Deployments for roles and pictures, and those of other
    components."""
    found = merged(_with(*BRINGING), {"models": {"storageClassName": ""}})
    for own in (_with("roles", "encode-workers"), _with()):
        for path in (*PLACES, *SWITCHES.values(), SETTINGS):
            value = got(own, path)
            if value is not None:
                put(found, path, value)
    return found


def _with(*components: str) -> Values:
    """Returns the values of the base with components that are all disabled."""
    folders = [K8S / "components" / name for name in components]
    return _of(kustomize.build(K8S / "base", *folders, hashed=False), [])


def _of(built: list[Resource], present: list[str]) -> Values:
    resources = {(r["kind"], r["metadata"]["name"]): r for r in built}
    values: Values = {}
    for component, switch in SWITCHES.items():
        put(values, switch, component in present)
    for path, (kind, name, place) in PLACES.items():
        found = at(resources.get((kind, name)), place)
        if found is not None:
            put(values, path, copy.deepcopy(found))
    if ("ScaledObject", "worker") in resources:
        triggers = resources["ScaledObject", "worker"]["spec"]["triggers"]
        (address,) = {trigger["metadata"]["serverAddress"] for trigger in triggers}
        put(values, PROMETHEUS, address)
    values[SETTINGS] = yaml.safe_load(resources["ConfigMap", "quire"]["data"]["quire.yaml"])
    return values


def at(resource: Resource | None, place: tuple[str | int, ...]) -> Any:
    """Returns the value at a place; None if there is none."""
    found: Any = resource
    for key in place:
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list):
            found = found[key] if isinstance(key, int) else _named(found, key)
    return found


def _named(items: list[Any], name: str) -> Any:
    """Returns the object with this name from a list; None if there is none."""
    return next((item for item in items if isinstance(item, dict) and item.get("name") == name), None)


def got(values: Values, path: str) -> Any:
    """Returns a value by path; None if there is none."""
    found: Any = values
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def put(values: Values, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        values = values.setdefault(part, {})
    values[last] = value


def differing(values: Values, defaults: Values) -> Values:
    """Returns the values that differ from `defaults`; settings that are missing are removed."""
    found = _added(values, defaults)
    put(found, SETTINGS, merged(_removed(values[SETTINGS], defaults[SETTINGS]), found.get(SETTINGS, {})))
    return {key: value for key, value in found.items() if value != {}}


def _added(values: Values, defaults: Values) -> Values:
    found: Values = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _added(value, default):
                found[key] = inner
        elif value != default:
            found[key] = value
    return found


def _removed(values: Values, defaults: Values) -> Values:
    return {
        service: gone
        for service, settings in defaults.items()
        if (gone := dict.fromkeys(name for name in settings if name not in values[service]))
    }


def merged(defaults: Values, given: Values) -> Values:
    """Merges values as Helm does: recursively; None removes a key."""
    found = {**defaults}
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merged(found[key], value)
        elif value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found

"""Kubernetes manifests are valid, their settings are accepted by the services, and they are consistent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml

from quire.shared.rpc.server import LIVENESS
from quire.shared.settings import FrontendSettings, Settings, WorkerSettings
from quire.shared.version import VERSION
from tests.deploy import dockerfile, kustomize, schemas, service
from tests.deploy.paths import DOCKERFILE, K8S, KUSTOMIZATIONS, PROMETHEUS
from tests.metrics.catalogue import families

KUBERNETES = "1.33"
BUILDS = {folder: kustomize.build(K8S / folder) for folder in KUSTOMIZATIONS}
# By Deployment: `worker`, and `prefill` where there are workers of two roles.
SERVICES = {
    folder: [
        resource["metadata"]["name"]
        for resource in build
        if resource["kind"] == "Deployment" and next(kustomize.containers([resource]))["image"].startswith("quire-")
    ]
    for folder, build in BUILDS.items()
}
WORKERS = [(folder, name) for folder, names in SERVICES.items() for name in names if name in ("worker", "prefill")]
workloads = pytest.mark.parametrize(
    ("folder", "role"), [(folder, role) for folder, names in SERVICES.items() for role in names]
)
every = pytest.mark.parametrize("folder", KUSTOMIZATIONS)
workers = pytest.mark.parametrize(("folder", "name"), WORKERS)


def of_kind(folder: str, kind: str) -> list[kustomize.Resource]:
    return [resource for resource in BUILDS[folder] if resource["kind"] == kind]


def named(folder: str, kind: str, name: str) -> kustomize.Resource:
    (found,) = [r for r in of_kind(folder, kind) if r["metadata"]["name"] == name]
    return found


def pod(folder: str, deployment: str) -> dict[str, Any]:
    spec: dict[str, Any] = named(folder, "Deployment", deployment)["spec"]["template"]["spec"]
    return spec


def container(folder: str, deployment: str) -> dict[str, Any]:
    (only,) = pod(folder, deployment)["containers"]
    return dict(only)


def described(folder: str, role: str) -> service.Service:
    """Returns the container: its image's environment, then the manifest's, and the settings file from its ConfigMap."""
    described = container(folder, role)
    image = dockerfile.target(DOCKERFILE, stage(described["image"]))
    environment = {**image.environment, **dict(variables(described))}
    (config,) = [v["configMap"]["name"] for v in pod(folder, role)["volumes"] if "configMap" in v]
    return service.Service(
        described["args"],
        {key: value for key, value in environment.items() if key.startswith("QUIRE_")},
        named(folder, "ConfigMap", config)["data"]["quire.yaml"],
        pod(folder, role)["terminationGracePeriodSeconds"],
    )


def stage(image: str) -> str:
    """Converts an image name such as quire-worker:0.1.0-cuda to its stage, worker-cuda."""
    role, _, flavour = image.removeprefix("quire-").replace(f":{VERSION}", "").partition("-")
    return f"{role}-{flavour}" if flavour else role


def variables(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in described.get("env", []):
        source = entry.get("valueFrom", {})
        path = source.get("fieldRef", {}).get("fieldPath") or source.get("resourceFieldRef", {}).get("resource")
        yield entry["name"], service.PLACEHOLDERS[path] if path else entry["value"]


def settings_of(folder: str, role: str, scratch: Path) -> Settings:
    return described(folder, role).settings(scratch)


@every
def test_fits_the_schemas_of_kubernetes(folder: str) -> None:
    for resource in BUILDS[folder]:
        if schemas.knows(resource):
            schemas.check(resource)
        else:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", sorted(kind for _, kind in schemas.SPECS))
def test_a_misspelled_field_of_another_projects_kind_is_an_error(kind: str) -> None:
    found = next(resource for folder in KUSTOMIZATIONS for resource in of_kind(folder, kind))
    for name, value in found["spec"].items():
        wrong = {**found, "spec": {**found["spec"], f"{name}s": value}}
        with pytest.raises(jsonschema.ValidationError):
            schemas.check(wrong)
    with pytest.raises(jsonschema.ValidationError):
        schemas.check({**found, "spec": {}})


def test_the_pool_of_a_gateway_is_the_frontends() -> None:
    """The pool selects frontends by label, on their HTTP port; the route leads to it."""
    folder = "overlays/gateway"
    (pool,), (route,) = of_kind(folder, "InferencePool"), of_kind(folder, "HTTPRoute")
    (frontend,) = selected(folder, pool["spec"]["selector"]["matchLabels"])
    assert frontend["metadata"]["name"] == "frontend"
    (port,) = pool["spec"]["targetPorts"]
    assert {"name": "http", "containerPort": port["number"]} in container(folder, "frontend")["ports"]
    ((backend,),) = [rule["backendRefs"] for rule in route["spec"]["rules"]]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(f"{backend['group']}/")


def test_the_endpoint_picker_is_told_metrics_that_frontends_report() -> None:
    text = (K8S / "components" / "inference-gateway" / "kustomization.yaml").read_text()
    told = re.findall(r"--[\w-]+-metric=(\S+)", text)
    assert len(told) == 4
    assert set(told) <= {family.name for family in families() if family.service == "frontend"}


@workloads
def test_settings_are_accepted(folder: str, role: str, tmp_path: Path) -> None:
    found = settings_of(folder, role, tmp_path)
    hooks = container(folder, role).get("lifecycle", {})
    slept = hooks.get("preStop", {}).get("sleep", {}).get("seconds", 0)
    service.check(found, described(folder, role).stop_after_s - slept)
    assert "config" in {m["name"] for m in container(folder, role)["volumeMounts"] if m["mountPath"] == "/etc/quire"}


@workloads
def test_runs_the_image_of_this_version(folder: str, role: str) -> None:
    described = container(folder, role)
    image = f"quire-{described['args'][0]}:{VERSION}"
    assert described["image"] in (image, f"{image}-cuda")


@workloads
def test_ports_are_those_of_the_settings(folder: str, role: str, tmp_path: Path) -> None:
    found = settings_of(folder, role, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container(folder, role)["ports"]}
    metrics = "http" if role == "frontend" else "metrics"
    media = {"media": found.media_port} if isinstance(found, FrontendSettings) else {}
    expected = {"grpc": found.grpc_port, metrics: service.metrics_port(found), **media}  # type: ignore[attr-defined]
    assert ports == expected


@workloads
def test_probes_ask_the_grpc_health_service(folder: str, role: str, tmp_path: Path) -> None:
    found = settings_of(folder, role, tmp_path)
    described = container(folder, role)
    ports = {port["name"]: port["containerPort"] for port in described["ports"]}
    assert described["readinessProbe"]["grpc"] == {"port": found.grpc_port}  # type: ignore[attr-defined]
    for kind in ("startupProbe", "livenessProbe"):
        probe = described[kind]
        if "grpc" in probe:
            assert probe["grpc"]["port"] == found.grpc_port  # type: ignore[attr-defined]
        else:
            assert probe["httpGet"]["port"] in ports


@every
def test_only_a_process_that_does_not_answer_is_restarted(folder: str) -> None:
    """A process that is not serving is not restarted: a worker without a scheduler keeps KV blocks, a frontend
    without one holds requests."""
    for role in SERVICES[folder]:
        assert container(folder, role)["livenessProbe"]["grpc"]["service"] == LIVENESS


@workloads
def test_frontends_and_workers_dial_the_scheduler_service(folder: str, role: str, tmp_path: Path) -> None:
    found = settings_of(folder, role, tmp_path)
    (port,) = named(folder, "Service", "scheduler")["spec"]["ports"]
    if isinstance(found, WorkerSettings):
        assert found.scheduler == f"scheduler:{port['port']}"
    if isinstance(found, FrontendSettings):
        assert found.schedulers == (f"scheduler:{port['port']}",)


@workers
def test_every_service_serves_the_same_model(folder: str, name: str, tmp_path: Path) -> None:
    frontend, worker = (settings_of(folder, role, tmp_path) for role in ("frontend", name))
    assert isinstance(frontend, FrontendSettings)
    assert isinstance(worker, WorkerSettings)
    assert (frontend.model, frontend.served_model_name) == (worker.model, worker.served_model_name)
    if frontend.model.startswith("/models/"):
        for role in ("frontend", name):
            assert "/models" in {mount["mountPath"] for mount in container(folder, role)["volumeMounts"]}


@workers
def test_cuda_images_get_a_gpu_and_others_none(folder: str, name: str, tmp_path: Path) -> None:
    described = container(folder, name)
    device = settings_of(folder, name, tmp_path).device  # type: ignore[attr-defined]
    on_gpu = stage(described["image"]) == "worker-cuda"
    assert ("nvidia.com/gpu" in described["resources"]["limits"]) == on_gpu
    assert device == ("cuda" if on_gpu else "cpu")


@every
def test_every_pod_is_locked_down(folder: str) -> None:
    """Pods follow the Pod Security Standard `restricted`, with a read-only root."""
    for spec in kustomize.pod_specs(BUILDS[folder]):
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for entry in spec["containers"]:
            assert entry["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@every
def test_no_pod_of_quire_has_a_token_or_variables_of_services(folder: str) -> None:
    """A Service named quire-... would put QUIRE_..._PORT into every pod, which settings refuse."""
    for spec in kustomize.pod_specs(BUILDS[folder]):
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is (spec["serviceAccountName"] == "prometheus")
    accounts = {account["metadata"]["name"] for account in of_kind(folder, "ServiceAccount")}
    assert {spec["serviceAccountName"] for spec in kustomize.pod_specs(BUILDS[folder])} <= accounts


@every
def test_every_container_has_probes_and_resources(folder: str) -> None:
    templates = [template for resource in BUILDS[folder] for template in kustomize.pod_templates(resource)]
    for template in templates:
        serves = template["metadata"]["labels"].get("app.kubernetes.io/component") != "ranks"
        for entry in template["spec"]["containers"]:
            assert not serves or {"startupProbe", "livenessProbe", "readinessProbe"} <= set(entry)
            assert {"cpu", "memory"} <= set(entry["resources"]["requests"])
            assert "memory" in entry["resources"]["limits"]


@every
def test_services_lead_to_ports_that_pods_have(folder: str) -> None:
    for entry in of_kind(folder, "Service"):
        (target,) = selected(folder, entry["spec"]["selector"])
        names = {port["name"] for c in target["spec"]["template"]["spec"]["containers"] for port in c["ports"]}
        assert {port["targetPort"] for port in entry["spec"]["ports"]} <= names


@every
def test_selectors_find_their_pods(folder: str) -> None:
    for entry in of_kind(folder, "Deployment"):
        (itself,) = selected(folder, entry["spec"]["selector"]["matchLabels"])
        assert itself is entry
        for spread in entry["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert selected(folder, spread["labelSelector"]["matchLabels"]) == [entry]
    for entry in of_kind(folder, "PodDisruptionBudget"):
        assert len(selected(folder, entry["spec"]["selector"]["matchLabels"])) == 1
    for entry in of_kind(folder, "PodMonitor"):
        found = selected(folder, entry["spec"]["selector"]["matchLabels"])
        assert [workload["metadata"]["name"] for workload in found] == SERVICES[folder]


def selected(folder: str, labels: dict[str, str]) -> list[kustomize.Resource]:
    return [
        entry
        for entry in of_kind(folder, "Deployment")
        if labels.items() <= entry["spec"]["template"]["metadata"]["labels"].items()
    ]


@every
def test_what_pods_mount_exists(folder: str) -> None:
    for spec in kustomize.pod_specs(BUILDS[folder]):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for entry in spec["containers"]:
            assert {mount["name"] for mount in entry["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                keys = named(folder, "ConfigMap", volume["configMap"]["name"])["data"]
                assert {item["key"] for item in volume["configMap"].get("items", [])} <= set(keys)
            if "persistentVolumeClaim" in volume:
                named(folder, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_workers_are_scaled_alone_and_by_nobody_else() -> None:
    (scaled,) = of_kind("overlays/gpu", "ScaledObject")
    target = scaled["spec"]["scaleTargetRef"]
    worker = named("overlays/gpu", target["kind"], target["name"])
    assert worker["metadata"]["name"] == "worker"
    assert "replicas" not in worker["spec"], "the next apply would undo what the autoscaler did"


def test_a_cluster_without_workers_is_woken_by_what_frontends_hold(tmp_path: Path) -> None:
    """Only what is reported without a worker can wake it; frontends hold work for as long as a worker may take."""
    folder = "overlays/gpu-to-zero"
    (scaled,) = of_kind(folder, "ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == 0
    queries = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    (waking,) = [query for query in queries if "quire_frontend_held_requests" in query["query"]]
    assert waking["activationThreshold"] == "0"
    assert len({query["serverAddress"] for query in queries}) == 1
    frontend = settings_of(folder, "frontend", tmp_path)
    assert isinstance(frontend, FrontendSettings)
    assert frontend.worker_start_s > frontend.unavailable_after_s
    probe = container(folder, "worker")["startupProbe"]
    assert frontend.worker_start_s <= probe["periodSeconds"] * probe["failureThreshold"]


def test_what_the_autoscaler_asks_has_a_name_in_every_namespace() -> None:
    (own,) = yaml.safe_load_all((K8S / "components" / "autoscaling" / "worker.yaml").read_text())
    for scaled in (own, *of_kind("overlays/gpu", "ScaledObject")):
        for trigger in scaled["spec"]["triggers"]:
            host = urlsplit(trigger["metadata"]["serverAddress"]).hostname
            assert host is not None
            assert "." in host, f"KEDA asks from its own namespace, where {host} is not known"


@pytest.mark.parametrize("folder", ["overlays/gpu", "overlays/gpu-to-zero", "overlays/gpu-roles"])
def test_the_autoscaler_counts_one_namespace(folder: str) -> None:
    (namespace,) = (resource["metadata"]["name"] for resource in of_kind(folder, "Namespace"))
    for scaled in of_kind(folder, "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            named = query.count(f'namespace="{namespace}"')
            assert named == len(re.findall(r"(?:vllm:|quire_)\w+", query)), query


def test_the_operator_gets_the_rules_of_prometheus() -> None:
    (rules,) = of_kind("overlays/gpu", "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((PROMETHEUS / "rules.yml").read_text())


@every
def test_overlays_have_a_namespace_of_their_own(folder: str) -> None:
    namespaces = {resource["metadata"].get("namespace") for resource in BUILDS[folder]}
    if folder != "base":
        (own,) = of_kind(folder, "Namespace")
        assert namespaces == {None, own["metadata"]["name"]}
        assert own["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"

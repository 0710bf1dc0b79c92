"""Network policies allow exactly the connections that the settings require.

Connections are derived from real configuration: settings, Prometheus's and Grafana's files, the autoscaler's
triggers. Then every pod, and outsiders, try every port of every other pod.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml

from quire.shared.settings import FrontendSettings, SchedulerSettings, Settings, WorkerSettings
from tests.deploy import kustomize, service
from tests.deploy.network import Network, Pod, Unsupported, matches
from tests.deploy.paths import GRAFANA, K8S, KUSTOMIZATIONS
from tests.deploy.test_manifests import BUILDS, SERVICES, named, of_kind, settings_of, workloads

NAMESPACE = "quire"
ADMIN, SSH = 40_000, 22  # other ports in a pod, which must be unreachable
every = pytest.mark.parametrize("folder", KUSTOMIZATIONS)


class Arrow(NamedTuple):
    """An allowed connection: source, target and port."""

    source: str
    target: str
    port: int


QUIRE = {"app.kubernetes.io/name": "quire"}
NAMES = Pod("names", "kube-system", {"k8s-app": "kube-dns"}, {"dns": 53})
# Outsiders: with Quire's labels in the wrong namespace, with half of the labels, and without any.
STRANGERS = (
    Pod("nobody", NAMESPACE),
    Pod("a frontend of something else", NAMESPACE, {"app.kubernetes.io/component": "frontend"}),
    Pod("a worker of something else", NAMESPACE, {"app.kubernetes.io/component": "worker"}),
    Pod("a frontend elsewhere", "other", {**QUIRE, "app.kubernetes.io/component": "frontend"}),
    Pod("a worker elsewhere", "other", {**QUIRE, "app.kubernetes.io/component": "worker"}),
    Pod("a prometheus elsewhere", "other", {"app.kubernetes.io/name": "prometheus"}),
    Pod("something in monitoring", "monitoring"),
)
THEIR_PROMETHEUS = Pod("prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"}, {"http": 9090})
KEDA = Pod("keda", "keda", {"app": "keda-operator"})


def pods(folder: str) -> list[Pod]:
    """Returns the pods of the deployments."""
    found = []
    for deployment in of_kind(folder, "Deployment"):
        template = deployment["spec"]["template"]
        ports = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", [])}
        found.append(Pod(deployment["metadata"]["name"], NAMESPACE, template["metadata"]["labels"], ports))
    return found


def hosts(folder: str) -> list[Pod]:
    """Returns the pods of ranks, with the label that LeaderWorkerSet sets."""
    found = []
    for group in of_kind(folder, "LeaderWorkerSet"):
        for template in kustomize.pod_templates(group):
            labels = template["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"]}
            ports = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", [])}
            found.append(Pod(labels["app.kubernetes.io/component"], NAMESPACE, labels, ports))
    return found


def network(folder: str) -> Network:
    policies = [{**p, "metadata": {"namespace": NAMESPACE, **p["metadata"]}} for p in of_kind(folder, "NetworkPolicy")]
    return Network(tuple(policies))


def arrows(folder: str) -> set[Arrow]:
    """Returns the connections between pods of this cluster, its Prometheus and KEDA."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = {role: settings_of(folder, role, Path(scratch)) for role in SERVICES[folder]}
    dialled = {Arrow(role, *target) for role, found in settings.items() for target in dials(folder, found)}
    scraped = {Arrow("prometheus", role, service.metrics_port(found)) for role, found in settings.items()}
    return dialled | scraped | set(exchanged(settings)) | set(watched(folder))


def dials(folder: str, settings: Settings) -> Iterator[tuple[str, int]]:
    """Returns (Deployment, port of its pods) for each address in a service's settings."""
    if isinstance(settings, FrontendSettings):
        yield from (behind(folder, address) for address in settings.schedulers)
    if isinstance(settings, WorkerSettings):
        yield from (behind(folder, address) for address in settings.scheduler.split(","))
    if isinstance(settings, FrontendSettings | SchedulerSettings) and settings.redis != "none":
        yield behind(folder, urlsplit(settings.redis).netloc)


def exchanged(settings: dict[str, Settings]) -> Iterator[Arrow]:
    """Returns KV transfers between workers of two Deployments, on the port of their health checks, and the fetches of
    pixels by workers from frontends."""
    workers = {name: found for name, found in settings.items() if isinstance(found, WorkerSettings)}
    yield from (Arrow(one, other, workers[other].grpc_port) for one, other in permutations(workers, 2))
    frontends = {name: found for name, found in settings.items() if isinstance(found, FrontendSettings)}
    yield from (Arrow(worker, name, found.media_port) for worker in workers for name, found in frontends.items())


def watched(folder: str) -> Iterator[Arrow]:
    """Returns the connections of Grafana and KEDA, where the folder has a Prometheus."""
    if not any(deployment["metadata"]["name"] == "prometheus" for deployment in of_kind(folder, "Deployment")):
        return
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "quire.yml").read_text())["datasources"]
    for source in sources:
        yield Arrow("grafana", *behind(folder, urlsplit(source["url"]).netloc))
    scaled = yaml.safe_load((K8S / "components" / "autoscaling" / "worker.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        host, _, port = urlsplit(trigger["metadata"]["serverAddress"]).netloc.partition(":")
        assert host.endswith(f".{NAMESPACE}")
        yield Arrow("keda", *behind(folder, f"{host.removesuffix(f'.{NAMESPACE}')}:{port}"))


def behind(folder: str, address: str) -> tuple[str, int]:
    """Returns the pods of a Service, and their port."""
    name, _, port = address.partition(":")
    found = named(folder, "Service", name)["spec"]
    (target,) = [p for p in pods(folder) if matches({"matchLabels": found["selector"]}, p.labels)]
    (entry,) = [entry for entry in found["ports"] if entry["port"] == int(port)]
    return target.name, target.ports[entry["targetPort"]]


def everybody(folder: str) -> list[Pod]:
    own = pods(folder)
    has_prometheus = any(pod.name == "prometheus" for pod in own)
    return [*own, *([] if has_prometheus or folder == "base" else [THEIR_PROMETHEUS]), KEDA, *STRANGERS]


def open_to_all(folder: str) -> set[tuple[str, int]]:
    """Returns the ports for clients."""
    (frontend,) = [pod for pod in pods(folder) if pod.name == "frontend"]
    return {("frontend", frontend.ports["http"]), ("frontend", frontend.ports["grpc"])}


@every
def test_what_gets_through_is_what_the_settings_need(folder: str) -> None:
    needed, doors, policies = arrows(folder), open_to_all(folder), network(folder)
    known = {pod.name for pod in everybody(folder)}
    needed = {arrow for arrow in needed if arrow.source in known}
    silent = {*SERVICES[folder], "grafana"}  # pods with restricted egress
    through = set()
    for source, target in product(everybody(folder), pods(folder)):
        if source.name == target.name:
            continue
        for port in {*target.ports.values(), ADMIN, SSH}:
            may = (target.name, port) in doors and source.name not in silent
            if policies.allows(source, target, port) and not may:
                through.add(Arrow(source.name, target.name, port))
    assert through == {arrow for arrow in needed if arrow[1:] not in doors}


@every
def test_pods_of_quire_reach_nothing_outside_but_names(folder: str) -> None:
    outside = Pod("the internet", "outside", {}, {"https": 443})
    for pod in pods(folder):
        if pod.name in ("prometheus", "redis"):
            continue
        assert not network(folder).allows(pod, outside, 443), pod.name
        for protocol in ("TCP", "UDP"):
            assert network(folder).allows(pod, NAMES, 53, protocol), pod.name


@every
def test_workers_reach_each_others_kv_and_nobody_else_does(folder: str) -> None:
    (worker,) = [pod for pod in pods(folder) if pod.name == "worker"]
    other = replace(worker, name="another worker")
    open_ports = {port for port in {*worker.ports.values(), ADMIN, SSH} if network(folder).allows(other, worker, port)}
    assert open_ports == {worker.ports["grpc"]}


def test_ranks_on_several_hosts_meet_and_nobody_else_gets_there() -> None:
    folder, ephemeral = "overlays/gpu-hosts", 29_500
    policies, (leader, other) = network(folder), hosts(folder)
    assert policies.allows(leader, other, ephemeral)
    assert policies.allows(other, leader, ephemeral)
    (scheduler,) = [pod for pod in pods(folder) if pod.name == "scheduler"]
    assert policies.allows(leader, scheduler, scheduler.ports["grpc"])
    assert not policies.allows(other, scheduler, scheduler.ports["grpc"])
    for stranger, host in product(everybody(folder), (leader, other)):
        assert not policies.allows(stranger, host, ephemeral), stranger.name


@every
def test_redis_reaches_nobody(folder: str) -> None:
    for source, target in product(pods(folder), everybody(folder)):
        if source.name == "redis" and target is not source:
            assert not any(network(folder).allows(source, target, port) for port in (443, 8000, 50051, 50052, 9090))


@every
def test_every_policy_is_about_somebody(folder: str) -> None:
    selecting = {name for pod in [*pods(folder), *hosts(folder)] for name in network(folder).selecting(pod)}
    assert selecting == {policy["metadata"]["name"] for policy in of_kind(folder, "NetworkPolicy")}


@pytest.mark.parametrize("name", ["frontend", "scheduler", "worker", "redis"])
def test_a_policy_that_is_missing_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing a policy that selects a pod breaks a needed connection, because `nothing-else` stays."""
    left = [r for r in BUILDS["base"] if (r["kind"], r["metadata"]["name"]) != ("NetworkPolicy", name)]
    monkeypatch.setitem(BUILDS, "base", left)
    with pytest.raises(AssertionError):
        test_what_gets_through_is_what_the_settings_need("base")


def test_a_door_that_is_open_too_far_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone: dict[str, Any] = {
        "kind": "NetworkPolicy",
        "metadata": {"name": "too-far"},
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/component": "worker"}},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"port": "metrics"}]}],
        },
    }
    monkeypatch.setitem(BUILDS, "base", [*BUILDS["base"], everyone])
    with pytest.raises(AssertionError):
        test_what_gets_through_is_what_the_settings_need("base")


def policy(**spec: Any) -> Network:
    return Network(({"metadata": {"name": "p", "namespace": "a"}, "spec": {"podSelector": {}, **spec}},))


def test_without_a_policy_everything_is_open() -> None:
    assert Network(()).allows(Pod("x", "a"), Pod("y", "b"), 1)


def test_a_rule_needs_its_peer_and_its_port() -> None:
    own = policy(policyTypes=["Ingress"], ingress=[{"from": [{"podSelector": {}}], "ports": [{"port": "web"}]}])
    target = Pod("y", "a", ports={"web": 80})
    assert own.allows(Pod("x", "a"), target, 80)
    assert not own.allows(Pod("x", "a"), target, 81)
    assert not own.allows(Pod("x", "a"), target, 80, "UDP")
    assert not own.allows(Pod("x", "b"), target, 80)
    assert own.allows(target, Pod("z", "b"), 80)


def test_both_ends_have_to_agree() -> None:
    out = policy(policyTypes=["Egress"], egress=[])
    assert not out.allows(Pod("x", "a"), Pod("y", "b"), 80)
    assert out.allows(Pod("y", "b"), Pod("x", "a"), 80)


def test_a_field_that_is_not_read_is_an_error() -> None:
    with pytest.raises(Unsupported, match="ipBlock"):
        policy(policyTypes=["Ingress"], ingress=[{"from": [{"ipBlock": {}}]}]).allows(Pod("x", "a"), Pod("y", "a"), 1)
    with pytest.raises(Unsupported, match="endPort"):
        policy(policyTypes=["Ingress"], ingress=[{"ports": [{"port": 1, "endPort": 9}]}]).allows(
            Pod("x", "a"), Pod("y", "a"), 1
        )
    with pytest.raises(Unsupported, match="NotIn"):
        matches({"matchExpressions": [{"key": "k", "operator": "NotIn", "values": []}]}, {})


@workloads
def test_the_admin_port_listens_in_the_pod_only(folder: str, role: str, tmp_path: Path) -> None:
    """No policy has to close it."""
    assert settings_of(folder, role, tmp_path).admin_host == "127.0.0.1"


def test_nobody_has_changed_what_is_built() -> None:
    assert kustomize.build(K8S / "base") == BUILDS["base"]

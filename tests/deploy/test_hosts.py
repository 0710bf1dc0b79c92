"""Ranks on several hosts in Kubernetes: a LeaderWorkerSet starts a consistent replica."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from quire.services.worker.building.rank_processes.start import check_nodes
from quire.shared.settings import WorkerSettings
from tests.deploy import dockerfile, kustomize, service
from tests.deploy.paths import DOCKERFILE
from tests.deploy.test_manifests import KUBERNETES, container, named, variables

FOLDER = "overlays/gpu-hosts"
GROUP = named(FOLDER, "LeaderWorkerSet", "ranks")
TEMPLATE = GROUP["spec"]["leaderWorkerTemplate"]
templates = pytest.mark.parametrize("template", kustomize.POD_TEMPLATES)


def controller_environment(index: int) -> dict[str, str]:
    """Returns the environment that the controller of LeaderWorkerSet (0.6) sets in each container."""
    return {
        "LWS_LEADER_ADDRESS": "ranks-0.ranks.quire",
        "LWS_GROUP_SIZE": str(TEMPLATE["size"]),
        "LWS_WORKER_INDEX": str(index),
    }


def settings_of(index: int, scratch: Path) -> WorkerSettings:
    pod = TEMPLATE["workerTemplate" if index else "leaderTemplate"]["spec"]
    (described,) = pod["containers"]
    arguments = described["args"]
    for name, value in controller_environment(index).items():
        arguments = [argument.replace(f"$({name})", value) for argument in arguments]
    image = dockerfile.target(DOCKERFILE, "worker-cuda")
    environment = {**image.environment, **dict(variables(described))}
    (config,) = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    found = service.Service(
        arguments,
        {key: value for key, value in environment.items() if key.startswith("QUIRE_")},
        named(FOLDER, "ConfigMap", config)["data"]["quire.yaml"],
        pod["terminationGracePeriodSeconds"],
    )
    settings = found.settings(scratch)
    service.check(settings, found.stop_after_s)
    assert isinstance(settings, WorkerSettings)
    return settings


@templates
def test_templates_fit_the_schemas_of_kubernetes(template: str) -> None:
    labels = TEMPLATE[template]["metadata"]["labels"]
    pods: dict[str, Any] = {"selector": {"matchLabels": labels}, "template": TEMPLATE[template]}
    wrapped = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": pods}
    kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)
    pods["template"] = {**TEMPLATE[template], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError, match="specs"):
        kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)


def test_every_host_gets_its_place_and_all_mean_the_same_replica(tmp_path: Path) -> None:
    nodes = [settings_of(index, tmp_path) for index in range(TEMPLATE["size"])]
    for index, settings in enumerate(nodes):
        check_nodes(settings)
        assert (settings.nnodes, settings.node_rank) == (len(nodes), index)
    assert len({(one.master_addr, one.master_port, one.model, one.num_ranks) for one in nodes}) == 1


@templates
def test_every_rank_of_a_host_has_a_gpu(template: str, tmp_path: Path) -> None:
    (described,) = TEMPLATE[template]["spec"]["containers"]
    settings = settings_of(0, tmp_path)
    assert settings.device == "cuda"
    assert int(described["resources"]["limits"]["nvidia.com/gpu"]) * settings.nnodes == settings.num_ranks
    assert described["image"] == container(FOLDER, "worker")["image"]
    assert "/dev/shm" in {mount["mountPath"] for mount in described["volumeMounts"]}, "what a pod has is 64 MiB"


def test_only_the_leader_is_looked_at() -> None:
    """Probes, Prometheus and budgets select workers by label; a host without rank 0 serves nothing."""
    leader, other = (TEMPLATE[template]["metadata"]["labels"] for template in kustomize.POD_TEMPLATES)
    assert leader["app.kubernetes.io/component"] == "worker"
    assert other["app.kubernetes.io/component"] == "ranks"
    assert not {"ports", "readinessProbe"} & TEMPLATE["workerTemplate"]["spec"]["containers"][0].keys()
    assert named(FOLDER, "Deployment", "worker")["spec"]["replicas"] == 0

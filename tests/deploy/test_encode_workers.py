"""Encode workers in Kubernetes: a Deployment that differs from `worker` in its role only."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from quire.shared.settings import WorkerSettings
from tests.deploy.test_manifests import named, settings_of

FOLDER = "overlays/gpu-encode"
LABELS = {"worker": "language", "encode": "encode"}  # by Deployment
ROLES = {"worker": "both", "encode": "encode"}
deployments = pytest.mark.parametrize("name", LABELS)


def without_role(name: str) -> dict[str, Any]:
    """Returns a Deployment's description without the parts that depend on the role."""
    spec = copy.deepcopy(named(FOLDER, "Deployment", name)["spec"])
    spec.pop("replicas", None)  # those of `worker` follow its load
    pod = spec["template"]["spec"]
    (spread,) = pod["topologySpreadConstraints"]
    for labels in (spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"]):
        assert labels.pop("media") == LABELS[name]
    assert spread["labelSelector"]["matchLabels"].pop("media") == LABELS[name]
    (container,) = pod["containers"]
    container["env"] = {entry["name"]: entry for entry in container["env"]}
    container["env"].pop("QUIRE_WORKER_ROLE", None)
    pod["volumes"] = {volume["name"]: volume for volume in pod["volumes"]}
    container["volumeMounts"] = {mount["name"]: mount for mount in container["volumeMounts"]}
    return dict(spec)


@deployments
def test_each_has_its_role(name: str, tmp_path: Path) -> None:
    settings = settings_of(FOLDER, name, tmp_path)
    assert isinstance(settings, WorkerSettings)
    assert settings.role == ROLES[name]


def test_they_differ_in_nothing_else() -> None:
    assert without_role("encode") == without_role("worker")


@deployments
def test_each_has_a_budget_of_its_own(name: str) -> None:
    selector = named(FOLDER, "Deployment", name)["spec"]["selector"]
    assert named(FOLDER, "PodDisruptionBudget", name)["spec"]["selector"] == selector

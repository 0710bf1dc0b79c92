"""Volumes for KV tiers: at the configured paths, and large enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.shared.settings import WorkerSettings
from tests.deploy.test_manifests import container, pod, settings_of

FOLDER = "overlays/gpu-tiers"
UNITS = {"Gi": 1.0, "Mi": 1 / 1024}
MORE = 1.02  # of a volume than of blocks: tables, headers and folders


def gib(quantity: str) -> float:
    return float(quantity[:-2]) * UNITS[quantity[-2:]]


def volume_at(path: str) -> dict[str, Any]:
    (name,) = [m["name"] for m in container(FOLDER, "worker")["volumeMounts"] if m["mountPath"] == path]
    (found,) = [volume for volume in pod(FOLDER, "worker")["volumes"] if volume["name"] == name]
    return dict(found)


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    found = settings_of(FOLDER, "worker", tmp_path)
    assert isinstance(found, WorkerSettings)
    return found


def test_the_region_is_in_memory_that_the_container_may_have(settings: WorkerSettings) -> None:
    volume = volume_at(settings.kv_offloading_region)["emptyDir"]
    assert volume["medium"] == "Memory", "a worker refuses another file system"
    assert gib(volume["sizeLimit"]) >= MORE * settings.kv_offloading_size > 0
    memory = gib(container(FOLDER, "worker")["resources"]["limits"]["memory"])
    assert memory >= gib(volume["sizeLimit"]) + 16, "the weights pass through host memory"


def test_the_folder_is_on_a_disk_with_room(settings: WorkerSettings) -> None:
    volume = volume_at(settings.kv_offloading_disk)["emptyDir"]
    assert "medium" not in volume
    size = gib(volume["sizeLimit"])
    assert size >= MORE * settings.kv_offloading_disk_size > 0, "more than the limit evicts the pod"
    asked = container(FOLDER, "worker")["resources"]["requests"]["ephemeral-storage"]
    assert gib(asked) >= size, "a node without that much is none for it"


def test_both_tiers_outlive_the_container_under_its_name(settings: WorkerSettings) -> None:
    """Folders are named by the pod's id, and the volumes belong to the pod."""
    assert settings.id == ""
    assert pod(FOLDER, "worker").get("restartPolicy", "Always") == "Always"

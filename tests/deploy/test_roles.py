"""Workers of two roles in Kubernetes: two Deployments that differ only in role, each scaled by its own load."""

from __future__ import annotations

import copy
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from quire.shared.settings import WorkerSettings
from tests.deploy.test_manifests import named, of_kind, settings_of

FOLDER = "overlays/gpu-roles"
ROLES = {"worker": "decode", "prefill": "prefill"}  # by Deployment
roles = pytest.mark.parametrize("name", ROLES)


def without_role(name: str) -> dict[str, Any]:
    """Returns a Deployment's description without the parts that depend on the role."""
    spec = copy.deepcopy(named(FOLDER, "Deployment", name)["spec"])
    pod = spec["template"]["spec"]
    (spread,) = pod["topologySpreadConstraints"]
    for labels in (spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"]):
        assert labels.pop("role") == ROLES[name]
    assert spread["labelSelector"]["matchLabels"].pop("role") == ROLES[name]
    (described,) = pod["containers"]
    described["env"] = {entry["name"]: entry for entry in described["env"]}
    assert described["env"].pop("QUIRE_WORKER_ROLE")["value"] == ROLES[name]
    pod["volumes"] = {volume["name"]: volume for volume in pod["volumes"]}
    described["volumeMounts"] = {mount["name"]: mount for mount in described["volumeMounts"]}
    return dict(spec)


@roles
def test_each_has_its_role(name: str, tmp_path: Path) -> None:
    settings = settings_of(FOLDER, name, tmp_path)
    assert isinstance(settings, WorkerSettings)
    assert settings.role == ROLES[name]


def test_they_differ_in_nothing_else() -> None:
    """GPUs, models, probes, settings: what a component changes, it changes in both."""
    assert without_role("prefill") == without_role("worker")


def test_no_deployment_selects_pods_of_the_other() -> None:
    for name, other in (("worker", "prefill"), ("prefill", "worker")):
        selector = named(FOLDER, "Deployment", name)["spec"]["selector"]["matchLabels"]
        labels = named(FOLDER, "Deployment", other)["spec"]["template"]["metadata"]["labels"]
        assert not selector.items() <= labels.items()


@roles
def test_each_has_a_budget_of_its_own(name: str) -> None:
    selector = named(FOLDER, "Deployment", name)["spec"]["selector"]
    assert named(FOLDER, "PodDisruptionBudget", name)["spec"]["selector"] == selector


@roles
def test_each_is_scaled_by_what_its_own_workers_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler reports a worker by its id, which has the name of the pod, which begins as the Deployment does."""
    scaled = named(FOLDER, "ScaledObject", name)["spec"]
    assert (scaled["scaleTargetRef"]["kind"], scaled["scaleTargetRef"]["name"]) == ("Deployment", name)
    assert "replicas" not in named(FOLDER, "Deployment", name)["spec"]
    for deployment in ROLES:
        monkeypatch.setattr(socket, "gethostname", lambda found=deployment: f"{found}-6b7f9c4d5-x2x9k")
        reported = settings_of(FOLDER, deployment, tmp_path).name
        for trigger in scaled["triggers"]:
            matchers = re.findall(r'\{namespace="quire", engine(=~|!~)"(.+?)"\}', trigger["metadata"]["query"])
            assert len(matchers) == trigger["metadata"]["query"].count("vllm:")
            for operator, pattern in matchers:
                is_counted = bool(re.fullmatch(pattern, reported)) == (operator == "=~")
                assert is_counted == (deployment == name), (operator, pattern, reported)


def test_both_ask_one_prometheus() -> None:
    triggers = [trigger for scaled in of_kind(FOLDER, "ScaledObject") for trigger in scaled["spec"]["triggers"]]
    assert len(triggers) == 3
    assert len({trigger["metadata"]["serverAddress"] for trigger in triggers}) == 1

"""The kustomization builder that other tests use."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import kustomize
from tests.deploy.paths import K8S, KUSTOMIZATIONS

KUBECTL = shutil.which("kubectl")


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_builds_what_kubectl_builds(folder: str) -> None:
    command = [str(KUBECTL), "kustomize", str(K8S / folder)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert normalised(kustomize.build(K8S / folder)) == normalised(list(yaml.safe_load_all(output)))


@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_no_two_resources_have_one_name(folder: str) -> None:
    resources = kustomize.build(K8S / folder)
    names = [(r["kind"], r["metadata"]["name"]) for r in resources]
    assert len(names) == len(set(names))


def test_every_kustomization_is_part_of_a_build_that_is_tested() -> None:
    seen: set[Path] = set()

    def visit(folder: Path) -> None:
        seen.add(folder)
        document = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for entry in [*document.get("resources", []), *document.get("components", [])]:
            if (folder / entry).is_dir():
                visit((folder / entry).resolve())

    for folder in KUSTOMIZATIONS:
        visit(K8S / folder)
    assert seen == {path.parent for path in K8S.rglob("kustomization.yaml")}


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("namePrefix: x-\n")
    with pytest.raises(kustomize.Unsupported, match="namePrefix"):
        kustomize.build(tmp_path)


def normalised(value: Any) -> Any:
    """Returns resources without the order of resources and of lists merged by key, which has no meaning."""
    if isinstance(value, dict):
        return {key: normalised(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return sorted(map(normalised, value), key=lambda item: json.dumps(item, sort_keys=True))
    return value

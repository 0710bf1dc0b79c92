"""The chart is up to date with the kustomizations, and renders to the objects that they build."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy import kustomize
from tests.deploy.chart import values
from tests.deploy.chart.contents import CHART, OVERLAYS, links, texts
from tests.deploy.chart.renderer import Renderer, Unsupported
from tests.deploy.chart.templates import CHECKSUM
from tests.deploy.paths import K8S

NAMESPACE = "quire"
GO, HELM = shutil.which("go"), shutil.which("helm")
CASES = {"": "base", **OVERLAYS}  # by file of values
every = pytest.mark.parametrize("name", CASES)


def values_of(name: str) -> values.Values:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    given = yaml.safe_load((CHART / "values" / f"{name}.yaml").read_text()) if name else {}
    return values.merged(defaults, given)


def templates() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}


def files() -> dict[str, str]:
    return {name: (CHART / name).read_text() for name in links()}


def rendered(given: values.Values) -> dict[str, str]:
    renderer = Renderer(given, files(), NAMESPACE)
    return {name: renderer.render(template) for name, template in templates().items()}


def objects(rendered_texts: list[str]) -> list[Any]:
    return [document for text in rendered_texts for document in yaml.safe_load_all(text) if document]


def comparable(resources: list[Any]) -> dict[tuple[str, str], Any]:
    """Returns objects by kind and name. Helm adds the namespace, and uses a checksum instead of a ConfigMap's hash."""
    found = {}
    for resource in copy.deepcopy(resources):
        resource["metadata"].pop("namespace", None)
        if "template" in resource.get("spec", {}):
            metadata = resource["spec"]["template"]["metadata"]
            metadata.get("annotations", {}).pop(CHECKSUM, None)
            if not metadata.get("annotations", True):
                del metadata["annotations"]
        if (resource["kind"], resource["metadata"]["name"]) == ("ConfigMap", "quire"):
            resource["data"]["quire.yaml"] = yaml.safe_load(resource["data"]["quire.yaml"])
        for subject in resource.get("subjects", []):
            subject["namespace"] = NAMESPACE
        if resource["kind"] != "Namespace":
            found[resource["kind"], resource["metadata"]["name"]] = resource
    return found


def test_is_current() -> None:
    """`python -m tests.deploy.chart` updates it."""
    expected = texts()
    assert {str(path.relative_to(CHART)) for path in CHART.rglob("*") if not path.is_dir()} == {*expected, *links()}
    for name, text in expected.items():
        assert (CHART / name).read_text() == text, name
    for name, target in links().items():
        assert (CHART / name).readlink() == Path(target)


@every
def test_renders_to_what_kustomize_builds(name: str) -> None:
    found = comparable(objects(list(rendered(values_of(name)).values())))
    assert found == comparable(kustomize.build(K8S / CASES[name], hashed=False))


@every
def test_its_values_fit_its_schema(name: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values_of(name), schema)
    for path in ("worker.replica", "autoscaling.tozero", "wrker"):
        wrong = copy.deepcopy(values_of(name))
        values.put(wrong, path, 1)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_another_setting_rolls_the_pods() -> None:
    def checksum(given: values.Values) -> set[str]:
        found = objects([rendered(given)[f"deployment-{role}.yaml"] for role in ("frontend", "scheduler", "worker")])
        return {d["spec"]["template"]["metadata"]["annotations"][CHECKSUM] for d in found}

    other = copy.deepcopy(values_of(""))
    other["settings"]["worker"]["cpu_kv_cache_gib"] = 2
    (before,), (after,) = checksum(values_of("")), checksum(other)
    assert before != after


@pytest.mark.slow
@pytest.mark.skipif(GO is None, reason="Go is not installed")
def test_the_language_of_helm_renders_the_same(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    source = Path(__file__).with_name("engine.go")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([str(GO), "build", "-o", engine, source], check=True, env=environment)
    for name in CASES:
        asked = {"values": values_of(name), "files": files(), "namespace": NAMESPACE, "templates": templates()}
        output = subprocess.run([engine], input=json.dumps(asked), check=True, capture_output=True, text=True).stdout
        own = rendered(values_of(name))
        assert {key: objects([text]) for key, text in json.loads(output).items()} == {
            key: objects([text]) for key, text in own.items()
        }


@pytest.mark.slow
@pytest.mark.skipif(HELM is None, reason="helm is not installed")
@every
def test_helm_renders_the_same(name: str) -> None:
    given = ["--values", str(CHART / "values" / f"{name}.yaml")] if name else []
    command = [str(HELM), "template", "quire", str(CHART), "--namespace", NAMESPACE, *given]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert comparable(objects([output])) == comparable(objects(list(rendered(values_of(name)).values())))


@pytest.mark.parametrize(
    "template",
    [
        "{{ range .Values.a }}{{ end }}",
        "{{ .Values.nothing }}",
        "{{ if .Values.a }}",
        "{{ end }}",
        "{{ .Values.a | trim }}",
    ],
)
def test_what_the_renderer_does_not_know_is_an_error(template: str) -> None:
    with pytest.raises(Unsupported):
        Renderer({"a": 1}, {}, NAMESPACE).render(template)

"""The example requests of the OpenAPI document succeed at a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from quire.bundled import ADAPTERS, FOLDER
from quire.cluster import Cluster
from quire.services.frontend.composition.dialects import DIALECTS
from quire.services.frontend.http.document.examples import examples
from quire.shared.security import secret_file
from tests.e2e.conftest import running_cluster
from tests.e2e.encoders import encoder_folder

KEY = "k" * 40
CLASSIFIES, UPDATES = {"/classify"}, {"/update_weights_from_disk"}
NEEDS_MORE = {  # needs more than a body: a trainer's process group, an uploaded file, a running response
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
    "/v1/files",
    "/v1/batches",
    "/v1/batches/{batch_id}/cancel",
    "/v1/responses/{response_id}/cancel",
}
FOLDERS = {"/adapters/sql": str(ADAPTERS / "json"), "/weights/step-7": str(FOLDER)}  # as operators send them
PATHS = sorted(examples("model", DIALECTS))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    key = tmp_path_factory.mktemp("operator") / "key"
    secret_file.write(key, KEY)
    worker = {"num_blocks": 300, "lora_folders": (str(ADAPTERS),)}
    with running_cluster(worker=worker, frontend={"admin_key_file": str(key)}) as running:
        yield running


@pytest.fixture(scope="module")
def document(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"http://{cluster.http_address}/openapi.json").json()
    return found


def example(document: dict[str, Any], path: str) -> Any:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]


def url(cluster: Cluster, document: dict[str, Any], path: str) -> str:
    """Returns the URL with example values of its parameters."""
    named = document["paths"][path]["post"].get("parameters", ())
    values = {one["name"]: one["example"] for one in named if one["in"] == "path"}
    return f"http://{cluster.http_address}{path.format(**values)}"


def test_every_operation_with_a_body_has_an_example(document: dict[str, Any]) -> None:
    bodies = {
        path
        for path, operations in document["paths"].items()
        if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert bodies == set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_an_example_is_of_the_documents_own_shape(path: str, document: dict[str, Any]) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(example(document, path), {**schema, "components": document["components"]})


@pytest.mark.parametrize("path", [path for path in PATHS if path not in CLASSIFIES | NEEDS_MORE | UPDATES])
def test_an_example_is_answered(path: str, cluster: Cluster, document: dict[str, Any]) -> None:
    if path == "/v1/unload_lora_adapter":
        posted(cluster, document, "/v1/load_lora_adapter")
    answer = posted(cluster, document, path)
    assert answer.status_code == 200, answer.text
    assert answer.content


def posted(cluster: Cluster, document: dict[str, Any], path: str) -> httpx.Response:
    body = json.dumps(example(document, path))
    for shown, own in FOLDERS.items():
        body = body.replace(shown, own)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    return httpx.post(url(cluster, document, path), content=body, headers=headers, timeout=60)


def test_weights_are_updated_as_the_example_says(tmp_path: Path) -> None:
    """Uses a cluster of its own, since weights cannot be updated where adapters were loaded."""
    secret_file.write(tmp_path / "key", KEY)
    worker = {"num_blocks": 300, "weights_folders": (str(FOLDER.parent),)}
    with running_cluster(worker=worker, frontend={"admin_key_file": str(tmp_path / "key")}) as running:
        found = httpx.get(f"http://{running.http_address}/openapi.json").json()
        answer = posted(running, found, "/update_weights_from_disk")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/pause", "/resume", "/sleep", "/wake_up"])
def test_calls_without_body_are_answered(path: str, cluster: Cluster, document: dict[str, Any]) -> None:
    answer = httpx.post(url(cluster, {"paths": {path: {"post": {}}}}, path), headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text


def test_a_model_that_classifies_answers_what_is_for_it(tmp_path: Path) -> None:
    encoder_folder.write(tmp_path, "bert", "ForSequenceClassification", num_labels=3)
    with running_cluster(model=str(tmp_path), worker={"num_blocks": 300}) as running:
        found = httpx.get(f"http://{running.http_address}/openapi.json").json()
        answer = httpx.post(f"http://{running.http_address}/classify", json=example(found, "/classify"), timeout=60)
    assert answer.status_code == 200, answer.text

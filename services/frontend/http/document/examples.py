"""Example bodies for the OpenAPI document, by path: small, and answered with 200 by a suitable model when sent
unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from quire.services.frontend.http.dialects import Dialects

Body = Mapping[str, Any]

WEIGHTS = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[256]]}
MARK = "x-examples"  # set in a document once it has examples
NAME, VERSION = "name", "version"  # parameters of paths


def examples(model: str, dialects: Dialects) -> dict[str, Body]:
    """Returns the example bodies of all dialects and operators' calls by path, for a frontend that serves `model`."""
    found = dict(_operation())
    for dialect in dialects.all:
        found |= dialect.examples(model)
    return found


def parameters(model: str) -> dict[str, str]:
    """Returns example values of path parameters."""
    return {NAME: model, VERSION: "1"}


def _operation() -> dict[str, Body]:
    """Returns example bodies of batches and of operators' calls by path."""
    return {
        "/v1/batches": {
            "input_file_id": "file-of-POST-v1-files",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
        "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "/adapters/sql"},
        "/v1/unload_lora_adapter": {"lora_name": "sql"},
        "/update_weights_from_disk": {"model_path": "/weights/step-7", "weight_version": "step-7"},
        "/init_weights_update_group": {
            "master_address": "127.0.0.1",
            "master_port": 29600,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "trainer",
            "backend": "gloo",
        },
        "/update_weights_from_distributed": {**WEIGHTS, "group_name": "trainer", "weight_version": "step-7"},
        "/destroy_weights_update_group": {"group_name": "trainer"},
    }


def add(app: FastAPI, model: str, dialects: Dialects) -> None:
    """Adds the examples to the app's OpenAPI document when it is next requested."""
    base_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        """Returns the document of the wrapped generator, with the examples added at the first call."""
        document = base_openapi()
        if not document.get(MARK):
            document[MARK] = True
            _fill(document["paths"], examples(model, dialects), parameters(model))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _fill(paths: Mapping[str, Any], bodies: Mapping[str, Body], values: Mapping[str, str]) -> None:
    """Adds the example bodies and the values of path parameters to the document's paths, in place."""
    for path, operations in paths.items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and parameter["name"] in values:
                    parameter["example"] = values[parameter["name"]]
            if method == "post" and path in bodies:
                operation["requestBody"]["content"]["application/json"]["example"] = bodies[path]

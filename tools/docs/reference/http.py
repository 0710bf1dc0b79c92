"""Page of the HTTP API, from the OpenAPI document of a running frontend."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from quire.cluster import Cluster, ClusterOptions
from quire.shared.settings import SERVICES
from tools.docs.reference.markdown import cell, code, table

HEAD = """# HTTP API

A frontend serves all of these paths on one port (8000). `/docs` of a running frontend has the shape of every body, and
sends calls; `/openapi.json` is the document behind it.
"""


def page() -> str:
    """Starts a cluster to read its OpenAPI document, and returns a row per path and method."""
    paths = _document()["paths"]
    rows = []
    for path, operations in sorted(paths.items()):
        for method, operation in operations.items():
            fields = ", ".join(code(name) for name in _required(operation))
            rows.append((code(f"{method.upper()} {path}"), cell(operation.get("summary", "")), fields))
    return f"{HEAD}\n" + table(("Path", "Operation", "Required fields"), rows)


def _required(operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    return list(schema.get("required", ()))


def _document() -> dict[str, Any]:
    """Returns the OpenAPI document of a frontend, in a cluster that is started for it and stopped."""
    quiet = {service: {"log_level": "warning"} for service in SERVICES}
    with (
        Cluster(ClusterOptions(http_port=0, grpc_port=0, settings=quiet)) as cluster,
        urllib.request.urlopen(f"http://{cluster.http_address}/openapi.json") as answer,
    ):
        document: dict[str, Any] = json.load(answer)
    return document

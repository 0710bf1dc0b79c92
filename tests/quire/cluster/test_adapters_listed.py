"""Frontends of a cluster with adapters are healthy once these are listed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cluster.endpoints import Endpoints
from quire.cluster.metrics_ports import MetricsPorts
from quire.cluster.options import ClusterOptions, ServiceSpec, plan


@pytest.mark.parametrize(
    ("settings", "awaits"),
    [
        ({}, None),
        ({"worker": {"lora": {}}}, None),
        ({"worker": {"lora": {"pirate": "folder"}}}, True),
        ({"worker": {"lora": {"pirate": "folder"}}, "frontend": {"health_awaits_worker": False}}, False),
    ],
)
def test_health_awaits_the_worker_that_has_them(settings: dict[str, Any], awaits: bool | None) -> None:
    endpoints = Endpoints()
    try:
        wanted = ClusterOptions(http_port=0, grpc_port=0, redis="none", settings=settings)
        specs = plan(wanted, endpoints, MetricsPorts(endpoints, 0))
        (frontend,) = [spec for spec in specs if isinstance(spec, ServiceSpec) and spec.role == "frontend"]
        assert frontend.flags.get("health_awaits_worker") is awaits
    finally:
        endpoints.close()

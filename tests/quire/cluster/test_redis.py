"""The Redis of a local cluster requires its password."""

from __future__ import annotations

import stat
import threading
from typing import Any

import pytest
import redis

from quire.cluster.endpoints import Endpoints
from quire.cluster.metrics_ports import MetricsPorts
from quire.cluster.options import ClusterOptions, RedisSpec, ServiceSpec, plan
from quire.cluster.process import ServiceProcess


@pytest.mark.slow
def test_its_password_is_on_no_command_line_and_all_services_know_it() -> None:
    endpoints = Endpoints()
    try:
        specs = plan(ClusterOptions(http_port=0, grpc_port=0, schedulers=2), endpoints, MetricsPorts(endpoints, 0))
        (spec,) = (spec for spec in specs if isinstance(spec, RedisSpec))
        services = [s for s in specs if isinstance(s, ServiceSpec) and s.role in ("scheduler", "frontend")]
        (path,) = {s.flags["redis_password_file"] for s in services}
        password = path.read_text().strip()
        assert len(password) >= 32
        for other in specs:
            assert password not in " ".join(other.command())
            assert password not in str(other.environment())
        for file in (path, spec.config):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        _check_server(spec, password)
    finally:
        endpoints.close()


def _check_server(spec: RedisSpec, password: str) -> None:
    others = set(threading.enumerate())
    process = ServiceProcess(spec, lambda _: None, None)
    process.start()
    try:
        assert process.ready.wait(60)
        with redis.Redis(unix_socket_path=str(spec.socket)) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("key")
        with redis.Redis(unix_socket_path=str(spec.socket), password=password) as known:
            assert known.set("key", "value")
    finally:
        process.close()
        for thread in set(threading.enumerate()) - others:
            thread.join(5)


def test_a_redis_of_others_gets_what_it_was_given() -> None:
    endpoints = Endpoints()
    try:
        specs = plan(
            ClusterOptions(http_port=0, grpc_port=0, redis="redis://10.0.0.1:6379"),
            endpoints,
            MetricsPorts(endpoints, 0),
        )
        flags = [s.flags for s in specs if isinstance(s, ServiceSpec) and s.role != "worker"]
        assert all(f["redis"] == "redis://10.0.0.1:6379" and "redis_password_file" not in f for f in flags)
    finally:
        endpoints.close()


@pytest.mark.parametrize(
    ("options", "retention_s"),
    [
        ({"frontends": 2, "redis": "none"}, 0.0),
        ({"frontends": 2, "redis": "none", "settings": {"frontend": {"stream_retention_s": 9.0}}}, 9.0),
        ({"frontends": 2, "redis": "redis://elsewhere"}, None),
        ({"frontends": 1, "redis": "none"}, None),
    ],
)
def test_frontends_that_share_a_port_and_no_redis_keep_no_streams(
    options: dict[str, Any], retention_s: float | None
) -> None:
    endpoints = Endpoints()
    try:
        specs = plan(ClusterOptions(http_port=0, grpc_port=0, **options), endpoints, MetricsPorts(endpoints, 0))
    finally:
        endpoints.close()
    found = [spec.flags.get("stream_retention_s") for spec in specs if getattr(spec, "role", "") == "frontend"]
    assert found == [retention_s] * options["frontends"]

"""Cluster secrets, schedulers' addresses, and joining a cluster on another machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.endpoints import Endpoints
from quire.cluster.metrics_ports import MetricsPorts
from quire.cluster.options import ClusterOptions, ServiceSpec, more_workers, plan
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.security import secret_file
from tests.ports import quiet_port


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    held = Endpoints()
    yield held
    held.close()


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return written(tmp_path / "secret")


def written(path: Path) -> str:
    secret_file.write(path, "s" * 32)
    return str(path)


def planned(endpoints: Endpoints, **options: Any) -> list[ServiceSpec]:
    specs = plan(ClusterOptions(http_port=0, grpc_port=0, **options), endpoints, MetricsPorts(endpoints, 0))
    return [spec for spec in specs if isinstance(spec, ServiceSpec)]


def secrets(specs: list[ServiceSpec]) -> dict[str, str]:
    return {spec.role: spec.flags["cluster_secret_file"] for spec in specs}


def test_without_a_named_secret_all_services_have_a_new_one(endpoints: Endpoints) -> None:
    (path,) = set(secrets(planned(endpoints)).values())
    assert len(Path(path).read_text().strip()) == 64


def test_a_named_secret_is_that_of_all_services(endpoints: Endpoints, secret: str) -> None:
    assert set(secrets(planned(endpoints, cluster_secret_file=secret)).values()) == {secret}


def test_the_flag_comes_before_the_environment_and_that_before_the_file(
    endpoints: Endpoints, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_file, of_variable = written(tmp_path / "of-file"), written(tmp_path / "of-variable")
    config = tmp_path / "quire.yaml"
    config.write_text(f"scheduler: {{cluster_secret_file: {of_file}}}\nworker: {{cluster_secret_file: {of_file}}}")
    monkeypatch.setenv("QUIRE_CONFIG", str(config))
    assert secrets(planned(endpoints)) == dict.fromkeys(("scheduler", "worker", "frontend"), of_file)
    monkeypatch.setenv("QUIRE_WORKER_CLUSTER_SECRET_FILE", of_variable)
    assert secrets(planned(endpoints)) == {"scheduler": of_file, "frontend": of_file, "worker": of_variable}
    assert set(secrets(planned(endpoints, cluster_secret_file=secret)).values()) == {secret}


def test_one_service_that_is_given_a_secret_gives_it_to_the_others(
    endpoints: Endpoints, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise services would use different secrets."""
    monkeypatch.setenv("QUIRE_SCHEDULER_CLUSTER_SECRET_FILE", secret)
    assert set(secrets(planned(endpoints)).values()) == {secret}


@pytest.mark.parametrize(("text", "mode"), [("short", 0o600), ("", 0o600), ("s" * 40, 0o644)])
def test_a_secret_that_is_of_no_use_starts_nothing(endpoints: Endpoints, tmp_path: Path, text: str, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(InvalidArgument, match="cluster_secret_file"):
        planned(endpoints, cluster_secret_file=str(path))


def test_schedulers_listen_where_workers_of_other_machines_reach_them(endpoints: Endpoints, secret: str) -> None:
    specs = planned(endpoints, scheduler_host="0.0.0.0", schedulers=2, cluster_secret_file=secret, redis="none")
    schedulers = [spec for spec in specs if spec.role == "scheduler"]
    (worker,) = (spec for spec in specs if spec.role == "worker")
    assert [spec.flags["host"] for spec in (*schedulers, worker)] == ["0.0.0.0"] * 3
    assert worker.flags["scheduler"] == [f"127.0.0.1:{spec.flags['grpc_port']}" for spec in schedulers]


def test_a_scheduler_has_the_port_that_was_asked_for_or_its_name_is_said(endpoints: Endpoints) -> None:
    port = quiet_port()
    (scheduler, *_) = planned(endpoints, scheduler_port=port)
    assert scheduler.flags["grpc_port"] == port
    with pytest.raises(FailedPrecondition, match=f"scheduler_port: 127.0.0.1:{port} is in use"):
        planned(endpoints, scheduler_port=port)


def test_who_joins_starts_workers_alone_with_names_of_their_own(endpoints: Endpoints, secret: str) -> None:
    join = "10.0.0.5:50052,10.0.0.6:50052"
    specs = planned(endpoints, join=join, cluster_secret_file=secret, workers=2, prefill_workers=1, host="10.0.0.7")
    mine = f"{socket.gethostname()}-{os.getpid()}"
    assert [spec.id for spec in specs] == [f"worker-{number}-{mine}" for number in range(3)]
    assert {spec.role for spec in specs} == {"worker"}
    assert {spec.flags["host"] for spec in specs} == {"10.0.0.7"}
    assert [spec.flags["scheduler"][0] for spec in specs] == ["10.0.0.5:50052", "10.0.0.6:50052", "10.0.0.5:50052"]
    assert secrets(specs) == {"worker": secret}


@pytest.mark.parametrize("join", ["10.0.0.5", ":50052", "10.0.0.5:", "10.0.0.5:0", "10.0.0.5:70000", "a:1,b"])
def test_an_address_to_join_has_a_host_and_a_port(endpoints: Endpoints, secret: str, join: str) -> None:
    with pytest.raises(InvalidArgument, match=r"join: .* must be HOST:PORT"):
        planned(endpoints, join=join, cluster_secret_file=secret)


def test_who_joins_without_a_secret_is_told_where_it_belongs(endpoints: Endpoints) -> None:
    with pytest.raises(InvalidArgument, match="cluster_secret_file: is required to join a cluster"):
        planned(endpoints, join="10.0.0.5:50052")


@pytest.mark.parametrize(
    "options",
    [{"workers": 0}, {"frontends": 2}, {"schedulers": 2}, {"redis": "embedded"}, {"scheduler_port": 1}],
    ids=str,
)
def test_what_belongs_to_the_joined_cluster_is_refused_by_name(
    endpoints: Endpoints, secret: str, options: dict[str, Any]
) -> None:
    (name,) = options
    with pytest.raises(InvalidArgument, match=f"^{name}: .*join"):
        planned(endpoints, join="10.0.0.5:50052", cluster_secret_file=secret, **options)


def test_workers_that_are_added_later_have_the_cluster_s_secret(endpoints: Endpoints, secret: str) -> None:
    metrics, options = MetricsPorts(endpoints, 0), ClusterOptions(http_port=0, grpc_port=0, cluster_secret_file=secret)
    specs = plan(options, endpoints, metrics)
    (added,) = more_workers(options, specs, [1], metrics)
    (first,) = (spec for spec in specs if spec.role == "worker")
    assert isinstance(first, ServiceSpec)
    assert {**added.flags, "id": "", "metrics_port": 0} == {**first.flags, "id": "", "metrics_port": 0}

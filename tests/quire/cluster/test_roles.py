"""Assignment of roles and GPUs to workers."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cluster import gpus
from quire.cluster.endpoints import Endpoints
from quire.cluster.metrics_ports import MetricsPorts
from quire.cluster.options import ClusterOptions, ServiceSpec, more_workers, plan


def workers(monkeypatch: pytest.MonkeyPatch, found: list[str], **options: Any) -> list[ServiceSpec]:
    monkeypatch.setenv(gpus.VARIABLE, ",".join(found))
    endpoints = Endpoints()
    try:
        ports = MetricsPorts(endpoints, 0)
        wanted = ClusterOptions(http_port=0, grpc_port=0, redis="none", **options)
        specs = plan(wanted, endpoints, ports)
        planned = [spec for spec in specs if isinstance(spec, ServiceSpec) and spec.role == "worker"]
        return [*planned, *more_workers(wanted, specs, [len(planned)], ports)]
    finally:
        endpoints.close()


def test_roles_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = workers(monkeypatch, [], workers=1, prefill_workers=1, decode_workers=2, encode_workers=1)
    assert [(spec.id, spec.flags.get("role", "both")) for spec in found] == [
        ("worker-0", "both"),
        ("worker-1", "prefill"),
        ("worker-2", "decode"),
        ("worker-3", "decode"),
        ("worker-4", "encode"),
        ("worker-5", "both"),
    ]


def test_an_encode_worker_is_one_process_beside_workers_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"worker": {"tensor_parallel_size": 2, "dtype": "float32"}}
    language, encoder, _ = workers(monkeypatch, [], workers=1, encode_workers=1, settings=settings)
    assert (language.flags["tensor_parallel_size"], encoder.flags["role"]) == (2, "encode")
    assert "tensor_parallel_size" not in encoder.flags
    assert encoder.flags["dtype"] == "float32"


@pytest.mark.parametrize(
    ("found", "ranks", "expected"),
    [
        (["0", "1", "2"], 1, ["0", "1", "2"]),
        (["GPU-a", "GPU-b"], 1, ["GPU-a", "GPU-b", "GPU-a"]),
        (["0", "1", "2", "3"], 2, ["0,1", "2,3", "0,1"]),
        (["0"], 1, [None] * 3),
        ([], 1, [None] * 3),
        (["0", "1", "2"], 2, [None] * 3),
    ],
)
def test_each_worker_has_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch, found: list[str], ranks: int, expected: list[str | None]
) -> None:
    for ranks_of in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        settings = {"worker": {"device": "cuda", ranks_of: ranks}}
        specs = workers(monkeypatch, found, workers=2, settings=settings)
        assert [spec.environment().get(gpus.VARIABLE) for spec in specs] == expected


def test_what_is_visible_is_what_the_user_made_visible() -> None:
    assert gpus.visible({gpus.VARIABLE: "3, 1"}) == ["3", "1"]
    assert gpus.visible({gpus.VARIABLE: ""}) == []

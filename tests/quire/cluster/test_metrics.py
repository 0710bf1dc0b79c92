"""Combined metrics page of a local cluster."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import LLM, SamplingParams
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions, metrics_page
from quire.cluster.endpoints import Endpoints
from quire.cluster.metrics_page import UP, ClusterPage, merged
from quire.cluster.metrics_ports import MetricsPorts
from quire.metrics import Counter, Gauge, Histogram, Metric
from quire.shared.errors import FailedPrecondition
from tests.ports import quiet_port
from tests.waiting import until

PATIENCE_S = 60.0
FEW_BLOCKS = {"worker": {"num_blocks": 300}}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the timeouts of the services' pages."""
    monkeypatch.setattr(metrics_page, "PATIENCE_S", PATIENCE_S)


def samples(text: str) -> dict[tuple[str, str], float]:
    """Returns samples by name and service, summed over other labels."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels["service"])
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_pages_become_one_in_which_each_sample_has_its_service() -> None:
    first = '# HELP a_total As\n# TYPE a_total counter\na_total 1.0\n# HELP b Bs\n# TYPE b gauge\nb{x="}"} 2.0\n'
    second = "# HELP b Bs\n# TYPE b gauge\nb 5\n"
    text = merged({"one": first, "two": second, "three": None})
    assert text.splitlines()[:3] == ["# HELP a_total As", "# TYPE a_total counter", 'a_total{service="one"} 1.0']
    assert text.count("# TYPE b gauge") == 1
    assert samples(text) == {
        ("a_total", "one"): 1.0,
        ("b", "one"): 2.0,
        ("b", "two"): 5.0,
        (UP, "one"): 1.0,
        (UP, "two"): 1.0,
        (UP, "three"): 0.0,
    }


@pytest.mark.usefixtures("patient")
def test_every_service_of_a_cluster_is_on_its_page_and_in_the_file_for_prometheus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has started when its frontends know of a worker, however late that is."""
    real, heard = ClusterPage.sample, []

    def late(page: ClusterPage, service: str, name: str) -> float:
        heard.append((service, real(page, service, name) if len(heard) > 2 else 0.0))
        return heard[-1][1]

    monkeypatch.setattr(ClusterPage, "sample", late)
    file = tmp_path / "targets.json"
    options = ClusterOptions(
        workers=2, frontends=2, http_port=0, grpc_port=0, settings=FEW_BLOCKS, metrics_targets_file=str(file)
    )
    with Cluster(options) as cluster, Client(cluster.grpc_address) as client:
        assert cluster.metrics is not None
        assert [service for service, workers in heard if workers] == ["frontend-0", "frontend-1"]
        assert httpx.get(f"http://{cluster.http_address}/v1/models").json()["data"][0]["max_model_len"] > 0
        client.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        found = samples(httpx.get(f"http://{cluster.metrics.address}/metrics").text)
        services = {"frontend-0", "frontend-1", "scheduler-0", "worker-0", "worker-1"}
        assert {service for name, service in found if name == UP and found[name, service]} == services
        assert sum(found["vllm:generation_tokens_total", f"frontend-{i}"] for i in range(2)) == 5
        assert found["quire_scheduler_generated_tokens_total", "scheduler-0"] == 5
        listed = json.loads(file.read_text())
        assert listed == httpx.get(f"http://{cluster.metrics.address}/targets").json()
        assert {group["labels"]["service"]: group["labels"]["job"] for group in listed}["worker-1"] == "quire-worker"
        for group in listed:
            (target,) = group["targets"]
            assert "process_cpu_seconds_total" in httpx.get(f"http://{target}/metrics").text
        cluster.scale_workers(3)
        assert len(json.loads(file.read_text())) == len(listed) + 1


@pytest.mark.slow
def test_a_service_that_is_away_is_said_to_be_so_and_comes_back_on_its_port() -> None:
    with Cluster(ClusterOptions(http_port=0, grpc_port=0, settings=FEW_BLOCKS)) as cluster:
        assert cluster.metrics is not None
        worker = cluster.process("worker-0")
        before = worker.addresses["metrics"]
        worker.signal(signal.SIGSTOP)
        assert samples(cluster.metrics.text())[UP, "worker-0"] == 0, "others are not held up for ever"
        worker.signal(signal.SIGKILL)
        worker.signal(signal.SIGCONT)
        until(lambda: worker.restarts and worker.ready.is_set(), 2 * PATIENCE_S)
        assert worker.addresses["metrics"] == before
        until(lambda: samples(cluster.metrics.text())[UP, "worker-0"] == 1, 2 * PATIENCE_S)  # type: ignore[union-attr]


def test_ports_are_one_behind_the_other_unless_nobody_asked_and_one_is_taken() -> None:
    endpoints = Endpoints()
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port := quiet_port()))
            with pytest.raises(FailedPrecondition, match=f"metrics_port: 127.0.0.1:{port} is in use"):
                MetricsPorts(endpoints, port)
        ports = MetricsPorts(endpoints, port)
        assert ports.of_cluster == port
        anywhere = MetricsPorts(endpoints, None), MetricsPorts(endpoints, None)
        assert anywhere[0].of_cluster != anywhere[1].of_cluster
    finally:
        endpoints.close()


@pytest.mark.usefixtures("patient")
def test_an_llm_tells_its_metrics_as_values() -> None:
    with LLM(num_blocks=300) as llm:
        llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        metrics = llm.get_metrics()
        with LLM(address=llm.address) as joined, pytest.raises(FailedPrecondition, match="/metrics"):
            joined.get_metrics()

    def named(name: str) -> Metric:
        (metric,) = (metric for metric in metrics if metric.name == name)
        return metric

    generated, running = named("vllm:generation_tokens_total"), named("vllm:num_requests_running")
    first_token = named("vllm:time_to_first_token_seconds")
    assert isinstance(generated, Counter)
    assert isinstance(running, Gauge)
    assert isinstance(first_token, Histogram)
    assert (generated.value, running.value, first_token.count) == (4, 0, 1)
    assert generated.labels == {"model_name": "quire-tiny", "engine": "0", "service": "frontend-0"}
    assert first_token.buckets["+Inf"] == 1
    assert first_token.sum > 0

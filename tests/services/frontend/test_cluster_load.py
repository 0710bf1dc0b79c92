"""Tests of the metrics that gateways read from a frontend: the load of its cluster, and its adapters."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from quire.shared.metrics.cluster_load import GAUGES, ClusterLoadCollector
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler


async def test_a_frontend_reports_the_load_of_its_cluster(folder: Path) -> None:
    script = ScriptedScheduler(num_waiting=3, num_running=2, kv_cache_usage=0.25, num_workers=2)
    async with scheduler(script), running(folder, script.address) as frontend:
        await frontend.until_sessions(1)
        found = await frontend.metrics()
    assert found["quire_frontend_cluster_requests_waiting"] == 3
    assert found["quire_frontend_cluster_requests_running"] == 2
    assert found["quire_frontend_cluster_kv_cache_usage"] == 0.25
    assert found["quire_frontend_cluster_workers"] == 2


def test_adapters_are_labels_of_the_time_of_their_last_change() -> None:
    adapters: list[str] = []
    now = iter([100.0, 200.0])
    collector = ClusterLoadCollector(lambda: dict.fromkeys(GAUGES, 0.0), lambda: adapters, lambda: 0, lambda: next(now))
    registry = CollectorRegistry()
    registry.register(collector)

    def lines() -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if line.startswith("vllm:lora")]

    assert lines() == []
    adapters += ["sql", "law"]
    line = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="law,sql",waiting_lora_adapters=""} 100.0'
    assert lines() == [line]
    assert lines() == [line]
    adapters.pop()
    assert lines() == [
        'vllm:lora_requests_info{max_lora="1",running_lora_adapters="sql",waiting_lora_adapters=""} 200.0'
    ]

"""Connections between services that are cut, slow or silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.cluster import Cluster, ClusterOptions
from quire.cluster.endpoints import Endpoints
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, Said
from tests.chaos.paused_processes import keep_fault
from tests.chaos.proxy import Proxy
from tests.chaos.test_workers import assert_survives

pytestmark = pytest.mark.timeout(300)


class Relayed:
    """A cluster whose services reach the scheduler through relays."""

    def __init__(self, cluster: Cluster, proxies: dict[str, Proxy]) -> None:
        self.cluster = cluster
        self.proxies = proxies


@pytest_asyncio.fixture
async def relayed() -> AsyncIterator[Relayed]:
    endpoints = Endpoints()
    port = endpoints.hold_port("scheduler")
    proxies = {name: Proxy(f"127.0.0.1:{port}") for name in ("worker", "frontend")}
    for proxy in proxies.values():
        await proxy.start()
    settings = {
        "worker": {**WORKER, "scheduler": f"127.0.0.1:{proxies['worker'].port}"},
        "frontend": {**FRONTEND, "schedulers": (f"127.0.0.1:{proxies['frontend'].port}",)},
        "scheduler": {**SCHEDULER, "grpc_port": port},
    }
    cluster = Cluster(ClusterOptions(http_port=0, grpc_port=0, settings=settings))
    await asyncio.to_thread(cluster.start)
    yield Relayed(cluster, proxies)
    for proxy in proxies.values():
        proxy.restore()
    await asyncio.to_thread(cluster.stop)
    for proxy in proxies.values():
        await proxy.close()
    endpoints.close()


@pytest.mark.parametrize("side", ["worker", "frontend"])
async def test_a_cut_connection_costs_a_pause(relayed: Relayed, undisturbed: dict[str, Said], side: str) -> None:
    async def cut() -> None:
        for _ in range(3):
            relayed.proxies[side].cut()
            await keep_fault(0.7)

    await assert_survives(relayed.cluster, undisturbed, cut)


@pytest.mark.parametrize("side", ["worker", "frontend"])
@pytest.mark.slow
async def test_a_silent_connection_is_noticed_and_replaced(
    relayed: Relayed, undisturbed: dict[str, Said], side: str
) -> None:
    async def swallow() -> None:
        relayed.proxies[side].swallow()
        await keep_fault(3)
        relayed.proxies[side].cut()
        relayed.proxies[side].restore()

    await assert_survives(relayed.cluster, undisturbed, swallow)


@pytest.mark.slow
async def test_slow_connections_lose_nothing(relayed: Relayed, undisturbed: dict[str, Said]) -> None:
    for proxy in relayed.proxies.values():
        proxy.delay_s = 0.02
    await assert_survives(relayed.cluster, undisturbed, lambda: None)

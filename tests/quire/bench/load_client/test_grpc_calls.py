"""Load is distributed evenly over all frontends."""

from __future__ import annotations

import asyncio

from quire.bench.load_client.grpc_calls import GrpcCaller
from quire.bench.workload.workloads import BenchRequest
from quire.client import Client
from quire.cluster.cluster import Cluster
from quire.cluster.options import ClusterOptions
from quire.shared.pb.admin.v1 import admin_pb2
from tests.waiting import eventually

FRONTENDS = 3
PATIENCE_S = 60.0


def busy(address: str) -> list[int]:
    """Returns the number of requests in progress at each frontend."""
    with Client(address) as client:
        return [service.running for service in client.status() if service.role == admin_pb2.ROLE_FRONTEND]


async def load_of_each(address: str) -> list[int]:
    """Returns the load of each frontend when four requests per frontend are in progress."""
    caller = GrpcCaller(address, 0.0, final_only=False, frontends=FRONTENDS)
    await caller.open()
    body = caller.body(BenchRequest((5, 6, 7), 1000))
    calls = [asyncio.create_task(caller.call(body)) for _ in range(4 * FRONTENDS)]
    found = await eventually(
        lambda: asyncio.to_thread(busy, address), lambda found: sum(found) >= len(calls), PATIENCE_S
    )
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await caller.close()
    return found


async def failure_at(address: str) -> str:
    caller = GrpcCaller(address, 0.0, final_only=False, frontends=FRONTENDS)
    await caller.open()
    timing, _ = await caller.call(caller.body(BenchRequest((5, 6, 7), 4)))
    await caller.close()
    return timing.error


def test_a_server_that_is_not_there_is_a_failed_request() -> None:
    assert asyncio.run(failure_at("127.0.0.1:9")).startswith("UNAVAILABLE")


def test_every_frontend_gets_as_many_requests() -> None:
    settings = {"worker": {"engine": "simulated", "simulated_step_ms": 100.0}}
    with Cluster(ClusterOptions(frontends=FRONTENDS, http_port=0, grpc_port=0, settings=settings)) as cluster:
        assert asyncio.run(load_of_each(cluster.grpc_address)) == [4] * FRONTENDS

"""Outputs of undisturbed runs, and the clusters that tests disturb."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
from collections.abc import Callable, Iterator

import httpx
import pytest

from quire.client import Client
from quire.cluster import Cluster
from quire.params import SamplingParams
from quire.shared.pb.admin.v1 import admin_pb2
from tests.chaos.streams import Crowd, constrained, everything, greedy
from tests.e2e.conftest import running_cluster
from tests.waiting import until

Said = list[tuple[object, ...]]

# Fast enough to notice within a test, slow enough for a busy machine that two workers share: a step of 2,048 tokens of
# a crowd that moves takes longer than a deadline of 2 s there.
WORKER = {"num_blocks": 1500, "threads": 1, "max_num_batched_tokens": 256}
SCHEDULER = {"heartbeat_interval_ms": 200, "step_deadline_s": 5.0}
LONGER_THAN_A_STEP_S = 8.0
# What begins anew takes ten times as long on a machine with as much else to do.
FRONTEND = {"unavailable_after_s": 120.0}


async def listen(cluster: Cluster, *kinds: Callable[[int], SamplingParams]) -> dict[str, Said]:
    """Returns the outputs of a crowd of each kind, by the name of the kind's function."""
    said = {}
    for params in kinds:
        crowd = Crowd(cluster.grpc_address, params)
        await crowd.finished()
        assert not crowd.errors
        said[params.__name__] = [stream.said for stream in crowd.streams]
    return said


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """Outputs of all streams without disturbance, computed once per test run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return hear()
    kept = tmp_path_factory.getbasetemp().parent / "undisturbed.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_bytes(pickle.dumps(hear()))
    said: dict[str, Said] = pickle.loads(kept.read_bytes())
    return said


def hear() -> dict[str, Said]:
    with running_cluster(worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        return asyncio.run(listen(cluster, greedy, everything, constrained))


@pytest.fixture
def one_worker() -> Iterator[Cluster]:
    with running_cluster(workers=1, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        yield cluster


@pytest.fixture
def two_workers() -> Iterator[Cluster]:
    with running_cluster(workers=2, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        yield cluster


def services(address: str) -> dict[str, admin_pb2.ServiceStatus]:
    with Client(address) as client:
        return {service.id: service for service in client.status()}


def page(address: str) -> str:
    return httpx.get(f"http://{address}/metrics").text


def leaves_nothing_behind(cluster: Cluster, page: Callable[[str], str] = page) -> None:
    """Waits until no worker owns a block and no sequence runs or waits; checks that no block is ever unowned."""
    workers: list[admin_pb2.ServiceStatus] = []

    def are_idle() -> bool:
        found = services(cluster.grpc_address).values()
        workers[:] = [service for service in found if service.role == admin_pb2.ROLE_WORKER]
        return not any(worker.blocks.used or worker.running or worker.waiting for worker in workers)

    until(are_idle, what="a worker owns blocks or has sequences")
    for process in cluster.processes:
        if process.spec.role == "scheduler" and process.running and process.ready.is_set():
            own = process.pid
            try:
                told = page(process.addresses["metrics"])
            except httpx.TransportError:
                until(lambda: (process.pid, process.running) != (own, True))  # noqa: B023 - it is on its way out
            else:
                assert "quire_scheduler_blocks_unowned 0.0" in told

"""A service that receives a drain request and then SIGTERM from its supervisor: streams are not affected."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from quire.async_client import AsyncClient
from quire.cluster import Cluster
from quire.outputs import Delta
from quire.params import SamplingParams
from quire.shared.pb.admin.v1 import admin_pb2
from tests.admin import admin_of, calling
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "Once upon a time there was a boy who counted: one, two, three, four,"
NUM_STREAMS = 4
ROLES = ("frontend", "scheduler", "worker")
LONG = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)  # seconds: they run when the ends come


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(worker={"threads": 1, "num_blocks": 400}) as running:
        yield running


async def streamed(client: AsyncClient, begun: asyncio.Event) -> list[Delta]:
    deltas = []
    async for delta in client.stream(PROMPT, LONG):
        deltas.append(delta)
        begun.set()
    return deltas


@pytest.mark.parametrize("roles", [ROLES[:1], ROLES[1:2], ROLES[2:], ROLES], ids=[*ROLES, "all of them"])
async def test_streams_finish_during_a_drain(cluster: Cluster, roles: tuple[str, ...]) -> None:
    ending = [cluster.process(f"{role}-0") for role in roles]
    client, begun = AsyncClient(cluster.grpc_address), [asyncio.Event() for _ in range(NUM_STREAMS)]
    whole = [delta.text for delta in await streamed(client, asyncio.Event())]
    streams = [asyncio.create_task(streamed(client, one)) for one in begun]
    async with asyncio.timeout(120):
        await asyncio.gather(*(one.wait() for one in begun))
        before = [(process, process.pid or 0, process.restarts) for process in ending]
        for process in ending:
            async with calling(admin_of(process.spec.role, process.addresses["grpc"])) as admin:
                await admin.Drain(admin_pb2.DrainRequest())
        for _, pid, _ in before:
            os.kill(pid, signal.SIGTERM)
        for deltas in await asyncio.gather(*streams):
            assert "".join(delta.text for delta in deltas) == "".join(whole)
            assert deltas[-1].finish_reason == "length"
        await client.close()
        await eventually(
            lambda: (
                not any((process.restarts == restarts or not process.ready.is_set() for process, _, restarts in before))
            )
        )

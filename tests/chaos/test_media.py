"""Pictures while parts of the cluster die: texts do not change, and no bytes or rows of media stay behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from quire.client import Client
from quire.cluster import Cluster
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, leaves_nothing_behind
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.pictures import data_url, shape
from tests.waiting import eventually, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

NUM_STREAMS = 12
MAX_TOKENS = 200
COLOURS = ("red", "green", "blue", "yellow")
GAUGES = (
    'quire_frontend_media_bytes{state="held"}',
    "quire_frontend_media_waiting",
    "quire_worker_encoder_cache_rows",
    "quire_worker_encoder_cache_items",
)


def body(index: int) -> dict[str, Any]:
    """Returns a request with two pictures, of which other requests have one."""
    urls = [
        data_url(shape("circle", COLOURS[index % 4], 60 + index % 3)),
        data_url(shape("square", COLOURS[index % 3])),
    ]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = {"type": "text", "text": f"Count from {index} to {index + 90}"}
    return {
        "model": "quire-tiny",
        "messages": [{"role": "user", "content": [*parts, text]}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }


@dataclass
class StreamedTexts:
    """Texts of all streams so far, and the errors."""

    texts: list[str] = field(default_factory=lambda: [""] * NUM_STREAMS)
    errors: list[str] = field(default_factory=list)


async def stream(client: httpx.AsyncClient, index: int, told: StreamedTexts) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body(index)) as response:
        if response.status_code != httpx.codes.OK:
            told.errors.append((await response.aread()).decode())
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                told.errors.append(line)
                return
            for choice in event["choices"]:
                told.texts[index] += choice["delta"].get("content") or ""


async def ask(cluster: Cluster, told: StreamedTexts) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=150) as client:
        await asyncio.gather(*(stream(client, index, told) for index in range(NUM_STREAMS)))


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Texts of all streams without disturbance."""
    told = StreamedTexts()
    with running_cluster(worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        asyncio.run(ask(cluster, told))
    assert not told.errors
    assert all(told.texts)
    return told.texts


def kept(cluster: Cluster) -> dict[str, float]:
    """Returns the gauges of media in use on all services that run."""
    found: dict[str, float] = {}
    for process in cluster.processes:
        if not (process.running and process.ready.is_set() and "metrics" in process.addresses):
            continue
        for line in httpx.get(f"http://{process.addresses['metrics']}/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name in GAUGES:
                found[f"{process.spec.id} {name}"] = float(value)
    return found


def nothing_kept(cluster: Cluster) -> None:
    """Waits until no request runs, and drops what is cached: rows that then remain belong to no media item."""
    leaves_nothing_behind(cluster)
    with Client(cluster.grpc_address) as client:
        client.reset_prefix_cache()
    until(lambda: not any(kept(cluster).values()), what=f"media are kept: {kept(cluster)}")
    assert {name.partition(" ")[2] for name in kept(cluster)} == set(GAUGES)


async def disturbed(
    cluster: Cluster, disturb: Callable[[], None], when: Callable[[StreamedTexts], bool]
) -> StreamedTexts:
    """Runs all streams, and disturbs the cluster when `when` holds."""
    told = StreamedTexts()
    asking = asyncio.ensure_future(ask(cluster, told))
    await eventually(lambda: when(told) or asking.done())
    disturb()
    await asking
    return told


WHEN: dict[str, Callable[[StreamedTexts], bool]] = {
    "at once": lambda _: True,
    "while they stream": lambda told: sum(map(bool, told.texts)) >= NUM_STREAMS // 2,
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
async def test_texts_do_not_change(victim: str, when: str, undisturbed: list[str]) -> None:
    with running_cluster(workers=2, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        told = await disturbed(cluster, lambda: os.kill(pid(cluster, victim), signal.SIGKILL), WHEN[when])
        assert not told.errors
        assert told.texts == undisturbed
        await asyncio.to_thread(nothing_kept, cluster)


async def test_clients_that_leave_leave_nothing(undisturbed: list[str]) -> None:
    with running_cluster(workers=2, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        told = StreamedTexts()
        asking = asyncio.ensure_future(ask(cluster, told))
        await eventually(lambda: any(told.texts))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.to_thread(nothing_kept, cluster)
        again = StreamedTexts()
        await ask(cluster, again)
        assert again.texts == undisturbed

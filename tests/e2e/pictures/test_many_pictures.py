"""A thousand different pictures leave the memory of every process bounded."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from PIL import Image

from quire.cluster import Cluster
from tests.attacks.memory import Memory, family
from tests.e2e.conftest import running_cluster
from tests.pictures import data_url
from tests.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NUM_PICTURES, AT_A_TIME = 1000, 8
WARM = 300  # by then every cache is full
MEDIA_BYTES = 2 << 20  # of the frontend's store, for later requests
SIDE = 336
CAPACITY = 3000  # rows of an encoder cache: 20 pictures
MOST_GROWTH = 32 << 20  # of a process and its children after WARM pictures


def picture(seed: int) -> str:
    """Returns a picture whose pixels no other one has."""
    tiles = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return data_url(Image.fromarray(tiles).resize((SIDE, SIDE), Image.Resampling.NEAREST))


async def ask(client: httpx.AsyncClient, seeds: range) -> None:
    """Sends a request for each picture, AT_A_TIME in progress."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def one(seed: int) -> None:
        async with places:
            content = [
                {"type": "image_url", "image_url": {"url": picture(seed)}},
                {"type": "text", "text": "What is this?"},
            ]
            body = {"model": "quire-tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == httpx.codes.OK, response.text

    await asyncio.gather(*(one(seed) for seed in seeds))


def gauges(cluster: Cluster) -> dict[str, float]:
    """Returns what is kept of media, by process and series."""
    found: dict[str, float] = {}
    for process in cluster.processes:
        for line in httpx.get(f"http://{process.addresses['metrics']}/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(("quire_frontend_media_bytes", "quire_worker_encoder_cache_rows")):
                found[f"{process.spec.id} {name}"] = float(value)
    return found


@pytest.mark.parametrize("encode_workers", [0, 1])
async def test_memory_stays_where_it_was(encode_workers: int) -> None:
    worker = {"num_blocks": 1500, "threads": 1, "encoder_cache_size": CAPACITY}
    frontend = {"mm_processor_cache_gb": MEDIA_BYTES / (1 << 30)}
    with running_cluster(encode_workers=encode_workers, worker=worker, frontend=frontend) as cluster:
        async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=120) as client:
            await ask(client, range(WARM))
            memories = {process.spec.id: Memory(family(process.pid)) for process in cluster.processes}
            await ask(client, range(WARM, NUM_PICTURES))
        grown = {name: memory.growth().after for name, memory in memories.items()}
        found = gauges(cluster)
        print({name: f"{num_bytes / (1 << 20):.1f} MiB" for name, num_bytes in grown.items()}, found)
        rows = [value for name, value in found.items() if "cache_rows" in name]
        assert len(rows) == 1 + encode_workers
        assert all(0 < value <= CAPACITY for value in rows)
        until(
            lambda: gauges(cluster)['frontend-0 quire_frontend_media_bytes{state="held"}'] == 0,
            what="pixels of ended requests are held",
        )
        assert sum(value for name, value in gauges(cluster).items() if "media_bytes" in name) <= MEDIA_BYTES
        assert all(num_bytes < MOST_GROWTH for num_bytes in grown.values()), grown

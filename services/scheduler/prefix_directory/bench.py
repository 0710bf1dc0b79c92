"""`python -m quire.services.scheduler.prefix_directory.bench URL`: measures the prefix index in a given, empty Redis.

Prints one JSON object: look-up of a 2,048-token prompt over 64 workers, publishing rate, and memory per million blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import sys
import time
from typing import Any

from quire.services.scheduler.prefix_directory.worker_index import MEMBERS_PER_COMMAND
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.prefix_index import BlockKeys, PrefixReader, WorkerEntry, connect
from quire.shared.prefix_index.keys import member

WORKERS = 64
BLOCKS_PER_WORKER = 4_000
PROMPT_BLOCKS = 128  # 2,048 tokens in blocks of 16
LOOKUPS = 200


def hashes(tag: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{tag}/{i}".encode()).digest() for i in range(count)]


async def publish(redis: Any, keys: BlockKeys, workers: list[WorkerEntry], prompt: list[bytes]) -> float:
    """Adds the blocks of all workers to Redis, each with an increasing part of `prompt`; returns blocks per second."""
    begin = time.perf_counter()
    for index, worker in enumerate(workers):
        held = prompt[: 2 * index] + hashes(worker.id, BLOCKS_PER_WORKER - 2 * index)
        for start in range(0, len(held), MEMBERS_PER_COMMAND):
            part = held[start : start + MEMBERS_PER_COMMAND]
            await redis.sadd(keys.blocks(worker.id, worker.epoch), *map(member, part))
    return WORKERS * BLOCKS_PER_WORKER / (time.perf_counter() - begin)


async def look_up(reader: PrefixReader, prompt: list[bytes], workers: list[WorkerEntry]) -> dict[str, float]:
    """Matches the prompt LOOKUPS times against all workers; returns the median and the 99th percentile in
    milliseconds."""
    times = []
    for _ in range(LOOKUPS):
        begin = time.perf_counter()
        matches = await reader.match(prompt, workers)
        times.append(1e3 * (time.perf_counter() - begin))
        assert len(matches) == WORKERS - 1, "all but the first hold a part of the prompt"
    times.sort()
    return {"lookup_ms_p50": round(statistics.median(times), 3), "lookup_ms_p99": round(times[int(0.99 * LOOKUPS)], 3)}


async def measure(url: str) -> dict[str, float]:
    """Publishes simulated workers to the Redis at `url`, measures look-ups and memory, and removes the entries
    again; returns the figures by name."""
    redis = connect(url, timeout_s=30)
    layout = model_pb2.BlockLayout(block_size=16, hash_scheme="sha256/1")
    keys = BlockKeys.of("bench", model_pb2.ModelIdentity(name="m", fingerprint="f"), layout)
    workers = [WorkerEntry(f"w{i}", 1, "s0") for i in range(WORKERS)]
    prompt = hashes("prompt", PROMPT_BLOCKS)
    before = (await redis.info("memory"))["used_memory"]
    rate = await publish(redis, keys, workers, prompt)
    memory = (await redis.info("memory"))["used_memory"] - before
    row = await look_up(PrefixReader(redis, keys), prompt, workers)
    for worker in workers:
        await redis.unlink(keys.blocks(worker.id, worker.epoch))
    await redis.aclose()
    return {
        **row,
        "workers": WORKERS,
        "prompt_blocks": PROMPT_BLOCKS,
        "published_blocks_per_s": round(rate),
        "bytes_per_block": round(memory / (WORKERS * BLOCKS_PER_WORKER), 1),
        "mb_per_million_blocks": round(memory / (WORKERS * BLOCKS_PER_WORKER), 1),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1]))))

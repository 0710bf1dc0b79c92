"""Measures the latency of prefix lookups.

python -m tests.services.frontend.directory.lookup [--workers 64] [--tokens 2048] [--at-once 1]

Uses a real Redis on this machine, published caches of the workers of four schedulers, and the frontend's lookup without
its time budget, so that late answers are measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from quire.services.frontend.directory.directory import PublishedCaches
from quire.services.frontend.directory.prefix_lookup import LookupTiming, PrefixLookup
from quire.services.frontend.scheduler_client.prompt_hashes import PromptHashes
from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.prefix_index import PrefixReader
from tests.redis_server import RedisServer
from tests.services.frontend.directory.published_caches import BLOCK_SIZE, Published
from tests.services.frontend.directory.test_prefix_lookup import WORK, ScriptedSession
from tests.services.frontend.load.overload import at
from tests.services.frontend.scripted_scheduler import ScriptedScheduler
from tests.services.frontend.tiny_folder import write_folder

ROUNDS = 500


@dataclass
class KnownIndex:
    """A directory that has already read the published caches."""

    found: PublishedCaches
    is_up: bool = True

    def index(self, _block_size: int) -> PublishedCaches:
        return self.found


async def fill(published: Published, workers: int, prompt: Sequence[int]) -> PublishedCaches:
    """Publishes about the first half of the prompt for each worker."""
    for number in range(workers):
        script = ScriptedScheduler()
        script.scheduler_id = f"scheduler-{number % 4}"
        num_blocks = len(prompt) // BLOCK_SIZE * (number + 1) // (workers + 1)
        await published.holds(script, f"worker-{number}", prompt, max(1, num_blocks))
    reader = PrefixReader(published.redis, published.blocks)
    return PublishedCaches(reader, await reader.workers())


async def measure(asked: Any, url: str, folder: Path) -> None:
    prompt = [(i * 7919) % 50_000 for i in range(asked.tokens)]
    published = Published(url, folder)
    known: Any = KnownIndex(await fill(published, asked.workers, prompt))
    sessions = [ScriptedSession(f"scheduler-{i}") for i in range(4)]
    lookup = PrefixLookup(known, lambda: sessions, FrontendMetrics("m", 100), timing=LookupTiming(budget_s=5.0))
    column, took = i32_bytes(prompt), []

    async def one() -> None:
        hashes = PromptHashes(block_hash.root_hash(), column)
        hashes.block_hashes(BLOCK_SIZE)  # computed by a submission in any case
        work = replace(WORK, prompt=column, num_prompt_tokens=len(prompt), hashes=hashes)
        start = time.perf_counter()
        (held,) = await lookup.cached_tokens([work])
        took.append(time.perf_counter() - start)
        assert len(held) == min(4, asked.workers)

    await asyncio.gather(*(one() for _ in range(asked.at_once)))
    took.clear()
    cpu = time.process_time()
    for _ in range(ROUNDS // asked.at_once):
        await asyncio.gather(*(one() for _ in range(asked.at_once)))
    cpu = (time.process_time() - cpu) / len(took)
    print(
        f"{asked.tokens} tokens, {asked.workers} workers, {asked.at_once} at once: p50 {at(took, 0.5) * 1e3:.2f} ms, "
        f"p99 {at(took, 0.99) * 1e3:.2f} ms, frontend CPU {cpu * 1e3:.2f} ms"
    )
    await published.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--at-once", type=int, default=1)
    with tempfile.TemporaryDirectory() as scratch:
        server = RedisServer(Path(scratch))
        server.start()
        try:
            uvloop.run(measure(parser.parse_args(), server.url, write_folder(Path(scratch) / "tiny")))
        finally:
            server.stop()


if __name__ == "__main__":
    main()

"""Writes to Redis what schedulers write there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from redis import RedisError

from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.models import model_identity
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.prefix_index import BlockKeys, RegistryKeys, connect
from quire.shared.prefix_index.keys import member
from tests.services.frontend.scripted_scheduler import ScriptedScheduler
from tests.waiting import accepted

BLOCK_SIZE = 16
LEASE_MS = 60_000


class Published:
    """The registry and the published caches of one namespace."""

    def __init__(self, url: str, folder: Path, namespace: str = "quire") -> None:
        self.redis = connect(url)
        self._registry = RegistryKeys(namespace)
        layout = model_pb2.BlockLayout(block_size=BLOCK_SIZE, hash_scheme=block_hash.SCHEME)
        self.blocks = BlockKeys.of(namespace, model_identity.identity(folder, ""), layout)

    async def lists(self, script: ScriptedScheduler, *, address: str = "", lease_ms: int = LEASE_MS) -> None:
        """Renews the lease of a scheduler."""
        entry = {"address": address or script.address, "epoch": script.epoch, "num_workers": 1}
        await self.redis.sadd(self._registry.schedulers, script.scheduler_id)
        await self.redis.set(self._registry.scheduler(script.scheduler_id), json.dumps(entry), px=lease_ms)

    async def holds(self, script: ScriptedScheduler, worker: str, prompt: Sequence[int], num_blocks: int) -> None:
        """Publishes the first blocks of the prompt for a worker of the scheduler."""
        hashes = block_hash.chain(block_hash.root_hash(), i32_bytes(prompt), BLOCK_SIZE)[:num_blocks]
        entry = {"epoch": 7, "scheduler": script.scheduler_id}
        await self.redis.sadd(self.blocks.workers, worker)
        await self.redis.set(self.blocks.worker(worker), json.dumps(entry), px=LEASE_MS)
        await self.redis.sadd(self.blocks.blocks(worker, 7), *map(member, hashes))

    async def until_it_answers(self) -> None:
        """Waits until Redis answers again after an outage, replacing broken connections."""
        await accepted(self.redis.ping, RedisError, OSError)

    async def close(self) -> None:
        await self.redis.aclose()

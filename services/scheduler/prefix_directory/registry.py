"""This scheduler's entry among the others, and theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from quire.shared.prefix_index import LOG_ONLY, MalformedEntries, RegistryKeys, RegistryReader, SchedulerEntry


class SchedulerRegistry:
    """A lease that says: this scheduler lives, here, with so many workers, and whether it is about to leave."""

    def __init__(
        self,
        redis: Any,
        keys: RegistryKeys,
        entry: Callable[[], SchedulerEntry],
        malformed: MalformedEntries = LOG_ONLY,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._entry = entry
        self._reader = RegistryReader(redis, keys, malformed)
        self.peers: list[SchedulerEntry] = []

    async def renew(self, lease_ms: int) -> None:
        """Writes the entry and reads the others'."""
        mine = self._entry()
        told = {"address": mine.address, "epoch": mine.epoch, "num_workers": mine.num_workers}
        value = json.dumps(told | ({"draining": True} if mine.draining else {}))
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(self._keys.scheduler(mine.id), value, px=lease_ms)
        pipeline.sadd(self._keys.schedulers, mine.id)
        await pipeline.execute()
        self.peers = [entry for entry in await self._reader.schedulers() if entry.id != mine.id]

    async def deregister(self) -> None:
        mine = self._entry()
        # Not a pipeline: that of Redis Cluster takes no UNLINK.
        await self._redis.unlink(self._keys.scheduler(mine.id))
        await self._redis.srem(self._keys.schedulers, mine.id)

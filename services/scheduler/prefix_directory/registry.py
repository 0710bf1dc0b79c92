"""Registry entries of this scheduler and of its peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from quire.shared.prefix_index import LOG_ONLY, MalformedEntries, RegistryKeys, RegistryReader, SchedulerEntry


class SchedulerRegistry:
    """Leased registry entry of this scheduler: its address, number of workers, and whether it is draining."""

    def __init__(
        self,
        redis: Any,
        keys: RegistryKeys,
        entry: Callable[[], SchedulerEntry],
        malformed: MalformedEntries = LOG_ONLY,
    ) -> None:
        """Stores the client without connecting. `entry`: returns this scheduler's present entry; `malformed`: counts
        entries of others that cannot be read."""
        self._redis = redis
        self._keys = keys
        self._entry = entry
        self._reader = RegistryReader(redis, keys, malformed)
        self.peers: list[SchedulerEntry] = []

    async def renew(self, lease_ms: int) -> None:
        """Writes this scheduler's entry with a lease of `lease_ms` milliseconds, then reads those of the others into
        `peers`. Raises Redis errors."""
        own = self._entry()
        fields = {"address": own.address, "epoch": own.epoch, "num_workers": own.num_workers}
        value = json.dumps(fields | ({"draining": True} if own.draining else {}))
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(self._keys.scheduler(own.id), value, px=lease_ms)
        pipeline.sadd(self._keys.schedulers, own.id)
        await pipeline.execute()
        self.peers = [entry for entry in await self._reader.schedulers() if entry.id != own.id]

    async def deregister(self) -> None:
        """Removes this scheduler's entry from Redis before its lease expires. Raises Redis errors."""
        own = self._entry()
        # Not a pipeline: Redis Cluster's pipeline does not support UNLINK.
        await self._redis.unlink(self._keys.scheduler(own.id))
        await self._redis.srem(self._keys.schedulers, own.id)

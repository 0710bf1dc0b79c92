"""Published prefix cache of one worker in one epoch."""

from __future__ import annotations

import json
import time
from typing import Any

from quire.services.scheduler.replicas.replica import Replica
from quire.shared.kv.kv_specs import reach
from quire.shared.prefix_index import BlockKeys
from quire.shared.prefix_index.keys import member

MEMBERS_PER_COMMAND = 1_000  # about a millisecond of Redis and of the event loop

# Adds and removes members in one script, and sets a lease on a key that has none, so that a process that is killed
# right after it leaves no permanent entry.
CHANGE = """
local last = 2 + tonumber(ARGV[2])
if last > 2 then
    redis.call('SADD', KEYS[1], unpack(ARGV, 3, last))
end
if #ARGV > last then
    redis.call('SREM', KEYS[1], unpack(ARGV, last + 1))
end
if redis.call('PTTL', KEYS[1]) == -1 then
    redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
"""


class WorkerIndex:
    """Tracks what Redis holds of a worker, and updates it."""

    def __init__(self, replica: Replica, keys: BlockKeys, scheduler_id: str) -> None:
        self.replica = replica
        self._keys = keys
        self._entry = json.dumps({"epoch": replica.epoch, "scheduler": scheduler_id, **_groups(replica)})
        self._blocks = keys.blocks(replica.id, replica.epoch)
        self._is_complete = False  # whether Redis held everything at the last publication
        self.num_published = 0
        self.changed_at: float | None = None

    def invalidate(self) -> None:
        """Marks the content of Redis as unknown, so that the next publish() writes everything."""
        self._is_complete = False
        self.num_published = 0
        self.changed_at = self.changed_at or time.monotonic()

    async def publish(self, redis: Any, lease_ms: int, *, renew: bool) -> bool:
        """Publishes changes, or everything if the content of Redis is unknown; returns whether it was everything.
        `renew`: also renews the lease, and invalidates the index if Redis holds another number of blocks. Raises
        Redis errors."""
        is_full = not self._is_complete
        if is_full:
            await self._publish_all(redis, lease_ms)
        else:
            await self._publish_changes(redis, lease_ms)
        if (is_full or renew) and not await self._renew(redis, lease_ms):
            self.invalidate()
        return is_full

    async def withdraw(self, redis: Any) -> None:
        """Removes all entries with one UNLINK. The worker's own entry stays if another epoch has written it."""
        await redis.unlink(self._blocks)
        if await redis.get(self._keys.worker(self.replica.id)) == self._entry.encode():
            await redis.unlink(self._keys.worker(self.replica.id))

    async def _publish_all(self, redis: Any, lease_ms: int) -> None:
        """Replaces the worker's blocks in Redis by all hashes that are cached now, and clears the pending changes."""
        self.replica.changes.take_changes()
        hashes = list(self.replica.core.kv.pool.cached_hashes)
        await redis.unlink(self._blocks)
        await self._change(redis, lease_ms, [*map(member, hashes)], [])
        self.num_published = len(hashes)
        self._is_complete, self.changed_at = True, None

    async def _publish_changes(self, redis: Any, lease_ms: int) -> None:
        """Sends the blocks stored and removed since the last publication to Redis, if there are any. Redis errors
        lose them: the caller then invalidates the index."""
        if not len(self.replica.changes):
            return
        self.changed_at = time.monotonic()
        stored, removed = self.replica.changes.take_changes()
        await self._change(redis, lease_ms, list(stored), list(removed))
        self.num_published += len(stored) - len(removed)
        self.changed_at = None

    async def _change(self, redis: Any, lease_ms: int, stored: list[bytes], removed: list[bytes]) -> None:
        """Adds and removes members of the worker's set of blocks, MEMBERS_PER_COMMAND at a time, by a script that
        gives the set a lease of `lease_ms` milliseconds if it has none."""
        change = redis.register_script(CHANGE)
        for start in range(0, max(len(stored), len(removed)), MEMBERS_PER_COMMAND):
            part = slice(start, start + MEMBERS_PER_COMMAND)
            added, dropped = stored[part], removed[part]
            await change(keys=[self._blocks], args=[lease_ms, len(added), *added, *dropped])

    async def _renew(self, redis: Any, lease_ms: int) -> bool:
        """Renews the lease; returns False if Redis does not hold what was published."""
        pipeline = redis.pipeline(transaction=False)
        pipeline.set(self._keys.worker(self.replica.id), self._entry, px=lease_ms)
        pipeline.sadd(self._keys.workers, self.replica.id)
        pipeline.pexpire(self._blocks, lease_ms)
        pipeline.scard(self._blocks)
        *_, held = await pipeline.execute()
        return bool(held == self.num_published)


def _groups(replica: Replica) -> dict[str, Any]:
    """Returns the KV group fields of the entry: windows in tokens, 0 for full attention; empty for a single
    full-attention group."""
    groups = replica.core.kv.groups
    if groups.plain:
        return {}
    windows = [reach(spec) or 0 for spec in groups.specs]
    return {"windows": windows, "block_size": groups.block_size}

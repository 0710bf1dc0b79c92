"""Publishes this scheduler and the prefix caches of its workers to Redis, in batches, asynchronously to the steps.

Every operation here may fail: serving does not depend on it. After any failure the whole index of every worker is
published again, because a restarted Redis may be empty or outdated.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from quire.services.scheduler.prefix_directory.registry import SchedulerRegistry
from quire.services.scheduler.prefix_directory.worker_index import WorkerIndex
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import DirectoryMetrics
from quire.shared.prefix_index import BlockKeys, SchedulerEntry, redis_error
from quire.shared.process.supervision import cancellable_sleep, is_cancel_requested

log = logger("prefix_directory")

PUBLISH_INTERVAL_S = 0.05
RENEW_INTERVAL_S = 1.0
LEASE_MS = 5_000
RETRY_INTERVAL_S = 0.5


class PrefixDirectory:
    """Publisher of the index. run() needs a task of its own; track() and untrack() never block."""

    def __init__(self, redis: Any, registry: SchedulerRegistry, scheduler_id: str, metrics: DirectoryMetrics) -> None:
        self._redis = redis
        self._registry = registry
        self._scheduler_id = scheduler_id
        self._metrics = metrics
        self._workers: dict[str, WorkerIndex] = {}
        self._detached: list[WorkerIndex] = []
        self._renewed_at = 0.0
        self.up: bool | None = None  # unknown before the first round
        metrics.up.set_function(lambda: bool(self.up))
        metrics.entries.set_function(lambda: self.num_entries)
        metrics.lag.set_function(lambda: self.lag_s)

    @property
    def peers(self) -> list[SchedulerEntry]:
        """Other schedulers, as of the last renewal."""
        return self._registry.peers

    @property
    def num_entries(self) -> int:
        return sum(index.num_published for index in self._workers.values())

    @property
    def lag_s(self) -> float:
        """Age of the oldest unpublished change in seconds."""
        now = time.monotonic()
        return max((now - index.changed_at for index in self._workers.values() if index.changed_at), default=0.0)

    def track(self, replica: Replica, keys: BlockKeys) -> None:
        self._workers[replica.id] = WorkerIndex(replica, keys, self._scheduler_id)

    def untrack(self, replica: Replica) -> None:
        """Stops publishing a worker; the next round removes its entries from Redis. Does nothing if a later
        attachment of the worker is tracked."""
        index = self._workers.get(replica.id)
        if index is not None and index.replica is replica:
            del self._workers[replica.id]
            self._detached.append(index)

    async def run(self) -> None:
        """Publishes until cancelled; then removes this scheduler from the registry."""
        try:
            while True:
                await cancellable_sleep(await self._round())
        finally:
            if is_cancel_requested():
                await self._deregister()

    async def _round(self) -> float:
        """Publishes pending changes; returns the seconds until the next round, which is later after a failure of
        Redis."""
        try:
            await self._publish()
        except (redis_error(), OSError) as error:
            self._fail(error)
            return RETRY_INTERVAL_S
        if not self.up:
            log.info("Redis is available", republished=len(self._workers))
        self.up = True
        return PUBLISH_INTERVAL_S

    async def _publish(self) -> None:
        """Renews the registry entry if that is due, removes entries of untracked workers, and publishes the changes
        of all others. Raises Redis errors."""
        renew = time.monotonic() - self._renewed_at >= RENEW_INTERVAL_S
        if renew:
            await self._registry.renew(LEASE_MS)
        while self._detached:
            await self._detached[0].withdraw(self._redis)
            del self._detached[0]  # others may have been appended meanwhile
        for index in list(self._workers.values()):
            if await index.publish(self._redis, LEASE_MS, renew=renew):
                self._metrics.republished.inc()
        if renew:
            self._renewed_at = time.monotonic()

    def _fail(self, error: Exception) -> None:
        """Records a failure of Redis: logs it, as a warning only the first time, and invalidates the index of every
        worker."""
        write_log = log.warning if self.up is not False else log.debug
        write_log("redis does not serve; continuing with local knowledge", error=str(error) or repr(error))
        self.up = False
        self._renewed_at = 0.0
        self._metrics.errors.inc()
        for index in self._workers.values():
            index.invalidate()

    async def _deregister(self) -> None:
        """Removes this scheduler and its workers from Redis and closes the connection; gives up silently after one
        second or on an error."""
        try:
            async with asyncio.timeout(1):
                await self._registry.deregister()
                for index in [*self._detached, *self._workers.values()]:
                    await index.withdraw(self._redis)
                await self._redis.aclose()
        except (redis_error(), OSError, TimeoutError):
            pass  # the leases expire by themselves

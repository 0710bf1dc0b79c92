"""Looking up: who is there, and who holds the longest prefix of a prompt."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.kv.block_hash import page_name
from shared.kv.kv_retention import Retention, longest_match, retention_of
from shared.kv.kv_specs import FULL, Window
from shared.prefix_index.keys import BlockKeys, RegistryKeys, member

# Blocks are evicted tail first, so what a worker holds of a prompt is a prefix, and its length is found by bisection: 7
# memberships for 128 blocks. In Redis, because asking for them from here would take a reply for each.
DEPTHS = """
local depths = {}
for i, key in ipairs(KEYS) do
    local low, high = 0, #ARGV
    while low < high do
        local middle = math.ceil((low + high) / 2)
        if redis.call('SISMEMBER', key, ARGV[middle]) == 1 then low = middle else high = middle - 1 end
    end
    depths[i] = low
end
return depths
"""


@dataclass(frozen=True, slots=True)
class SchedulerEntry:
    """A scheduler that renewed its lease."""

    id: str
    address: str
    epoch: int
    num_workers: int
    draining: bool = False  # it takes nobody


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker whose scheduler renewed its lease: only its present epoch is believed."""

    id: str
    epoch: int
    scheduler: str
    groups: tuple[Retention, ...] = ()  # of KV; none: a single one that keeps everything


@dataclass(frozen=True, slots=True)
class WorkerMatch:
    """How many blocks at the head of a prompt a worker seems to hold."""

    worker: WorkerEntry
    num_blocks: int


class RegistryReader:
    """Who schedules. Errors of Redis come as redis.RedisError."""

    def __init__(self, redis: Any, keys: RegistryKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def schedulers(self) -> list[SchedulerEntry]:
        entries = await _entries(self._redis, self._keys.schedulers, self._keys.scheduler)
        return [
            SchedulerEntry(name, e["address"], e["epoch"], e["num_workers"], bool(e.get("draining")))
            for name, e in entries
        ]


class PrefixReader:
    """Who holds what. Errors of Redis come as redis.RedisError."""

    def __init__(self, redis: Any, keys: BlockKeys) -> None:
        self._redis = redis
        self._keys = keys
        self._depths = redis.register_script(DEPTHS)

    async def workers(self) -> list[WorkerEntry]:
        entries = await _entries(self._redis, self._keys.workers, self._keys.worker)
        return [WorkerEntry(name, e["epoch"], e["scheduler"], _groups(e)) for name, e in entries]

    async def match(self, block_hashes: Sequence[bytes], workers: Sequence[WorkerEntry]) -> list[WorkerMatch]:
        """One round trip for all workers of one kind."""
        plain = [worker for worker in workers if not worker.groups]
        grouped = [worker for worker in workers if worker.groups]
        found: list[tuple[WorkerEntry, int]] = []
        if block_hashes and plain:
            depths = await self._depths(keys=self._blocks(plain), args=[member(digest) for digest in block_hashes])
            found += zip(plain, depths, strict=True)
        if block_hashes and grouped:
            found += zip(grouped, await self._depths_of_groups(block_hashes, grouped), strict=True)
        return [WorkerMatch(worker, depth) for worker, depth in found if depth]

    def _blocks(self, workers: Sequence[WorkerEntry]) -> list[str]:
        return [self._keys.blocks(worker.id, worker.epoch) for worker in workers]

    async def _depths_of_groups(self, block_hashes: Sequence[bytes], workers: Sequence[WorkerEntry]) -> list[int]:
        """What a window has left is no prefix: every membership is asked for, and reckoned with here."""
        pipeline = self._redis.pipeline(transaction=False)
        for key, worker in zip(self._blocks(workers), workers, strict=True):
            groups = range(len(worker.groups))
            pipeline.smismember(key, [member(page_name(digest, group)) for group in groups for digest in block_hashes])
        count, answers = len(block_hashes), await pipeline.execute()
        return [
            longest_match(worker.groups, functools.partial(_is_there, held, count), count)
            for worker, held in zip(workers, answers, strict=True)
        ]


def _is_there(held: Sequence[int], count: int, group: int, block: int) -> bool:
    return bool(held[group * count + block])


def _groups(entry: dict[str, Any]) -> tuple[Retention, ...]:
    size = int(entry.get("block_size", 1))
    return tuple(
        retention_of(Window(length) if length else FULL, size) for length in map(int, entry.get("windows", ()))
    )


async def _entries(redis: Any, index: str, key: Callable[[str], str]) -> list[tuple[str, dict[str, Any]]]:
    """Members of a registry set whose own key is still there."""
    names = sorted(name.decode() for name in await redis.smembers(index))
    if not names:
        return []
    values = await redis.mget([key(name) for name in names])
    return [(name, json.loads(value)) for name, value in zip(names, values, strict=True) if value is not None]

"""Looking up: who is there, and who holds the longest prefix of a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.prefix_index.keys import BlockKeys, RegistryKeys, member

PROBES = 32  # hashes of a prompt asked for, evenly spaced: a 2,048-token prompt of 16-token blocks is known to 4 blocks


@dataclass(frozen=True, slots=True)
class SchedulerEntry:
    """A scheduler that renewed its lease."""

    id: str
    address: str
    epoch: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker whose scheduler renewed its lease: only its present epoch is believed."""

    id: str
    epoch: int
    scheduler: str


@dataclass(frozen=True, slots=True)
class Match:
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
        return [SchedulerEntry(name, e["address"], e["epoch"], e["num_workers"]) for name, e in entries]


class PrefixReader:
    """Who holds what. Errors of Redis come as redis.RedisError."""

    def __init__(self, redis: Any, keys: BlockKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def workers(self) -> list[WorkerEntry]:
        entries = await _entries(self._redis, self._keys.workers, self._keys.worker)
        return [WorkerEntry(name, e["epoch"], e["scheduler"]) for name, e in entries]

    async def match(self, block_hashes: Sequence[bytes], workers: Sequence[WorkerEntry]) -> list[Match]:
        """One pipelined round trip for all workers."""
        depths = probe_depths(len(block_hashes))
        if not depths or not workers:
            return []
        members = [member(block_hashes[depth - 1]) for depth in depths]
        pipeline = self._redis.pipeline(transaction=False)
        for worker in workers:
            pipeline.smismember(self._keys.blocks(worker.id, worker.epoch), members)
        answers = await pipeline.execute()
        return [
            Match(worker, _depth_held(depths, held)) for worker, held in zip(workers, answers, strict=True) if held[0]
        ]


async def _entries(redis: Any, index: str, key: Callable[[str], str]) -> list[tuple[str, dict[str, Any]]]:
    """Members of a registry set whose own key is still there."""
    names = sorted(name.decode() for name in await redis.smembers(index))
    if not names:
        return []
    values = await redis.mget([key(name) for name in names])
    return [(name, json.loads(value)) for name, value in zip(names, values, strict=True) if value is not None]


def probe_depths(num_blocks: int) -> list[int]:
    """Prefix lengths to ask for, in blocks, ascending; the first and the whole are among them."""
    if num_blocks <= PROBES:
        return list(range(1, num_blocks + 1))
    return [max(1, round(num_blocks * i / (PROBES - 1))) for i in range(PROBES)]


def _depth_held(depths: Sequence[int], held: Sequence[int]) -> int:
    """Blocks are evicted tail first, so what is held is a prefix; the first gap ends it."""
    longest = 0
    for depth, there in zip(depths, held, strict=True):
        if not there:
            break
        longest = depth
    return longest

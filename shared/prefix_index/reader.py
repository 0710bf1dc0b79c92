"""Reads the registry and the index: live schedulers and workers, and which worker holds the longest prefix of a
prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from quire.shared.kv.block_hash import page_name
from quire.shared.kv.kv_retention import longest_match
from quire.shared.prefix_index.entries import (
    LOG_ONLY,
    MalformedEntries,
    SchedulerEntry,
    WorkerEntry,
    name_of,
    scheduler_entry,
    worker_entry,
)
from quire.shared.prefix_index.keys import BlockKeys, RegistryKeys, member

Entry = TypeVar("Entry")

# Blocks are evicted tail first, so a worker holds a prefix of a prompt, whose length is found by bisection: 7
# lookups for 128 blocks. Runs inside Redis, because here every lookup would cost a round trip.
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


class Kind(NamedTuple, Generic[Entry]):
    """Kind of entry: its set of ids, the key of each entry, and its parser."""

    name: str
    ids: str
    key: Callable[[str], str]
    read: Callable[[str, bytes], Entry]


@dataclass(frozen=True, slots=True)
class WorkerMatch:
    """Number of leading blocks of a prompt that a worker appears to hold."""

    worker: WorkerEntry
    num_blocks: int


class RegistryReader:
    """Reads the live schedulers. Raises redis.RedisError; malformed entries are skipped and counted."""

    def __init__(self, redis: Any, keys: RegistryKeys, malformed: MalformedEntries = LOG_ONLY) -> None:
        self._redis = redis
        self._keys = keys
        self._malformed = malformed

    async def schedulers(self) -> list[SchedulerEntry]:
        kind = Kind("scheduler", self._keys.schedulers, self._keys.scheduler, scheduler_entry)
        return await _entries(self._redis, kind, self._malformed)


class PrefixReader:
    """Reads the blocks that workers hold. Raises redis.RedisError; malformed entries are skipped and counted."""

    def __init__(self, redis: Any, keys: BlockKeys, malformed: MalformedEntries = LOG_ONLY) -> None:
        self._redis = redis
        self._keys = keys
        self._malformed = malformed
        self._depths = redis.register_script(DEPTHS)

    async def workers(self) -> list[WorkerEntry]:
        kind = Kind("worker", self._keys.workers, self._keys.worker, worker_entry)
        return await _entries(self._redis, kind, self._malformed)

    async def match(self, block_hashes: Sequence[bytes], workers: Sequence[WorkerEntry]) -> list[WorkerMatch]:
        """Returns the numbers of leading blocks that workers hold, without those that hold none, in one round trip
        for all workers with a single KV group and one for the others."""
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
        """Returns prefix lengths for workers with several KV groups: what a window leaves is not a prefix, so all
        memberships are read and evaluated here."""
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


async def _entries(redis: Any, kind: Kind[Entry], malformed: MalformedEntries) -> list[Entry]:
    """Returns the parsed entries of a registry set's members whose lease has not expired."""
    names: list[tuple[str, bytes]] = []
    for data in sorted(await redis.smembers(kind.ids)):
        try:
            names.append((name_of(data), data))
        except ValueError as error:
            malformed.add(kind.name, data, str(error))
    if not names:
        return []
    found: list[Entry] = []
    values = await redis.mget([kind.key(name) for name, _ in names])
    for (name, data), value in zip(names, values, strict=True):
        if value is None:
            continue
        try:
            found.append(kind.read(name, value))
        except ValueError as error:
            malformed.add(kind.name, data, str(error))
    return found

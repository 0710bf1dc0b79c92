"""Resumable streams in Redis: per stream a request, a list of entries, the producer's lease, and two flags set by
others (cancel and read).

All keys of a tenant share one hash tag, so Redis Cluster keeps them on one node, and expire by themselves. The totals
of all tenants have a hash tag of their own (redis_usage.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from quire.services.frontend.streams.redis_usage import RedisUsage, tenant_name
from quire.services.frontend.streams.store import (
    DELETED_S,
    LeaseStatus,
    StoreFull,
    StoreLimits,
    StoreUnavailable,
    StoreUsage,
    StreamExists,
    StreamKey,
    StreamUpdate,
    StreamUsage,
)
from quire.shared.prefix_index import redis_error
from quire.shared.process.supervision import is_cancel_requested

LEASE_MS = 3000  # lease of a producer; afterwards a frontend with a reader takes the stream over
READ_MS = 3000  # a poll counts as a reader for this long
ENTRIES_AT_ONCE = 512  # per poll and stream
UNBOUNDED = 2**31
OTHER_TYPE = "WRONGTYPE"  # error prefix for a command on a value of another type

CREATE = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
local owner = redis.call('GET', KEYS[3])
local is_owner = ARGV[7] == '1' and (not owner or owner == ARGV[2])
if redis.call('EXISTS', KEYS[1]) == 1 and not is_owner then return 0 end
if ARGV[7] == '1' and redis.call('EXISTS', KEYS[5]) == 1 then return 0 end
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
if redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[4]) then return -1 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[5])
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
redis.call('DEL', KEYS[2], KEYS[5])
redis.call('ZADD', KEYS[4], now + ARGV[5], ARGV[6])
if redis.call('PTTL', KEYS[4]) < tonumber(ARGV[5]) then redis.call('PEXPIRE', KEYS[4], ARGV[5]) end
return 1
"""

# A producer that stalled finds another owner in the lease, or more entries than it wrote: it stops producing.
# A log with too few entries belongs to a Redis that restarted with an old state: the producer stores everything again.
APPEND = """
local function status(exists, is_owner)
    return {exists, is_owner, redis.call('EXISTS', KEYS[5]), redis.call('EXISTS', KEYS[6])}
end
if redis.call('EXISTS', KEYS[1]) == 0 then return status(0, 1) end
local owner = redis.call('GET', KEYS[3])
if owner and owner ~= ARGV[1] then return status(1, 0) end
local num_missing = tonumber(ARGV[4]) - redis.call('LLEN', KEYS[2])
if num_missing > 0 then return status(0, 1) end
if num_missing < 0 then return status(1, 0) end
for i = 7, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
if ARGV[5] == '1' then
    redis.call('DEL', KEYS[3])
else
    redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
local now = redis.call('TIME')
redis.call('ZADD', KEYS[4], now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[3], ARGV[6])
if redis.call('PTTL', KEYS[4]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[4], ARGV[3]) end
return status(1, 1)
"""

LEAVE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

Result = TypeVar("Result")


class RedisStore:
    """A StreamStore in Redis, shared by all frontends of a namespace; several keys per stream, changed together by
    scripts."""

    is_shared = True

    def __init__(self, redis: Any, namespace: str) -> None:
        self._redis = redis
        self._namespace = namespace
        self._create = redis.register_script(CREATE)
        self._append = redis.register_script(APPEND)
        self._leave = redis.register_script(LEAVE)
        self._usage = RedisUsage(redis, namespace)

    async def create(
        self,
        key: StreamKey,
        request: bytes,
        owner: str,
        ttl_ms: int,
        bounds: StoreLimits | None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Implements StreamStore.create(). The usage is counted first and reverted if the stream cannot be created."""
        usage, limit = StreamUsage(key, len(request), ttl_ms), UNBOUNDED if bounds is None else bounds.per_tenant
        is_new = await _answered(self._usage.admit(usage, bounds))
        keys = [*(self._key(key, name) for name in ("request", "log", "lease")), self._index(key)]
        args = [request, owner, LEASE_MS, limit, ttl_ms, key.request_id, int(overwrite)]
        done = await _answered(self._create(keys=[*keys, self._key(key, "deleted")], args=args))
        if done <= 0 and is_new:
            await self.report_usage([usage._replace(num_bytes=0, ttl_ms=0)])
        if done == 0:
            raise StreamExists
        if done < 0:
            raise StoreFull("per_tenant", limit)

    async def append(
        self, key: StreamKey, owner: str, place: int, entries: Sequence[bytes], ttl_ms: int, *, is_last: bool = False
    ) -> LeaseStatus:
        """Implements StreamStore.append() with one script, which also returns the cancel and reader flags."""
        state_keys, flag_keys = ("request", "log", "lease"), ("cancel", "read")
        keys = [*(self._key(key, name) for name in state_keys), self._index(key)]
        keys += [self._key(key, name) for name in flag_keys]
        args = [owner, LEASE_MS, ttl_ms, place, int(is_last), key.request_id, *entries]
        return LeaseStatus(*map(bool, await _answered(self._append(keys=keys, args=args))))

    async def request(self, key: StreamKey) -> bytes | None:
        found: bytes | None = await _answered(self._redis.get(self._key(key, "request")))
        return found

    async def read(self, wanted: Sequence[tuple[StreamKey, int]]) -> list[StreamUpdate]:
        """Implements StreamStore.read() with one pipeline: per stream at most ENTRIES_AT_ONCE entries, and a reader
        mark that expires after READ_MS."""
        pipeline = self._redis.pipeline(transaction=False)
        for key, place in wanted:
            pipeline.exists(
                self._key(key, "lease")
            )  # before lrange: a lease that expires in between was renewed with an entry
            pipeline.lrange(self._key(key, "log"), place, place + ENTRIES_AT_ONCE - 1)
            pipeline.exists(self._key(key, "request"))
            pipeline.set(self._key(key, "read"), 1, px=READ_MS)
        answers = await _answered(_executed(pipeline))
        return [_found(*answers[at : at + 3]) for at in range(0, len(answers), 4)]

    async def acquire_lease(self, key: StreamKey, owner: str) -> bool:
        return bool(await _answered(self._redis.set(self._key(key, "lease"), owner, nx=True, px=LEASE_MS)))

    async def release_lease(self, key: StreamKey, owner: str) -> None:
        await _answered(self._leave(keys=[self._key(key, "lease")], args=[owner]))

    async def cancel(self, key: StreamKey) -> bool:
        """Implements StreamStore.cancel(): sets a flag that the producer reads with its next append and that expires
        with the stream."""
        left_ms: int = await _answered(self._redis.pttl(self._key(key, "request")))
        if left_ms <= 0:
            return False
        await _answered(self._redis.set(self._key(key, "cancel"), 1, px=left_ms))
        return True

    async def delete(self, key: StreamKey) -> None:
        """Implements StreamStore.delete(): drops the stream's keys, its index entry and its usage."""
        names = ("request", "log", "lease", "cancel", "read")
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.unlink(*(self._key(key, name) for name in names))
        pipeline.zrem(self._index(key), key.request_id)
        pipeline.set(self._key(key, "deleted"), 1, ex=DELETED_S)
        await _answered(pipeline.execute())
        await self.report_usage([StreamUsage(key, 0, 0)])

    async def is_deleted(self, key: StreamKey) -> bool:
        return bool(await _answered(self._redis.exists(self._key(key, "deleted"))))

    async def report_usage(self, uses: Sequence[StreamUsage]) -> StoreUsage:
        return await _answered(self._usage.report_usage(uses))

    async def close(self) -> None:
        await self._redis.aclose()

    def _tag(self, key: StreamKey) -> str:
        return f"{{{self._namespace}:stream:{tenant_name(key)}}}"

    def _key(self, key: StreamKey, name: str) -> str:
        return f"{self._tag(key)}:{name}:{key.request_id}"

    def _index(self, key: StreamKey) -> str:
        return f"{self._tag(key)}:ids"


async def _executed(pipeline: Any) -> list[Any]:
    """Returns all answers of a pipeline; errors about values of another type stay in the list, since they concern one
    key."""
    answers: list[Any] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and not str(answer).startswith(OTHER_TYPE):
            raise answer
    return answers


def _found(has_producer: Any, entries: Any, exists: Any) -> StreamUpdate:
    """Returns the update of one stream. A log of another type, which no frontend wrote, counts as a missing stream."""
    if not isinstance(entries, list):
        return StreamUpdate(exists=False, has_producer=False, entries=[])
    return StreamUpdate(bool(exists), bool(has_producer), entries)


async def _answered(command: Awaitable[Result]) -> Result:
    """Awaits a Redis command and converts its errors to StoreUnavailable. Re-raises a cancellation that the Redis
    client swallowed."""
    try:
        answer = await command
    except (redis_error(), OSError) as error:
        if is_cancel_requested():
            raise asyncio.CancelledError from None
        raise StoreUnavailable(f"{type(error).__name__}: {error}") from None
    if is_cancel_requested():
        raise asyncio.CancelledError
    return answer

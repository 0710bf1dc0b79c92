"""Number of streams and bytes that all tenants have in Redis, updated when streams start and by their producers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from quire.services.frontend.streams.store import DELETED_S, StoreFull, StoreLimits, StoreUsage, StreamKey, StreamUsage

AT_ONCE = 500  # streams per script call

# Drops expired streams and their bytes. Admitting a stream that is already counted changes nothing.
REPORT = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do
    redis.call('HINCRBY', KEYS[2], '', 0 - (redis.call('HGET', KEYS[2], gone) or 0))
    redis.call('HDEL', KEYS[2], gone)
    redis.call('ZREM', KEYS[1], gone)
end
local count, total = redis.call('ZCARD', KEYS[1]), tonumber(redis.call('HGET', KEYS[2], '') or 0)
if ARGV[1] ~= '' then
    if redis.call('ZSCORE', KEYS[1], ARGV[4]) then return {0, count, total} end
    if count >= tonumber(ARGV[1]) then return {-1, count, total} end
    if total >= tonumber(ARGV[2]) then return {-2, count, total} end
end
for i = 4, #ARGV, 3 do
    redis.call('ZADD', KEYS[1], now + ARGV[i + 2], ARGV[i])
    redis.call('HINCRBY', KEYS[2], '', ARGV[i + 1] - (redis.call('HGET', KEYS[2], ARGV[i]) or 0))
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {1, redis.call('ZCARD', KEYS[1]), tonumber(redis.call('HGET', KEYS[2], '') or 0)}
"""

UNBOUNDED = 2**53
EXPIRES_MS = 2 * DELETED_S * 1000  # longer than the longest retention


class RedisUsage:
    """Number and bytes of the streams of one namespace, counted in Redis over all frontends."""

    def __init__(self, redis: Any, namespace: str) -> None:
        self._report = redis.register_script(REPORT)
        self._keys = [f"{{{namespace}:streams}}:{name}" for name in ("until", "bytes")]

    async def admit(self, use: StreamUsage, bounds: StoreLimits | None) -> bool:
        """Counts a new stream; returns False if it is already counted. `bounds`: None for no limits. Raises
        StoreFull."""
        limits = (UNBOUNDED, UNBOUNDED) if bounds is None else (bounds.all_tenants, bounds.kept_bytes)
        done, count, total = await self._report(keys=self._keys, args=[*limits, EXPIRES_MS, *_script_args(use)])
        if done == -1:
            raise StoreFull("all_tenants", count)
        if done == -2:
            raise StoreFull("kept_bytes", total)
        return bool(done)

    async def report_usage(self, uses: Sequence[StreamUsage]) -> StoreUsage:
        """Updates the usage of these streams, AT_ONCE per call of the script, and returns the totals; also without
        streams."""
        for start in range(0, max(1, len(uses)), AT_ONCE):
            entries = [value for use in uses[start : start + AT_ONCE] for value in _script_args(use)]
            args = ["", "", EXPIRES_MS, *entries]
            _, count, total = await self._report(keys=self._keys, args=args)
        return StoreUsage(count, total)


def _script_args(use: StreamUsage) -> tuple[str, int, int]:
    """Returns the script's arguments for one stream: name, bytes, and time to live."""
    return f"{tenant_name(use.key)}:{use.key.request_id}", use.num_bytes, use.ttl_ms


def tenant_name(key: StreamKey) -> str:
    """Returns a name for the tenant that is safe in a Redis key."""
    return hashlib.sha256(key.tenant.encode()).hexdigest()[:32]

"""Usage of API keys over all frontends of a cluster, synchronized through Redis twice a second.

No request waits for it: a frontend admits by the state it knows, so all frontends together may exceed a limit by what
they admit in half a second. Without Redis each frontend counts alone, and reports its usage when Redis is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from quire.services.frontend.access.account import Account, AccountLevel
from quire.shared.logs import logger
from quire.shared.prefix_index import redis_error
from quire.shared.process.supervision import cancellable_sleep

log = logger("access")

SYNC_S = 0.5
AT_ONCE = 64  # accounts in flight
KEEP_S = 2 * 86_400  # counters unused for this long expire

# Refills one key's buckets by Redis' clock and subtracts the usage that a frontend reports. A clock that was set back
# changes nothing. Numbers are returned as strings, because Redis truncates Lua numbers to integers.
SCRIPT = f"""
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local day = math.floor(now / 86400)
local before = redis.call('HMGET', KEYS[1], 'seen', 'requests', 'tokens', 'day', 'day_tokens')
local passed = math.max(0, now - (tonumber(before[1]) or now))
local function level(was, per_minute, used)
    if per_minute == 0 then return 0 end
    return math.min(per_minute, (tonumber(was) or per_minute) + passed * per_minute / 60) - used
end
local requests = level(before[2], tonumber(ARGV[1]), tonumber(ARGV[3]))
local tokens = level(before[3], tonumber(ARGV[2]), tonumber(ARGV[4]))
local day_tokens = tonumber(ARGV[4])
if tonumber(before[4]) == day then day_tokens = day_tokens + tonumber(before[5]) end
redis.call('HSET', KEYS[1], 'seen', string.format('%.6f', now), 'requests', tostring(requests),
    'tokens', tostring(tokens), 'day', day, 'day_tokens', day_tokens)
redis.call('EXPIRE', KEYS[1], {KEEP_S})
return {{tostring(requests), tostring(tokens), day, day_tokens}}
"""


class SharedUsage:
    """Synchronizes the accounts of one frontend with the counters in Redis, which all frontends share."""

    def __init__(
        self, redis: Any, namespace: str, accounts: Mapping[str, Account], on_error: Callable[[], None]
    ) -> None:
        """Stores the accounts and registers the script. `accounts`: by key name; may grow. `on_error`: called at each
        failure."""
        self.redis = redis
        self._namespace = namespace
        self.accounts = accounts
        self._on_error = on_error
        self._script = redis.register_script(SCRIPT)
        self._is_down = False

    async def run(self) -> None:
        """Synchronizes the accounts every SYNC_S until cancelled."""
        while True:
            await cancellable_sleep(SYNC_S)
            await self.sync()

    async def sync(self) -> None:
        """Synchronizes all active accounts once, AT_ONCE at a time; stops at the first failure, the rest waits for the
        next round."""
        active = [(name, account) for name, account in self.accounts.items() if account.is_active]
        for start in range(0, len(active), AT_ONCE):
            done = await asyncio.gather(*(self._sync(*one) for one in active[start : start + AT_ONCE]))
            self._note_state(all(done))
            if not all(done):
                return

    async def close(self) -> None:
        await self.redis.aclose()

    async def _sync(self, name: str, account: Account) -> bool:
        """Reports the unreported usage of one account and applies the shared level that Redis returns. Returns False if
        Redis is unavailable; the usage is restored then."""
        key, usage = account.key, account.take_unreported()
        values = [key.requests_per_minute, key.tokens_per_minute, usage.requests, usage.tokens]
        try:
            found = await self._script(keys=[f"{self._namespace}:use:{name}"], args=values)
        except (redis_error(), OSError):
            account.restore_unreported(usage)  # counted twice if Redis applied it and only the answer was lost
            return False
        account.apply_shared_level(AccountLevel(float(found[0]), float(found[1]), int(found[2]), int(found[3])))
        return True

    def _note_state(self, is_up: bool) -> None:
        """Counts a failure, and logs when Redis becomes unavailable or available again."""
        if not is_up:
            self._on_error()
            if not self._is_down:
                log.warning("Redis is unavailable: API key usage is counted per frontend")
        elif self._is_down:
            log.info("API key usage is shared with other frontends again")
        self._is_down = not is_up

"""What the owner of a key has used: buckets that fill up steadily, and a count for the day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.services.frontend.access.api_key import ApiKey
from quire.services.frontend.access.rate_limit import RateLimit
from quire.shared.errors import ResourceExhausted

MINUTE_S = 60.0
DAY_S = 86_400.0
ACTIVE_S = 120.0


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """What other frontends have not been told of."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AccountLevel:
    """Of all frontends together: what is left in the buckets, and what the day has cost."""

    requests: float
    tokens: float
    day: int
    day_tokens: int


@dataclass(slots=True)
class TokenBucket:
    """Holds a minute's worth at most. It may be overdrawn: what a request used is known at its end. While there is no
    limit it is empty: what was taken then does not count against a later one."""

    level: float
    seen_s: float

    def refill(self, per_minute: int, now: float) -> None:
        self.level = min(float(per_minute), self.level + (now - self.seen_s) * per_minute / MINUTE_S)
        self.seen_s = now

    def spend(self, amount: float, per_minute: int) -> None:
        self.level = self.level - amount if per_minute else 0.0

    def wait_s(self, wanted: float, per_minute: int) -> float:
        """Until there is so much; 0 if it is there."""
        return max(0.0, (wanted - self.level) * MINUTE_S / per_minute)

    def rate_limit(self, of: Literal["requests", "tokens"], per_minute: int) -> RateLimit:
        reset_s = self.wait_s(per_minute, per_minute) if per_minute else 0.0
        return RateLimit(of, per_minute, self.level, reset_s)


class Account:
    """Of one key, at one frontend and, as far as it has heard, at others. `clock`: seconds that only grow; `wall`: of
    the epoch, for days."""

    def __init__(self, key: ApiKey, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        now = clock()
        self._requests = TokenBucket(float(key.requests_per_minute), now)
        self._tokens = TokenBucket(float(key.tokens_per_minute), now)
        self._day, self._day_tokens = int(wall() // DAY_S), 0
        self.key = key
        self._touched_s = now
        self._unreported = AccountUsage(0, 0)

    @property
    def is_active(self) -> bool:
        """It has limits, and its key has been used a short while ago."""
        key = self.key
        is_limited = key.requests_per_minute or key.tokens_per_minute or key.tokens_per_day
        return bool(is_limited) and self._clock() - self._touched_s < ACTIVE_S

    def admit_request(self, key: ApiKey) -> None:
        """One more request, by what `key` allows now; ResourceExhausted that names the limit and when to come back."""
        now = self._touched_s = self._clock()
        self.key = key
        self._requests.refill(key.requests_per_minute, now)
        self._tokens.refill(key.tokens_per_minute, now)
        if key.requests_per_minute and (wait_s := self._requests.wait_s(1.0, key.requests_per_minute)):
            raise _over(key, "requests_per_minute", key.requests_per_minute, wait_s)
        if key.tokens_per_minute and (wait_s := self._tokens.wait_s(1.0, key.tokens_per_minute)):
            raise _over(key, "tokens_per_minute", key.tokens_per_minute, wait_s)
        if key.tokens_per_day and self._today() >= key.tokens_per_day:
            raise _over(key, "tokens_per_day", key.tokens_per_day, DAY_S - self._wall() % DAY_S)
        self._requests.spend(1.0, key.requests_per_minute)
        self._unreported = AccountUsage(self._unreported.requests + 1, self._unreported.tokens)

    def charge(self, num_tokens: int) -> None:
        """What a request has used, prompt and output."""
        self._touched_s = self._clock()
        self._tokens.spend(num_tokens, self.key.tokens_per_minute)
        self._day_tokens = self._today() + num_tokens
        self._unreported = AccountUsage(self._unreported.requests, self._unreported.tokens + num_tokens)

    def rate_limits(self) -> list[RateLimit]:
        """Of the key as it was shown last; none where it has none by the minute."""
        now, key = self._clock(), self.key
        self._requests.refill(key.requests_per_minute, now)
        self._tokens.refill(key.tokens_per_minute, now)
        found = [
            self._requests.rate_limit("requests", key.requests_per_minute),
            self._tokens.rate_limit("tokens", key.tokens_per_minute),
        ]
        return [one for one in found if one.limit]

    def take_unreported(self) -> AccountUsage:
        """For the others; restore_unreported() if they could not be told."""
        told, self._unreported = self._unreported, AccountUsage(0, 0)
        return told

    def restore_unreported(self, untold: AccountUsage) -> None:
        self._unreported = AccountUsage(
            self._unreported.requests + untold.requests, self._unreported.tokens + untold.tokens
        )

    def apply_shared_level(self, level: AccountLevel) -> None:
        """What all have used, this frontend up to the last take_unreported()."""
        now = self._clock()
        self._requests = TokenBucket(level.requests - self._unreported.requests, now)
        self._tokens = TokenBucket(level.tokens - self._unreported.tokens, now)
        self._today()
        if level.day == self._day:
            self._day_tokens = level.day_tokens + self._unreported.tokens

    def _today(self) -> int:
        day = int(self._wall() // DAY_S)
        if day != self._day:
            self._day, self._day_tokens = day, 0
        return self._day_tokens


def _over(key: ApiKey, limit: str, most: int, wait_s: float) -> ResourceExhausted:
    return ResourceExhausted(
        f"{limit}: the API key {key.name} has used its {most}", field=limit, retry_after_ms=max(1, round(wait_s * 1000))
    )

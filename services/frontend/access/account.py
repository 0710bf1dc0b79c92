"""Usage of an API key: token buckets per minute, and a count per day."""

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
    """Requests and tokens of one key that are not yet reported to the shared counters."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AccountLevel:
    """Shared state of all frontends: remaining bucket levels, and the tokens used today."""

    requests: float
    tokens: float
    day: int
    day_tokens: int


@dataclass(slots=True)
class TokenBucket:
    """A token bucket that holds at most one minute's amount. It may go negative, since a request's tokens are known at
    its end. Without a limit it stays at 0, so that earlier use does not count against a later limit."""

    level: float
    seen_s: float

    def refill(self, per_minute: int, now: float) -> None:
        """Adds what has accrued since the last call, up to `per_minute`. `now`: monotonic seconds."""
        self.level = min(float(per_minute), self.level + (now - self.seen_s) * per_minute / MINUTE_S)
        self.seen_s = now

    def spend(self, amount: float, per_minute: int) -> None:
        self.level = self.level - amount if per_minute else 0.0

    def wait_s(self, wanted: float, per_minute: int) -> float:
        """Returns the seconds until the level reaches `wanted`; 0 if it has."""
        return max(0.0, (wanted - self.level) * MINUTE_S / per_minute)

    def rate_limit(self, of: Literal["requests", "tokens"], per_minute: int) -> RateLimit:
        """Returns the state of the bucket, as of the last refill, for the rate-limit headers."""
        reset_s = self.wait_s(per_minute, per_minute) if per_minute else 0.0
        return RateLimit(of, per_minute, self.level, reset_s)


class Account:
    """Usage of one API key at this frontend and, once synchronized, at others. `clock`: monotonic seconds; `wall`: Unix
    time, for days."""

    def __init__(self, key: ApiKey, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        """Starts with full buckets and no usage. `clock`: monotonic seconds; `wall`: Unix time, for days."""
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
        """Whether the key has limits and was used in the last ACTIVE_S; only such accounts are synchronized."""
        key = self.key
        is_limited = key.requests_per_minute or key.tokens_per_minute or key.tokens_per_day
        return bool(is_limited) and self._clock() - self._touched_s < ACTIVE_S

    def admit_request(self, key: ApiKey) -> None:
        """Counts a request under the limits of `key`. Raises ResourceExhausted that names the limit and the time to
        retry."""
        now = self._touched_s = self._clock()
        self.key = key
        self._requests.refill(key.requests_per_minute, now)
        self._tokens.refill(key.tokens_per_minute, now)
        if key.requests_per_minute and (wait_s := self._requests.wait_s(1.0, key.requests_per_minute)):
            raise _limit_exceeded(key, "requests_per_minute", key.requests_per_minute, wait_s)
        if key.tokens_per_minute and (wait_s := self._tokens.wait_s(1.0, key.tokens_per_minute)):
            raise _limit_exceeded(key, "tokens_per_minute", key.tokens_per_minute, wait_s)
        if key.tokens_per_day and self._today() >= key.tokens_per_day:
            raise _limit_exceeded(key, "tokens_per_day", key.tokens_per_day, DAY_S - self._wall() % DAY_S)
        self._requests.spend(1.0, key.requests_per_minute)
        self._unreported = AccountUsage(self._unreported.requests + 1, self._unreported.tokens)

    def charge(self, num_tokens: int) -> None:
        """Counts the prompt and output tokens of a finished request in the minute and the day, and as not yet
        reported."""
        self._touched_s = self._clock()
        self._tokens.spend(num_tokens, self.key.tokens_per_minute)
        self._day_tokens = self._today() + num_tokens
        self._unreported = AccountUsage(self._unreported.requests, self._unreported.tokens + num_tokens)

    def rate_limits(self) -> list[RateLimit]:
        """Returns the per-minute limits of the key as last presented; empty if it has none."""
        now, key = self._clock(), self.key
        self._requests.refill(key.requests_per_minute, now)
        self._tokens.refill(key.tokens_per_minute, now)
        limits = [
            self._requests.rate_limit("requests", key.requests_per_minute),
            self._tokens.rate_limit("tokens", key.tokens_per_minute),
        ]
        return [one for one in limits if one.limit]

    def take_unreported(self) -> AccountUsage:
        """Returns the unreported usage and resets it; restore_unreported() undoes that if reporting fails."""
        taken, self._unreported = self._unreported, AccountUsage(0, 0)
        return taken

    def restore_unreported(self, usage: AccountUsage) -> None:
        """Adds back what take_unreported() returned, to usage that has arrived since."""
        self._unreported = AccountUsage(
            self._unreported.requests + usage.requests, self._unreported.tokens + usage.tokens
        )

    def apply_shared_level(self, level: AccountLevel) -> None:
        """Sets the levels to those of all frontends, which include this one's usage up to the last
        take_unreported()."""
        now = self._clock()
        self._requests = TokenBucket(level.requests - self._unreported.requests, now)
        self._tokens = TokenBucket(level.tokens - self._unreported.tokens, now)
        self._today()
        if level.day == self._day:
            self._day_tokens = level.day_tokens + self._unreported.tokens

    def _today(self) -> int:
        """Returns the tokens used in the present UTC day, and starts at 0 when the day has changed."""
        day = int(self._wall() // DAY_S)
        if day != self._day:
            self._day, self._day_tokens = day, 0
        return self._day_tokens


def _limit_exceeded(key: ApiKey, limit: str, maximum: int, wait_s: float) -> ResourceExhausted:
    """Returns the error for a used-up limit, with a hint to retry after `wait_s` seconds."""
    return ResourceExhausted(
        f"{limit}: the API key {key.name} has reached its limit of {maximum}; retry later",
        field=limit,
        retry_after_ms=max(1, round(wait_s * 1000)),
    )

"""Rate limits in OpenAI's response headers: limit, remaining amount, and time until it is full again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MINUTE_S, HOUR_S = 60, 3600


@dataclass(frozen=True, slots=True)
class RateLimit:
    """State of one limit, as the x-ratelimit headers report it."""

    of: Literal["requests", "tokens"]
    limit: int
    remaining: float
    reset_s: float  # until `remaining` is back at `limit`

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's headers x-ratelimit-{limit,remaining,reset}-{requests,tokens}; a negative rest is shown as
        0."""
        fields = (
            ("limit", str(self.limit)),
            ("remaining", str(max(0, math.floor(self.remaining)))),
            ("reset", duration(self.reset_s)),
        )
        return [(f"x-ratelimit-{part}-{self.of}".encode(), value.encode()) for part, value in fields]


def rate_limit_headers(limits: Iterable[RateLimit]) -> list[tuple[bytes, bytes]]:
    return [header for limit in limits for header in limit.headers()]


def duration(seconds: float) -> str:
    """Returns a duration in Go's notation, as OpenAI does: 0s, 20ms, 1.5s, 6m0s, 1h0m30s."""
    millis = max(0, math.ceil(seconds * 1000))
    if 0 < millis < 1000:
        return f"{millis}ms"
    seconds_whole, rest = divmod(millis, 1000)
    hours, minutes, last = seconds_whole // HOUR_S, seconds_whole % HOUR_S // MINUTE_S, seconds_whole % MINUTE_S
    fraction = f".{rest:03}".rstrip("0") if rest else ""
    front = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{front}{last}{fraction}s"

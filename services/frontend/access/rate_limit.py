"""Limits as OpenAI's headers tell them: how much there may be, how much is left, and when all of it is there again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MINUTE_S, HOUR_S = 60, 3600


@dataclass(frozen=True, slots=True)
class RateLimit:
    """One limit at this moment."""

    of: Literal["requests", "tokens"]
    limit: int
    remaining: float
    reset_s: float  # until `remaining` is `limit`, if nothing more is asked

    def headers(self) -> list[tuple[bytes, bytes]]:
        told = (
            ("limit", str(self.limit)),
            ("remaining", str(max(0, math.floor(self.remaining)))),
            ("reset", duration(self.reset_s)),
        )
        return [(f"x-ratelimit-{part}-{self.of}".encode(), value.encode()) for part, value in told]


def rate_limit_headers(limits: Iterable[RateLimit]) -> list[tuple[bytes, bytes]]:
    return [header for limit in limits for header in limit.headers()]


def duration(seconds: float) -> str:
    """As Go writes it, and OpenAI: 0s, 20ms, 1.5s, 6m0s, 1h0m30s."""
    millis = max(0, math.ceil(seconds * 1000))
    if 0 < millis < 1000:
        return f"{millis}ms"
    whole, rest = divmod(millis, 1000)
    hours, minutes, last = whole // HOUR_S, whole % HOUR_S // MINUTE_S, whole % MINUTE_S
    fraction = f".{rest:03}".rstrip("0") if rest else ""
    front = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{front}{last}{fraction}s"

"""Limits for resumable streams."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """A stream that exceeds its own limits ends with RESOURCE_EXHAUSTED; when the totals are reached, no new stream
    starts."""

    messages: int = 131_072  # per stream
    bytes: int = 16 * 2**20  # of messages per stream
    per_tenant: int = 64  # streams in progress or stored, over all frontends
    all_tenants: int = 4096  # the same over all tenants
    kept_bytes: int = 4 * 2**30  # of all messages and requests stored in Redis
    frontend_bytes: int = 256 * 2**20  # of all streams in one frontend's memory

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

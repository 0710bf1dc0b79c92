"""How much of resumable streams is kept."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """A stream that grows beyond its own ends with RESOURCE_EXHAUSTED; beyond the others none begins."""

    messages: int = 131_072  # of a stream
    bytes: int = 16 * 2**20  # of its messages
    per_tenant: int = 64  # streams that run or are kept, at all frontends
    all_tenants: int = 4096  # the same of all tenants together
    kept_bytes: int = 4 * 2**30  # of all that are kept in Redis, messages and requests
    frontend_bytes: int = 256 * 2**20  # of all that one frontend has in memory

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

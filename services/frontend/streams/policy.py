"""What resumable streams are offered, and the words for what is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.services.frontend.request.request import Request
from quire.services.frontend.streams.store import StoreLimits, StreamKey
from quire.services.frontend.streams.stream import Stream
from quire.shared.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from quire.shared.settings.stream_limits import StreamLimits

RETRY_MS = 1000
WHOSE = {"per_tenant": "a tenant", "all_tenants": "all tenants together", "kept_bytes": "all tenants together"}
WHAT = {
    "per_tenant": "streams that run or are kept",
    "all_tenants": "streams that run or are kept",
    "kept_bytes": "of messages and requests that are kept",
}
FIELDS = ("resumable", "request_id")  # that errors about streams name
REASONS: Mapping[type[QuireError], str] = {
    ResourceExhausted: "full",
    FailedPrecondition: "taken",
    NotFound: "not_found",
    Unavailable: "redis_away",
}


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Of one frontend."""

    retention_s: float  # the longest that a request may ask for; 0: none is offered
    limits: StreamLimits

    def check_offered(self, field: str) -> None:
        """Raises Unimplemented."""
        if not self.retention_s:
            raise Unimplemented(f"{field}: this server keeps no streams (stream_retention_s=0)", field=field)

    def retention_for_s(self, asked_s: float) -> float:
        """Of a request that asks for so long, 0: as long as there is. Raises Unimplemented, InvalidArgument."""
        self.check_offered("resumable")
        if not 0 <= asked_s <= self.retention_s:
            raise InvalidArgument(
                f"retention_s must be at most stream_retention_s={self.retention_s:g} of this server, got {asked_s:g}",
                field="retention_s",
            )
        return asked_s or self.retention_s

    def check_memory(self, field: str, streams: Iterable[Stream]) -> None:
        """Raises ResourceExhausted."""
        most, num_bytes = self.limits.frontend_bytes, sum(stream.memory_bytes for stream in streams)
        if num_bytes >= most:
            raise ResourceExhausted(
                f"{field}: stream_limits allow this frontend frontend_bytes={most}, its streams have {num_bytes}",
                field=field,
                retry_after_ms=RETRY_MS,
            )

    def store_limits(self, tenant: str) -> StoreLimits:
        """Clients without a name have half of all places, and each address its share at the frontend that it asks."""
        limits = self.limits
        own = limits.per_tenant if tenant else max(limits.per_tenant, limits.all_tenants // 2)
        return StoreLimits(own, limits.all_tenants, limits.kept_bytes)

    def full(self, bound: str) -> ResourceExhausted:
        """`bound`: the one that is reached."""
        text = f"resumable: stream_limits allow {WHOSE[bound]} {bound}={getattr(self.limits, bound)} {WHAT[bound]}"
        return ResourceExhausted(text, field="resumable", retry_after_ms=RETRY_MS)

    def check_growth(self, stream: Stream, num_messages: int, num_bytes: int) -> None:
        """By so much. Raises ResourceExhausted."""
        for name, found in (
            ("messages", stream.num_messages + num_messages),
            ("bytes", stream.num_bytes + num_bytes),
        ):
            if found > (most := getattr(self.limits, name)):
                raise ResourceExhausted(f"stream_limits: a stream may have {name}={most}, this one would have {found}")


def check_resumable(request: Request) -> None:
    """Raises InvalidArgument for what cannot be kept piece by piece."""
    if len(request.prompts) != 1:
        raise InvalidArgument(f"resumable is for one prompt, got {len(request.prompts)}", field="resumable")
    if request.final_only:
        raise InvalidArgument("resumable is for streams; the answer was asked for in one piece", field="resumable")
    if request.sampling.beam_search is not None:
        raise InvalidArgument("resumable cannot go with beam_search, whose results come at its end", field="resumable")


def stream_exists(key: StreamKey) -> FailedPrecondition:
    return FailedPrecondition(f"request_id: {key.request_id!r} is that of a stream which is kept", field="request_id")


def not_found(key: StreamKey, *, is_shared: bool) -> NotFound:
    where = "" if is_shared else ", or another frontend has it: without Redis each keeps its own"
    text = f"request_id: there is no stream {key.request_id!r}: none was begun, its time is over{where}"
    return NotFound(text, field="request_id")


def store_unavailable() -> Unavailable:
    text = "Redis is away, where streams are kept: attach again later"
    return Unavailable(text, field="request_id", retry_after_ms=RETRY_MS)


def refusal_reason(error: QuireError) -> str | None:
    """As metrics call it; None where it is about anything else than streams."""
    return REASONS.get(type(error)) if error.field in FIELDS else None

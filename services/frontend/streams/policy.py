"""Limits and retention of resumable streams, and the errors for requests that exceed them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from quire.services.frontend.request.request import Request
from quire.services.frontend.streams.store import StoreLimits, StoreUnavailable, StreamKey
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

Result = TypeVar("Result")

RETRY_MS = 1000
MAX_RUNNING = 256
RUNNING_PART = 4  # 1/4 of the frontend's places is the most that streams of one client take
LIMIT_SCOPES = {"per_tenant": "a tenant", "all_tenants": "all tenants together", "kept_bytes": "all tenants together"}
LIMIT_UNITS = {
    "per_tenant": "streams that run or are kept",
    "all_tenants": "streams that run or are kept",
    "kept_bytes": "of messages and requests that are kept",
}
FIELDS = ("resumable", "request_id")  # fields named by errors about streams
REASONS: Mapping[type[QuireError], str] = {
    ResourceExhausted: "full",
    FailedPrecondition: "taken",
    NotFound: "not_found",
    Unavailable: "redis_away",
}


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Retention and limits of one frontend's streams, and the errors for requests beyond them."""

    retention_s: float  # longest retention that a request may ask for; 0: resumable streams are disabled
    limits: StreamLimits
    max_running: int = MAX_RUNNING  # streams in progress of a tenant, or of an address without a key, at this frontend

    def check_offered(self, field: str) -> None:
        """Raises Unimplemented if resumable streams are disabled."""
        if not self.retention_s:
            raise Unimplemented(
                f"{field}: this server keeps no streams; start it with --stream-retention-s", field=field
            )

    def retention_for_s(self, asked_s: float) -> float:
        """Returns the retention of a request that asks for `asked_s` seconds; 0 asks for the longest. Raises
        Unimplemented, InvalidArgument."""
        self.check_offered("resumable")
        if not 0 <= asked_s <= self.retention_s:
            raise InvalidArgument(
                f"retention_s must be at most stream_retention_s={self.retention_s:g} of this server, got {asked_s:g}",
                field="retention_s",
            )
        return asked_s or self.retention_s

    def check_memory(self, field: str, streams: Iterable[Stream]) -> None:
        """Raises ResourceExhausted if the streams take all the memory of this frontend's limit."""
        limit, num_bytes = self.limits.frontend_bytes, sum(stream.memory_bytes for stream in streams)
        if num_bytes >= limit:
            raise ResourceExhausted(
                f"{field}: stream_limits allow a frontend frontend_bytes={limit}, its streams use {num_bytes}; retry "
                "later",
                field=field,
                retry_after_ms=RETRY_MS,
            )

    def check_running(self, num_running: int) -> None:
        """Raises ResourceExhausted if a client has as many streams in progress as it may: they run without it, and
        would otherwise take the places of all others."""
        if num_running >= self.max_running:
            raise ResourceExhausted(
                f"resumable: {num_running} resumable streams or responses in the background of this client are in "
                f"progress, and at most {self.max_running} may be, 1/{RUNNING_PART} of max_inflight_requests of this "
                "server; cancel one, or retry when one has ended",
                field="resumable",
                retry_after_ms=RETRY_MS,
            )

    def store_limits(self, tenant: str) -> StoreLimits:
        """Returns the limits of a tenant. Clients without a tenant share half of all streams, and each address has its
        own share at the frontend it calls."""
        limits = self.limits
        per_tenant = limits.per_tenant if tenant else max(limits.per_tenant, limits.all_tenants // 2)
        return StoreLimits(per_tenant, limits.all_tenants, limits.kept_bytes)

    def full(self, bound: str) -> ResourceExhausted:
        """Returns the error for a reached limit. `bound`: name of the limit in StreamLimits."""
        limit = getattr(self.limits, bound)
        text = f"resumable: stream_limits allow {LIMIT_SCOPES[bound]} {bound}={limit} {LIMIT_UNITS[bound]}"
        return ResourceExhausted(text, field="resumable", retry_after_ms=RETRY_MS)

    def check_growth(self, stream: Stream, num_messages: int, num_bytes: int) -> None:
        """Raises ResourceExhausted if a stream would exceed its limits with this many more messages and bytes."""
        for name, found in (
            ("messages", stream.num_messages + num_messages),
            ("bytes", stream.num_bytes + num_bytes),
        ):
            if found > (limit := getattr(self.limits, name)):
                raise ResourceExhausted(f"stream_limits: a stream may have {name}={limit}, this one would have {found}")


def check_resumable(request: Request) -> None:
    """Raises InvalidArgument for requests whose output cannot be stored piece by piece."""
    if len(request.prompts) != 1:
        raise InvalidArgument(f"resumable is for one prompt, got {len(request.prompts)}", field="resumable")
    if request.final_only:
        raise InvalidArgument("resumable requires stream=true", field="resumable")
    if request.sampling.beam_search is not None:
        raise InvalidArgument(
            "resumable cannot be combined with beam_search, which returns its results at the end", field="resumable"
        )


def stream_exists(key: StreamKey) -> FailedPrecondition:
    """Returns the error for a request id that is already in use."""
    return FailedPrecondition(f"request_id: {key.request_id!r} belongs to a stored stream", field="request_id")


def not_found(key: StreamKey, *, is_shared: bool) -> NotFound:
    """Returns the error for an unknown request id. `is_shared`: whether a store shares streams between frontends."""
    where = "" if is_shared else ", or another frontend has it: without Redis, streams are local to a frontend"
    text = (
        f"request_id: there is no stream {key.request_id!r}: it was never started, or its retention has expired{where}"
    )
    return NotFound(text, field="request_id")


def store_unavailable() -> Unavailable:
    """Returns the error for an unavailable store."""
    text = "Redis, which stores resumable streams, is unavailable: attach again later"
    return Unavailable(text, field="request_id", retry_after_ms=RETRY_MS)


async def answer_of_store(command: Awaitable[Result]) -> Result:
    """Returns the store's answer. Raises Unavailable, for the client, in place of StoreUnavailable."""
    try:
        return await command
    except StoreUnavailable:
        raise store_unavailable() from None


def refusal_reason(error: QuireError) -> str | None:
    """Returns the metric label of a refusal, or None if the error does not concern streams."""
    return REASONS.get(type(error)) if error.field in FIELDS else None

"""Interface of the store for resumable streams, shared by all frontends of a cluster or local to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from quire.shared.errors import Internal
from quire.shared.pb.frontend.v1 import stream_pb2 as pb

DELETED_S = 86_400  # the longest retention; copies of a stream are not trusted for longer


class StreamKey(NamedTuple):
    """Identifies a stream by tenant and request id; other tenants cannot see it."""

    tenant: str
    request_id: str


Read = TypeVar("Read", bound=Message)


class StoreUnavailable(Exception):
    """The store did not answer, or answered with an error of its own."""


class StreamExists(Exception):
    """The tenant already has a stream with this id."""


class StoreFull(Exception):
    """A limit on the number or size of streams is reached."""

    def __init__(self, bound: str, found: int) -> None:
        """Stores which limit was reached. `bound`: name of the limit in StreamLimits; `found`: the present value."""
        super().__init__(bound)
        self.bound, self.found = bound, found


class StoreLimits(NamedTuple):
    """Limits beyond which no new stream is accepted; see StreamLimits."""

    per_tenant: int
    all_tenants: int
    kept_bytes: int


class StreamUsage(NamedTuple):
    """Memory of one stream in the store, and its time to live if it is not reported again."""

    key: StreamKey
    num_bytes: int
    ttl_ms: int


class StoreUsage(NamedTuple):
    """Number and bytes of streams over all tenants and frontends."""

    num_streams: int = 0
    num_bytes: int = 0


class LeaseStatus(NamedTuple):
    """State of a stream that its producer gets with every append."""

    exists: bool = True  # False: the store lost it, so the producer must store it again
    is_owner: bool = True  # False: another frontend produces the stream
    is_cancelled: bool = False
    has_reader: bool = False  # at any frontend, recently


class StreamUpdate(NamedTuple):
    """New entries of a stream, as a reader at another frontend polls them."""

    exists: bool
    has_producer: bool  # its lease is valid
    entries: list[bytes]


class StreamStore(Protocol):
    """Stores resumable streams. `owner`: lease owner id, unique for every start of a producer. All methods raise
    StoreUnavailable."""

    is_shared: bool

    async def create(
        self,
        key: StreamKey,
        request: bytes,
        owner: str,
        ttl_ms: int,
        bounds: StoreLimits | None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Creates a stream and its lease. Raises StreamExists, or StoreFull beyond `bounds`. `overwrite`: empties an
        existing stream that has no other producer."""

    async def append(
        self, key: StreamKey, owner: str, place: int, entries: Sequence[bytes], ttl_ms: int, *, is_last: bool = False
    ) -> LeaseStatus:
        """Appends `entries` after the first `place` ones and renews the lease, also without entries. The last append
        drops the lease."""

    async def request(self, key: StreamKey) -> bytes | None:
        """Returns the stored request, or None if there is no such stream."""

    async def read(self, wanted: Sequence[tuple[StreamKey, int]]) -> list[StreamUpdate]:
        """Returns entries from a position on, a bounded number per call, and marks each stream as being read."""

    async def acquire_lease(self, key: StreamKey, owner: str) -> bool:
        """Acquires the lease of a stream without producer. Returns False if another frontend was faster."""

    async def release_lease(self, key: StreamKey, owner: str) -> None:
        """Releases the lease, so that another frontend may continue the stream."""

    async def cancel(self, key: StreamKey) -> bool:
        """Asks the producer to cancel the stream. Returns False if there is no such stream."""

    async def delete(self, key: StreamKey) -> None:
        """Deletes an ended stream; only a deletion marker remains, for DELETED_S."""

    async def is_deleted(self, key: StreamKey) -> bool:
        """Returns whether any frontend has deleted the stream; frontends drop their copies then."""

    async def report_usage(self, uses: Sequence[StreamUsage]) -> StoreUsage:
        """Updates the memory use of these streams and returns the totals."""

    async def close(self) -> None:
        """Closes the connection to the store."""


class NullStreamStore:
    """The store without Redis: streams exist only in the memory of the frontend that produces them."""

    is_shared = False

    async def create(
        self,
        key: StreamKey,
        request: bytes,
        owner: str,
        ttl_ms: int,
        bounds: StoreLimits | None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Does nothing: the frontend's own table of streams is complete."""

    async def append(
        self, key: StreamKey, owner: str, place: int, entries: Sequence[bytes], ttl_ms: int, *, is_last: bool = False
    ) -> LeaseStatus:
        return LeaseStatus()

    async def request(self, key: StreamKey) -> bytes | None:
        return None

    async def read(self, wanted: Sequence[tuple[StreamKey, int]]) -> list[StreamUpdate]:
        return [StreamUpdate(exists=False, has_producer=False, entries=[]) for _ in wanted]

    async def acquire_lease(self, key: StreamKey, owner: str) -> bool:
        return False

    async def release_lease(self, key: StreamKey, owner: str) -> None:
        """Does nothing: there are no leases."""

    async def cancel(self, key: StreamKey) -> bool:
        return False

    async def delete(self, key: StreamKey) -> None:
        """Does nothing: the frontend drops its own copy."""

    async def is_deleted(self, key: StreamKey) -> bool:
        return False

    async def report_usage(self, uses: Sequence[StreamUsage]) -> StoreUsage:
        return StoreUsage()

    async def close(self) -> None:
        """Does nothing: there is no connection."""


def parse_entry(entry: bytes) -> pb.KeptMessage:
    """Parses a stored entry. Raises Internal if no frontend has written it."""
    return _read(pb.KeptMessage, entry, "a message of the stream")


def parse_request(kept: bytes) -> pb.KeptRequest:
    """Parses a stored request. Raises Internal if no frontend has written it."""
    return _read(pb.KeptRequest, kept, "the request of the stream")


def _read(kind: type[Read], data: bytes, what: str) -> Read:
    """Parses stored bytes as a message of this kind. `what`: names the value in the error. Raises Internal."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Internal(f"{what} cannot be read: something else has written to its place in Redis") from None

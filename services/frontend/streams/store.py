"""Where streams are kept, for all frontends of a cluster or for this one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from quire.shared.errors import Internal
from quire.shared.pb.frontend.v1 import stream_pb2 as pb

DELETED_S = 86_400  # the longest retention: no copy of a stream is believed for longer


class StreamKey(NamedTuple):
    """A stream belongs to a tenant; others find nothing under its id."""

    tenant: str
    request_id: str


Read = TypeVar("Read", bound=Message)


class StoreUnavailable(Exception):
    """It gave no answer."""


class StreamExists(Exception):
    """The tenant has a stream of that id."""


class StoreFull(Exception):
    """There are as many streams as there may be."""

    def __init__(self, bound: str, found: int) -> None:
        """`bound`: the name of the one that is reached."""
        super().__init__(bound)
        self.bound, self.found = bound, found


class StoreLimits(NamedTuple):
    """Beyond any of them no stream begins; see StreamLimits."""

    per_tenant: int
    all_tenants: int
    kept_bytes: int


class StreamUsage(NamedTuple):
    """What one stream takes of the store, and for how long from now on if no more is told."""

    key: StreamKey
    num_bytes: int
    ttl_ms: int


class StoreUsage(NamedTuple):
    """Of all tenants' streams, at all frontends."""

    num_streams: int = 0
    num_bytes: int = 0


class LeaseStatus(NamedTuple):
    """Of a stream, as who makes it hears with each of its entries."""

    exists: bool = True  # else it has to be kept overwrite
    is_owner: bool = True  # else another frontend makes it
    is_cancelled: bool = False
    has_reader: bool = False  # somewhere, lately


class StreamUpdate(NamedTuple):
    """More of a stream, as its readers elsewhere find it."""

    exists: bool
    has_producer: bool  # somebody renews its lease
    entries: list[bytes]


class StreamStore(Protocol):
    """`owner`: who makes a stream, unique for each time that somebody begins to. All raise StoreUnavailable."""

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
        """Raises StreamExists, or StoreFull beyond `bounds`. `overwrite`: one that nobody else makes is emptied."""

    async def append(
        self, key: StreamKey, owner: str, place: int, entries: Sequence[bytes], ttl_ms: int, *, is_last: bool = False
    ) -> LeaseStatus:
        """Behind `place` entries. Renews the lease, with or without any; after the last there is none."""

    async def request(self, key: StreamKey) -> bytes | None:
        """None where there is none such."""

    async def read(self, wanted: Sequence[tuple[StreamKey, int]]) -> list[StreamUpdate]:
        """Entries from a place on, some at a time; tells whoever makes it that somebody reads."""

    async def acquire_lease(self, key: StreamKey, owner: str) -> bool:
        """The lease of a stream that nobody makes. False if somebody was faster."""

    async def release_lease(self, key: StreamKey, owner: str) -> None:
        """Gives the lease back: somebody else may go on."""

    async def cancel(self, key: StreamKey) -> bool:
        """Whoever makes it will hear of it. False where there is none such."""

    async def delete(self, key: StreamKey) -> None:
        """Of one that has ended, nothing stays but that it was deleted, for DELETED_S."""

    async def is_deleted(self, key: StreamKey) -> bool:
        """By whichever frontend; whoever has a copy forgets it."""

    async def report_usage(self, uses: Sequence[StreamUsage]) -> StoreUsage:
        """What streams take by now."""

    async def close(self) -> None:
        """Nothing more is asked."""


class NullStreamStore:
    """Without Redis: streams are in the memory of the frontend that makes them, and nowhere else."""

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
        """Whoever has the streams knows what there is."""

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
        """There is no lease."""

    async def cancel(self, key: StreamKey) -> bool:
        return False

    async def delete(self, key: StreamKey) -> None:
        """Whoever has the streams forgets it."""

    async def is_deleted(self, key: StreamKey) -> bool:
        return False

    async def report_usage(self, uses: Sequence[StreamUsage]) -> StoreUsage:
        return StoreUsage()

    async def close(self) -> None:
        """There is nothing to close."""


def parse_entry(entry: bytes) -> pb.KeptMessage:
    """Raises Internal for an entry that no frontend has written."""
    return _read(pb.KeptMessage, entry, "a message of the stream")


def parse_request(kept: bytes) -> pb.KeptRequest:
    """Raises Internal for what no frontend has written."""
    return _read(pb.KeptRequest, kept, "the request of the stream")


def _read(kind: type[Read], data: bytes, what: str) -> Read:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Internal(f"{what} cannot be read: something else has written to its place in Redis") from None

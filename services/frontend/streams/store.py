"""Where streams are kept, for all frontends of a cluster or for this one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shared.pb.frontend.v1 import stream_pb2 as pb


class Key(NamedTuple):
    """A stream belongs to a tenant; others find nothing under its id."""

    tenant: str
    request_id: str


class StoreAway(Exception):
    """It gave no answer."""


class Exists(Exception):
    """The tenant has a stream of that id."""


class Full(Exception):
    """The tenant has as many streams as it may have."""


class Standing(NamedTuple):
    """Of a stream, as who makes it hears with each of its entries."""

    is_there: bool = True  # else it has to be kept anew
    is_mine: bool = True  # else another frontend makes it
    is_cancelled: bool = False
    is_read: bool = False  # somewhere, lately


class Found(NamedTuple):
    """More of a stream, as its readers elsewhere find it."""

    is_there: bool
    is_made: bool  # somebody renews its lease
    entries: list[bytes]


class Store(Protocol):
    """`owner`: who makes a stream, unique for each time that somebody begins to. All raise StoreAway."""

    is_shared: bool

    async def create(
        self, key: Key, request: bytes, owner: str, keep_ms: int, most: int, *, anew: bool = False
    ) -> None:
        """Raises Exists, or Full where the tenant has `most`. `anew`: one that nobody else makes is emptied."""

    async def append(
        self, key: Key, owner: str, place: int, entries: Sequence[bytes], keep_ms: int, *, is_last: bool = False
    ) -> Standing:
        """Behind `place` entries. Renews the lease, with or without any; after the last there is none."""

    async def request(self, key: Key) -> bytes | None:
        """None where there is none such."""

    async def read(self, wanted: Sequence[tuple[Key, int]]) -> list[Found]:
        """Entries from a place on, some at a time; tells whoever makes it that somebody reads."""

    async def take(self, key: Key, owner: str) -> bool:
        """The lease of a stream that nobody makes. False if somebody was faster."""

    async def leave(self, key: Key, owner: str) -> None:
        """Gives the lease back: somebody else may go on."""

    async def cancel(self, key: Key) -> bool:
        """Whoever makes it will hear of it. False where there is none such."""

    async def delete(self, key: Key) -> None:
        """Of one that has ended, nothing stays."""

    async def close(self) -> None:
        """Nothing more is asked."""


class OnlyHere:
    """Without Redis: streams are in the memory of the frontend that makes them, and nowhere else."""

    is_shared = False

    async def create(
        self, key: Key, request: bytes, owner: str, keep_ms: int, most: int, *, anew: bool = False
    ) -> None:
        """Whoever has the streams knows what there is."""

    async def append(
        self, key: Key, owner: str, place: int, entries: Sequence[bytes], keep_ms: int, *, is_last: bool = False
    ) -> Standing:
        return Standing()

    async def request(self, key: Key) -> bytes | None:
        return None

    async def read(self, wanted: Sequence[tuple[Key, int]]) -> list[Found]:
        return [Found(is_there=False, is_made=False, entries=[]) for _ in wanted]

    async def take(self, key: Key, owner: str) -> bool:
        return False

    async def leave(self, key: Key, owner: str) -> None:
        """There is no lease."""

    async def cancel(self, key: Key) -> bool:
        return False

    async def delete(self, key: Key) -> None:
        """Whoever has the streams forgets it."""

    async def close(self) -> None:
        """There is nothing to close."""


def parsed(entry: bytes) -> pb.KeptMessage:
    return pb.KeptMessage.FromString(entry)

"""One stream as this frontend has it: entries that readers may have, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from quire.services.frontend.streams.store import StreamKey
from quire.shared.errors import QuireError, from_proto
from quire.shared.pb.frontend.v1 import stream_pb2 as pb

PIECES_AT_ONCE = 64  # that one reader gets before others have their turn


class StreamPiece(NamedTuple):
    """A message of a stream, and its place in it; None: it is kept nowhere, and cannot be had again."""

    offset: int | None
    message: bytes


class Stream:
    """num_stored <= num_visible <= len(entries); what is shown and not kept could not be."""

    def __init__(self, key: StreamKey, request: pb.KeptRequest, address: str = "") -> None:
        """`address`: of the client that began it here."""
        self.key = key
        self.address = address
        self.request = request
        self.entries: list[pb.KeptMessage] = []
        self.num_visible = 0  # entries that readers may have
        self.num_stored = 0  # ... that any frontend can find
        self.num_bytes = 0  # of the entries
        self._request_bytes = request.ByteSize()
        self.num_readers = 0
        self.unread_since_s: float | None = None  # without a reader
        self.failure: QuireError | None = None  # why nothing more comes here, though it has not ended
        self._changed = asyncio.Event()

    @property
    def kind(self) -> str:
        return self.request.kind

    @property
    def has_ended(self) -> bool:
        """And every reader may know."""
        return self.num_visible > 0 and self.entries[self.num_visible - 1].HasField("end")

    @property
    def memory_bytes(self) -> int:
        """Of memory: the request has the whole body, and whatever conversation that goes on with."""
        return self._request_bytes + self.num_bytes

    @property
    def num_messages(self) -> int:
        return len(self.entries) - (bool(self.entries) and self.entries[-1].HasField("end"))

    @property
    def error(self) -> QuireError | None:
        """That it has ended with, without a message that says so."""
        last = self.entries[self.num_visible - 1] if self.num_visible else None
        return from_proto(last.end.error) if last is not None and last.end.HasField("error") else None

    @property
    def first_message(self) -> bytes | None:
        """As last_message."""
        return self.entries[0].message if self.num_visible > self.has_ended else None

    @property
    def last_message(self) -> bytes | None:
        """That readers may have."""
        place = self.num_visible - 1 - self.has_ended
        return self.entries[place].message if place >= 0 else None

    def append(self, entries: Iterable[pb.KeptMessage]) -> None:
        """Not to be seen yet."""
        for entry in entries:
            self.entries.append(entry)
            self.num_bytes += entry.ByteSize()

    def mark_stored(self, count: int) -> None:
        """So many of them are, and may be seen."""
        self.num_stored = count
        self.num_visible = max(self.num_visible, count)
        self._notify()

    def publish_all(self) -> None:
        """All that there is, kept or not."""
        self.num_visible = len(self.entries)
        self._notify()

    def drop_unstored(self) -> None:
        """What is not kept is another's to make."""
        del self.entries[self.num_stored :]
        self.num_visible = self.num_stored
        self.num_bytes = sum(entry.ByteSize() for entry in self.entries)

    def fail(self, error: QuireError) -> None:
        """Readers hear it behind what there is."""
        self.failure = error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, offset: int) -> AsyncIterator[StreamPiece]:
        """Messages from `offset` on until the end; raises the error that it ends with."""
        place = offset
        while True:
            while place < self.num_visible:
                entry = self.entries[place]
                if entry.HasField("end"):
                    if entry.end.HasField("error"):
                        raise from_proto(entry.end.error)
                    return
                yield StreamPiece(place if place < self.num_stored else None, entry.message)
                place += 1
                if (place - offset) % PIECES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
            if self.has_ended:  # before `offset`
                return
            await self._changed.wait()

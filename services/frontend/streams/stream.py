"""One stream in this frontend's memory: a list of entries that readers follow, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from quire.services.frontend.streams.store import StreamKey
from quire.shared.errors import QuireError, from_proto
from quire.shared.pb.frontend.v1 import stream_pb2 as pb

PIECES_AT_ONCE = 64  # per reader before the event loop runs other tasks


class StreamPiece(NamedTuple):
    """A message of a stream and its offset; None if the message is not stored and cannot be read again."""

    offset: int | None
    message: bytes


class Stream:
    """Entries of one stream and the readers that wait for more. Invariant: num_stored <= num_visible <= len(entries);
    visible entries beyond num_stored could not be stored."""

    def __init__(self, key: StreamKey, request: pb.KeptRequest, address: str = "") -> None:
        """Creates an empty stream. `address`: of the client that started it here, or empty."""
        self.key = key
        self.address = address
        self.request = request
        self.entries: list[pb.KeptMessage] = []
        self.num_visible = 0  # entries that readers can see
        self.num_stored = 0  # entries that every frontend can read from the store
        self.num_bytes = 0  # of the entries
        self._request_bytes = request.ByteSize()
        self.num_readers = 0
        self.unread_since_s: float | None = None  # when the last reader left
        self.failure: QuireError | None = None  # why this frontend gets no more entries of an unfinished stream
        self._changed = asyncio.Event()

    @property
    def kind(self) -> str:
        return self.request.kind

    @property
    def has_ended(self) -> bool:
        """Whether the end entry is visible to readers."""
        return self.num_visible > 0 and self.entries[self.num_visible - 1].HasField("end")

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory: the stored request, with its whole body, and the entries."""
        return self._request_bytes + self.num_bytes

    @property
    def num_messages(self) -> int:
        """Number of messages, without the end entry."""
        return len(self.entries) - (bool(self.entries) and self.entries[-1].HasField("end"))

    @property
    def error(self) -> QuireError | None:
        """The error that the stream ended with, if no message carries it."""
        last = self.entries[self.num_visible - 1] if self.num_visible else None
        return from_proto(last.end.error) if last is not None and last.end.HasField("error") else None

    @property
    def first_message(self) -> bytes | None:
        """The first visible message, or None."""
        return self.entries[0].message if self.num_visible > self.has_ended else None

    @property
    def last_message(self) -> bytes | None:
        """The last visible message, or None."""
        place = self.num_visible - 1 - self.has_ended
        return self.entries[place].message if place >= 0 else None

    def append(self, entries: Iterable[pb.KeptMessage]) -> None:
        """Appends entries that are not visible to readers yet, and counts their bytes."""
        for entry in entries:
            self.entries.append(entry)
            self.num_bytes += entry.ByteSize()

    def mark_stored(self, count: int) -> None:
        """Marks the first `count` entries as stored and visible, and wakes the readers."""
        self.num_stored = count
        self.num_visible = max(self.num_visible, count)
        self._notify()

    def publish_all(self) -> None:
        """Makes all entries visible, stored or not."""
        self.num_visible = len(self.entries)
        self._notify()

    def drop_unstored(self) -> None:
        """Drops the entries that are not stored; the next producer generates them again."""
        del self.entries[self.num_stored :]
        self.num_visible = self.num_stored
        self.num_bytes = sum(entry.ByteSize() for entry in self.entries)

    def fail(self, error: QuireError) -> None:
        """Reports an error to readers after the visible entries."""
        self.failure = error
        self._notify()

    def _notify(self) -> None:
        """Wakes all readers that wait; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, offset: int) -> AsyncIterator[StreamPiece]:
        """Yields visible messages from `offset` on until the end, waiting for further ones. Raises the error that the
        stream ends with, or the reason why no more entries arrive here."""
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
            if self.has_ended:  # `offset` lies after the end
                return
            await self._changed.wait()

"""Content-addressed store of the tiles of media items.

An item is kept for as long as a request holds it, and after that until its bytes are needed for others: the item that
was held least recently is dropped first. Requests that ask for an item while its tiles are being made share the result.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

from quire.services.frontend.media.stage_clock import MediaTimes, StageClock
from quire.services.frontend.media.tiles import MediaTiles
from quire.shared.errors import ResourceExhausted
from quire.shared.process.supervision import Tasks

RETRY_AFTER_MS = 1000


@dataclass(slots=True)
class _Entry:
    """Item in the store, with the number of requests that hold it."""

    tiles: MediaTiles
    num_holds: int = 0
    names: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Making:
    """Item that is being made, with the number of requests that wait for it."""

    task: asyncio.Task[MediaTiles]
    num_waiting: int = 0


class MediaStore:
    """Store of one frontend, bounded by bytes. Belongs to one event loop."""

    def __init__(self, max_idle_bytes: int, max_held_bytes: int) -> None:
        """Starts empty. `max_idle_bytes`: of items that no request holds; `max_held_bytes`: of those that some do."""
        self._max_idle_bytes, self._max_held_bytes = max_idle_bytes, max_held_bytes
        self._held: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently held first
        self._making: dict[bytes, _Making] = {}
        self._named: dict[bytes, bytes] = {}  # client's name of an item -> identifier
        self._tasks = Tasks()
        self.held_bytes = self.idle_bytes = 0
        self.num_queries = self.num_hits = 0

    def holding(self) -> MediaHolds:
        """Returns the holds of one request, to be used in a `with`."""
        return MediaHolds(self)

    def find(self, identifier: bytes) -> MediaTiles | None:
        """Returns the tiles of an item, without a hold; None if the store does not have them."""
        entry = self._held.get(identifier) or self._idle.get(identifier)
        return None if entry is None else entry.tiles

    def named(self, name: bytes) -> bytes | None:
        """Returns the identifier of the item that a client gave this name; None if there is none, or it was dropped."""
        return self._named.get(name)

    async def hold(self, identifier: bytes, make: Callable[[], Awaitable[MediaTiles]], name: bytes) -> MediaTiles:
        """Returns the tiles of an item and counts a hold, which release() ends; `make` makes them if the store does not
        have them. `name`: the client's name of the item, by which named() finds it; empty: none. Raises the error of
        `make`, and ResourceExhausted if requests hold too many bytes."""
        self.num_queries += 1
        self.num_hits += self.find(identifier) is not None
        if self.find(identifier) is None:
            tiles = await self._make_once(identifier, make)
            if self.find(identifier) is None:
                self._add(identifier, tiles)
        entry = self._held.get(identifier)
        if entry is None:
            entry = self._idle.pop(identifier)
            self.idle_bytes -= len(entry.tiles.pixels)
            self.held_bytes += len(entry.tiles.pixels)
            self._held[identifier] = entry
        entry.num_holds += 1
        if name:
            entry.names.add(name)
            self._named[name] = identifier
        return entry.tiles

    async def _make_once(self, identifier: bytes, make: Callable[[], Awaitable[MediaTiles]]) -> MediaTiles:
        """Returns the tiles that `make` makes for the first request that asks; further requests wait for the same task,
        which is cancelled when all of them have been cancelled."""
        making = self._making.get(identifier)
        if making is None:
            making = self._making[identifier] = _Making(self._tasks.start("media", _run(make)))
            making.task.add_done_callback(lambda _: self._making.pop(identifier, None))
        making.num_waiting += 1
        try:
            return await asyncio.shield(making.task)
        finally:
            making.num_waiting -= 1
            if not making.num_waiting and not making.task.done():
                self._making.pop(identifier, None)
                making.task.cancel()

    def _add(self, identifier: bytes, tiles: MediaTiles) -> None:
        """Adds an item without a hold. Raises ResourceExhausted if requests hold too many bytes already."""
        size = len(tiles.pixels)
        if self.held_bytes and self.held_bytes + size > self._max_held_bytes:
            raise ResourceExhausted(
                f"the pictures of requests in flight take {self.held_bytes >> 20} MiB; at most "
                f"{self._max_held_bytes >> 20} are kept (max_media_gb)",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._idle[identifier] = _Entry(tiles)
        self.idle_bytes += size

    def release(self, identifier: bytes) -> None:
        """Ends one hold. An item without holds becomes idle; the longest idle ones are dropped while all of them exceed
        `max_idle_bytes`."""
        entry = self._held[identifier]
        entry.num_holds -= 1
        if entry.num_holds:
            return
        self._idle[identifier] = self._held.pop(identifier)
        self.held_bytes -= len(entry.tiles.pixels)
        self.idle_bytes += len(entry.tiles.pixels)
        while self.idle_bytes > self._max_idle_bytes:
            oldest, dropped = self._idle.popitem(last=False)
            self.idle_bytes -= len(dropped.tiles.pixels)
            for name in dropped.names:
                if self._named.get(name) == oldest:
                    del self._named[name]

    def check_invariants(self) -> None:
        """Asserts that the counted bytes are those of the items."""
        assert not self._held.keys() & self._idle.keys()
        assert all(entry.num_holds > 0 for entry in self._held.values())
        assert not any(entry.num_holds for entry in self._idle.values())
        assert self.held_bytes == sum(len(entry.tiles.pixels) for entry in self._held.values())
        assert self.idle_bytes == sum(len(entry.tiles.pixels) for entry in self._idle.values())
        assert all(identifier in self._held or identifier in self._idle for identifier in self._named.values())

    async def close(self) -> None:
        await self._tasks.close()


async def _run(make: Callable[[], Awaitable[MediaTiles]]) -> MediaTiles:
    return await make()


class MediaHolds:
    """Items that one request holds until the end of its `with`, and the time that it takes to get them."""

    def __init__(self, store: MediaStore) -> None:
        self._store = store
        self.clock = StageClock(time.monotonic)
        self._identifiers: list[bytes] = []

    async def hold(self, identifier: bytes, make: Callable[[], Awaitable[MediaTiles]], name: bytes = b"") -> MediaTiles:
        """Returns the tiles of an item and holds them. `make` makes them if they are not there; `name`: the client's
        name of the item. Raises the error of `make`, and ResourceExhausted."""
        tiles = await self._store.hold(identifier, make, name)
        self._identifiers.append(identifier)
        return tiles

    @property
    def times(self) -> MediaTimes | None:
        """Time until now that the media took; None for a request without media."""
        return self.clock.times

    def __enter__(self) -> MediaHolds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._identifiers:
            self._store.release(self._identifiers.pop())


class NoHolds(MediaHolds):
    """Holds of requests without media, which share one object."""

    times = None


NO_HOLDS = NoHolds(MediaStore(0, 0))

"""Follows streams produced by other frontends for local readers, and takes over streams whose producer is gone."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

from quire.services.frontend.streams.policy import not_found, store_unavailable
from quire.services.frontend.streams.store import StoreUnavailable, StreamStore, StreamUpdate, parse_entry
from quire.services.frontend.streams.stream import Stream
from quire.shared.errors import Internal, QuireError
from quire.shared.logs import logger
from quire.shared.process.supervision import Tasks, cancellable_sleep

log = logger("streams")

POLL_INTERVAL_S = 0.02  # between two polls; one poll is one round trip for all streams with local readers


class StreamFollower:
    """Polls the store for new entries of remote streams while any of them has a local reader."""

    def __init__(
        self,
        store: StreamStore,
        list_streams: Callable[[], list[Stream]],
        *,
        on_lost: Callable[[Stream, QuireError], None],
        on_taken_over: Callable[[Stream, str], None],
    ) -> None:
        """Stores the callbacks. `list_streams`: remote streams with local readers; `on_lost`: called when no more
        entries of a stream can arrive, with the reason; `on_taken_over`: called with the new owner id once this
        frontend holds the stream's lease and all its entries."""
        self._store = store
        self._list_streams = list_streams
        self._on_lost = on_lost
        self._on_taken_over = on_taken_over
        self._being_acquired: set[Stream] = set()
        self._has_work = asyncio.Event()
        self.tasks = Tasks()

    def wake(self) -> None:
        """Wakes the polling loop, which waits while there is nothing to follow."""
        self._has_work.set()

    async def run(self) -> None:
        """Polls the followed streams every POLL_INTERVAL_S until cancelled; waits for wake() while no stream has a
        reader."""
        while True:
            wanted = [stream for stream in self._list_streams() if stream not in self._being_acquired]
            if wanted:
                await self.poll(wanted)
                await cancellable_sleep(POLL_INTERVAL_S)
            elif self._being_acquired:
                await cancellable_sleep(POLL_INTERVAL_S)
            else:
                self._has_work.clear()
                await self._has_work.wait()

    async def poll(self, wanted: Sequence[Stream]) -> bool:
        """Reads new entries of the given streams once; returns whether there were any. Readers get an error while the
        store is unavailable, and may attach again."""
        places = [len(stream.entries) for stream in wanted]
        try:
            updates = await self._store.read([(one.key, at) for one, at in zip(wanted, places, strict=True)])
        except StoreUnavailable:
            for stream in wanted:
                self._on_lost(stream, store_unavailable())
            return False
        for stream, place, update in zip(wanted, places, updates, strict=True):
            if place == len(stream.entries):  # no concurrent poll has advanced it
                self._apply_update(stream, update)
        return any(update.entries for update in updates)

    def _apply_update(self, stream: Stream, update: StreamUpdate) -> None:
        """Appends the entries of an update; starts a takeover if the stream is unfinished and has no producer."""
        if not self._append(stream, update):
            return
        if stream.has_ended or update.entries or stream in self._being_acquired:
            return
        if not update.exists:
            self._on_lost(stream, not_found(stream.key, is_shared=self._store.is_shared))
        elif not update.has_producer:
            self._being_acquired.add(stream)
            self.tasks.start("take over", self._take_over(stream))

    async def _take_over(self, stream: Stream) -> None:
        """Acquires the lease of a stream whose producer is gone and reports the takeover."""
        owner = uuid.uuid4().hex
        try:
            if await self._try_acquire(stream, owner):
                log.warning(
                    "taking over a resumable stream", request=stream.key.request_id, messages=stream.num_messages
                )
                self._on_taken_over(stream, owner)
        except StoreUnavailable:
            self._on_lost(stream, store_unavailable())
        finally:
            self._being_acquired.remove(stream)

    async def _try_acquire(self, stream: Stream, owner: str) -> bool:
        """Acquires the lease and reads the remaining entries. Returns False if another frontend was faster or the
        stream has ended."""
        if not await self._store.acquire_lease(stream.key, owner):
            return False
        has_more = True
        while has_more and not stream.has_ended:
            (update,) = await self._store.read([(stream.key, len(stream.entries))])
            if not self._append(stream, update):
                return False
            has_more = bool(update.entries)
        if stream.has_ended:
            await self._store.release_lease(stream.key, owner)
        return not stream.has_ended

    def _append(self, stream: Stream, update: StreamUpdate) -> bool:
        """Appends the parsed entries. Returns False, and reports the stream as lost, if an entry cannot be parsed."""
        try:
            entries = [*map(parse_entry, update.entries)]
        except Internal as error:
            log.error("cannot read a resumable stream", request=stream.key.request_id, reason=error.message)
            self._on_lost(stream, error)
            return False
        stream.append(entries)
        stream.mark_stored(len(stream.entries))
        return True

    async def close(self) -> None:
        await self.tasks.close()

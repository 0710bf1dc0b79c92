"""Streams that other frontends make: brought to those who read them here, and gone on with where nobody makes them."""

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

LOOK_S = 0.02  # between two looks: one round trip for all streams that are read here


class StreamFollower:
    """Looks at them as long as there are any."""

    def __init__(
        self,
        store: StreamStore,
        list_streams: Callable[[], list[Stream]],
        *,
        on_lost: Callable[[Stream, QuireError], None],
        on_taken_over: Callable[[Stream, str], None],
    ) -> None:
        """`wanted`: those that have readers here; `lose`: nothing more of this one comes; `go_on`: its lease is that of
        this owner now, and all is here that it has told."""
        self._store = store
        self._list_streams = list_streams
        self._on_lost = on_lost
        self._on_taken_over = on_taken_over
        self._taking: set[Stream] = set()
        self._is_wanted = asyncio.Event()
        self.tasks = Tasks()

    def wake(self) -> None:
        """There may be something to follow."""
        self._is_wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            wanted = [stream for stream in self._list_streams() if stream not in self._taking]
            if wanted:
                await self.poll(wanted)
                await cancellable_sleep(LOOK_S)
            elif self._taking:
                await cancellable_sleep(LOOK_S)
            else:
                self._is_wanted.clear()
                await self._is_wanted.wait()

    async def poll(self, wanted: Sequence[Stream]) -> bool:
        """Once; whether there was anything. Who reads while Redis is away hears of it, and comes back."""
        places = [len(stream.entries) for stream in wanted]
        try:
            found = await self._store.read([(one.key, at) for one, at in zip(wanted, places, strict=True)])
        except StoreUnavailable:
            for stream in wanted:
                self._on_lost(stream, store_unavailable())
            return False
        for stream, place, news in zip(wanted, places, found, strict=True):
            if place == len(stream.entries):  # nobody else has looked meanwhile
                self._on_news(stream, news)
        return any(news.entries for news in found)

    def _on_news(self, stream: Stream, news: StreamUpdate) -> None:
        if not self._add(stream, news):
            return
        if stream.has_ended or news.entries or stream in self._taking:
            return
        if not news.exists:
            self._on_lost(stream, not_found(stream.key, is_shared=self._store.is_shared))
        elif not news.has_producer:
            self._taking.add(stream)
            self.tasks.start("take over", self._take_over(stream))

    async def _take_over(self, stream: Stream) -> None:
        """Whoever made it is gone."""
        owner = uuid.uuid4().hex
        try:
            if await self._is_taken(stream, owner):
                log.warning("a stream is taken over", request=stream.key.request_id, messages=stream.num_messages)
                self._on_taken_over(stream, owner)
        except StoreUnavailable:
            self._on_lost(stream, store_unavailable())
        finally:
            self._taking.remove(stream)

    async def _is_taken(self, stream: Stream, owner: str) -> bool:
        """False if somebody was faster, or it has ended after all."""
        if not await self._store.acquire_lease(stream.key, owner):
            return False
        has_more = True
        while has_more and not stream.has_ended:
            (news,) = await self._store.read([(stream.key, len(stream.entries))])
            if not self._add(stream, news):
                return False
            has_more = bool(news.entries)
        if stream.has_ended:
            await self._store.release_lease(stream.key, owner)
        return not stream.has_ended

    def _add(self, stream: Stream, news: StreamUpdate) -> bool:
        """Returns False, and loses the stream, where an entry cannot be read."""
        try:
            entries = [*map(parse_entry, news.entries)]
        except Internal as error:
            log.error("a stream is lost", request=stream.key.request_id, reason=error.message)
            self._on_lost(stream, error)
            return False
        stream.append(entries)
        stream.mark_stored(len(stream.entries))
        return True

    async def close(self) -> None:
        await self.tasks.close()

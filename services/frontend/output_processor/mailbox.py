"""Between the loop that reads a scheduler and the coroutine that writes to a client: samples with news, no queue."""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.frontend.delta import Delta
from shared.errors import QuireError


class Letter(Protocol):
    """A sample that merges its own news until they are taken."""

    def take(self) -> Delta:
        """All news since the last time."""


class Mailbox:
    """One writer loop, one reader. However slow the reader, there is at most one delta per sample."""

    __slots__ = ("_error", "_reader", "_ready")

    def __init__(self) -> None:
        self._ready: list[Letter] = []
        self._reader: asyncio.Future[None] | None = None
        self._error: QuireError | None = None

    def put(self, letter: Letter) -> None:
        """Called when `letter` has its first news since it was taken."""
        self._ready.append(letter)
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Ends it: the reader gets what is ready, then `error`. The first one counts."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def take(self) -> list[Delta]:
        """Waits for news of at least one sample; not to be called when all of them were taken to their end."""
        while not (self._error or self._ready):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._ready and self._error is not None:
            raise self._error
        ready, self._ready = self._ready, []
        return [letter.take() for letter in ready]

"""Bound on the memory of all transcriptions in progress: their files, and the samples that these become."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from quire.shared.errors import DeadlineExceeded

MIB = 1 << 20
MOST_BYTES = 1024 * MIB
MOST_CALLS = 32  # whatever their size: silence compresses without bound
MOST_EXPANSION = 96  # of a file into samples of float32 at 16 kHz: Opus at 6 kbit/s has 85
SAMPLES_BYTES = 96 * MIB  # of the longest file, 25 minutes


def memory_of(file_bytes: int) -> int:
    """Returns the bytes that the transcription of a file of this size may take: the body, the file in it, and the
    samples."""
    return 2 * file_bytes + min(MOST_EXPANSION * file_bytes, SAMPLES_BYTES)


class _Waiting(NamedTuple):
    """Call that waits for its share."""

    num_bytes: int
    granted: asyncio.Future[None]


class SoundMemory:
    """Shares of memory for transcriptions. Calls wait in the order of their arrival, and tenants in turn, so that the
    many files of one delay those of another by one file at most."""

    def __init__(self, most_bytes: int = MOST_BYTES, most_calls: int = MOST_CALLS) -> None:
        self._most_bytes, self._most_calls = most_bytes, most_calls
        self.held_bytes = self.num_held = 0
        self._waiting: dict[str, deque[_Waiting]] = {}  # by tenant; the first one is next

    @property
    def num_waiting(self) -> int:
        """Calls that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def held(self, num_bytes: int, tenant: str = "", deadline_s: float | None = None) -> AsyncIterator[None]:
        """Waits until the share is free, and holds it within the `with`; more than there is counts as all. Raises
        DeadlineExceeded at the deadline, on the event loop's clock."""
        num_bytes = min(num_bytes, self._most_bytes)
        if self._waiting or not self._fits(num_bytes):
            await self._wait(num_bytes, tenant, deadline_s)
        else:
            self._add(num_bytes)
        try:
            yield
        finally:
            self._release(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return self.num_held < self._most_calls and self.held_bytes + num_bytes <= self._most_bytes

    def _add(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.num_held += 1

    def _release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        self.num_held -= 1
        self._grant()

    async def _wait(self, num_bytes: int, tenant: str, deadline_s: float | None) -> None:
        """Waits in the tenant's queue until the share is granted. One that is granted as its call is cancelled goes to
        the next call."""
        waiting = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiting)
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiting.granted
        except (asyncio.CancelledError, TimeoutError) as error:
            if waiting.granted.done() and not waiting.granted.cancelled():
                self._release(num_bytes)
            else:
                self._forget(tenant, waiting)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the deadline passed while other files were transcribed") from None
            raise

    def _forget(self, tenant: str, waiting: _Waiting) -> None:
        """Removes a call from its queue; those behind it may fit now."""
        queue = self._waiting[tenant]
        queue.remove(waiting)
        if not queue:
            del self._waiting[tenant]
        self._grant()

    def _grant(self) -> None:
        """Grants the shares that fit, one tenant after the other. The first one that does not fit is waited for, so
        that large files are not passed by small ones without end."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting[tenant]
            if not self._fits(queue[0].num_bytes):
                return
            waiting = queue.popleft()
            del self._waiting[tenant]
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            self._add(waiting.num_bytes)
            waiting.granted.set_result(None)

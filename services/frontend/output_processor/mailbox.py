"""Mailbox between the loop that reads a scheduler and the coroutine that writes to a client: samples with output, no
queue."""

from __future__ import annotations

import asyncio
from typing import Protocol

from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from quire.shared.errors import QuireError


class PendingOutput(Protocol):
    """Sample that merges its outputs until the reader takes them."""

    def take_delta(self) -> SampleDelta:
        """Returns all output since the last call."""


class Mailbox:
    """Outputs of a request between one writer and one reader; holds at most one delta per sample, however slow the
    reader."""

    __slots__ = ("_error", "_is_wakeup_requested", "_pacer", "_reader", "is_late", "ready", "round", "woken_s")

    def __init__(self, pacer: WakeupPacer) -> None:
        self._pacer = pacer
        self.ready: list[PendingOutput] = []
        self._reader: asyncio.Future[None] | None = None
        self._is_wakeup_requested = False
        self._error: QuireError | None = None
        self.round, self.woken_s = 0, 0.0
        self.is_late = False

    def put(self, output: PendingOutput) -> None:
        """Adds a sample that has its first output since its last delta was taken."""
        self.ready.append(output)
        if self._reader is not None and not self._is_wakeup_requested:
            self._is_wakeup_requested = True
            self._pacer.request_wakeup(self)

    def fail(self, error: QuireError) -> None:
        """Ends the mailbox: the reader gets what is pending, then the first error reported."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> bool:
        """Wakes the waiting reader; returns False if no reader waits or it was cancelled."""
        reader, self._reader = self._reader, None
        if reader is None or reader.done():
            return False
        reader.set_result(None)
        return True

    async def next_deltas(self) -> list[SampleDelta]:
        """Waits for output of at least one sample; must not be called after all samples have finished."""
        self._pacer.reader_done(self)
        if self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            self._is_wakeup_requested = bool(self.ready)
            if self._is_wakeup_requested:
                self._pacer.request_wakeup(self)
            await self._reader
        return self.take_pending()

    def take_pending(self) -> list[SampleDelta]:
        """Returns and clears the output of all samples without waiting, for readers that never call `next_deltas`.
        Raises the generation's error after the last output."""
        if not self.ready and self._error is not None:
            raise self._error
        ready, self.ready = self.ready, []
        return [output.take_delta() for output in ready]

    def close(self) -> None:
        """Removes the reader from the wakeup pacer."""
        self._pacer.reader_done(self)

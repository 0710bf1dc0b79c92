"""Guards callbacks of one worker's attachment: an error in one of them ends that attachment only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Call = Callable[[], None]


class LoopGuard:
    """call_soon and call_later of the event loop for one owner; `failed` gets the first error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.failed: asyncio.Future[None] = loop.create_future()

    def call_soon(self, call: Call) -> None:
        self._loop.call_soon(self._run, call)

    def call_later(self, delay_s: float, call: Call) -> None:
        self._loop.call_later(delay_s, self._run, call)

    def _run(self, call: Call) -> None:
        """Calls `call` unless the attachment has failed or ended; the first exception becomes that of `failed`."""
        if self.failed.done():  # after an error, or because the attachment has ended
            return
        try:
            call()
        except Exception as error:
            self.failed.set_exception(error)

"""Prepares admitted requests one per iteration of the event loop, so that other tasks run in between.

A burst would otherwise block running streams and cheap refusals for as long as it takes to parse, tokenize and submit
all of it. While many requests are being refused, refusals go first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

REFUSALS_FIRST_S = 0.1  # per WINDOW_S; a longer series of refusals must not starve admitted requests
WINDOW_S = 1.0


class PreparationQueue:
    """FIFO queue that admits one request per event loop iteration, so that tokenizing many does not delay the
    others."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # a request was prepared in this loop iteration
        self._has_refused = False  # a request was refused in this loop iteration
        self._window_s = -WINDOW_S  # start of the window in which refusals go first

    async def wait_turn(self) -> None:
        """Returns at once if no request was prepared in this loop iteration; else waits in line."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self.waiting.append(turn)
            await turn
        else:
            loop.call_soon(self._advance)
            self._is_taken = True  # set last: waiters are only woken by _advance

    def note_refusal(self) -> None:
        """Notes a refusal in this loop iteration; more may follow."""
        self._has_refused = True

    def _advance(self) -> None:
        """Runs in the next loop iteration and wakes the next waiter."""
        self._is_taken = False
        if not self.waiting:
            return
        asyncio.get_running_loop().call_soon(self._advance)
        self._is_taken = True
        if not self._refusals_go_first():
            self._call_next()

    def _call_next(self) -> None:
        """Wakes the first waiter that was not cancelled, if any."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():  # it was not cancelled
                turn.set_result(None)
                return

    def _refusals_go_first(self) -> bool:
        """Whether the waiters yield this iteration to refusals: after a refusal, for at most REFUSALS_FIRST_S in each
        window of WINDOW_S."""
        if not self._has_refused:
            return False
        self._has_refused = False
        now = self.clock()
        if now - self._window_s > WINDOW_S:
            self._window_s = now
        return now - self._window_s < REFUSALS_FIRST_S

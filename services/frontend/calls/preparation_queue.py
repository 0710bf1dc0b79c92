"""Requests are prepared one at a time: between two of them the event loop hears who else has come.

A burst would otherwise hold up everything for as long as all of it takes to parse, tokenize and submit: tokens of the
streams that run, and refusals, which cost next to nothing. While there are many to refuse, they come first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

REFUSALS_FIRST_S = 0.1  # of any WINDOW_S: who goes on refusing for longer has no right to starve those who are let in
WINDOW_S = 1.0


class PreparationQueue:
    """One for each turn of the event loop, first come, first served."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # that of this turn of the loop
        self._has_refused = False  # in this turn of the loop
        self._window_s = -WINDOW_S  # when refusals began to come first

    async def wait_turn(self) -> None:
        """Returns at once if nobody has had this turn of the loop."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self.waiting.append(turn)
            await turn
        else:
            loop.call_soon(self._advance)
            self._is_taken = True  # only now: who waits is called by nobody else

    def note_refusal(self) -> None:
        """Somebody was turned away in this turn of the loop; others may stand behind."""
        self._has_refused = True

    def _advance(self) -> None:
        """Whoever had this turn has done what it does without waiting."""
        self._is_taken = False
        if not self.waiting:
            return
        asyncio.get_running_loop().call_soon(self._advance)
        self._is_taken = True
        if not self._refusals_go_first():
            self._call_next()

    def _call_next(self) -> None:
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():  # it was not cancelled
                turn.set_result(None)
                return

    def _refusals_go_first(self) -> bool:
        if not self._has_refused:
            return False
        self._has_refused = False
        now = self.clock()
        if now - self._window_s > WINDOW_S:
            self._window_s = now
        return now - self._window_s < REFUSALS_FIRST_S

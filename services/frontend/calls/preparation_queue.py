"""Prepares admitted requests one per iteration of the event loop, those of each client in turn, so that other tasks run
in between.

A burst would otherwise block running streams and cheap refusals for as long as it takes to parse, tokenize and submit
all of it, and a single request of another client would wait for the whole burst. While many requests of a client are
being refused, its refusals go first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

REFUSALS_FIRST_S = 0.1  # per WINDOW_S; a longer series of refusals must not starve admitted requests
WINDOW_S = 1.0
EVERYONE = None  # the client of a refusal whose client is not known


class PreparationQueue:
    """Queue that admits one request per event loop iteration, so that tokenizing many does not delay the others.
    Clients take turns; the requests of one client are served in the order of their arrival."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, the next one to be served first
        self._is_taken = False  # a request was prepared in this loop iteration
        self._refused: set[str | None] = set()  # clients that were refused a request in this loop iteration
        self._window_s = -WINDOW_S  # start of the window in which refusals go first

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return sum(map(len, self._waiting.values()))

    async def wait_turn(self, client: str = "") -> None:
        """Returns at once if no request was prepared in this loop iteration; else waits in line. `client`: whose
        requests are served in order, alternating with those of other clients."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.setdefault(client, deque()).append(turn)
            await turn
        else:
            loop.call_soon(self._advance)
            self._is_taken = True  # set last: waiters are only woken by _advance

    def note_refusal(self, client: str | None = EVERYONE) -> None:
        """Notes a refusal in this loop iteration; more may follow."""
        self._refused.add(client)

    def _advance(self) -> None:
        """Runs in the next loop iteration and wakes the next waiter."""
        self._is_taken = False
        if not self._waiting:
            return
        asyncio.get_running_loop().call_soon(self._advance)
        self._is_taken = True
        self._call_next(self._refused_clients())

    def _call_next(self, refused: set[str | None]) -> None:
        """Wakes the first waiter of the next client that has one that was not cancelled, except clients with refusals
        in progress."""
        if EVERYONE in refused:
            return
        for client in [*self._waiting]:
            if client in refused:
                continue
            turns = self._waiting.pop(client)
            while turns:
                turn = turns.popleft()
                if not turn.done():  # it was not cancelled
                    if turns:
                        self._waiting[client] = turns  # after the other clients
                    turn.set_result(None)
                    return

    def _refused_clients(self) -> set[str | None]:
        """Returns the clients whose waiters yield this iteration to refusals: after a refusal, for at most
        REFUSALS_FIRST_S in each window of WINDOW_S."""
        refused, self._refused = self._refused, set()
        if not refused:
            return refused
        now = self.clock()
        if now - self._window_s > WINDOW_S:
            self._window_s = now
        return refused if now - self._window_s < REFUSALS_FIRST_S else set()

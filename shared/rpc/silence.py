"""Measures how long a peer has been silent, in turns of the local event loop.

A clock would include the time in which this process itself was stopped (SIGSTOP, a suspended machine, a blocked
loop), and every peer would be considered lost before their pending messages are read.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from quire.shared.errors import Unavailable

SILENCE_FACTOR = 5  # heartbeat intervals
TURNS_PER_INTERVAL = 2


class Silence:
    """Silence of one peer. A standstill of this process counts as one turn, however long it lasted."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._num_turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        """Wraps the read of one message; it ends with Unavailable when the peer has been silent for too long."""
        self._num_turns = 0
        self._reading = asyncio.timeout(None)
        await self._reading.__aenter__()
        if self._timer is None:
            self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the read of one message. Raises Unavailable if it ended because the peer was silent for too long."""
        assert self._reading is not None
        reading, self._reading = self._reading, None
        try:
            await reading.__aexit__(kind, error, trace)
        except TimeoutError:
            silent_s = SILENCE_FACTOR * self.interval_s
            raise Unavailable(f"the peer has been silent for {silent_s:g} s") from None

    def heard(self) -> int:
        """Records a part of the message; returns the number of turns since the previous one."""
        turns, self._num_turns = self._num_turns, 0
        return turns

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.interval_s / TURNS_PER_INTERVAL, self._turn)

    def _turn(self) -> None:
        """Counts a turn without a message; the timer stops when no read is in progress."""
        self._timer = None
        if self._reading is None:
            return
        self._num_turns += 1
        if self._num_turns > SILENCE_FACTOR * TURNS_PER_INTERVAL:
            self._reading.reschedule(asyncio.get_running_loop().time())
        else:
            self._wait()

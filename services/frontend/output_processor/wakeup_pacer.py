"""Pacing of readers' wakeups: together, and not before the last woken ones have written.

A stream whose tokens arrive faster than this process can write them would otherwise cost one message per token. With
rounds, output that arrives while others write is merged into the next message. The next round begins no sooner than the
last round's processor time after its end, in which the loop receives steps. If there is enough time, no reader waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter, thread_time  # the loop's own clock may stand still between its turns
from typing import Protocol

LONGEST_ROUND_S = 0.01  # a client that reads slowly delays the others no longer than this


class PacedReader(Protocol):
    """Reader that is woken in rounds."""

    round: int  # the round in which it was woken; 0: it has written since
    woken_s: float  # time of the wakeup
    is_late: bool  # it took too long in its last round

    def wake(self) -> bool:
        """Wakes the reader; returns False if it is gone."""


class WakeupPacer:
    """Pacer of all streams of an event loop."""

    def __init__(
        self,
        observe: Callable[[float], None],
        clock: Callable[[], float] = perf_counter,
        cpu_clock: Callable[[], float] = thread_time,
        longest_round_s: float = LONGEST_ROUND_S,
    ) -> None:
        """Creates a pacer without readers.

        `observe`: called with the seconds of each round, from waking the first reader until all have written;
        `longest_round_s`: bound of the rounds that begin from now on.
        """
        self._observe, self._clock, self._cpu_clock = observe, clock, cpu_clock
        self.longest_round_s = longest_round_s
        self.waiting: list[PacedReader] = []
        self._round = 0
        self.num_writing = 0  # readers of this round that have not written, except late ones
        self._began_s = self._began_cpu_s = self._next_s = 0.0
        self._is_due = False  # a round has begun or is scheduled
        self._end_at: asyncio.TimerHandle | None = None

    def request_wakeup(self, reader: PacedReader) -> None:
        """Schedules a wakeup of `reader`, which has output and waits."""
        if not self._is_due:
            self._schedule_round()
        self.waiting.append(reader)

    def reader_done(self, reader: PacedReader) -> None:
        """Records that `reader` has written or leaves; the last one of a round ends it. A reader that took longer
        than longest_round_s is not counted in its next round."""
        if reader.round == 0:
            return
        counted = reader.round == self._round and self._end_at is not None and not reader.is_late
        reader.round, reader.is_late = 0, self._clock() - reader.woken_s > self.longest_round_s
        if counted:
            self.num_writing -= 1
            if not self.num_writing:
                self._end()

    def _schedule_round(self) -> None:
        """Schedules the next round after the pause that the last one earned, at the earliest after the current
        step's output."""
        loop, rest_s = asyncio.get_running_loop(), self._next_s - self._clock()
        if rest_s > 0:
            loop.call_later(rest_s, self._begin)
        else:
            loop.call_soon(self._begin)  # after all samples of this step have their output
        # set last: after a failure above, all readers would wait for ever for a round that was not scheduled
        self._is_due = True

    def _begin(self) -> None:
        """Starts a round: wakes all waiting readers and ends when they have written, or after longest_round_s."""
        self._round += 1
        self._began_s, self._began_cpu_s = self._clock(), self._cpu_clock()
        self._end_at = asyncio.get_running_loop().call_later(self.longest_round_s, self._end)
        readers, self.waiting = self.waiting, []
        for reader in readers:
            if reader.wake():
                reader.round, reader.woken_s = self._round, self._began_s
                self.num_writing += not reader.is_late
        if not self.num_writing:
            self._end()

    def _end(self) -> None:
        """Ends the round, observes its duration, and sets a pause as long as its processor time before the next one."""
        assert self._end_at is not None
        self._end_at.cancel()
        self._end_at = None
        self.num_writing = 0
        now = self._clock()
        self._observe(now - self._began_s)
        self._next_s = now + self._cpu_clock() - self._began_cpu_s
        self._is_due = False
        if self.waiting:
            self._schedule_round()

"""When readers are woken: together, and not before those woken last have written.

A stream whose tokens come faster than this process can write them would otherwise cost a message for every token. In
rounds, what arrives while others write is merged into the next message. And the next round begins no sooner than the
last one's processor time after its end, in which the loop takes in steps. Where there is time enough nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter, thread_time  # the loop's own clock may stand still between its turns
from typing import Protocol

LONGEST_ROUND_S = 0.01  # a client that reads slowly holds up the others no longer


class PacedReader(Protocol):
    """Whoever is woken."""

    round: int  # in which it was woken; 0: it has been back since
    woken_s: float  # when it was
    is_late: bool  # it took too long the last time

    def wake(self) -> bool:
        """False if it is gone."""


class WakeupPacer:
    """One for all streams of an event loop."""

    def __init__(
        self,
        observe: Callable[[float], None],
        clock: Callable[[], float] = perf_counter,
        cpu_clock: Callable[[], float] = thread_time,
        longest_round_s: float = LONGEST_ROUND_S,
    ) -> None:
        """`observe` is told the seconds of each round, from waking the first reader until all have written;
        `longest_round_s`: bounds the rounds that begin from now on."""
        self._observe, self._clock, self._cpu_clock = observe, clock, cpu_clock
        self.longest_round_s = longest_round_s
        self.waiting: list[PacedReader] = []
        self._round = 0
        self.num_writing = 0  # of this round, those that are not late anyway
        self._began_s = self._began_cpu_s = self._next_s = 0.0
        self._is_due = False  # a round has begun or will
        self._end_at: asyncio.TimerHandle | None = None

    def request_wakeup(self, reader: PacedReader) -> None:
        """`reader` has news and waits."""
        if not self._is_due:
            self._schedule_round()
        self.waiting.append(reader)

    def reader_done(self, reader: PacedReader) -> None:
        """`reader` has written, or goes."""
        if reader.round == 0:
            return
        counted = reader.round == self._round and self._end_at is not None and not reader.is_late
        reader.round, reader.is_late = 0, self._clock() - reader.woken_s > self.longest_round_s
        if counted:
            self.num_writing -= 1
            if not self.num_writing:
                self._end()

    def _schedule_round(self) -> None:
        loop, rest_s = asyncio.get_running_loop(), self._next_s - self._clock()
        if rest_s > 0:
            loop.call_later(rest_s, self._begin)
        else:
            loop.call_soon(self._begin)  # when all of this step have their news
        self._is_due = True  # only now: a round that was not called for would be waited for by all, for ever

    def _begin(self) -> None:
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

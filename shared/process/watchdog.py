"""Ends a process whose event loop is stuck, after printing the stacks of all threads.

A stuck process answers no probe, ignores signals and keeps its connections open. The watchdog counts its own turns
instead of time: a process that is suspended and resumed loses one turn, however long that took, and a slow loop
makes some progress between turns.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading

from quire.shared import logs

TURN_S = 1.0
MAX_TURNS = 60  # turns without progress of the loop; Kubernetes' probes give up after the same time
EXIT_STUCK = 3


class Watchdog:
    """Watches the running event loop from a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_turns = 0  # turns of the event loop
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts watching; called from the loop's thread."""
        self._turn()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _turn(self) -> None:
        self._num_turns += 1
        if not self._over.is_set():
            self._loop.call_later(TURN_S, self._turn)

    def _watch(self) -> None:
        """Ends the process with EXIT_STUCK, after printing all stacks, when the event loop has not turned for
        MAX_TURNS checks in a row; returns after stop()."""
        seen, num_waits = self._num_turns, 0
        while not self._over.wait(TURN_S):
            num_waits = 0 if seen != self._num_turns else num_waits + 1
            seen = self._num_turns
            if num_waits > MAX_TURNS:
                logs.print_line(f"quire: the event loop has been stuck for {MAX_TURNS * TURN_S:g} s:", sys.stderr)
                faulthandler.dump_traceback(file=sys.__stderr__ or 2)
                logs.flush()
                os._exit(EXIT_STUCK)

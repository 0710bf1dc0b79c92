"""Ends a process whose event loop stands still for good, with the place where it does.

Such a process answers no probe, drains on no signal and keeps its sessions' sockets open. The watch counts its own
turns and not a clock: a process that is stopped and continued loses one turn, however long that took, and a loop that
is slow gets ahead a little between two of them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading

from quire.shared import logs

TURN_S = 1.0
MOST_TURNS = 60  # without one of the loop; Kubernetes gives up a process after as long
EXIT_STUCK = 3


class Watchdog:
    """Of the running event loop, from a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_turns = 0  # of the loop
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """From the loop's thread."""
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
        seen, num_waits = self._num_turns, 0
        while not self._over.wait(TURN_S):
            num_waits = 0 if seen != self._num_turns else num_waits + 1
            seen = self._num_turns
            if num_waits > MOST_TURNS:
                logs.print_line(f"quire: the event loop has stood still for {MOST_TURNS * TURN_S:g} s:", sys.stderr)
                faulthandler.dump_traceback(file=sys.__stderr__ or 2)
                logs.flush()
                os._exit(EXIT_STUCK)

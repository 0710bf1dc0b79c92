"""A thread that sleeps until the device, or another rank, has done something."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from quire.services.worker.engine.replies import as_failure
from quire.shared.logs import logger

log = logger("worker.engine")

Item = TypeVar("Item")


class Waiter(Generic[Item]):
    """Waits for one item after the other, in the order in which they are put. Begins at once."""

    def __init__(
        self, name: str, things: str, wait: Callable[[Item], None], died: Callable[[BaseException], None]
    ) -> None:
        """`name`: the thread's; `things`: what it waits for, in words; `died` is told what `wait` raised, which ends
        the thread."""
        self._things, self._wait, self._died = things, wait, died
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """From any thread."""
        self._queue.put(item)

    def stop(self) -> threading.Thread:
        """Ends after what was put before. Returns the thread, to be joined."""
        self._queue.put(None)
        return self._thread

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._wait(item)
        except BaseException as error:  # else nobody would hear that the thread is gone
            log.exception(f"the thread that waits for {self._things} failed")
            self._died(as_failure(error))

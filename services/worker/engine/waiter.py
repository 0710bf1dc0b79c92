"""A thread that waits for the device or for other ranks."""

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
    """Waits for items one at a time, in the order in which they are put. Starts at once."""

    def __init__(
        self, name: str, things: str, wait: Callable[[Item], None], died: Callable[[BaseException], None]
    ) -> None:
        """`name`: thread name; `things`: what it waits for, for log messages; `died`: called with the error of `wait`,
        which ends the thread."""
        self._things, self._wait, self._died = things, wait, died
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queues an item; callable from any thread."""
        self._queue.put(item)

    def stop(self) -> threading.Thread:
        """Stops after the queued items; returns the thread, to be joined."""
        self._queue.put(None)
        return self._thread

    def _run(self) -> None:
        """Thread body: passes each item to `wait` until None; an error is logged, passed to `died` and ends the
        thread."""
        try:
            while (item := self._queue.get()) is not None:
                self._wait(item)
        except BaseException as error:  # report it: the thread ends here
            log.exception(f"the thread waiting for {self._things} failed")
            self._died(as_failure(error))

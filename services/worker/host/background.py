"""Execution of jobs in background threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
Jobs = queue.SimpleQueue[Callable[[], None] | None]


class BackgroundThreads:
    """Runs jobs in submission order. The threads end with this object; a hanging one does not keep the
    process alive."""

    def __init__(self, name: str, num_threads: int = 1, begin: Callable[[], None] = lambda: None) -> None:
        """Starts daemon threads that share one queue of jobs. `name`: of the threads; `begin`: called first in each."""
        self._name = name
        self._begin = begin
        self._jobs: Jobs = queue.SimpleQueue()
        self._num_threads = 0
        for _ in range(num_threads):
            self.add_thread()

    def add_thread(self) -> None:
        """Adds a thread, in place of one that hangs."""
        self._num_threads += 1
        threading.Thread(target=_run, args=(self._jobs, self._begin), name=self._name, daemon=True).start()

    def remove_thread(self) -> None:
        """Ends one thread after the queued jobs, when a hanging one continues."""
        self._num_threads -= 1
        self._jobs.put(None)

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Queues a job and returns its future; errors of the job, BaseException included, are set there."""
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                outcome.set_result(job())
            except BaseException as error:
                outcome.set_exception(error)

        self._jobs.put(run)
        return outcome

    def __del__(self) -> None:
        for _ in range(self._num_threads):
            self._jobs.put(None)


def _run(jobs: Jobs, begin: Callable[[], None]) -> None:
    """Thread body: calls `begin`, then runs jobs until None."""
    begin()
    while (job := jobs.get()) is not None:
        job()
        del job  # it may hold the last reference to the threads' owner

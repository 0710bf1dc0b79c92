"""The thread that owns the device: builds the replica, executes commands in order and publishes its progress."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

import torch

from quire.services.worker.engine.commands import Command
from quire.services.worker.engine.device_executor import DeviceExecutor, OutcomeHandler
from quire.services.worker.engine.replies import Replies, as_failure
from quire.services.worker.ranks.group import RankGroup
from quire.services.worker.replica.replica import Occupancy, Replica
from quire.services.worker.runner.expert_load import LoadByLayer
from quire.services.worker.structured.compile_pool import CompilePool
from quire.shared.logs import logger

log = logger("worker.engine")

IDLE_AFTER_S = 0.05
PUBLISH_EVERY_S = 0.25  # counting used blocks costs up to a millisecond, too much for every step

Commands = queue.SimpleQueue[Command | None]  # None: stop


class DeviceThread:
    """Executes commands and sleeps while there are none. Published attributes may be read from any thread."""

    def __init__(
        self,
        build: Callable[[], Replica],
        inbox: Commands,
        outcomes: OutcomeHandler,
        *,
        ranks: RankGroup,
        grammars: CompilePool,
        replies: Replies,
        started: asyncio.Future[Replica],
        died: Callable[[BaseException], None],
    ) -> None:
        """Starts the thread. `started` receives the replica or the error of building it; `died` is called with a later
        fatal error."""
        self._build, self._inbox, self._outcomes = build, inbox, outcomes
        self._ranks, self._grammars, self._replies = ranks, grammars, replies
        self._started, self._died = started, died
        self._executor: DeviceExecutor | None = None  # set when the replica is built
        self._num_started = self._num_finished = 0  # commands
        self._has_unpublished_state = True
        self._published_s = 0.0
        self.occupancy = Occupancy(0, 0, 0)
        self.expert_load: LoadByLayer = {}
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def progress(self) -> dict[str, object]:
        """Returns {"device": number of finished commands} while there is work, else {}. Callable from any thread."""
        if self._executor is not None and self._executor.maintenance_running:
            return {}
        in_flight = self._executor is not None and self._executor.num_in_flight > 0
        has_work = self._num_started > self._num_finished or in_flight or not self._inbox.empty()
        return {"device": self._num_finished} if has_work else {}

    def stop(self) -> threading.Thread:
        """Stops after the queued commands; returns the thread, to be joined."""
        self._inbox.put(None)
        return self._thread

    def _run(self) -> None:
        """Thread body: builds the replica, resolves `started`, then processes commands until None. An error of building
        fails `started`; any later one is passed to `died` and ends the thread."""
        with torch.inference_mode():
            try:
                replica = self._build()
                self._ranks.wait_ready()
            except BaseException as error:  # includes panics of Rust libraries and an exit() in a plugin
                self._replies.fail(self._started, as_failure(error))
                return
            self._executor = DeviceExecutor(replica, self._ranks, self._grammars, self._outcomes)
            self._replies.resolve(self._started, replica)
            try:
                while (command := self._next(replica)) is not None:
                    self._num_started += 1
                    self._has_unpublished_state = True
                    self._executor.process(command)
                    self._num_finished += 1
            except BaseException as error:  # report it: the thread ends here
                log.exception("the device thread failed")
                self._died(as_failure(error))

    def _next(self, replica: Replica) -> Command | None:
        """Waits for the next command; None stops the thread. Publishes progress before waiting if PUBLISH_EVERY_S have
        passed, and after IDLE_AFTER_S without a command."""
        if self._has_unpublished_state and time.monotonic() - self._published_s > PUBLISH_EVERY_S:
            self._publish(replica)
        if self._has_unpublished_state:
            try:
                return self._inbox.get(timeout=IDLE_AFTER_S)
            except queue.Empty:
                self._publish(replica)
        return self._inbox.get()

    def _publish(self, replica: Replica) -> None:
        """Reads occupancy and expert load from the replica into the attributes that other threads read."""
        self.occupancy = replica.occupancy()
        self.expert_load = replica.experts.read_load()
        self._published_s = time.monotonic()
        self._has_unpublished_state = False

"""Open session of a worker process, as seen by later connections with the same id."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quire.shared.pb.worker.v1 import worker_pb2 as pb


@dataclass(slots=True)
class OpenSession:
    """Session of one worker process, until `task` is done."""

    hello: pb.WorkerHello
    task: asyncio.Task[None]
    num_messages: int = 0  # messages received from the worker, heartbeats included

    def is_same_process(self, hello: pb.WorkerHello) -> bool:
        """Returns whether `hello` comes from the same process."""
        return (self.hello.pid, self.hello.address) == (hello.pid, hello.address)

    async def is_alive(self, interval_s: float) -> bool:
        """Returns whether the worker still sends messages. Returns False when the session ends; a silent worker's
        session is ended by its timeout."""
        await asyncio.wait([self.task], timeout=interval_s)  # messages that a dead worker had sent have arrived by then
        before = self.num_messages
        while not self.task.done() and self.num_messages == before:
            await asyncio.wait([self.task], timeout=interval_s)
        return not self.task.done()

    def duplicate_id_error(self, hello: pb.WorkerHello) -> str:
        """Returns the error text for a second process with this id."""
        return (
            f"worker_id: {hello.worker_id!r} is attached and alive, as process {self.hello.pid} at "
            f"{self.hello.address!r}; process {hello.pid} at {hello.address!r} needs another id (setting id)"
        )

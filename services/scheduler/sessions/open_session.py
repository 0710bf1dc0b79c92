"""The session of one worker's process, as others of the same id find it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quire.shared.pb.worker.v1 import worker_pb2 as pb


@dataclass(slots=True)
class OpenSession:
    """Until `work` is done."""

    hello: pb.WorkerHello
    task: asyncio.Task[None]
    num_messages: int = 0  # messages of the worker, heartbeats among them

    def is_same_process(self, hello: pb.WorkerHello) -> bool:
        """Whether the same process says hello again."""
        return (self.hello.pid, self.hello.address) == (hello.pid, hello.address)

    async def is_alive(self, interval_s: float) -> bool:
        """Whether the worker still speaks, or its session ends; one that is silent is given up, which ends this too."""
        await asyncio.wait([self.task], timeout=interval_s)  # what a dead one had sent has come by then
        before = self.num_messages
        while not self.task.done() and self.num_messages == before:
            await asyncio.wait([self.task], timeout=interval_s)
        return not self.task.done()

    def duplicate_id_error(self, hello: pb.WorkerHello) -> str:
        """What a second process of this id is told."""
        return (
            f"worker_id: {hello.worker_id!r} is attached and lives, as process {self.hello.pid} at "
            f"{self.hello.address!r}; process {hello.pid} at {hello.address!r} needs another id (setting id)"
        )

"""Two frontends of one cluster with a real Redis, one of which can be killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import redis

from quire.services.frontend.composition.timing import FrontendTiming
from tests.redis_server import RedisServer
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import SLOWLY_S, ScriptedScheduler, count_up, scheduler, slowly
from tests.services.frontend.streams.reading import first


@dataclass(slots=True)
class Clock:
    """Clock of the retention of streams: the system's, or ahead of it."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Pair(NamedTuple):
    """Frontend `a` starts streams, `b` takes them over."""

    a: Running
    b: Running
    script: ScriptedScheduler
    redis: RedisServer
    clock: Clock

    def ask_redis(self) -> Any:
        return redis.Redis.from_url(self.redis.url)

    @property
    def last_seed(self) -> int:
        """Seed of the last submitted request; its samples count from there."""
        last = self.script.submissions[-1]
        return int(last.sampling.seed - last.first_sample)

    async def begun(self, call: Any, count: int) -> list[Any]:
        """Reads so many messages of an unfinished stream, then pauses the model."""
        with slowly(self.script):
            found = await first(call, count)
            self.script.pause()
        return found

    async def kill_maker(self, request_id: str) -> None:
        """Stops the producer at `a` and the renewal of its lease, as if its process were killed."""
        self.script.pause()
        streams = self.a.frontend.core.streams
        (key,) = (key for key in streams.local if key.request_id == request_id)
        made = streams.local[key]
        task = streams.running[key]
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert done, "the task did not end after its cancellation"
        streams.forget(made.stream)
        with self.ask_redis() as client:
            for lease in client.keys(f"*:lease:{request_id}"):  # no lease if this took longer than its time to live
                client.delete(lease)
        self.script.resume()


@asynccontextmanager
async def paired(folder: Path, server: RedisServer, **settings: Any) -> AsyncIterator[Pair]:
    """Two frontends whose settings name the scheduler: Redis is used for streams only."""
    clock = Clock()
    settings["timing"] = FrontendTiming(stream_clock=clock)
    async with (
        scheduler(ScriptedScheduler(count_up, step_s=SLOWLY_S, max_model_len=4096)) as script,
        running(folder, script.address, redis=server.url, id="a", **settings) as a,
        running(folder, script.address, redis=server.url, id="b", **settings) as b,
    ):
        for one in (a, b):  # a suspended machine must not expire a live producer
            pool = one.frontend.core.streams.store._redis.connection_pool
            pool.connection_kwargs |= {"socket_timeout": 60, "socket_connect_timeout": 60}
        yield Pair(a, b, script, server, clock)

"""A reset of prefix caches ends, even if a worker is lost meanwhile."""

from __future__ import annotations

import asyncio

from quire.services.scheduler.replicas.replica import Replica
from quire.shared.pb.admin.v1 import admin_pb2
from tests.admin import admin_of, calling
from tests.observing import calls_of
from tests.services.scheduler.test_service import PROMPTS, Start, start

__all__ = ["start"]

PATIENCE_S = 30.0


async def test_steps_of_a_lost_worker_are_not_waited_for(start: Start) -> None:
    bench = await start()
    worker = await bench.worker()
    worker.stand_still_after(5)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=60, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)
    begun = asyncio.Event()
    async with calling(admin_of("scheduler", bench.address)) as admin, asyncio.timeout(PATIENCE_S):
        reset = asyncio.ensure_future(admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(preempt_running=True)))
        with calls_of(Replica.pause, on_return=lambda _: begun.set()):
            await begun.wait()
        worker.task.cancel()
        assert (await reset).num_blocks == 0
    await bench.worker()
    await frontend.ended(0)

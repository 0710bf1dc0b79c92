"""How late the event loop is: the first thing to look at when streams stutter."""

from __future__ import annotations

import asyncio

from quire.shared.metrics.frontend import FrontendMetrics

INTERVAL_S = 0.1


async def watch_loop_delay(metrics: FrontendMetrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        metrics.loop_delay.observe(max(0.0, loop.time() - due_s))

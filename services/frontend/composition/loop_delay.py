"""Measures how late the event loop runs timers: the first metric to check when streams stutter."""

from __future__ import annotations

import asyncio

from quire.shared.metrics.frontend import FrontendMetrics

INTERVAL_S = 0.1


async def watch_loop_delay(metrics: FrontendMetrics) -> None:
    """Observes every INTERVAL_S how many seconds late the event loop wakes this task, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        metrics.loop_delay.observe(max(0.0, loop.time() - due_s))
